"""A tensor's memory as integers, so that NaN payloads and the sign of zero are compared too."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SAME_WIDTH = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def as_integers(tensor: torch.Tensor) -> NDArray[np.signedinteger]:
    """Of a CPU tensor, in its shape."""
    numbers: NDArray[np.signedinteger] = tensor.view(SAME_WIDTH[tensor.element_size()]).numpy()
    return numbers
