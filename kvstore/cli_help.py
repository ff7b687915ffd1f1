"""How `kvstore --help` is laid out: commands by what one wants to do, and an example for each.

Held by tests: every command stands in one section, has an example, and the example's options exist.
Must not be here: what a command does; its own module says that.
"""

from __future__ import annotations

import copy
import inspect
from typing import TYPE_CHECKING, Annotated, Any, get_args

from typer.core import TyperGroup

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

SECTIONS = {
    "Run": ("serve", "demo", "warm", "tenant", "cert"),
    "Look inside": (
        *("status", "ls", "tree", "inspect", "explain", "top", "dashboard", "stats", "quota"),
    ),
    "Change": ("pin", "unpin", "evict", "flush", "verify", "export", "import"),
    "Plan": ("doctor", "size", "record", "simulate"),
}
INTRODUCTION = (
    "A KV-cache store for LLM inference: run it, look inside, change what it keeps.\n\n"
    "STORE is a store's directory, or a kvstore:// address of a server; a directory that a server "
    "holds is asked through it. `kvstore COMMAND --help` has an example of each."
)
EPILOG = (
    "\b\n"
    "Exit codes: 0 done; 1 refused or failed, or something is wrong (verify, doctor); 2 wrong\n"
    "usage; 130 broken off with Ctrl-C. --json prints one JSON document, also of a failure; why a\n"
    "command failed is said on stderr. Colours only on a terminal, and not with NO_COLOR set."
)
EXAMPLES = {
    "serve": "kvstore serve /var/cache/kv --host-bytes 32GiB --disk-bytes 1TiB",
    "demo": "kvstore demo",
    "warm": "kvstore warm http://localhost:8000 prompts.txt --store /var/cache/kv",
    "cert": "kvstore cert certs --host kv.example.org --client acme:writer",
    "status": "kvstore status /var/cache/kv",
    "stats": "kvstore stats /var/cache/kv --json",
    "ls": "kvstore ls /var/cache/kv --sort hits --limit 20",
    "tree": "kvstore tree /var/cache/kv --depth 2 --tokenizer ./my-model",
    "inspect": "kvstore inspect /var/cache/kv 3fa2",
    "explain": "kvstore explain /var/cache/kv --text-file prompt.txt --tokenizer ./my-model",
    "top": "kvstore top /var/cache/kv --interval 5s",
    "dashboard": "kvstore dashboard /var/cache/kv --open",
    "quota": "kvstore quota /var/cache/kv",
    "pin": "kvstore pin /var/cache/kv 3fa2 --ttl 2h",
    "unpin": "kvstore unpin /var/cache/kv 3fa2",
    "evict": "kvstore evict /var/cache/kv --older-than 7d --yes",
    "flush": "kvstore flush /var/cache/kv --deadline 1m",
    "verify": "kvstore verify /var/cache/kv --repair",
    "export": "kvstore export /var/cache/kv prompts.kv --tenant acme",
    "import": "kvstore import kvstore://unix:/run/kv/kvstore.sock prompts.kv",
    "doctor": "kvstore doctor /var/cache/kv",
    "size": "kvstore size ./my-model --memory 80GiB",
    "record": "kvstore record /var/cache/kv start",
    "simulate": "kvstore simulate trace.jsonl --policy lru --policy csl --capacity 5%,10%",
}


class Sections(TyperGroup):
    """Lists commands section by section."""

    def list_commands(self, ctx: Any) -> list[str]:
        """In the order of SECTIONS; what stands in none comes last."""
        placed = [name for names in SECTIONS.values() for name in names if name in self.commands]
        return placed + [name for name in self.commands if name not in placed]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Each section with the first sentence of its commands."""
        left = self.list_commands(ctx)
        for title, names in {**SECTIONS, "More": tuple(left)}.items():
            shown = [name for name in names if name in left]
            left = [name for name in left if name not in shown]
            if shown:
                room = formatter.width - 6 - max(map(len, shown))
                rows = [(name, self.commands[name].get_short_help_str(room)) for name in shown]
                with formatter.section(title):
                    formatter.write_dl(rows)


def add_examples(commands: list[Any]) -> None:
    """Put its example below the help of each command that is registered."""
    for each in commands:
        name = each.name or each.callback.__name__
        if name in EXAMPLES:
            each.epilog = f"\b\nExample:\n  {EXAMPLES[name]}"


def described(command: Callable[..., None], words: Mapping[str, str]) -> Callable[..., None]:
    """The command with these words as help of its options, by parameter name."""
    signature = inspect.signature(command, eval_str=True)
    parameters = []
    for each in signature.parameters.values():
        kind, *given = get_args(each.annotation) if each.name in words else (None,)
        if given:
            option = copy.copy(given[0])
            option.help = words[each.name]
            said: Any = Annotated[kind, option]
            each = each.replace(annotation=said)
        parameters.append(each)
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command
