"""Prompts and namespaces as the command line names them."""

from __future__ import annotations

import difflib
import json
import re
import sys
from typing import TYPE_CHECKING

from kvstore.errors import InvalidRequest
from kvstore.identity import DEFAULT_TENANT

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

    from kvstore.interface import OperatorLike

_WHOLE = re.compile(r"[0-9a-fA-F]{32}")
NAMED_MAX = 5  # names of tenants or writers in one message
PROMPT_CHARS_MAX = 256 * 1024 * 1024  # of a file with token ids or text


def read(
    tokens: str | None,
    tokens_file: Path | None,
    text: str | None,
    text_file: Path | None,
    tokenizer: Path | None,
    *,
    empty: str = "is empty; leave it out to mean any",
) -> list[int] | None:
    """The one prompt that was given, as token ids; None when there is none.

    An empty one is refused, with these words: it begins every prompt of a store.
    """
    given = [item for item in (tokens, tokens_file, text, text_file) if item is not None]
    if not given:
        return None
    if len(given) > 1:
        raise InvalidRequest("give one prompt: --tokens, --tokens-file, --text or --text-file")
    if tokens is not None:
        return _not_empty(numbers(tokens, "--tokens"), "--tokens", empty)
    if tokens_file is not None:
        ids = numbers(_content(tokens_file), str(tokens_file))
        return _not_empty(ids, f"--tokens-file {tokens_file}", empty)
    words = text if text is not None else _content(text_file)
    if tokenizer is None:
        raise InvalidRequest("a prompt as text needs --tokenizer PATH (a tokenizer.json)")
    ids = _load_tokenizer(tokenizer).encode(words, add_special_tokens=False).ids
    return _not_empty(ids, "--text" if text is not None else f"--text-file {text_file}", empty)


def read_extras(given: str | None) -> dict[int, bytes] | None:
    """Extras by page index out of {"0": "hex digits"}; None when there are none."""
    if given is None:
        return None
    try:
        found = json.loads(given)
        return {int(page): bytes.fromhex(content) for page, content in found.items()}
    except (AttributeError, TypeError, ValueError, RecursionError) as exc:
        raise InvalidRequest(
            '--extras: a JSON object of page indices and hex digits is needed, as {"0": "a1b2"}'
        ) from exc


def read_salt(given: str | None) -> bytes:
    """The bytes of a salt: its UTF-8, or what follows "hex:"; none for None."""
    if given is None or not given.startswith("hex:"):
        return (given or "").encode()
    try:
        return bytes.fromhex(given.removeprefix("hex:"))
    except ValueError as exc:
        raise InvalidRequest("--salt: after hex: an even number of hex digits is needed") from exc


def decoder(tokenizer: Path | None) -> Callable[[int], str] | None:
    """Turns a token id into text, when there is a tokenizer."""
    if tokenizer is None:
        return None
    loaded = _load_tokenizer(tokenizer)
    return lambda token: repr(loaded.decode([token], skip_special_tokens=False))


def text_decoder(tokenizer: Path | None) -> Callable[[list[int]], str] | None:
    """Turns token ids into text, when there is a tokenizer."""
    if tokenizer is None:
        return None
    loaded = _load_tokenizer(tokenizer)
    return lambda tokens: str(loaded.decode(tokens, skip_special_tokens=False))


def text_encoder(tokenizer: Path | None) -> Callable[[str], list[int]] | None:
    """Turns text into token ids, without special ones, when there is a tokenizer."""
    if tokenizer is None:
        return None
    loaded = _load_tokenizer(tokenizer)
    return lambda text: list(loaded.encode(text, add_special_tokens=False).ids)


def namespace_prefix(store: OperatorLike, namespace: str | None) -> bytes | None:
    """The one namespace that begins with these hex digits; None for None."""
    if namespace is None:
        return None
    if not namespace:
        raise InvalidRequest("--namespace is empty; leave it out to mean any")
    return bytes.fromhex(_one_namespace(store, namespace, None))


def check_tenant(store: OperatorLike, tenant: str) -> None:
    """Refuse one that has no page here, with the name that was meant, most likely."""
    found = {space.tenant for space in store.namespaces()}
    if not found:
        raise InvalidRequest("the store is empty: no tenant has pages here")
    if tenant not in found:
        raise InvalidRequest(f"tenant {tenant} has no pages here; {did_you_mean(tenant, found)}")


