"""One frozen record of all settings of a store; it checks itself, defaults included.

A setting has one name everywhere: keyword, flag (`--host-bytes`), TOML key (`host_bytes`) and
environment variable (`KVSTORE_HOST_BYTES`). Flags win over the environment, that over the file,
that over the defaults. Unknown names are refused, so that a typo is never a silent default.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from kvstore.errors import ConfigError
from kvstore.quantity import SIZE_BYTES_MAX, format_bytes, parse_bytes, parse_duration, shown
from kvstore.remembered import remembered
from kvstore.tiers import codec
from kvstore.tiers.available_memory import available_memory_bytes
from kvstore.tiers.redis_address import RedisAddress

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pydantic_core import ErrorDetails

# What a config that extends StoreConfig is written with comes from here, pydantic's names included.
__all__ = [
    "HOST_BYTES_MIN",
    "Bytes",
    "Count",
    "Field",
    "OptionalPath",
    "OptionalSeconds",
    "Seconds",
    "StoreConfig",
    "default_directory",
    "default_disk_bytes",
    "default_host_bytes",
    "environment_values",
    "load_config",
    "model_validator",
]

PAGES_EXPECTED_MAX = 4 << 20
HOST_BYTES_MIN = 64 << 10
HOST_BYTES_MAX = 64 << 40
HOST_BYTES_DEFAULT_MAX = 8 << 30
HOST_SHARE_OF_FREE_MEMORY = 0.25
DISK_BYTES_DEFAULT_MAX = 64 << 30
DISK_SHARE_OF_FREE_DISK = 0.5
ENVIRONMENT_PREFIX = "KVSTORE_"

# What pydantic finds wrong, in our words.
_BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("more than", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("less than", "lt"),
}
_KINDS = {
    **dict.fromkeys(("int_parsing", "int_type", "int_from_float"), "a whole number is needed"),
    **dict.fromkeys(("bool_parsing", "bool_type"), "true or false is needed"),
    "string_type": "text is needed",
}

# Kubernetes sets these in every pod beside a service named "kvstore"; they are not settings.
_KUBERNETES = re.compile(r"KVSTORE_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_\w+)?)")


def _path(value: object) -> Path:
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise ConfigError(f"{shown(value)} is not a path")
    text = os.fsdecode(value)
    if "\0" in text:
        raise ConfigError("a path cannot hold a NUL character")
    if not text.isprintable():
        raise ConfigError("a path with characters that cannot be printed; choose another name")
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError as exc:  # no home directory
        raise ConfigError(f"{shown(text)}: {exc}") from exc


def _paths(value: object) -> tuple[Path, ...]:
    """Several paths: a list, or one text with ':' between them as in $PATH."""
    if isinstance(value, str):
        value = value.split(os.pathsep) if value else []
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{shown(value)} is not a list of paths")
    return tuple(_path(item) for item in value)


def _optional_path(value: object) -> Path | None:
    return None if value is None else _path(value)


def _optional_duration(value: object) -> float | None:
    return None if value is None else parse_duration(value)


def _no_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ConfigError("a whole number is wanted")
    return value


Bytes = Annotated[int, BeforeValidator(parse_bytes)]
Seconds = Annotated[float, BeforeValidator(parse_duration)]
OptionalSeconds = Annotated[float | None, BeforeValidator(_optional_duration)]
OptionalPath = Annotated[Path | None, BeforeValidator(_optional_path)]
Count = Annotated[int, BeforeValidator(_no_bool)]


def _disk_codec(value: object) -> str:
    try:
        codec.disk_codec(str(value))
    except codec.CodecError as exc:
        raise ConfigError(str(exc)) from exc
    return str(value)


DiskCodec = Annotated[str, BeforeValidator(_disk_codec)]


class StoreConfig(BaseModel):
    """All settings of one store. A bad one raises ConfigError, with a line for each problem."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    # Where the store lives; None keeps it in memory only.
    directory: OptionalPath = Field(default=None, validation_alias=AliasChoices("directory", "dir"))
    # More directories for segment files, for instance one a drive.
    disk_directories: Annotated[tuple[Path, ...], BeforeValidator(_paths)] = ()
    # The arena, headers and staging included.
    host_bytes: Bytes = Field(default=0, ge=HOST_BYTES_MIN, le=HOST_BYTES_MAX)
    # Everything below the directories, catalog and reserve included; 0 = no disk tier.
    disk_bytes: Bytes = Field(default=0, le=SIZE_BYTES_MAX)
    # The arena from the machine's pool of 2 MiB pages.
    huge_pages: bool = False
    # The store secret, where several stores must have it in common; else DIR/secret.
    secret_file: OptionalPath = None
    # New pages on disk with AES-256-GCM, a key a tenant; unset: as the store was.
    encrypt: bool | None = None
    # Where the keys are, if not in DIR/keys: on another medium they do not leave with the disk.
    keys_dir: OptionalPath = None
    # Pages stored longer ago leave; None = only for want of room.
    max_age_s: OptionalSeconds = Field(default=None, gt=0)
    # What may wait for the disk at once; a commit waits no longer than the disk takes.
    dirty_bytes_max: Bytes = Field(default=256 << 20, ge=4096)
    # Threads that read and write segment files.
    io_threads: Count = Field(default=4, ge=1, le=64)
    # How new pages lie on disk: raw, or lossless (packed, byte for byte the same when read).
    disk_codec: DiskCodec = "raw"
    # What leaves a tier first; see README, "What stays".
    policy: Literal["csl", "lru", "arc", "gdsf", "auto"] = "csl"
    # What leaves memory first, where that is not to be the same as for the disk behind it.
    host_policy: Literal["same", "csl", "lru", "arc", "gdsf"] = "same"
    # What csl and gdsf are to save: hits, time to first token, or prefill work.
    objective: Literal["hits", "ttft", "compute"] = "hits"
    # At which position of a prompt attention costs as much as the rest of the model.
    even_tokens: Count = Field(default=30_000, ge=1)
    # When pages go to disk: at commit (through), or on leaving memory, all of them (back) or only
    # those that admission admits, which then means those used again unless it says otherwise
    # (selective). What is in memory only is lost when the process is.
    write_policy: Literal["through", "back", "selective"] = "through"
    # Of these, which are written at all, unless committed durable; see tiers/admission.py.
    admission: Literal["always", "second-touch", "ghost", "frequency"] = "always"
    # Pages read from disk before anybody asks for them, as what follows a prompt that hit: so many
    # bytes of them wait in memory to be used. 0: none.
    prefetch_bytes: Bytes = Field(default=0, ge=0)
    # A new file to record look-ups in, anonymised, for `kvstore simulate`; None: no recording.
    record_file: OptionalPath = None
    # How long `stage` waits for the disk unless the call says otherwise.
    stage_deadline_s: Seconds = Field(default=2.0, gt=0, le=3600)
    # A Redis or Valkey to share pages through; see tiers/redis_address.py. Empty: none.
    redis_url: str = ""
    # Pages there that the store refers to at once; what Redis holds is for its maxmemory to bound.
    redis_bytes: Bytes = Field(default=64 << 30, ge=1 << 20, le=SIZE_BYTES_MAX)
    # How long Redis keeps a page that nobody stores again.
    redis_ttl_s: Seconds = Field(default=86_400.0, ge=1, le=365 * 86_400)
    # A 0600 file with the password; the user, if any, is in redis_url.
    redis_password_file: OptionalPath = None
    # How long a look-up waits for Redis, when the store itself lacks a page.
    redis_lookup_s: Seconds = Field(default=0.02, gt=0, le=0.05)

    def __init__(self, **values: Any) -> None:
        """Settings by name; what is not given is taken from the machine, see `default_*`."""
        try:
            super().__init__(**values)
        except ValidationError as exc:
            lines = [_line(each, values, type(self)) for each in exc.errors()]
            raise ConfigError("\n".join(lines)) from None

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults(cls, values: dict[str, Any]) -> dict[str, Any]:
        return cls.with_defaults(values)

    @classmethod
    def with_defaults(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Settings with what depends on the machine put in; nothing is checked yet."""
        filled = dict(values)
        if "directory" not in filled and "dir" not in filled:
            filled["directory"] = default_directory()
        if filled.get("host_bytes") is None:
            filled["host_bytes"] = default_host_bytes()
        _fill_remembered(filled)
        if filled.get("disk_bytes") is None:
            places = _places(filled.get("directory", filled.get("dir")), filled)
            filled["disk_bytes"] = default_disk_bytes(places) if places else 0
        return filled

    @model_validator(mode="after")
    def _check_together(self) -> StoreConfig:
        """What no field can know alone."""
        if self.redis_url:
            try:
                RedisAddress.parse(self.redis_url)
            except ValueError as exc:
                raise ConfigError(f"redis_url: {exc}") from exc
        if self.directory is None:
            for name in ("disk_directories", "disk_bytes", "encrypt", "keys_dir"):
                if getattr(self, name):
                    raise ConfigError(f"{name}: given, but there is no directory; set dir")
            return self
        places = self.segment_directories
        if len(set(places)) != len(places):
            raise ConfigError("disk_directories: one directory is named twice")
        for place in places:
            if os.path.exists(place) and not os.path.isdir(place):
                raise ConfigError(f"dir: {place} is not a directory")
        total = sum(_file_systems(places, "f_blocks").values())
        if self.disk_bytes and not total:
            raise ConfigError(
                f"dir: no pages can be kept in {', '.join(map(str, places))}: its file system "
                "holds no files; name a directory on a disk"
            )
        if self.disk_bytes > total:
            raise ConfigError(
                f"disk_bytes: {format_bytes(self.disk_bytes)} asked, the file system of "
                f"{', '.join(map(str, places))} has {format_bytes(total)} in all; lower disk_bytes"
            )
        return self

    @property
    def segment_directories(self) -> tuple[Path, ...]:
        """Where segment files go, the store directory first; () in memory."""
        return (self.directory, *self.disk_directories) if self.directory else ()

    def pages_expected(self, page_bytes: int) -> int:
        """About how many pages of a size there may be. The page table has room for the smallest:
        that is address space only, and to copy it when it is full takes 36 ms a million pages."""
        return min((self.host_bytes + self.disk_bytes) // page_bytes, PAGES_EXPECTED_MAX)


Config = TypeVar("Config", bound=StoreConfig)


def load_config(
    flags: Mapping[str, Any] | None = None,
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    kind: type[Config] = StoreConfig,  # type: ignore[assignment]  # a default for a type variable
) -> Config:
    """The config of a process: flags over environment over a TOML file over defaults.

    Flags that are None were not given. `environ` is os.environ unless said otherwise. `kind` is
    StoreConfig, or what adds settings to it.
    """
    environ = os.environ if environ is None else environ
    in_file = _file_values(file) if file is not None else {}
    variables = environment_values(environ, kind)
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    flagged = _one_name(given)
    sources = dict.fromkeys(in_file, f"in {file}")
    sources |= {name: _variable(name, environ) for name in variables}
    try:
        return kind(**(in_file | variables | flagged))
    except ConfigError as exc:
        lines = str(exc).split("\n")
        raise ConfigError(
            "\n".join(_with_source(each, sources, flagged) for each in lines)
        ) from None


def environment_values(
    environ: Mapping[str, str], kind: type[StoreConfig] = StoreConfig
) -> dict[str, str]:
    """All settings in `KVSTORE_*` variables, by setting name. The only reader of them."""
    values = {}
    for name, value in environ.items():
        if name.startswith(ENVIRONMENT_PREFIX) and not _KUBERNETES.fullmatch(name):
            key = name.removeprefix(ENVIRONMENT_PREFIX).lower()
            if key not in _names(kind):
                shown = [ENVIRONMENT_PREFIX + known.upper() for known in _names(kind)]
                raise ConfigError(f"{name}: unknown environment variable; {_near(name, shown)}")
            values[key] = value
    return _one_name(values)


def _variable(name: str, environ: Mapping[str, str]) -> str:
    """Of a setting that came from there."""
    variable = ENVIRONMENT_PREFIX + name.upper()
    return variable if variable in environ else ENVIRONMENT_PREFIX + "DIR"


def _with_source(line: str, sources: Mapping[str, str], flagged: Mapping[str, Any]) -> str:
    """A problem with where its setting was read, if that is not the command line."""
    field, colon, rest = line.partition(":")
    name = "directory" if field == "dir" else field
    if not colon or name not in sources or name in flagged:
        return line
    return f"{field} ({sources[name]}):{rest}"


def default_directory() -> Path:
    """$XDG_CACHE_HOME/kvstore, by default ~/.cache/kvstore; a relative XDG_CACHE_HOME is void."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(cache):
        return Path(cache) / "kvstore"
    return _path("~/.cache/kvstore")


def default_host_bytes(free_bytes: int | None = None) -> int:
    """min(25 % of the memory that is free for this process, 8 GiB), whole MiB.

    `free_bytes` is what the machine and its control groups say, unless given.
    """
    free = available_memory_bytes() if free_bytes is None else free_bytes
    share = int(free * HOST_SHARE_OF_FREE_MEMORY)
    return max(HOST_BYTES_MIN, min(share, HOST_BYTES_DEFAULT_MAX) >> 20 << 20)


def default_disk_bytes(directories: Iterable[Path], free_bytes: int | None = None) -> int:
    """min(50 % of free disk, 64 GiB), whole MiB; what a store there already holds counts as free.

    Otherwise a store would shrink at each start. `free_bytes` is what the file systems say, unless
    given.
    """
    places = list(directories)
    free = free_disk_bytes(places) if free_bytes is None else free_bytes
    own = sum(_bytes_below(place) for place in places)
    share = int((free + own) * DISK_SHARE_OF_FREE_DISK)
    return min(share, DISK_BYTES_DEFAULT_MAX) >> 20 << 20


def free_disk_bytes(places: Iterable[Path]) -> int:
    """Free bytes of the file systems that hold `places`, which need not exist yet."""
    return sum(_file_systems(places, "f_bavail").values())


def _names(kind: type[StoreConfig]) -> list[str]:
    return ["dir", *kind.model_fields]


def _one_name(values: Mapping[str, Any]) -> dict[str, Any]:
    """`dir` and `directory` are one setting, so that a flag can override either."""
    if "dir" in values and "directory" in values:
        raise ConfigError("dir: given twice, as dir and as directory")
    return {"directory" if name == "dir" else name: value for name, value in values.items()}


def _file_values(file: Path) -> dict[str, Any]:
    try:
        return _one_name(tomllib.loads(file.read_text(encoding="utf-8")))
    except OSError as exc:
        raise ConfigError(f"config file {file}: {exc.strerror}") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"config file {file}: is not TOML: {exc}") from exc


