"""deploy/: the unit and the Dockerfile parse, keep to the rules, and say flags that there are."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
INSTRUCTIONS = {
    *("ADD", "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL"),
    *("RUN", "SHELL", "STOPSIGNAL", "USER", "VOLUME", "WORKDIR"),
}
FLAGS_OF_THE_UNIT = {
    *("NoNewPrivileges", "ProtectHome", "PrivateTmp", "PrivateDevices", "ProtectKernelTunables"),
    *("ProtectKernelModules", "ProtectKernelLogs", "ProtectControlGroups", "ProtectClock"),
    *("ProtectHostname", "RestrictNamespaces", "RestrictRealtime", "RestrictSUIDSGID"),
    *("LockPersonality", "RemoveIPC"),
}


def logical_lines(text: str) -> list[str]:
    """Lines without comments and blanks, continued ones joined."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith(("#", ";"))]
    return re.sub(r"\\\n\s*", " ", "\n".join(lines)).splitlines()


def unit_of(text: str) -> dict[str, dict[str, list[str]]]:
    """Sections, keys and values of a unit file; ValueError where it is none."""
    found: dict[str, dict[str, list[str]]] = {}
    section: dict[str, list[str]] | None = None
    for line in logical_lines(text):
        if header := re.fullmatch(r"\[(Unit|Service|Install)\]", line):
            section = found.setdefault(header[1], {})
            continue
        pair = re.fullmatch(r"([A-Za-z]+)=(.*)", line)
        if pair is None or section is None:
            raise ValueError(f"not a line of a unit: {line}")
        section.setdefault(pair[1], []).append(pair[2].strip())
    return found


def dockerfile_of(text: str) -> list[tuple[str, str]]:
    """Instructions and arguments; ValueError where it is no Dockerfile."""
    found = []
    for line in logical_lines(text):
        name, _, rest = line.partition(" ")
        if name not in INSTRUCTIONS or not rest.strip():
            raise ValueError(f"not an instruction: {line}")
        found.append((name, rest.strip()))
    if not found or found[0][0] not in ("FROM", "ARG"):
        raise ValueError("does not begin with FROM")
    return found


UNIT = unit_of((DEPLOY / "kvstore.service").read_text())
DOCKERFILE = dockerfile_of((DEPLOY / "Dockerfile").read_text())


def last(name: str) -> str:
    """What the final image has for an instruction."""
    begin = max(number for number, each in enumerate(DOCKERFILE) if each[0] == "FROM")
    return [rest for each, rest in DOCKERFILE[begin:] if each == name][-1]


def test_the_parsers_refuse_what_is_wrong() -> None:
    for text in ("[Service]\nExecStart", "ExecStart=/x", "[Servce]\nUser=x", "[Service]\nUser x"):
        with pytest.raises(ValueError, match="not a line"):
            unit_of(text)
    for text in ("", "RUN x", "FROM a\nRUNN x", "FROM a\nRUN", "FROM a\nmake"):
        with pytest.raises(ValueError, match=r"instruction|FROM"):
            dockerfile_of(text)


def test_the_unit_is_closed_to_others_and_ends_in_time() -> None:
    service = UNIT["Service"]
    assert all(len(values) == 1 for key, values in service.items() if key != "ExecStartPre")
    one = {key: values[0] for key, values in service.items()}
    assert set(one) >= FLAGS_OF_THE_UNIT
    assert all(one[key] == "yes" for key in FLAGS_OF_THE_UNIT)
    assert one["ProtectSystem"] == "strict"
    assert one["CapabilityBoundingSet"] == one["AmbientCapabilities"] == ""
    assert one["User"] not in ("", "root")
    assert one["StateDirectoryMode"] == one["RuntimeDirectoryMode"] == "0700"
    assert (one["UMask"], one["LimitCORE"]) == ("0077", "0")
    assert int(one["TimeoutStopSec"]) > 10, "the server may take 10 s"
    assert int(one["LimitNOFILE"]) >= 65536
    assert UNIT["Install"]["WantedBy"] == ["multi-user.target"]
    assert int(UNIT["Unit"]["StartLimitBurst"][0]) == 3


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd's own checker is not on this machine"
)
def test_systemd_takes_the_unit_as_it_is(tmp_path: Path) -> None:
    text = (DEPLOY / "kvstore.service").read_text()
    unit = tmp_path / "kvstore.service"
    unit.write_text(text.replace("/opt/kvstore/bin/kvstore", sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60
    )
    about_us = [line for line in done.stderr.splitlines() if "kvstore.service" in line]
    assert not about_us
    unit.write_text(text.replace("TimeoutStopSec=15", "TimeoutStopSecs=15"))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60
    )
    assert "TimeoutStopSecs" in done.stderr, "the checker would not have noticed anything"


def test_the_image_runs_as_a_user_and_takes_signals() -> None:
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", last("USER"))
    assert last("STOPSIGNAL") == "SIGTERM"
    # The exec form: a shell in between would keep SIGTERM to itself.
    assert json.loads(last("ENTRYPOINT")) == ["kvstore"]
    assert json.loads(last("CMD"))[0] == "serve"
    assert set(json.loads(last("VOLUME"))) == {"/var/lib/kvstore", "/run/kvstore"}


def test_the_image_is_made_of_pinned_parts_and_holds_no_secret() -> None:
    stages = [rest for name, rest in DOCKERFILE if name == "FROM"]
    assert stages
    for stage in stages:
        assert re.match(r"[\w./-]+:\d[\w.-]+", stage), f"{stage}: name a version"
    assert not [rest for name, rest in DOCKERFILE if name == "ADD"], "COPY says what it does"
    text = " ".join(rest for _, rest in DOCKERFILE)
    assert not re.search(r"curl|wget|sudo|chmod\s+777|secret|token|password", text, re.IGNORECASE)
    copied = [rest.split() for name, rest in DOCKERFILE if name == "COPY" and "--from" not in rest]
    for each in copied:
        for source in each[:-1]:
            assert (ROOT / source).exists(), source


@pytest.mark.slow
def test_the_flags_that_are_said_here_are_flags_of_the_server(tmp_path: Path) -> None:
    """Each command line is run with --check-config, on directories of this test."""
    (pre,) = UNIT["Service"]["ExecStartPre"]
    (start,) = UNIT["Service"]["ExecStart"]
    assert "--check-config" in pre
    image = [*json.loads(last("ENTRYPOINT")), *json.loads(last("CMD"))]
    for words in (shlex.split(pre), shlex.split(start), image):
        assert Path(words[0]).name == "kvstore"
        there = [
            word.replace("/var/lib/kvstore", str(tmp_path / "kv")).replace(
                "/run/kvstore", str(tmp_path / "run")
            )
            for word in words[1:]
        ]
        command = [sys.executable, "-m", "kvstore.cli", *there]
        command += ["--host-bytes", "4MiB", "--disk-bytes", "32MiB"]
        command += [] if "--check-config" in there else ["--check-config"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir()), "checking makes nothing"