def did_you_mean(name: str, known: Collection[str]) -> str:
    """The rest of a sentence: the name that is near, else some of those there are."""
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f"did you mean {near[0]}?"
    named = ", ".join(sorted(known)[:NAMED_MAX])
    return f"known here: {named}" + (", and more" if len(known) > NAMED_MAX else "")


def choose_tenant(store: OperatorLike, tenant: str | None) -> str:
    """The tenant that was named, or the only one that has pages, or "default"."""
    if tenant is not None:
        return tenant
    found = {space.tenant for space in store.namespaces()}
    return found.pop() if len(found) == 1 else DEFAULT_TENANT


def choose_namespace(
    store: OperatorLike, namespace: str | None, tenant: str, *, known_only: bool = True
) -> bytes:
    """The namespace that was named, or the only one that the tenant has.

    Without `known_only` a whole name stands for itself, whether it has pages or not.
    """
    if not known_only and namespace is not None and _WHOLE.fullmatch(namespace):
        return bytes.fromhex(namespace)
    return bytes.fromhex(_one_namespace(store, namespace or "", tenant))


def _one_namespace(store: OperatorLike, digits: str, tenant: str | None) -> str:
    spaces = {
        space.namespace
        for space in store.namespaces()
        if space.namespace.startswith(digits.lower()) and tenant in (None, space.tenant)
    }
    if len(spaces) == 1:
        return spaces.pop()
    of_tenant = f" of tenant {tenant}" if tenant is not None else ""
    if not spaces:
        if tenant is not None and not digits:
            check_tenant(store, tenant)
        named = f" begins with {digits}" if digits else " has pages here"
        raise InvalidRequest(f"no namespace{of_tenant}{named}; `kvstore ls` shows them")
    raise InvalidRequest(
        f"{len(spaces)} namespaces{of_tenant} fit: {', '.join(sorted(spaces)[:5])}; "
        "name one with --namespace"
    )


def _not_empty(ids: list[int], where: str, words: str) -> list[int]:
    if not ids:
        raise InvalidRequest(f"{where} {words}")
    return ids


def numbers(content: str, where: str) -> list[int]:
    """Token ids: a JSON list, or apart by spaces and commas; InvalidRequest names `where`."""
    content = content.strip()
    if content.startswith("["):
        try:
            values = json.loads(content)
        except (json.JSONDecodeError, RecursionError) as exc:
            raise InvalidRequest(f"{where}: not a JSON list: {exc}") from exc
        if not all(isinstance(value, int) for value in values):
            raise InvalidRequest(f"{where}: a flat list of whole numbers is needed")
        return list(values)
    parts = [part for part in re.split(r"[\s,]+", content) if part]
    for part in parts:
        if not re.fullmatch(r"-?\d{1,19}", part):
            raise InvalidRequest(f"{where}: {part[:40]!r} is not a token id")
    return [int(part) for part in parts]


def _content(path: Path | None) -> str:
    assert path is not None
    return read_file(path, PROMPT_CHARS_MAX)


def read_file(path: Path, chars_max: int) -> str:
    """A text file, or stdin for "-"; InvalidRequest when it can't be read or is too long."""
    try:
        with sys.stdin if str(path) == "-" else path.open() as file:
            content = file.read(chars_max + 1)
        if len(content) > chars_max:
            raise InvalidRequest(f"{path}: more than {chars_max} characters")
        return content
    except OSError as exc:
        raise InvalidRequest(f"{path}: cannot be read: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise InvalidRequest(f"{path}: is no text: {exc.reason} at byte {exc.start}") from exc


def _load_tokenizer(path: Path):  # type: ignore[no-untyped-def] # its package is optional
    try:
        from tokenizers import Tokenizer
    except ImportError as exc:
        raise InvalidRequest(
            "--tokenizer needs the package tokenizers: pip install 'kvstore-llm[transformers]'"
        ) from exc
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise InvalidRequest(f"--tokenizer: there is no {file}")
    try:
        return Tokenizer.from_file(str(file))
    except Exception as exc:  # the package raises bare Exception for a malformed file
        raise InvalidRequest(f"--tokenizer: {file}: {exc}") from exc
