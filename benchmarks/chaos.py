"""Kill the processes of a sweep at random moments, and test that its records equal those of an undisturbed sweep.

python benchmarks/chaos.py --kills 200            # tens of minutes: after a kill the run loads the libraries again
python benchmarks/chaos.py --kills 12 --cells 96  # the short form that the tests run
python benchmarks/chaos.py --runs --kills 60      # kills only the runs, while their servers and workers are busy
python benchmarks/chaos.py --sealing --kills 50   # a minute: kills only processes that seal
python benchmarks/chaos.py --workers --kills 50 --cells 56  # kills only workers, and repeats the same command

The run, its server and its workers are killed by SIGKILL and SIGTERM while they load, work, write records and
checkpoints, or end. When the run has ended, the same command is run again. Moments and victims are drawn from a seed,
but their effect depends on the machine. With `--workers` only workers are killed, by SIGKILL, and no cell is killed
twice. The command is then run without `--rerun failed`, and the board must equal the undisturbed one, except columns of
time. No process of a sweep may exist after its runs have ended.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from sparsebench.records import store, table
from sparsebench.records.record import Record
from sparsebench.runner.process import descendants

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
params = {{epochs = 2, test = 20, pretrain_epochs = 1, pretrain_samples = 40, batch = 10}}
n_train = [40]
"""
REAL = Path(__file__).resolve().parents[1] / "leaderboard" / "quick"
PAUSES = (0.05, 0.5, 5.0, 20.0)
"""Maximum seconds between two kills, one of which is drawn for each kill: a run needs time to load the libraries."""
AT_WORK = 0.8
"""Share of the kills that wait until the run has a worker. Most other kills hit a run that loads libraries."""
SIGNALS = (signal.SIGKILL, signal.SIGTERM)
OF_TIME = frozenset({"images_per_s", "pareto_speed"})
"""Columns of boards that depend on time."""
MARK = "SPARSEBENCH_CHAOS"
"""Environment variable of all processes of a sweep; its value is the sweep's folder."""
PATIENCE = 20.0
"""Seconds within which processes must end after their run."""
NOT_COMPARED = frozenset({"images_per_s"})
"""Metrics of time, which differ between runs."""


