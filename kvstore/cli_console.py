"""How commands reach a screen: colours where there are some, whole lines in a pipe.

With NO_COLOR set nothing is bold either. A pipe gets no line broken and no spaces at its end,
since what reads it goes by lines and columns. The only module of the commands that begins with
rich: import it where something is printed.
"""

from __future__ import annotations

import os
from typing import Any

from rich.console import Console
from rich.table import Table

PIPE_COLUMNS = 1 << 16  # what reads lines from a pipe wants a sentence to be one


def screen(*, stderr: bool = False) -> Console:
    """As the terminal is."""
    system: Any = None if os.environ.get("NO_COLOR") else "auto"
    return Console(stderr=stderr, highlight=False, markup=False, color_system=system)


def console() -> Console:
    """Stdout: colours and width as the terminal has them; plain and never broken into a pipe."""
    made = screen()
    return made if made.is_terminal else _Pipe(highlight=False, markup=False, width=PIPE_COLUMNS)


class _Pipe(Console):
    def print(self, *objects: Any, **options: Any) -> None:
        """Without what fills lines up to the width of a table."""
        with self.capture() as captured:
            super().print(*objects, **options)
        self.file.writelines(
            line.rstrip(" \n") + "\n" * line.endswith("\n")
            for line in captured.get().splitlines(keepends=True)
        )


def plain_table() -> Table:
    """Columns without lines between them."""
    return Table(box=None, pad_edge=False, header_style="bold")
