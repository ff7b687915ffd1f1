"""The connector with workers that copy as over a device, for a real engine on a CPU.

Streams run late (late_streams.py), pages pass the two buffers, and gather and scatter are the
kernels' own wrappers. Named to vLLM by kv_connector_module_path.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from late_streams import LateDevice

from kvstore.engine_adapter import vllm_connector
from kvstore.engine_adapter.device_blocks import DeviceBlocks

if TYPE_CHECKING:
    from kvstore.engine_adapter.block_planes import BlockPlanes


def over_device(planes: BlockPlanes) -> DeviceBlocks:
    device = LateDevice(compute_at_once=True, wrappers=True)
    return DeviceBlocks(planes, accelerator=device, gather=device.gather, scatter=device.scatter)


class KVStoreConnector(vllm_connector.KVStoreConnector):
    """The real one, but for what copies."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if self._worker is not None:
            self._worker._copier = over_device
