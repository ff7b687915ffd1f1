"""The specs that a store has met, as small files beside its pages: DIR/namespaces/HEX.json.

They are for people and for tools: pages carry the namespace's digest, and that decides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.errors import InvalidRequest, SpecError
from kvstore.remembered import replace_file
from kvstore.spec import CacheSpec

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

FOLDER = "namespaces"
SPECS_MAX = 10_000


class SpecFolder:
    """Remembers specs by namespace; in memory only when there is no directory."""

    def __init__(self, directory: Path | None) -> None:
        self._folder = directory / FOLDER if directory is not None else None
        self._texts: dict[bytes, str] = {}
        if self._folder is not None:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for path in sorted(self._folder.glob("*.json"))[:SPECS_MAX]:
                self._read(path)

    def remember(self, spec: CacheSpec) -> None:
        """Keep a spec; a full disk only costs its name in listings."""
        if spec.namespace in self._texts or len(self._texts) >= SPECS_MAX:
            return
        self._texts[spec.namespace] = spec.to_json()
        if self._folder is None:
            return
        path = self._folder / f"{spec.namespace.hex()}.json"
        replace_file(path, self._texts[spec.namespace].encode())

    def json_of(self, namespace: bytes) -> str | None:
        """Canonical JSON of a spec, if it was met."""
        return self._texts.get(namespace)

    def texts(self) -> Mapping[bytes, str]:
        """Canonical JSON of every spec by namespace."""
        return self._texts

    def texts_with(self, namespace: bytes, spec_json: str | None) -> Mapping[bytes, str]:
        """The same with one more spec, if it is given; InvalidRequest if it is another's."""
        if spec_json is None:
            return self._texts
        spec = CacheSpec.from_json(spec_json)
        if spec.namespace != namespace:
            raise InvalidRequest(
                f"the spec is that of namespace {spec.namespace.hex()}, not {namespace.hex()}"
            )
        return {**self._texts, namespace: spec.to_json()}

    def models(self) -> dict[bytes, str]:
        """The model's name of every namespace."""
        return {key: CacheSpec.from_json(text).model for key, text in self._texts.items()}

    def _read(self, path: Path) -> None:
        """Take a file at its word only if its content gives the digest that names it."""
        try:
            spec = CacheSpec.from_json(path.read_text())
        except (OSError, ValueError, SpecError):
            return
        if spec.namespace.hex() == path.stem:
            self._texts[spec.namespace] = spec.to_json()
