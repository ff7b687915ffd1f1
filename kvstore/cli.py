"""Entry point of the command `kvstore`: Ctrl-C and every error end it in one line, never a stack.

Exit codes: 0 done; 1 refused or failed, or something was found wrong (verify, doctor); 2 wrong
usage; 130 broken off with Ctrl-C, from the first moment on: the commands are loaded only after
that is settled. Must not be here: imports that take time.
"""

from __future__ import annotations

import os
import signal
import sys

TYPE_CHECKING = False  # as typing's, which is one of those
if TYPE_CHECKING:
    from types import FrameType

BROKEN_OFF = 130


def main() -> None:
    """Run the command that sys.argv names."""
    interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not in nohup
    if interruptible:
        signal.signal(signal.SIGINT, _leave)
    from kvstore.cli_commands import run

    if interruptible:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code = run(sys.argv[1:])
    except KeyboardInterrupt:
        _leave()
    if interruptible:
        signal.signal(signal.SIGINT, _leave)  # while the interpreter ends
    sys.exit(code)


def _leave(number: int = 0, frame: FrameType | None = None) -> None:
    """At once: a stack of imports or of an ending interpreter tells nobody anything."""
    os.write(2, b"\n")
    os._exit(BROKEN_OFF)


if __name__ == "__main__":
    main()