def _line(error: ErrorDetails, values: Mapping[str, Any], kind: type[StoreConfig]) -> str:
    """One problem in one line: the setting, what was given, what is wanted."""
    field = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"{field}: unknown setting; {_near(field, _names(kind))}"
    if error["type"] == "value_error":
        reason = str(error["ctx"]["error"])
        return f"{field}: {reason}" if field else reason
    given = shown(values.get(field, error["input"]))
    return f"{field}: {given} given; {_wanted(error, field)}"


def _wanted(error: ErrorDetails, field: str) -> str:
    context, kind = error.get("ctx", {}), error["type"]
    if kind in _BOUNDS:
        words, key = _BOUNDS[kind]
        bound = context[key]
        unit = " s" if field.endswith("_s") else ""
        bound = format_bytes(bound) if "bytes" in field else f"{bound:.12g}{unit}"
        return f"{words} {bound} is needed"
    if kind == "literal_error":
        return f"{context['expected']} is needed"
    return _KINDS.get(kind, error["msg"])


def _near(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"


def _places(directory: object, values: Mapping[str, Any]) -> tuple[Path, ...]:
    """Segment directories of settings that are not checked yet; () if they make no sense."""
    try:
        return (*_paths([directory]), *_paths(values.get("disk_directories", ())))
    except ConfigError:
        return ()


def _fill_remembered(filled: dict[str, Any]) -> None:
    """A store that exists keeps its size and its segments' places unless they are given."""
    try:
        directory = _optional_path(filled.get("directory", filled.get("dir")))
    except ConfigError:  # said with all other problems
        return
    if directory is not None:
        for name, value in remembered(directory).items():
            if filled.get(name) is None:
                filled[name] = value


def _file_systems(places: Iterable[Path], blocks: str) -> dict[int, int]:
    """Bytes by device of the file systems below `places`; a place need not exist yet."""
    found = {}
    for place in places:
        near = next(each for each in (place, *place.parents) if os.path.exists(each))
        try:
            system = os.statvfs(near)
            found[os.stat(near).st_dev] = int(getattr(system, blocks)) * system.f_frsize
        except OSError as exc:
            raise ConfigError(f"dir: {near}: {exc.strerror}") from exc
    return found


def _bytes_below(place: Path) -> int:
    """Disk bytes of the files in a directory and one level below, as a store lays them out."""
    total = 0
    for file in (*place.glob("*"), *place.glob("*/*")):
        try:
            found = file.lstat()
        except OSError:  # it left while we looked
            continue
        total += found.st_blocks * 512
    return total
