"""The command `kvstore serve`: one server process, until SIGTERM."""

from __future__ import annotations

import logging
import os
import resource
import signal
import sys
from pathlib import Path  # typer looks at the annotations
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstore.cli_help import described
from kvstore.server_log import log_to_stderr

if TYPE_CHECKING:
    from types import FrameType

    from kvstore.server import Server
    from kvstore.server_config import ServerConfig
    from kvstore.server_security import ServerSecurity

Size = Annotated[str | None, typer.Option(help="Like 8GiB.", show_default=False)]
Duration = Annotated[str | None, typer.Option(help="Like 60s.", show_default=False)]
Count = Annotated[int | None, typer.Option(show_default=False)]
Admission = Annotated[
    str | None, typer.Option(help="always, second-touch, ghost or frequency.", show_default=False)
]
RecordFile = Annotated[Path | None, typer.Option(help="Record look-ups there, anonymised.")]
RedisUrl = Annotated[
    str | None, typer.Option(help="A Redis to share pages through: redis://host:6379.")
]
Listen = Annotated[
    str | None, typer.Option(help="unix:/path or host:port; by default unix:DIR/kvstore.sock.")
]
MetricsListen = Annotated[
    str | None, typer.Option(help="Prometheus metrics: unix:/path or 127.0.0.1:9464.")
]
DashboardListen = Annotated[
    str | None, typer.Option(help="The dashboard: unix:/path or 127.0.0.1:9465.")
]
DashboardTokenizer = Annotated[
    Path | None, typer.Option(help="A tokenizer.json: prompts there as text.")
]
EventsListen = Annotated[
    str | None, typer.Option(help="Page events as vLLM sends them: ipc:///path.")
]
ClientCa = Annotated[Path | None, typer.Option(help="Clients need a certificate of this CA, PEM.")]
TenantsFile = Annotated[
    Path | None, typer.Option(help="Tenants and their tokens; see `kvstore tenant`.")
]
Switch = Annotated[bool | None, typer.Option(show_default=False)]
Encrypt = Annotated[
    bool | None, typer.Option(help="Encrypt pages on disk, a key a tenant.", show_default=False)
]
Codec = Annotated[
    str | None, typer.Option(help="New pages on disk: raw, lossless.", show_default=False)
]


def serve(
    directory: Annotated[
        Path | None, typer.Argument(help="The store's directory.", metavar="DIR")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file with settings.")] = None,
    listen: Listen = None,
    host_bytes: Size = None,
    disk_bytes: Size = None,
    staging_bytes: Size = None,
    secret_file: Annotated[Path | None, typer.Option(help="The store secret, to share.")] = None,
    encrypt: Encrypt = None,
    keys_dir: Annotated[Path | None, typer.Option(help="Where those keys are: DIR/keys.")] = None,
    huge_pages: Switch = None,
    max_rpcs: Count = None,
    sessions_max: Count = None,
    workers: Count = None,
    waiting_workers: Count = None,
    io_threads: Count = None,
    disk_codec: Codec = None,
    policy: Annotated[str | None, typer.Option(help="csl, lru, arc, gdsf, auto.")] = None,
    host_policy: Annotated[str | None, typer.Option(help="same, or memory's own.")] = None,
    objective: Annotated[str | None, typer.Option(help="hits, ttft or compute.")] = None,
    even_tokens: Count = None,
    write_policy: Annotated[str | None, typer.Option(help="through, back, selective.")] = None,
    admission: Admission = None,
    prefetch_bytes: Size = None,
    record_file: RecordFile = None,
    redis_url: RedisUrl = None,
    redis_bytes: Size = None,
    redis_ttl_s: Duration = None,
    redis_password_file: Annotated[Path | None, typer.Option(help="0600.")] = None,
    redis_lookup_s: Duration = None,
    drain_s: Duration = None,
    idle_exit_s: Duration = None,
    insecure_network: Switch = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate chain, PEM.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key, PEM.")] = None,
    tls_client_ca: ClientCa = None,
    tenants_file: TenantsFile = None,
    metrics_listen: MetricsListen = None,
    dashboard_listen: DashboardListen = None,
    dashboard_tokenizer: DashboardTokenizer = None,
    events_listen: EventsListen = None,
    events_replay_listen: EventsListen = None,
    reflection: Switch = None,
    log_json: Switch = None,
    check_config: Annotated[
        bool, typer.Option("--check-config", help="Check all settings, print them, don't serve.")
    ] = False,
) -> None:
    """Serve one store to all engines of this host, until SIGTERM.

    Every setting is also a key of the TOML file and a variable KVSTORE_NAME.
    """
    flags: dict[str, Any] = dict(locals())
    _limit_libraries()
    from kvstore.config import load_config
    from kvstore.server_config import ServerConfig
    from kvstore.server_security import ServerSecurity

    del flags["config"], flags["check_config"]
    settings = load_config(flags, config, kind=ServerConfig)
    security = ServerSecurity.of(settings)
    if check_config:
        _check_and_print(settings)
        return
    log_to_stderr(as_json=settings.log_json)
    _serve(settings, security)


def _limit_libraries() -> None:
    """Before numpy is loaded: no matrix is multiplied here, and its threads map 40 MiB a core."""
    from kvstore.address_space import refuse_small_address_space

    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    refuse_small_address_space()


def _serve(settings: ServerConfig, security: ServerSecurity) -> None:
    from kvstore.address_space import refuse_small_address_space
    from kvstore.footprint import footprint_of
    from kvstore.open_files import allow_open_files

    _set_process_limits()
    footprint = footprint_of(settings)
    allow_open_files(settings)
    refuse_small_address_space(settings)
    from kvstore.server import Server  # grpc, which no other command needs

    server = Server(settings, security)
    footprint.say()  # a server that is refused takes nothing
    _stop_on_signals(server)
    server.start()
    code = server.run()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)  # a thread that hangs in the kernel must not keep the process


