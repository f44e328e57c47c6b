"""Measure the error of the estimated time left (in the bar, `sparsebench status` and --dry-run), and the bar's updates.

python benchmarks/progress.py                  # the suite quick, about two minutes on 2 idle cores
python benchmarks/progress.py --suite quick-scratch --plugin tome

The state of a run in a new folder is read every half second. The true time left is known at the end of the run.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from sparsebench.runner.progress import underway

LOOK = 0.5
BEGIN = 0.2
"""Estimates before this share of the run are ignored."""
END = 5.0
"""Estimates in these last seconds are ignored, because the board is made then."""


class Look(NamedTuple):
    """The state that a run reported at a time."""

    now: float
    seconds: float | None
    done: float


def main() -> None:
    """Run the suite, read its states and print the errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", default="quick")
    parser.add_argument("--plugin", default="attn_topk")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "sparsebench", "run", "--suite", asked.suite, "--plugin", asked.plugin]
        run = subprocess.Popen([*command, "--out", folder], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        looks = watched(run, Path(folder))
    if run.returncode:
        sys.exit(f"the run left with {run.returncode}")
    show(looks)


def watched(run: subprocess.Popen[bytes], folder: Path) -> list[Look]:
    """Return the states of a run until its end."""
    looks: list[Look] = []
    while run.poll() is None:
        for state in underway(folder).values():
            finished = sum(state.left.values()) - state.done
            look = Look(state.updated, state.seconds, -finished)
            if not looks or look.now > looks[-1].now:
                looks.append(look)
        time.sleep(LOOK)
    return looks


def show(looks: list[Look]) -> None:
    """Print the errors of the estimates, and the longest time without a move of the bar."""
    begin, end = looks[0].now, looks[-1].now
    later = [look for look in looks if begin + BEGIN * (end - begin) < look.now < end - END]
    known = [(look, look.seconds) for look in later if look.seconds]
    factors = [max(seconds / (end - look.now), (end - look.now) / seconds) for look, seconds in known]
    moved = [look.now for look, before in zip(looks[1:], looks, strict=False) if look.done != before.done]
    still = max(after - before for before, after in zip([begin, *moved], [*moved, end], strict=True))
    print(f"seconds of the run: {end - begin:.0f}; looks from {BEGIN:.0%} on: {len(later)}")
    print(f"looks without an estimate: {len(later) - len(known)}")
    print(
        f"factor between estimate and truth: median {statistics.median(factors):.2f}, largest {max(factors):.2f}, "
        f"within 1.5: {statistics.mean(factor <= 1.5 for factor in factors):.0%}"
    )
    print(f"longest time without a move of the bar, but for its clock: {still:.1f} s")


if __name__ == "__main__":
    main()