def command(out: Path, cells: int, *more: str) -> list[str]:
    """Return the command of a sweep of `cells` cells, rounded up to 8, and one pre-trained network for each 8 cells."""
    suite = out.parent / "chaos.toml"
    suite.write_text(SUITE.format(seeds=-(-cells // 8)))
    words = [
        "run",
        "--suite",
        str(suite),
        *(more or ("--rerun", "failed", "--jobs", "2")),
        "--checkpoint",
        "0.02",
        "--out",
        str(out),
    ]
    return [sys.executable, "-m", "sparsebench", *words]


def finish(out: Path, cells: int) -> None:
    """Run missing and failed cells until none is left.

    Raises:
        RuntimeError: if cells fail in every try.
    """
    for _ in range(5):
        done = subprocess.run(command(out, cells), capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
    raise RuntimeError(f"the sweep does not finish: {done.stderr[-500:]}")


def disturb(out: Path, cells: int, kills: int, rng: random.Random, below: float = 0.75) -> Counter[str]:
    """Run the command repeatedly and kill its processes, until all cells are done or `kills` processes were killed.

    The share `below` of the kills hits a descendant of the run, if the run has any.

    Returns:
        The numbers of killed processes, by kind and signal.
    """
    killed: Counter[str] = Counter()
    with (out.parent / f"{out.name}.log").open("ab") as log:
        while killed.total() < kills:
            run = started(out, command(out, cells), log)
            while run.poll() is None and killed.total() < kills:
                at_work = rng.random() < AT_WORK
                while at_work and run.poll() is None and len(descendants(run.pid)) < 2:
                    time.sleep(0.05)
                with suppress(subprocess.TimeoutExpired):
                    run.wait(rng.random() * rng.choice(PAUSES))
                if hit := _kill(run, rng, below):
                    killed[hit] += 1
            if run.poll() is None:
                run.kill()
            if run.wait() == 0:
                break
    return killed


def started(out: Path, words: list[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start a run of a folder and mark its processes, so that `orphans` finds them."""
    return subprocess.Popen(words, stdout=log, stderr=log, env=os.environ | {MARK: str(out)})


def orphans(out: Path) -> list[str]:
    """Return the commands of the processes that are left after all runs of a folder have ended."""
    mark, until = f"{MARK}={out}".encode(), time.monotonic() + PATIENCE
    while True:
        left = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    left.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        if not left or time.monotonic() > until:
            return left
        time.sleep(0.5)


def _kill(run: subprocess.Popen[bytes], rng: random.Random, share: float) -> str:
    """Send a signal to the run or to a descendant. Return what was killed, or "" if the process was gone."""
    how, below = rng.choice(SIGNALS), descendants(run.pid) if run.poll() is None else []
    victim = rng.choice(below) if below and rng.random() < share else None
    if run.poll() is not None:
        return ""
    try:
        run.send_signal(how) if victim is None else os.kill(victim, how)
    except ProcessLookupError:
        return ""
    return f"{'runs' if victim is None else 'servers and workers'} by {how.name}"


def end_workers(out: Path, cells: int, kills: int, rng: random.Random) -> tuple[int, int]:
    """Repeat the command until it succeeds, and kill workers in the meantime.

    At least two records are written between two kills. One of them may belong to a cell that had finished before the
    first kill, so no cell is killed twice.

    Returns:
        The number of killed workers, and the number of commands.
    """
    killed = times = records = 0
    with (out.parent / f"{out.name}.log").open("ab") as log:
        while True:
            times += 1
            run = started(out, command(out, cells, "--jobs", "1"), log)
            while run.poll() is None:
                time.sleep(rng.random() * rng.choice((0.02, 0.5, 2.0)))
                workers = [pid for pid in descendants(run.pid) if _is_worker(pid)]
                if killed < kills and workers and (not killed or _lines(out) > records + 1):
                    with suppress(ProcessLookupError):
                        os.kill(workers[-1], signal.SIGKILL)
                        killed, records = killed + 1, _lines(out)
            if run.returncode == 0:
                return killed, times
            if times > kills + 3:
                ends = Counter(record.status for record in store.read(out).values())
                raise RuntimeError(f"the same command does not complete the sweep: {dict(ends)}")


def _is_worker(pid: int) -> bool:
    """Return whether a process is a worker: it was forked from a server and has the same command."""
    try:
        parent = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1].decode()
        commands = [Path(f"/proc/{number}/cmdline").read_bytes() for number in (str(pid), parent)]
    except OSError:
        return False
    return all(b"sparsebench.runner.process" in command for command in commands)


def _lines(out: Path) -> int:
    return len(store.rows(out, counted=False)) if store.summaries(out) else 0


def board(out: Path) -> str:
    """Return the board of a folder as CSV, without its columns of time."""
    with (out / "leaderboard.csv").open() as file:
        rows = list(csv.DictReader(file))
    return json.dumps([{k: v for k, v in row.items() if k not in OF_TIME} for row in rows])


def heal(folder: Path, cells: int, kills: int, seed: int) -> tuple[int, list[str], int, int]:
    """Return the number of killed workers, differences of boards and records, and numbers of sweeps and commands."""
    rng, killed, wrong, sweeps, times = random.Random(seed), 0, list[str](), 0, 0
    finish(folder / "undisturbed", cells)
    while killed < kills:
        out, sweeps = folder / f"disturbed-{sweeps}", sweeps + 1
        hit, commands = end_workers(out, cells, kills - killed, rng)
        killed, times = killed + hit, times + commands
        wrong += differences(out, folder / "undisturbed")
        wrong += ["another board"] * (board(out) != board(folder / "undisturbed"))
        wrong += [f"left: {process}" for process in orphans(out)]
    return killed, wrong, sweeps, times


def differences(out: Path, undisturbed: Path) -> list[str]:
    """Return the differences between the records of two folders, also cells with two records and unsealed segments."""
    successes = Counter(
        row["cell_id"] for row in table.rows_of(store.rows(out, counted=False)) if row["status"] == "ok"
    )
    twice = sum(number > 1 for number in successes.values())
    have, want = (_compared(store.read(folder)) for folder in (out, undisturbed))
    other = sum(have[cell] != want[cell] for cell in want.keys() & have.keys())
    lost, added = len(want.keys() - have.keys()), len(have.keys() - want.keys())
    counts = {"lost": lost, "added": added, "not sealed": len(store.segments(out)), "ok twice": twice, "other": other}
    return [f"{number} {what}" for what, number in counts.items() if number]


def _compared(records: dict[str, Record]) -> dict[str, dict[str, Any]]:
    """Return the contents of each record that must not depend on the kills."""
    contents = {}
    for cell, record in records.items():
        content = record.model_dump(mode="json", include={"status", "metrics", "trajectory", "outcomes"})
        content["metrics"] = {name: value for name, value in content["metrics"].items() if name not in NOT_COMPARED}
        contents[cell] = content
    return contents


def chaos(folder: Path, cells: int, kills: int, seed: int, below: float = 0.75) -> tuple[Counter[str], list[str], int]:
    """Return the killed processes, the differences from an undisturbed sweep, and the number of sweeps."""
    rng, killed, wrong, rounds = random.Random(seed), Counter[str](), list[str](), 0
    finish(folder / "undisturbed", cells)
    while killed.total() < kills:
        out, rounds = folder / f"disturbed-{rounds}", rounds + 1
        killed += disturb(out, cells, kills - killed.total(), rng, below)
        wrong += [f"left: {process}" for process in orphans(out)]
        finish(out, cells)
        wrong += differences(out, folder / "undisturbed")
    return killed, wrong, rounds


def end_sealing(folder: Path, kills: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Kill processes that seal three segments, then seal. Return how many files they had written, and the errors.

    The moments are drawn from the duration of an undisturbed sealing.
    """
    code = "import sys; from pathlib import Path; from sparsebench.records import store; import pyarrow.parquet; "
    code += "print(flush=True); store.seal(Path(sys.argv[1]))"
    records = list(store.read(REAL).values())
    for part in range(3):
        writer = store.Writer(folder / "lines")
        for record in records[part::3]:
            writer.append(record)
        writer.close()

    def begun(out: Path) -> subprocess.Popen[bytes]:
        shutil.copytree(folder / "lines", out)
        sealing = subprocess.Popen([sys.executable, "-c", code, str(out)], stdout=subprocess.PIPE)
        assert sealing.stdout
        sealing.stdout.readline()
        return sealing

    start = time.monotonic()
    with begun(folder / "undisturbed") as sealing:
        sealing.wait()
    takes, rng = time.monotonic() - start, random.Random(seed)
    made, wrong = Counter[str](), list[str]()
    for number in range(kills):
        out = folder / str(number)
        with begun(out) as sealing:
            time.sleep(rng.random() * takes)
            sealing.kill()
        made[f"{len(store.sealed_files(out))} files"] += 1
        wrong += ["lost before it is sealed"] * (store.read(out).keys() != store.read(folder / "lines").keys())
        store.seal(out)
        wrong += differences(out, folder / "undisturbed")
        wrong += ["twice"] * (len(store.rows(out, counted=False)) != len(records))
    return made, wrong


def main() -> None:
    """Print the killed processes and the differences."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--cells", type=int, default=304)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sealing", action="store_true", help="kill only processes that seal")
    parser.add_argument("--workers", action="store_true", help="kill only workers, and repeat the same command")
    parser.add_argument("--runs", action="store_true", help="kill only runs")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        if given.sealing:
            made, wrong = end_sealing(Path(folder), given.kills, given.seed)
            what = ", ".join(f"{number} had made {files}" for files, number in sorted(made.items()))
            print(f"{made.total()} killed while they sealed three segments, of which {what}:")
            print(", ".join(wrong) or "no record is lost, doubled or torn, and all are sealed")
            sys.exit(bool(wrong))
        if given.workers:
            number, wrong, rounds, times = heal(Path(folder), given.cells, given.kills, given.seed)
            cells = len(store.read(Path(folder) / "undisturbed"))
            print(f"{number} workers killed by SIGKILL in {rounds} sweeps of {cells} cells, the command run {times}")
            what = ", ".join(wrong) or "boards and records equal the undisturbed ones"
            print(f"times, {time.monotonic() - began:.0f} s: {what}")
            sys.exit(bool(wrong))
        killed, wrong, rounds = chaos(Path(folder), given.cells, given.kills, given.seed, 0.0 if given.runs else 0.75)
        cells = len(store.read(Path(folder) / "undisturbed"))
    hit = ", ".join(f"{n} {what}" for what, n in sorted(killed.items()))
    print(f"{killed.total()} kills ({hit}) in {rounds} sweeps of {cells} cells, {time.monotonic() - began:.0f} s:")
    print(", ".join(wrong) or "the records equal those of the undisturbed sweep")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
