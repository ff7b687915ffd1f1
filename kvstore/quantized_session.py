"""Sessions over fp8, int8 or int4 pages: callers see whole pages, the store holds codes.

    session = quantized_session(store, spec, "int8")

Quantizing changes numbers, so these pages are others: their spec names the scheme
(KvQuantization), their namespace is their own, and none ever answers for an exact page or for one
in another scheme. The two layouts of separate K and V give the same codes, so they share pages.
Must not be here: codecs, engines.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvstore.errors import InvalidRequest, SpecError
from kvstore.page_layout import AttentionKind, KvQuantization, PageLayout
from kvstore.tiers.codec import LOSSY_CODECS, CodecError, KvShape

if TYPE_CHECKING:
    from collections.abc import Hashable
    from typing import Self

    from kvstore.interface import MatchLike, ReservationLike, SessionLike, StoreLike
    from kvstore.request import Extras, Tokens
    from kvstore.reservation import Commit
    from kvstore.spec import CacheSpec
    from kvstore.tiers.codec import LossyCodec

SCHEMES = tuple(LOSSY_CODECS)


def quantized_session(
    store: StoreLike, spec: CacheSpec, scheme: str, **chosen: Any
) -> QuantizedSession:
    """Work with pages of `spec` kept in a scheme of SCHEMES; `chosen` as for `store.session()`.

    SpecError for pages that are not plain K and V, or one latent, of equal layers in one shard.
    """
    codec = codec_of(spec, scheme)
    return QuantizedSession(store.session(quantized_spec(spec, codec), **chosen), spec, codec)


def codec_of(spec: CacheSpec, scheme: str) -> LossyCodec:
    """The codec for pages of a spec; SpecError says why there is none."""
    if scheme not in LOSSY_CODECS:
        raise SpecError(f"quantization: {scheme!r} is not one of {', '.join(SCHEMES)}")
    if spec.quantization != KvQuantization.none():
        raise SpecError(f"quantization: pages of this spec are in {spec.quantization} already")
    if spec.layout is None or spec.layout.declares_bytes:
        raise SpecError(f"layout: what pages in {spec.layout} hold is not known here")
    if len(spec.groups) != 1 or len(spec.shard_ranges()) != 1:
        raise SpecError("groups, geometry: pages of equal layers in one shard are needed")
    group = spec.groups[0]
    latent = group.attention is AttentionKind.MLA
    if not latent and group.key_dim != group.value_dim:
        raise SpecError(f"groups[0]: key_dim {group.key_dim}, value_dim {group.value_dim}")
    try:
        shape = KvShape(
            spec.kv_dtype,
            spec.layers,
            1 if latent else 2,
            group.kv_heads,
            spec.page_tokens,
            group.key_dim,
            tokens_first=spec.layout is PageLayout.LAYER_KV_TOKEN_HEAD_DIM,
        )
        return LOSSY_CODECS[scheme](shape)
    except CodecError as error:
        raise SpecError(f"quantization: {scheme} does not take this spec: {error}") from error


def quantized_spec(spec: CacheSpec, codec: LossyCodec) -> CacheSpec:
    """The spec of the codec's pages."""
    return replace(
        spec,
        layout=PageLayout.ENGINE,
        quantization=KvQuantization(codec.name, "page"),
        shard_bytes=(codec.encoded_bytes,),
    )