described(
    serve,
    {
        "host_bytes": "Memory for pages, as 8GiB; by default 25 % of what is free, 8GiB at most.",
        "disk_bytes": "Disk for pages, as 1TiB; by default 50 % of what is free, 64GiB at most.",
        "staging_bytes": "Of host-bytes, for writers to fill; by default an eighth.",
        "huge_pages": "Memory from the machine's pool of 2 MiB pages.",
        "max_rpcs": "Calls at once, waiting ones included; more are refused. By default 256.",
        "sessions_max": "Sessions at once; by default 1024.",
        "workers": "Threads for calls that don't wait; by default 8.",
        "waiting_workers": "Threads for calls that wait for the disk, or store; by default 32.",
        "io_threads": "Threads that read and write the disk; by default 4.",
        "policy": "What leaves first: csl, lru, arc, gdsf or auto.",
        "objective": "What csl and gdsf save: hits, compute or ttft.",
        "even_tokens": "Where attention costs as much as the rest of prefill; by default 30000.",
        "write_policy": "When pages go to disk: through (at once), back or selective.",
        "admission": "Which go there, if selective: always, second-touch, ghost or frequency.",
        "prefetch_bytes": "Read on so far behind a prompt that was found whole; by default 0.",
        "redis_bytes": "Pages in Redis that this server refers to at once; by default 64GiB.",
        "redis_ttl_s": "How long Redis keeps a page that nobody stores again; by default 1d.",
        "redis_password_file": "A file (0600) with the password of Redis.",
        "redis_lookup_s": "How long a look-up waits for Redis; by default 20ms.",
        "drain_s": "After SIGTERM, how long calls under way may take; by default 5s.",
        "idle_exit_s": "End after so long without a session; by default never.",
        "insecure_network": "Listen at a network address without TLS or credentials.",
        "events_replay_listen": "Where subscribers ask for events that they missed: ipc:///path.",
        "reflection": "Tell whoever connects what the service looks like (gRPC reflection).",
        "log_json": "Log one JSON object a line instead of text.",
    },
)


def _check_and_print(settings: ServerConfig) -> None:
    from kvstore.settings_check import check_settings  # what a start need not load

    check_settings(settings)
    if settings.warning:
        typer.echo(f"kvstore: warning: {settings.warning}", err=True)
    typer.echo(settings.model_dump_json(indent=2))


def _set_process_limits() -> None:
    """Before threads start and files are made."""
    from kvstore.heap import limit_heaps

    os.umask(0o077)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # pages are prompts
    limit_heaps()


def _stop_on_signals(server: Server) -> None:
    """The first signal asks for a good end, the second ends the process at once."""
    asked = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            os._exit(128 + number)
        asked = True
        server.request_stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)
