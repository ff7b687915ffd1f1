from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OpenRequest(_message.Message):
    __slots__ = ("client_version", "spec_json", "salt", "writer", "shared_memory", "without_public")
    CLIENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    SPEC_JSON_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    WRITER_FIELD_NUMBER: _ClassVar[int]
    SHARED_MEMORY_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_PUBLIC_FIELD_NUMBER: _ClassVar[int]
    client_version: str
    spec_json: str
    salt: bytes
    writer: str
    shared_memory: bool
    without_public: bool
    def __init__(self, client_version: _Optional[str] = ..., spec_json: _Optional[str] = ..., salt: _Optional[bytes] = ..., writer: _Optional[str] = ..., shared_memory: bool = ..., without_public: bool = ...) -> None: ...

class OpenReply(_message.Message):
    __slots__ = ("session", "boot_epoch", "server_version", "attach_token", "attach_path", "staging_bytes", "page_bytes", "heartbeat_s", "takes_back")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    BOOT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    ATTACH_TOKEN_FIELD_NUMBER: _ClassVar[int]
    ATTACH_PATH_FIELD_NUMBER: _ClassVar[int]
    STAGING_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_S_FIELD_NUMBER: _ClassVar[int]
    TAKES_BACK_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    boot_epoch: int
    server_version: str
    attach_token: bytes
    attach_path: str
    staging_bytes: int
    page_bytes: int
    heartbeat_s: int
    takes_back: bool
    def __init__(self, session: _Optional[bytes] = ..., boot_epoch: _Optional[int] = ..., server_version: _Optional[str] = ..., attach_token: _Optional[bytes] = ..., attach_path: _Optional[str] = ..., staging_bytes: _Optional[int] = ..., page_bytes: _Optional[int] = ..., heartbeat_s: _Optional[int] = ..., takes_back: bool = ...) -> None: ...

