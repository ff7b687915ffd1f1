"""The commands of `kvstore`: look inside a store, evict from it, serve it, run the demo.

Every listing has `--json`, and then a failure is a document too. Tables go to stdout, sentences
about trouble to stderr; exit codes are in cli.py. What a command says is the same whether it opened
the directory itself or asked the server that holds it. `kvstore --help` loads all of this: what
takes time to import (numpy, pydantic, rich, grpc) is imported where it is used.
"""

from __future__ import annotations

import json as json_library
import os
import sys
from typing import Annotated, Any

import typer

from kvstore import cli_output as output
from kvstore._version import __version__
from kvstore.cli_cert import cert
from kvstore.cli_dashboard import dashboard
from kvstore.cli_directory import Place, on_store
from kvstore.cli_doctor import doctor
from kvstore.cli_evict import evict
from kvstore.cli_explain import explain
from kvstore.cli_help import EPILOG, INTRODUCTION, Sections, add_examples
from kvstore.cli_options import Chain, Json, Limit, Sort, seconds_of
from kvstore.cli_pin import pin, unpin
from kvstore.cli_quota import quota
from kvstore.cli_record import record
from kvstore.cli_serve import serve
from kvstore.cli_simulate import simulate
from kvstore.cli_size import size
from kvstore.cli_tenant import tenant_app
from kvstore.cli_top import top
from kvstore.cli_transfer import export, import_file
from kvstore.cli_tree import tree
from kvstore.cli_verify import verify
from kvstore.cli_warm import warm
from kvstore.errors import AccessDenied, InvalidRequest, KVStoreError

# click's own, or that of the copy which newer releases of typer carry.
_UsageError: Any = typer.BadParameter.__base__

app = typer.Typer(
    name="kvstore",
    cls=Sections,
    help=INTRODUCTION,
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

app.command()(serve)
app.add_typer(tenant_app)
app.command()(cert)
app.command()(simulate)
app.command()(dashboard)
app.command()(doctor)
app.command()(size)
app.command()(warm)
for each in (evict, explain, tree, pin, unpin, quota, record, top, verify, export):
    app.command()(on_store(each))
app.command("import")(on_store(import_file))


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvstore {__version__}")
        raise typer.Exit


@app.callback()
def _global(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Options before the command; they act through their callbacks."""


@app.command()
@on_store
def ls(
    store: Place,
    limit: Limit = 50,
    sort: Sort = "size",
    tier: Annotated[
        str | None,
        typer.Option(help="Only chains with pages there: host or disk.", metavar="TIER"),
    ] = None,
    json: Json = False,
) -> None:
    """List namespaces and the chains in them."""
    from kvstore.inspection import SORTS, TIERS_LISTED

    if sort not in SORTS:
        raise typer.BadParameter(f"{sort!r} given; one of {', '.join(SORTS)}", param_hint="--sort")
    if tier is not None and tier not in TIERS_LISTED:
        raise typer.BadParameter(f"{tier!r} given; one of host, disk", param_hint="--tier")
    with store.opened() as opened:
        spaces = opened.namespaces()
        chains, total = opened.chains(limit=limit, sort=sort, tier=tier)
    output.show_listing(spaces, chains, total, as_json=json)


@app.command("stats", help="The same as status.")
@app.command("status")
@on_store
def stats(store: Place, json: Json = False) -> None:
    """Show bytes and pages of each tier; with --json, counters."""
    with store.opened() as opened:
        found = opened.stats()
    output.show_stats(found, as_json=json)


@app.command()
@on_store
def inspect(
    store: Place,
    chain: Chain,
    json: Json = False,
) -> None:
    """Show one chain page by page, and the spec of its namespace."""
    if not chain or set(chain.lower()) - set("0123456789abcdef"):
        raise InvalidRequest(f"chain {chain!r}: hex digits are needed, as `kvstore ls` shows them")
    with store.opened() as opened:
        found = opened.find_chain(chain)
    if not found:
        raise InvalidRequest(f"no page's id begins with {chain}; `kvstore ls` shows chains")
    if len(found) > 1:
        ids = ", ".join(each.chain.chain_id for each in found[:5])
        raise InvalidRequest(f"{len(found)} pages' ids begin with {chain}: {ids}; say more")
    output.show_chain(found[0], as_json=json)


@app.command()
@on_store
def flush(
    store: Place,
    deadline: Annotated[str, typer.Option(help="How long to wait: 10s, 1m.")] = "10s",
    json: Json = False,
) -> None:
    """Wait until all that was committed is on disk. Exit code 1 when the deadline passed first."""
    seconds = seconds_of(deadline, "--deadline")
    with store.opened() as opened:
        done = opened.flush(seconds)
    output.show_flush(done, as_json=json)
    if not done:
        raise typer.Exit(1)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def demo(context: typer.Context) -> None:
    """Show a real model answer from the cache, also after kill -9."""
    # A child process: the store knows nothing of engines, and its package need not be complete.
    import subprocess

    command = [sys.executable, "-m", "kvstore.engine_adapter.demo", *context.args]
    raise typer.Exit(subprocess.run(command, check=False).returncode)  # noqa: S603


add_examples(app.registered_commands)


def run(arguments: list[str]) -> int:
    """Run one command line; its exit code. Whatever it refuses it says in one sentence."""
    # gRPC writes lines of its own to stderr, in a form of its own; what they say we say.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        return int(app(arguments, prog_name="kvstore", standalone_mode=False) or 0)
    except _UsageError as exc:
        exc.show()
        return _failed(arguments, exc.format_message(), 2)
    except BrokenPipeError:
        sys.stderr.close()
        return 0
    except AccessDenied as exc:
        return _refused(arguments, f"{exc}; {_ADMIN}")
    except PermissionError as exc:
        return _refused(arguments, f"{exc}: {_FOREIGN}")
    except (KVStoreError, OSError) as exc:  # the other: of what is written to, as a full disk
        return _refused(arguments, str(exc))
    except (MemoryError, RuntimeError, ImportError) as exc:
        from kvstore.tiers.process_limits import start_limit_said

        said = start_limit_said(exc)
        if not said:
            raise
        return _refused(arguments, said)


_FOREIGN = "run as its owner, or ask its server by an address (kvstore://...)"
_ADMIN = "it takes the token or certificate of an admin (--token-file, or --cert and --key)"


def _refused(arguments: list[str], why: str) -> int:
    typer.echo(f"kvstore: {why}", err=True)
    return _failed(arguments, why, 1)


def _failed(arguments: list[str], why: str, code: int) -> int:
    """Where a document is awaited, it is one that says why."""
    if "--json" in arguments:
        typer.echo(json_library.dumps({"error": why.strip(), "exit_code": code}))
    return code
