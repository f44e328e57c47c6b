"""A sweep whose processes are killed at random moments ends with the records of an undisturbed one.

python benchmarks/chaos.py --kills 200            # tens of minutes: a killed run loads the libraries anew
python benchmarks/chaos.py --kills 12 --cells 96  # the short form that the tests run
python benchmarks/chaos.py --runs --kills 60      # the runs alone, with their servers and workers at work
python benchmarks/chaos.py --sealing --kills 50   # a minute: processes that seal, and nothing else
python benchmarks/chaos.py --workers --kills 50 --cells 56  # workers alone, and only the same command again

The run, its server and its workers are killed, by SIGKILL and SIGTERM, while they load, work, write records and
checkpoints, or end; the same command is given again whenever it is gone. Moments and victims are drawn from a seed, but
what they hit hangs on the machine. With `--workers` nothing but workers is killed, by SIGKILL and no cell twice, and
the command is given without `--rerun failed`: the board must be the undisturbed one, but for columns of time. No
process of a sweep may be left when its runs have ended.
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
"""The longest seconds between two kills, drawn each time: a run takes some to load the libraries."""
AT_WORK = 0.8
"""Share of the kills that wait until the run has a worker: most others hit a run that loads libraries."""
SIGNALS = (signal.SIGKILL, signal.SIGTERM)
OF_TIME = frozenset({"images_per_s", "pareto_speed"})
"""Columns of boards that tell of time."""
MARK = "SPARSEBENCH_CHAOS"
"""The variable that all processes of a sweep have, with its folder."""
PATIENCE = 20.0
"""Seconds that processes have to end after their run."""
NOT_COMPARED = frozenset({"images_per_s"})
"""Metrics of time, which no two runs have alike."""


def command(out: Path, cells: int, *more: str) -> list[str]:
    """Return the command of a sweep of so many cells, or up to 7 more, and one for each 8 that is pre-trained."""
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
    """Run what is missing or failed, until nothing is.

    Raises:
        RuntimeError: something always fails.
    """
    for _ in range(5):
        done = subprocess.run(command(out, cells), capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
    raise RuntimeError(f"the sweep does not come to its end: {done.stderr[-500:]}")


def disturb(out: Path, cells: int, kills: int, rng: random.Random, below: float = 0.75) -> Counter[str]:
    """Give the command again and again, and kill something of it, until all is done or so many were killed.

    In that share of the kills, `below`, what is killed is one of the processes below a run, where there are some.

    Returns:
        what was killed, and how.
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
    """Begin a run of a folder, whose processes can be told from others; see `orphans`."""
    return subprocess.Popen(words, stdout=log, stderr=log, env=os.environ | {MARK: str(out)})