class Beat(_message.Message):
    __slots__ = ("session", "boot_epoch", "prefill_saved_s", "prefill_tokens", "prefill_positions", "prefill_s")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    BOOT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SAVED_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    boot_epoch: int
    prefill_saved_s: float
    prefill_tokens: float
    prefill_positions: float
    prefill_s: float
    def __init__(self, session: _Optional[bytes] = ..., boot_epoch: _Optional[int] = ..., prefill_saved_s: _Optional[float] = ..., prefill_tokens: _Optional[float] = ..., prefill_positions: _Optional[float] = ..., prefill_s: _Optional[float] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("session", "count")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    count: int
    def __init__(self, session: _Optional[bytes] = ..., count: _Optional[int] = ...) -> None: ...

class AttachReply(_message.Message):
    __slots__ = ("attach_token", "path")
    ATTACH_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    attach_token: _containers.RepeatedScalarFieldContainer[bytes]
    path: str
    def __init__(self, attach_token: _Optional[_Iterable[bytes]] = ..., path: _Optional[str] = ...) -> None: ...

class CloseRequest(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    def __init__(self, session: _Optional[bytes] = ...) -> None: ...

class CloseReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Extras(_message.Message):
    __slots__ = ("page_index", "content")
    PAGE_INDEX_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    page_index: _containers.RepeatedScalarFieldContainer[int]
    content: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, page_index: _Optional[_Iterable[int]] = ..., content: _Optional[_Iterable[bytes]] = ...) -> None: ...

class MatchRequest(_message.Message):
    __slots__ = ("session", "tokens", "extras", "after_match", "call")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXTRAS_FIELD_NUMBER: _ClassVar[int]
    AFTER_MATCH_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    tokens: bytes
    extras: Extras
    after_match: int
    call: int
    def __init__(self, session: _Optional[bytes] = ..., tokens: _Optional[bytes] = ..., extras: _Optional[_Union[Extras, _Mapping]] = ..., after_match: _Optional[int] = ..., call: _Optional[int] = ...) -> None: ...

class Places(_message.Message):
    __slots__ = ("host_slots", "host_generations")
    HOST_SLOTS_FIELD_NUMBER: _ClassVar[int]
    HOST_GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    host_slots: bytes
    host_generations: bytes
    def __init__(self, host_slots: _Optional[bytes] = ..., host_generations: _Optional[bytes] = ...) -> None: ...

class MatchReply(_message.Message):
    __slots__ = ("match", "pages", "places", "reason")
    MATCH_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    match: int
    pages: int
    places: Places
    reason: str
    def __init__(self, match: _Optional[int] = ..., pages: _Optional[int] = ..., places: _Optional[_Union[Places, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class StageRequest(_message.Message):
    __slots__ = ("session", "match", "deadline_s")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    MATCH_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    match: int
    deadline_s: float
    def __init__(self, session: _Optional[bytes] = ..., match: _Optional[int] = ..., deadline_s: _Optional[float] = ...) -> None: ...

class StageReply(_message.Message):
    __slots__ = ("host_pages", "places")
    HOST_PAGES_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    host_pages: int
    places: Places
    def __init__(self, host_pages: _Optional[int] = ..., places: _Optional[_Union[Places, _Mapping]] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("session", "match", "call")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    MATCH_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    match: _containers.RepeatedScalarFieldContainer[int]
    call: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session: _Optional[bytes] = ..., match: _Optional[_Iterable[int]] = ..., call: _Optional[_Iterable[int]] = ...) -> None: ...

class ReleaseReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("session", "tokens", "extras", "deadline_s", "after_match", "call")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXTRAS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    AFTER_MATCH_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    tokens: bytes
    extras: Extras
    deadline_s: float
    after_match: int
    call: int
    def __init__(self, session: _Optional[bytes] = ..., tokens: _Optional[bytes] = ..., extras: _Optional[_Union[Extras, _Mapping]] = ..., deadline_s: _Optional[float] = ..., after_match: _Optional[int] = ..., call: _Optional[int] = ...) -> None: ...

class ReserveReply(_message.Message):
    __slots__ = ("reservation", "start", "count", "reason", "staging_offsets")
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STAGING_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    reservation: int
    start: int
    count: int
    reason: str
    staging_offsets: bytes
    def __init__(self, reservation: _Optional[int] = ..., start: _Optional[int] = ..., count: _Optional[int] = ..., reason: _Optional[str] = ..., staging_offsets: _Optional[bytes] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("session", "reservation", "durable", "deadline_s")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    reservation: int
    durable: bool
    deadline_s: float
    def __init__(self, session: _Optional[bytes] = ..., reservation: _Optional[int] = ..., durable: bool = ..., deadline_s: _Optional[float] = ...) -> None: ...

class CommitReply(_message.Message):
    __slots__ = ("pages", "durable", "reason")
    PAGES_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    pages: int
    durable: bool
    reason: str
    def __init__(self, pages: _Optional[int] = ..., durable: bool = ..., reason: _Optional[str] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("session", "reservation")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    reservation: int
    def __init__(self, session: _Optional[bytes] = ..., reservation: _Optional[int] = ...) -> None: ...

class AbortReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushRequest(_message.Message):
    __slots__ = ("session", "deadline_s")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    deadline_s: float
    def __init__(self, session: _Optional[bytes] = ..., deadline_s: _Optional[float] = ...) -> None: ...

class FlushReply(_message.Message):
    __slots__ = ("done",)
    DONE_FIELD_NUMBER: _ClassVar[int]
    done: bool
    def __init__(self, done: bool = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("session", "tokens", "extras", "ttl_s", "after_match")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXTRAS_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    AFTER_MATCH_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    tokens: bytes
    extras: Extras
    ttl_s: float
    after_match: int
    def __init__(self, session: _Optional[bytes] = ..., tokens: _Optional[bytes] = ..., extras: _Optional[_Union[Extras, _Mapping]] = ..., ttl_s: _Optional[float] = ..., after_match: _Optional[int] = ...) -> None: ...

class PinReply(_message.Message):
    __slots__ = ("pages",)
    PAGES_FIELD_NUMBER: _ClassVar[int]
    pages: int
    def __init__(self, pages: _Optional[int] = ...) -> None: ...

class UnpinRequest(_message.Message):
    __slots__ = ("session", "tokens", "extras", "after_match")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXTRAS_FIELD_NUMBER: _ClassVar[int]
    AFTER_MATCH_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    tokens: bytes
    extras: Extras
    after_match: int
    def __init__(self, session: _Optional[bytes] = ..., tokens: _Optional[bytes] = ..., extras: _Optional[_Union[Extras, _Mapping]] = ..., after_match: _Optional[int] = ...) -> None: ...

class UnpinReply(_message.Message):
    __slots__ = ("pages",)
    PAGES_FIELD_NUMBER: _ClassVar[int]
    pages: int
    def __init__(self, pages: _Optional[int] = ...) -> None: ...

class HintRequest(_message.Message):
    __slots__ = ("session", "tokens", "extras", "after_match", "next_use_s", "priority", "done", "conversation", "ends_conversation")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXTRAS_FIELD_NUMBER: _ClassVar[int]
    AFTER_MATCH_FIELD_NUMBER: _ClassVar[int]
    NEXT_USE_S_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    ENDS_CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    tokens: bytes
    extras: Extras
    after_match: int
    next_use_s: float
    priority: int
    done: bool
    conversation: str
    ends_conversation: bool
    def __init__(self, session: _Optional[bytes] = ..., tokens: _Optional[bytes] = ..., extras: _Optional[_Union[Extras, _Mapping]] = ..., after_match: _Optional[int] = ..., next_use_s: _Optional[float] = ..., priority: _Optional[int] = ..., done: bool = ..., conversation: _Optional[str] = ..., ends_conversation: bool = ...) -> None: ...

class HintReply(_message.Message):
    __slots__ = ("pages",)
    PAGES_FIELD_NUMBER: _ClassVar[int]
    pages: int
    def __init__(self, pages: _Optional[int] = ...) -> None: ...

class EvictRequest(_message.Message):
    __slots__ = ("tenant", "namespace_prefix", "tokens", "has_prefix", "writer", "unused_for_s", "older_than_s", "everything", "dry_run", "include_pinned", "extras", "erase_key", "tier")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_PREFIX_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    HAS_PREFIX_FIELD_NUMBER: _ClassVar[int]
    WRITER_FIELD_NUMBER: _ClassVar[int]
    UNUSED_FOR_S_FIELD_NUMBER: _ClassVar[int]
    OLDER_THAN_S_FIELD_NUMBER: _ClassVar[int]
    EVERYTHING_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_PINNED_FIELD_NUMBER: _ClassVar[int]
    EXTRAS_FIELD_NUMBER: _ClassVar[int]
    ERASE_KEY_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    namespace_prefix: bytes
    tokens: bytes
    has_prefix: bool
    writer: str
    unused_for_s: float
    older_than_s: float
    everything: bool
    dry_run: bool
    include_pinned: bool
    extras: Extras
    erase_key: bool
    tier: str
    def __init__(self, tenant: _Optional[str] = ..., namespace_prefix: _Optional[bytes] = ..., tokens: _Optional[bytes] = ..., has_prefix: bool = ..., writer: _Optional[str] = ..., unused_for_s: _Optional[float] = ..., older_than_s: _Optional[float] = ..., everything: bool = ..., dry_run: bool = ..., include_pinned: bool = ..., extras: _Optional[_Union[Extras, _Mapping]] = ..., erase_key: bool = ..., tier: _Optional[str] = ...) -> None: ...

class EvictReply(_message.Message):
    __slots__ = ("chains", "pages", "payload_bytes", "kept_leased", "kept_pinned", "dry_run", "redis_pages", "kept_above")
    CHAINS_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    KEPT_LEASED_FIELD_NUMBER: _ClassVar[int]
    KEPT_PINNED_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    REDIS_PAGES_FIELD_NUMBER: _ClassVar[int]
    KEPT_ABOVE_FIELD_NUMBER: _ClassVar[int]
    chains: int
    pages: int
    payload_bytes: int
    kept_leased: int
    kept_pinned: int
    dry_run: bool
    redis_pages: int
    kept_above: int
    def __init__(self, chains: _Optional[int] = ..., pages: _Optional[int] = ..., payload_bytes: _Optional[int] = ..., kept_leased: _Optional[int] = ..., kept_pinned: _Optional[int] = ..., dry_run: bool = ..., redis_pages: _Optional[int] = ..., kept_above: _Optional[int] = ...) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ("limit", "sort", "tier")
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    SORT_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    limit: int
    sort: str
    tier: str
    def __init__(self, limit: _Optional[int] = ..., sort: _Optional[str] = ..., tier: _Optional[str] = ...) -> None: ...

class InspectRequest(_message.Message):
    __slots__ = ("chain", "several")
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    SEVERAL_FIELD_NUMBER: _ClassVar[int]
    chain: str
    several: bool
    def __init__(self, chain: _Optional[str] = ..., several: bool = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("tokens", "namespace_prefix", "tenant", "extras", "spec_json", "own_tenant_only", "salt")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_PREFIX_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    EXTRAS_FIELD_NUMBER: _ClassVar[int]
    SPEC_JSON_FIELD_NUMBER: _ClassVar[int]
    OWN_TENANT_ONLY_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    tokens: bytes
    namespace_prefix: bytes
    tenant: str
    extras: Extras
    spec_json: str
    own_tenant_only: bool
    salt: bytes
    def __init__(self, tokens: _Optional[bytes] = ..., namespace_prefix: _Optional[bytes] = ..., tenant: _Optional[str] = ..., extras: _Optional[_Union[Extras, _Mapping]] = ..., spec_json: _Optional[str] = ..., own_tenant_only: bool = ..., salt: _Optional[bytes] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Document(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: str
    def __init__(self, json: _Optional[str] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("after_sequence",)
    AFTER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    after_sequence: int
    def __init__(self, after_sequence: _Optional[int] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("sequence", "kind", "medium", "keys", "tenant")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MEDIUM_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    kind: str
    medium: str
    keys: bytes
    tenant: str
    def __init__(self, sequence: _Optional[int] = ..., kind: _Optional[str] = ..., medium: _Optional[str] = ..., keys: _Optional[bytes] = ..., tenant: _Optional[str] = ...) -> None: ...

class ReadPagesHeader(_message.Message):
    __slots__ = ("session", "match", "start", "stop")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    MATCH_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    match: int
    start: int
    stop: int
    def __init__(self, session: _Optional[bytes] = ..., match: _Optional[int] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...

class WritePagesHeader(_message.Message):
    __slots__ = ("session", "reservation", "durable", "deadline_s")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    reservation: int
    durable: bool
    deadline_s: float
    def __init__(self, session: _Optional[bytes] = ..., reservation: _Optional[int] = ..., durable: bool = ..., deadline_s: _Optional[float] = ...) -> None: ...

class TreeRequest(_message.Message):
    __slots__ = ("tenant", "namespace_prefix", "depth", "branches")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_PREFIX_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    BRANCHES_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    namespace_prefix: bytes
    depth: int
    branches: int
    def __init__(self, tenant: _Optional[str] = ..., namespace_prefix: _Optional[bytes] = ..., depth: _Optional[int] = ..., branches: _Optional[int] = ...) -> None: ...

class PinChainRequest(_message.Message):
    __slots__ = ("chain", "ttl_s")
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    chain: str
    ttl_s: float
    def __init__(self, chain: _Optional[str] = ..., ttl_s: _Optional[float] = ...) -> None: ...

class RecordRequest(_message.Message):
    __slots__ = ("start", "bytes_max", "stop")
    START_FIELD_NUMBER: _ClassVar[int]
    BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    start: str
    bytes_max: int
    stop: bool
    def __init__(self, start: _Optional[str] = ..., bytes_max: _Optional[int] = ..., stop: bool = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ("repair",)
    REPAIR_FIELD_NUMBER: _ClassVar[int]
    repair: bool
    def __init__(self, repair: bool = ...) -> None: ...

class ExportRequest(_message.Message):
    __slots__ = ("tenant", "namespace_prefix", "chain")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_PREFIX_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    namespace_prefix: bytes
    chain: str
    def __init__(self, tenant: _Optional[str] = ..., namespace_prefix: _Optional[bytes] = ..., chain: _Optional[str] = ...) -> None: ...

class ImportHeader(_message.Message):
    __slots__ = ("tenant",)
    TENANT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    def __init__(self, tenant: _Optional[str] = ...) -> None: ...

class RawPiece(_message.Message):
    __slots__ = ("piece",)
    PIECE_FIELD_NUMBER: _ClassVar[int]
    piece: bytes
    def __init__(self, piece: _Optional[bytes] = ...) -> None: ...
