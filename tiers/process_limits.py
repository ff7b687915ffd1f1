"""What the process may have by its resource limits, and which errors say that it may not.

A limit on files, memory or descriptors fails the reading and the writing of a sound store as damage
would; taken for damage, it would cost pages. Must not be here: anything but limits.
"""

from __future__ import annotations

import errno
import resource
import signal

# Of these a system call fails by what the process may have, never by what a file holds.
_DENIED = frozenset({errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.EACCES, errno.EPERM})
# Also by what a damaged file makes a reader ask for: a sign of a limit only where there is one.
_OUT_OF_MEMORY = frozenset({errno.ENOMEM})
# How a process ends by its own doing; the others come from outside: an operator, an OOM killer.
_OWN_SIGNALS = frozenset(
    {signal.SIGBUS, signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP}
)


def file_bytes_allowed() -> float:
    """How long a file may be that this process writes: RLIMIT_FSIZE."""
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return float("inf") if soft == resource.RLIM_INFINITY else soft


def file_limit_said(needed_bytes: int = 0) -> str:
    """That limit, and the way out, for the text of an error."""
    allowed = file_bytes_allowed()
    said = "of any size" if allowed == float("inf") else f"of at most {allowed:.0f} bytes"
    needed = f", {needed_bytes} are needed" if needed_bytes else ""
    return (
        f"this process may write files {said}{needed} (ulimit -f, RLIMIT_FSIZE): set `ulimit -f "
        "unlimited`, or LimitFSIZE=infinity in its unit"
    )


def memory_is_limited() -> bool:
    """Whether the process may have less memory than there is, by ulimit -v or -d."""
    limits = (resource.RLIMIT_AS, resource.RLIMIT_DATA)
    return any(resource.getrlimit(each)[0] != resource.RLIM_INFINITY for each in limits)


def start_limit_said(error: BaseException) -> str:
    """Which limit it was and the way out, of an error by which a thread, memory or a library could
    not be had; "" for any other error, and for memory where none is limited."""
    is_thread = isinstance(error, RuntimeError) and "can't start new thread" in str(error)
    is_library = isinstance(error, ImportError) and "failed to map segment" in str(error)
    if not (is_thread or is_library or isinstance(error, MemoryError)):
        return ""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        return (
            f"this process may map {soft >> 10} KiB of memory (ulimit -v, RLIMIT_AS), and needs "
            "more: set `ulimit -v unlimited`, or LimitAS=infinity in its unit"
        )
    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if soft != resource.RLIM_INFINITY:
        return (
            f"this process may have {soft >> 10} KiB of data (ulimit -d, RLIMIT_DATA), and needs "
            "more: set `ulimit -d unlimited`, or LimitDATA=infinity in its unit"
        )
    if not is_thread:
        return ""
    return (
        "this process may start no more threads (ulimit -u, RLIMIT_NPROC, or pids.max of its "
        "control group): raise it, or TasksMax in its unit"
    )


def is_denied(error: BaseException) -> bool:
    """Whether an error says what this process may not have, and nothing of what it worked on."""
    code = getattr(error, "errno", None) or getattr(error, "code", None)
    if code in _OUT_OF_MEMORY or isinstance(error, MemoryError):
        return memory_is_limited()
    return code in _DENIED


def killed_from_outside(signal_number: int) -> bool:
    """Whether a process that died of this signal was ended by another one, or by the kernel."""
    return signal_number not in _OWN_SIGNALS