class QuantizedSession:
    """A session whose callers see pages of `spec`; `stored_spec` is that of the store's."""

    def __init__(self, session: SessionLike, spec: CacheSpec, codec: LossyCodec) -> None:
        self._session = session
        self._codec = codec
        self.spec = spec

    @property
    def stored_spec(self) -> CacheSpec:
        """Names the scheme; operators find the pages under its namespace."""
        return self._session.spec

    def match(self, tokens: Tokens, extras: Extras | None = None) -> QuantizedMatch:
        """Find the longest stored chain of a prompt and lease it, in one step."""
        found = self._session.match(tokens, extras)
        return QuantizedMatch(found, self._codec, self.spec.page_bytes)

    def reserve(
        self, tokens: Tokens, extras: Extras | None = None, *, deadline_s: float = 0.25
    ) -> QuantizedReservation:
        """Room for the pages of this prompt that nobody has stored or is storing."""
        run = self._session.reserve(tokens, extras, deadline_s=deadline_s)
        return QuantizedReservation(run, self._codec, self.spec.page_bytes)

    def report_saved(self, prefill_s: float) -> None:
        """For the metrics: how much prefill the last match saved, as the engine measures it."""
        self._session.report_saved(prefill_s)

    def report_prefill(self, tokens: int, before: int, seconds: float) -> None:
        """Computing `tokens` of a prompt that follow `before` others took so long."""
        self._session.report_prefill(tokens, before, seconds)

    def flush(self, deadline_s: float = 10.0) -> bool:
        """Wait until all that was committed is on disk; False when `deadline_s` passed first."""
        return self._session.flush(deadline_s)

    def pin(self, tokens: Tokens, ttl_s: float, extras: Extras | None = None) -> int:
        """Keep the stored chain of this prompt for `ttl_s` seconds; how many pages it has."""
        return self._session.pin(tokens, ttl_s, extras)

    def unpin(self, tokens: Tokens, extras: Extras | None = None) -> int:
        """Take back every pin on the stored chain of this prompt; how many pages it has."""
        return self._session.unpin(tokens, extras)

    def hint(
        self,
        tokens: Tokens,
        extras: Extras | None = None,
        *,
        next_use_s: float | None = None,
        priority: int | None = None,
        done: bool = False,
        conversation: str = "",
    ) -> int:
        """Tell what is known of the stored chain of this prompt; how many pages it has."""
        return self._session.hint(
            tokens,
            extras,
            next_use_s=next_use_s,
            priority=priority,
            done=done,
            conversation=conversation,
        )

    def end_conversation(self, name: str) -> int:
        """It won't go on: the pages that are only its own leave first; how many they are."""
        return self._session.end_conversation(name)

    def close(self) -> None:
        """Release all matches, abort all reservations."""
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class QuantizedMatch:
    """A chain of quantized pages, decoded when they are looked at. See MatchLike."""

    def __init__(self, found: MatchLike, codec: LossyCodec, page_bytes: int) -> None:
        self._found = found
        self._codec = codec
        self._page_bytes = page_bytes

    @property
    def reason(self) -> str:
        return self._found.reason

    @property
    def pages(self) -> int:
        return self._found.pages

    @property
    def tokens(self) -> int:
        return self._found.tokens

    @property
    def versions(self) -> list[Hashable]:
        return self._found.versions

    @property
    def tiers(self) -> list[str]:
        return self._found.tiers

    @property
    def host_pages(self) -> int:
        return self._found.host_pages

    def stage(self, deadline_s: float | None = None) -> int:
        """Bring pages into memory; how many leading pages can be read now."""
        return self._found.stage(deadline_s)

    def views(self, start: int = 0, stop: int | None = None) -> list[memoryview]:
        """Pages [start, stop) decoded into memory of their own, read-only."""
        decoded = []
        for view in self._found.views(start, stop):
            page = bytearray(self._page_bytes)
            self._codec.decode(view, page)
            decoded.append(memoryview(page).toreadonly())
        return decoded

    def valid(self) -> bool:
        """Call after views(); False: the pages had moved, drop what was decoded."""
        return self._found.valid()

    def release(self) -> None:
        """End the lease; doing it again does nothing."""
        self._found.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


class QuantizedReservation:
    """Pages to write, in memory of their own until commit() encodes them. See ReservationLike."""

    def __init__(self, run: ReservationLike, codec: LossyCodec, page_bytes: int) -> None:
        self._run = run
        self._codec = codec
        self._pages = [bytearray(page_bytes) for _ in range(run.count)]
        self.reason = run.reason

    @property
    def start(self) -> int:
        return self._run.start

    @property
    def count(self) -> int:
        return self._run.count

    def views(self) -> list[memoryview]:
        """Writable bytes, `spec.page_bytes` a page."""
        return [memoryview(page) for page in self._pages]

    def commit(self, *, durable: bool = False, deadline_s: float | None = None) -> Commit:
        """Encode and publish. InvalidRequest for numbers that are not finite: nothing is stored."""
        try:
            # No views, and a reason from commit(), once the store has dropped the run.
            for view, page in zip(self._run.views(), self._pages, strict=False):
                view[:] = self._codec.encode(page)
        except CodecError as error:
            self.abort()
            raise InvalidRequest(f"{self._codec.name} does not take a page: {error}") from error
        return self._run.commit(durable=durable, deadline_s=deadline_s)

    def abort(self) -> None:
        """Give the pages up; nothing was ever visible. Doing it again does nothing."""
        self._run.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.abort()
