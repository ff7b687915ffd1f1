"""Cuts the power of a working store again and again, and checks that it kept its word.

    python tests/crash/power_cut.py --cycles 100                    (root, for loop devices)
    python tests/crash/power_cut.py --variant layer                 without any rights
    python tests/crash/power_cut.py --mutate no-fdatasync           exit 0: every variant caught it

Variants: direct and buffered run on ext4 on a loop device that is shut down under the store, LMDB's
file included; layer keeps a durable image in the process, see image_files.py for what it can prove.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # no threads in the parent: it forks

from crash_loop import CrashLoop, Odds, Progress
from ext4_loop import LoopDisk
from media import DurableImage, PowerCut
from mutants import MUTANTS
from summary import print_mutant, print_summary

if TYPE_CHECKING:
    from media import Medium

VARIANTS = ("direct", "buffered", "layer")
ODDS = Odds(flip=0.25, fault=0.25)


def main() -> int:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cycles", type=int, default=100, help="of each variant")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--variant", choices=(*VARIANTS, "all"), default="all")
    parser.add_argument("--mutate", choices=sorted(MUTANTS), default="")
    parser.add_argument("--json", action="store_true", help="the summary as one JSON object")
    parser.add_argument("--directory", type=Path, help="where to work (default: a temporary one)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.directory, prefix="power-cut-") as name:
        scratch = Path(name)
        variants = list(VARIANTS) if given.variant == "all" else [given.variant]
        missing = LoopDisk.missing_rights(scratch) if variants != ["layer"] else ""
        if missing:
            sys.stderr.write(
                f"*** NO POWER CUTS ON A FILE SYSTEM: {missing}.\n"
                "*** Only the layer variant runs: it can't test LMDB's or the kernel's part.\n"
            )
            variants = ["layer"]
        progress = Progress(quiet=given.json)
        loops = []
        for variant in variants:
            loop = CrashLoop(_medium(variant, scratch), scratch, given.seed, ODDS, given.mutate)
            loop.run(given.cycles, stop_when_bad=bool(given.mutate), progress=progress)
            loops.append(loop)
        if given.mutate:
            return print_mutant(given.mutate, loops, as_json=given.json)
        return print_summary("power_cut", loops, given.seed, progress.seconds, given.json)


def _medium(variant: str, scratch: Path) -> Medium:
    if variant == "layer":
        return DurableImage(scratch)
    return PowerCut(scratch, buffered=variant == "buffered")


if __name__ == "__main__":
    sys.exit(main())
