"""A part of the README that a bench writes: what stands between two marks, and in a page of docs/.

A test compares both, so that the README can't tell of another run than the page. Nothing but text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

END = "<!-- until here -->"
SHORT = "## In short"  # the page's section that has the same


def begin(page: str) -> str:
    """The mark in front, for a page of docs/."""
    return f"<!-- from docs/{page}, written with it -->"


def block_of(text: str, page: str) -> str:
    """What stands between the marks."""
    return text.partition(begin(page))[2].partition(END)[0].strip("\n")


def short_of(text: str) -> str:
    """What the page itself says."""
    return text.partition(f"{SHORT}\n")[2].partition("\n## ")[0].strip("\n")


def put_into(file: Path, page: str, said: str) -> None:
    """Replace what stands between the marks; without marks the file stays as it is."""
    text = file.read_text()
    before, mark, rest = text.partition(begin(page))
    _, end, after = rest.partition(END)
    if mark and end:
        file.write_text(f"{before}{mark}\n{said}\n{end}{after}")
