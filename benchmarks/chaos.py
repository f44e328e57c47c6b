"""A sweep whose processes are killed at random moments ends with the records of an undisturbed one.

python benchmarks/chaos.py --kills 200            # tens of minutes: a killed run loads the libraries anew
python benchmarks/chaos.py --kills 12 --cells 96  # the short form that the tests run

The run, its keepers and its workers are killed, by SIGKILL and SIGTERM, while they load, work, write records and
checkpoints, or end; the same command is given again whenever it is gone. Moments and victims are drawn from a seed, but
what they hit hangs on the machine.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from sparsebench.contain.keeper import descendants
from sparsebench.records import store
from sparsebench.records.record import Record

SUITE = """
name = "chaos"
version = 1
title = "Small cells, half of them networks that are checkpointed"
baselines = ["dense", "random", "oracle", "anti_oracle"]
seeds = {seeds}

[budget]
keep_rate = 0.5

[[task]]
name = "theory"
model = "shallow"
params = {{steps = 30, test = 20, tokens = 20}}
n_train = [8]

[[task]]
name = "composite"
model = "vit"
model_params = {{dim = 16, depth = 2, heads = 2}}
params = {{epochs = 2, test = 20, pretrain_epochs = 0, batch = 10}}
n_train = [40]
"""
PAUSES = (0.05, 0.5, 5.0, 20.0)
"""The longest seconds between two kills, drawn each time: a run takes some to load the libraries."""
SIGNALS = (signal.SIGKILL, signal.SIGTERM)
NOT_COMPARED = frozenset({"images_per_s"})
"""Metrics of time, which no two runs have alike."""


def command(out: Path, cells: int) -> list[str]:
    """Return the command of a sweep of so many cells, or up to 7 more."""
    suite = out.parent / "chaos.toml"
    suite.write_text(SUITE.format(seeds=-(-cells // 8)))
    words = [
        "run",
        "--suite",
        str(suite),
        "--rerun",
        "failed",
        "--jobs",
        "2",
        "--checkpoint",
        "0.02",
        "--out",
        str(out),
    ]
    return [sys.executable, "-m", "sparsebench", *words]


def finish(out: Path, cells: int) -> None:
    """Run what is missing or failed, until nothing is.

    Raises:
        RuntimeError: something always fails.
    """
    for _ in range(5):
        done = subprocess.run(command(out, cells), capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
    raise RuntimeError(f"the sweep does not come to its end: {done.stderr[-500:]}")


def disturb(out: Path, cells: int, kills: int, rng: random.Random) -> Counter[str]:
    """Give the command again and again, and kill something of it, until all is done or so many were killed.

    Returns:
        what was killed, and how.
    """
    killed: Counter[str] = Counter()
    with (out.parent / f"{out.name}.log").open("ab") as log:
        while killed.total() < kills:
            run = subprocess.Popen(command(out, cells), stdout=log, stderr=log)
            while run.poll() is None and killed.total() < kills:
                with suppress(subprocess.TimeoutExpired):
                    run.wait(rng.random() * rng.choice(PAUSES))
                if hit := _kill(run, rng):
                    killed[hit] += 1
            if run.poll() is None:
                run.kill()
            if run.wait() == 0:
                break
    return killed


def _kill(run: subprocess.Popen[bytes], rng: random.Random) -> str:
    """Send a signal to the run or to something below it; return what was killed, "" if it was gone."""
    how, below = rng.choice(SIGNALS), descendants(run.pid) if run.poll() is None else []
    victim = rng.choice(below) if below and rng.random() < 0.75 else None
    if run.poll() is not None:
        return ""
    try:
        run.send_signal(how) if victim is None else os.kill(victim, how)
    except ProcessLookupError:
        return ""
    return f"{'runs' if victim is None else 'keepers and workers'} by {how.name}"


def differences(out: Path, undisturbed: Path) -> list[str]:
    """Return what the records of two folders do not have in common, in words; also what is torn or there twice."""
    found, torn = Counter[str](), 0
    for path in store.segments(out):
        for line in path.read_bytes().splitlines():
            try:
                record = store.parse(line)
            except ValueError:
                torn += not path.read_bytes().endswith(line)  # a last line may be torn: it was not acknowledged
                continue
            found[record.cell_id] += record.status == "ok"
    twice = sum(number > 1 for number in found.values())
    have, want = (_compared(store.read(folder)) for folder in (out, undisturbed))
    other = sum(have[cell] != want[cell] for cell in want.keys() & have.keys())
    lost, added = len(want.keys() - have.keys()), len(have.keys() - want.keys())
    said = {"lost": lost, "added": added, "torn": torn, "ok twice": twice, "other": other}
    return [f"{number} {what}" for what, number in said.items() if number]


def _compared(records: dict[str, Record]) -> dict[str, dict[str, Any]]:
    """Return what of each record must not hang on the way there."""
    kept = {}
    for cell, record in records.items():
        own = record.model_dump(mode="json", include={"status", "metrics", "trajectory", "outcomes"})
        own["metrics"] = {name: value for name, value in own["metrics"].items() if name not in NOT_COMPARED}
        kept[cell] = own
    return kept


def chaos(folder: Path, cells: int, kills: int, seed: int) -> tuple[Counter[str], list[str], int]:
    """Return what was killed, how the sweeps differ from an undisturbed one, and how many sweeps it took."""
    rng, killed, wrong, rounds = random.Random(seed), Counter[str](), list[str](), 0
    finish(folder / "undisturbed", cells)
    while killed.total() < kills:
        out, rounds = folder / f"disturbed-{rounds}", rounds + 1
        killed += disturb(out, cells, kills - killed.total(), rng)
        finish(out, cells)
        wrong += differences(out, folder / "undisturbed")
    return killed, wrong, rounds


def main() -> None:
    """Print what was killed, and what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--cells", type=int, default=304)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        killed, wrong, rounds = chaos(Path(folder), given.cells, given.kills, given.seed)
        cells = len(store.read(Path(folder) / "undisturbed"))
    hit = ", ".join(f"{n} {what}" for what, n in sorted(killed.items()))
    print(f"{killed.total()} kills ({hit}) in {rounds} sweeps of {cells} cells, {time.monotonic() - began:.0f} s:")
    print(", ".join(wrong) or "the records are those of the undisturbed sweep")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
