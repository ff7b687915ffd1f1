"""Kills a working store again and again, and checks that it kept its word.

    python tests/crash/kill_loop.py --cycles 200
    python tests/crash/kill_loop.py --cycles 50 --encrypt
    python tests/crash/kill_loop.py --mutate no-verify        exit 0: the mutant was caught

Ends with status 1 when a page was wrong or lost. Kill -9 leaves the page cache as it is, so a
missing sync can't be seen here: see power_cut.py.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # no threads in the parent: it forks

from crash_loop import CrashLoop, Odds, Progress
from media import KilledOnly
from mutants import MUTANTS, ONLY_POWER_CUT
from summary import print_mutant, print_summary

ODDS = Odds(cut_catalog_each=17, start_series_each=29)


def main() -> int:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cycles", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mutate", choices=sorted(MUTANTS), default="")
    parser.add_argument("--encrypt", action="store_true", help="the store encrypts its pages")
    parser.add_argument("--json", action="store_true", help="the summary as one JSON object")
    parser.add_argument("--directory", type=Path, help="where to work (default: a temporary one)")
    given = parser.parse_args()
    if given.mutate in ONLY_POWER_CUT:
        sys.stderr.write(
            f"{given.mutate}: kill -9 can't show a missing sync, the page cache survives it: "
            f"use power_cut.py --mutate {given.mutate}\n"
        )
        return 2
    with tempfile.TemporaryDirectory(dir=given.directory, prefix="kill-loop-") as scratch:
        medium = KilledOnly(Path(scratch))
        loop = CrashLoop(
            medium, Path(scratch), given.seed, ODDS, given.mutate, encrypt=given.encrypt
        )
        progress = Progress(quiet=given.json)
        loop.run(given.cycles, stop_when_bad=bool(given.mutate), progress=progress)
        if given.mutate:
            return print_mutant(given.mutate, [loop], as_json=given.json)
        return print_summary("kill_loop", [loop], given.seed, progress.seconds, given.json)


if __name__ == "__main__":
    sys.exit(main())
