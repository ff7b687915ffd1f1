"""Sizes and durations as people write them: "8GiB", "1.5G", "90s", "1h30m". The one parser.

Exact: a size that is not a whole number of bytes is refused, and so is whatever looks like a typo.
"""

from __future__ import annotations

import difflib
import re
from decimal import Decimal

from kvstore.errors import ConfigError

__all__ = [
    "DURATION_S_MAX",
    "SIZE_BYTES_MAX",
    "format_age",
    "format_bytes",
    "parse_bytes",
    "parse_duration",
    "shown",
]

SIZE_BYTES_MAX = 1 << 60
DURATION_S_MAX = 10 * 365 * 86_400.0

_BINARY = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "PiB": 1 << 50}
_DECIMAL = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}
# A lone letter means the binary unit, as it does for du, dd and docker.
_SIZE_UNITS = {"B": 1, **_BINARY, **_DECIMAL, **{unit[0]: n for unit, n in _BINARY.items()}}
_SIZE_UNITS_LOWER = {unit.lower(): factor for unit, factor in _SIZE_UNITS.items()}
_DURATION_UNITS = {
    "ms": Decimal("0.001"),
    "s": Decimal(1),
    "m": Decimal(60),
    "h": Decimal(3600),
    "d": Decimal(86_400),
    "w": Decimal(7 * 86_400),
}
_NUMBER = r"[0-9]{1,20}(?:\.[0-9]{1,20})?"
_SIZE = re.compile(rf"({_NUMBER}) ?([A-Za-z]*)")
_DURATION_PART = re.compile(rf"({_NUMBER})([A-Za-z]+)")
_SHOWN_CHARS_MAX = 60


def parse_bytes(value: object) -> int:
    """Bytes of 8589934592, "8GiB", "512MB", "1.5G" (= 1.5 GiB) or "4096"; else ConfigError.

    KB, MB, ... are powers of 1000; KiB, MiB, ... and a lone K, M, ... powers of 1024. Case does
    not matter.
    """
    if isinstance(value, str):
        size = _bytes_of_text(value)
    elif isinstance(value, int) and not isinstance(value, bool):
        size = value
    else:
        raise ConfigError(f"{shown(value)} is not a size; write bytes, or like '8GiB' or '512MB'")
    if not 0 <= size <= SIZE_BYTES_MAX:
        raise ConfigError(f"{shown(value)} is out of bounds; must be 0 to {SIZE_BYTES_MAX} bytes")
    return size


def parse_duration(value: object) -> float:
    """Seconds of 90, 0.5, "90", "10m", "1h30m", "250ms" or "2d"; else ConfigError."""
    if isinstance(value, str):
        seconds = _seconds_of_text(value)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(min(value, 2 * DURATION_S_MAX))
    else:
        raise ConfigError(f"{shown(value)} is not a duration; write seconds, or like '10m' or '2h'")
    if not 0 <= seconds <= DURATION_S_MAX:
        raise ConfigError(
            f"{shown(value)} is out of bounds; must be 0 to {DURATION_S_MAX:.0f} seconds"
        )
    return seconds


def format_age(seconds: float) -> str:
    """A duration as people say it: 5s, 12m, 3h, 4d."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s"


def format_bytes(size: int) -> str:
    """A size for people: "1.5 GiB", "640 KiB", "12 B"; rounded, so not for parsing back."""
    for unit, factor in reversed(_BINARY.items()):
        if abs(size) >= factor:
            return f"{size / factor:.4g} {unit}"
    return f"{size} B"


def shown(value: object) -> str:
    """What was given, short enough for a message."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS_MAX else text[:_SHOWN_CHARS_MAX] + "..."


def _bytes_of_text(text: str) -> int:
    matched = _SIZE.fullmatch(text.strip())
    if matched is None:
        raise ConfigError(f"{shown(text)} is not a size; write like '8GiB' or '512MB'")
    number, unit = matched.groups()
    factor = _SIZE_UNITS_LOWER.get((unit or "B").lower())
    if factor is None:
        raise ConfigError(f"{shown(text)} is not a size; {_hint(number, unit, _SIZE_UNITS)}")
    size = Decimal(number) * factor
    if size != int(size):
        raise ConfigError(f"{shown(text)} is not a whole number of bytes")
    return int(size)


def _seconds_of_text(text: str) -> float:
    stripped = text.strip()
    if re.fullmatch(_NUMBER, stripped):
        return float(stripped)
    parts = _DURATION_PART.findall(stripped)
    if not parts or "".join(number + unit for number, unit in parts) != stripped:
        raise ConfigError(f"{shown(text)} is not a duration; write like '90s', '10m' or '1h30m'")
    seconds = Decimal(0)
    for number, unit in parts:
        if unit not in _DURATION_UNITS:
            hint = _hint(number, unit, _DURATION_UNITS)
            raise ConfigError(f"{shown(text)} is not a duration; {hint}")
        seconds += Decimal(number) * _DURATION_UNITS[unit]
    return float(seconds)


def _hint(number: str, unit: str, units: dict[str, int] | dict[str, Decimal]) -> str:
    """What was meant, most likely: the unit nearest to the one that was typed."""
    folded = {known.lower(): known for known in units}
    swapped = [known for known in folded if sorted(known) == sorted(unit.lower())]
    # By another first letter it would be a guess, and one that is wrong by a factor of 1000.
    alike = [known for known in folded if known[0] == unit[0].lower()]
    near = swapped or difflib.get_close_matches(unit.lower(), alike, n=1, cutoff=0.3)
    if near:
        return f"did you mean '{number}{folded[near[0]]}'?"
    return f"the units are {', '.join(units)}"
