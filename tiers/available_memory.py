"""How much memory this process may still take, as the machine and its control groups see it.

A pool larger than this would not fail when it is allocated but later, by the OOM killer.
"""

from __future__ import annotations

from pathlib import Path

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")
HUGE_PAGE_BYTES = 2 << 20


def available_memory_bytes(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """The least of MemAvailable and the room in every control group above this process.

    Page cache that a group can give back counts as room. Limits that can't be read are none.
    """
    return max(0, min(_machine_bytes(proc), _groups_bytes(proc, cgroup)))


def is_bound_by_group(proc: Path = PROC, cgroup: Path = CGROUP) -> bool:
    """Whether it is a control group that leaves no more, and not the machine."""
    return _groups_bytes(proc, cgroup) < _machine_bytes(proc)


def _machine_bytes(proc: Path) -> int:
    return _meminfo(proc).get("MemAvailable", 0)


def _groups_bytes(proc: Path, cgroup: Path) -> int:
    limits = [_UNLIMITED_BYTES]
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            names, base = _V2_FILES, cgroup
        elif "memory" in controllers.split(","):
            names, base = _V1_FILES, cgroup / "memory"
        else:
            continue
        limits += [_group_room_bytes(group, *names) for group in _groups_above(base, path)]
    return min(limits)


def free_huge_pages_bytes(proc: Path = PROC) -> int:
    """Bytes in the machine's pool of reserved 2 MiB pages that nobody has taken."""
    text = _text(proc / "meminfo")
    for line in text.splitlines():
        if line.startswith("HugePages_Free:"):
            return int(line.split()[1]) * HUGE_PAGE_BYTES
    return 0


_V1_FILES = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2_FILES = ("memory.max", "memory.current", "inactive_file")
_UNLIMITED_BYTES = 1 << 62


def _meminfo(proc: Path) -> dict[str, int]:
    fields = (line.split() for line in _text(proc / "meminfo").splitlines())
    return {f[0].rstrip(":"): int(f[1]) * 1024 for f in fields if len(f) == 3}


def _groups_above(base: Path, path: str) -> list[Path]:
    # In a container the path may name a place outside of what is mounted: then the mount's root
    # is the group.
    group = base / path.lstrip("/")
    if not group.is_dir():
        return [base]
    return [group, *(p for p in group.parents if p.is_relative_to(base))]


def _group_room_bytes(group: Path, limit_name: str, usage_name: str, cache_name: str) -> int:
    limit, usage = _text(group / limit_name).strip(), _text(group / usage_name).strip()
    if not limit.isdigit() or not usage.isdigit():  # absent, or "max"
        return _UNLIMITED_BYTES
    cache = 0
    for line in _text(group / "memory.stat").splitlines():
        if line.startswith(cache_name + " "):
            cache = int(line.split()[1])
    return int(limit) - int(usage) + cache


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