def orphans(out: Path) -> list[str]:
    """Return the commands of processes of a folder's runs, all of which have ended, that do not end soon."""
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
    """Send a signal to the run or to something below it; return what was killed, "" if it was gone."""
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
    """Give the command until it ends well, killing workers meanwhile.

    Two records come between two kills, one of which may have been on its way at the first: so no cell is killed twice.

    Returns:
        how many were killed, and how often the command was given.
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
                raise RuntimeError(f"the same command does not heal: {dict(ends)}")


def _is_worker(pid: int) -> bool:
    """Say whether a process is a worker: it is forked from a server, whose command it has."""
    try:
        parent = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1].decode()
        commands = [Path(f"/proc/{one}/cmdline").read_bytes() for one in (str(pid), parent)]
    except OSError:
        return False
    return all(b"sparsebench.runner.process" in command for command in commands)


def _lines(out: Path) -> int:
    return len(store.rows(out, counted=False)) if store.heads(out) else 0


def board(out: Path) -> str:
    """Return the board of a folder as CSV, without its columns of time."""
    with (out / "leaderboard.csv").open() as file:
        rows = list(csv.DictReader(file))
    return json.dumps([{k: v for k, v in row.items() if k not in OF_TIME} for row in rows])


def heal(folder: Path, cells: int, kills: int, seed: int) -> tuple[int, list[str], int, int]:
    """Return how many workers were killed, how boards and records differ, and how many sweeps and commands it took."""
    rng, killed, wrong, sweeps, times = random.Random(seed), 0, list[str](), 0, 0
    finish(folder / "undisturbed", cells)
    while killed < kills:
        out, sweeps = folder / f"disturbed-{sweeps}", sweeps + 1
        hit, given = end_workers(out, cells, kills - killed, rng)
        killed, times = killed + hit, times + given
        wrong += differences(out, folder / "undisturbed")
        wrong += ["another board"] * (board(out) != board(folder / "undisturbed"))
        wrong += [f"left: {one}" for one in orphans(out)]
    return killed, wrong, sweeps, times


def differences(out: Path, undisturbed: Path) -> list[str]:
    """Return what the records of two folders do not have in common, in words; also what is twice, or not sealed."""
    found = Counter(row["cell_id"] for row in table.rows_of(store.rows(out, counted=False)) if row["status"] == "ok")
    twice = sum(number > 1 for number in found.values())
    have, want = (_compared(store.read(folder)) for folder in (out, undisturbed))
    other = sum(have[cell] != want[cell] for cell in want.keys() & have.keys())
    lost, added = len(want.keys() - have.keys()), len(have.keys() - want.keys())
    said = {"lost": lost, "added": added, "not sealed": len(store.segments(out)), "ok twice": twice, "other": other}
    return [f"{number} {what}" for what, number in said.items() if number]


def _compared(records: dict[str, Record]) -> dict[str, dict[str, Any]]:
    """Return what of each record must not hang on the way there."""
    kept = {}
    for cell, record in records.items():
        own = record.model_dump(mode="json", include={"status", "metrics", "trajectory", "outcomes"})
        own["metrics"] = {name: value for name, value in own["metrics"].items() if name not in NOT_COMPARED}
        kept[cell] = own
    return kept


def chaos(folder: Path, cells: int, kills: int, seed: int, below: float = 0.75) -> tuple[Counter[str], list[str], int]:
    """Return what was killed, how the sweeps differ from an undisturbed one, and how many sweeps it took."""
    rng, killed, wrong, rounds = random.Random(seed), Counter[str](), list[str](), 0
    finish(folder / "undisturbed", cells)
    while killed.total() < kills:
        out, rounds = folder / f"disturbed-{rounds}", rounds + 1
        killed += disturb(out, cells, kills - killed.total(), rng, below)
        wrong += [f"left: {one}" for one in orphans(out)]
        finish(out, cells)
        wrong += differences(out, folder / "undisturbed")
    return killed, wrong, rounds


def end_sealing(folder: Path, kills: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Kill processes that seal three segments, and then seal; return how many files each had made, and what is wrong.

    The moments are drawn from the time that sealing takes when nobody disturbs it.
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
    """Print what was killed, and what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--cells", type=int, default=304)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sealing", action="store_true", help="kill processes that seal, and nothing else")
    parser.add_argument("--workers", action="store_true", help="kill workers alone, and give the same command again")
    parser.add_argument("--runs", action="store_true", help="kill runs alone")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        if given.sealing:
            made, wrong = end_sealing(Path(folder), given.kills, given.seed)
            what = ", ".join(f"{number} had made {files}" for files, number in sorted(made.items()))
            print(f"{made.total()} killed while they sealed three segments, of which {what}:")
            print(", ".join(wrong) or "nothing is lost, doubled or torn, and all is sealed")
            sys.exit(bool(wrong))
        if given.workers:
            number, wrong, rounds, times = heal(Path(folder), given.cells, given.kills, given.seed)
            cells = len(store.read(Path(folder) / "undisturbed"))
            print(f"{number} workers killed by SIGKILL in {rounds} sweeps of {cells} cells, the command given {times}")
            what = ", ".join(wrong) or "boards and records are the undisturbed ones"
            print(f"times, {time.monotonic() - began:.0f} s: {what}")
            sys.exit(bool(wrong))
        killed, wrong, rounds = chaos(Path(folder), given.cells, given.kills, given.seed, 0.0 if given.runs else 0.75)
        cells = len(store.read(Path(folder) / "undisturbed"))
    hit = ", ".join(f"{n} {what}" for what, n in sorted(killed.items()))
    print(f"{killed.total()} kills ({hit}) in {rounds} sweeps of {cells} cells, {time.monotonic() - began:.0f} s:")
    print(", ".join(wrong) or "the records are those of the undisturbed sweep")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
