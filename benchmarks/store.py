"""Time stores of many records, and test whether killed writers lose records.

python benchmarks/store.py            # 10 minutes, 6 GB below --at; prints the tables of RESULTS.md
python benchmarks/store.py --small    # a hundredth of the records

The records are those of leaderboard/quick with other seeds, strategies and budgets.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

from tabulate import tabulate

from sparsebench.records import store
from sparsebench.records.record import canonical

REAL = Path(__file__).resolve().parents[1] / "leaderboard" / "quick"
BUDGETS, VARIANTS = (0.3, 0.4, 0.5, 0.6, 0.7), 20


def made() -> Iterator[bytes]:
    """Yield lines of records without end, each of a different cell."""
    lines = [record.model_dump(mode="json") for record in store.read(REAL).values()]
    seeds = 1 + max(line["cell"]["repetition"] for line in lines)
    for block in count():
        for variant in range(VARIANTS):
            for macs in BUDGETS:
                for line in lines:
                    if line["cell"]["budget"]["macs"] != 1.0 or macs == BUDGETS[0]:
                        yield changed(line, block * seeds, variant, macs)


def changed(line: dict[str, Any], seed: int, variant: int, macs: float) -> bytes:
    """Return the line of a record with another seed, strategy and budget."""
    cell = line["cell"] | {"repetition": line["cell"]["repetition"] + seed}
    if variant:
        params = cell["strategy"]["params"] | {"variant": variant}
        cell["strategy"] = cell["strategy"] | {"params": params}
    if cell["budget"]["macs"] != 1.0:
        cell["budget"] = cell["budget"] | {"macs": macs}
    label = f"{line['label']} v{variant}" if variant else line["label"]
    own = {"cell": cell, "cell_id": hashlib.sha256(canonical(cell).encode()).hexdigest()[:16], "label": label}
    return canonical(line | own).encode() + b"\n"


def fill(out: Path, number: int, segments: int) -> None:
    """Write a store with `number` records."""
    lines = made()
    (out / "records").mkdir(parents=True)
    for i in range(segments):
        with (out / "records" / f"20260101T000000-made-{i:04}-0.jsonl").open("wb") as file:
            file.writelines(islice(lines, number // segments))


def resumed(out: str) -> None:
    """Determine the missing cells of a store from the hashes of all cells."""
    ids = {json.loads(line)["cell_id"] for line in islice(made(), 1000)}
    start = time.process_time()
    known = store.summaries(Path(out))
    assert not ids - set(known)
    report(start, len(known))


def board(out: str) -> None:
    """Print the leaderboard of a store."""
    start = time.process_time()
    from sparsebench.cli import main

    main(["leaderboard", out, "--format", "csv"], standalone_mode=False)
    report(start, 0)


def seal(out: str) -> None:
    """Seal the segments of a store."""
    start = time.process_time()
    store.seal(Path(out))
    report(start, 0)


def report(start: float, number: int) -> None:
    """Print the time and the peak memory to standard error."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps([time.process_time() - start, peak, number]), file=sys.stderr)


def write(out: str, first: str, number: str) -> None:
    """Append records one by one, and acknowledge each after it is written."""
    writer = store.Writer(Path(out))
    for line in islice(made(), int(first), int(first) + int(number)):
        record = store.parse(line)
        writer.append(record)
        os.write(1, record.cell_id.encode() + b"\n")


PARTS: dict[str, Callable[..., None]] = {"resumed": resumed, "board": board, "seal": seal, "write": write}


def part(*words: object) -> tuple[float, float, bytes]:
    """Run a part in its own process; return CPU seconds, peak MiB and its output."""
    process = subprocess.run([sys.executable, __file__, *map(str, words)], check=True, capture_output=True)
    seconds, peak, _ = json.loads(process.stderr.splitlines()[-1])
    return seconds, peak, process.stdout


def killed(out: Path, writers: int, number: int, victims: int) -> tuple[int, int, int]:
    """Kill some of several writers; return the numbers of acknowledged, stored and lost records."""
    logs = [(out.parent / f"{out.name}-{i}.log").open("w+b") for i in range(writers)]
    processes = [
        subprocess.Popen([sys.executable, __file__, "write", str(out), str(i * number), str(number)], stdout=log)
        for i, log in enumerate(logs)
    ]
    for i, process in enumerate(processes[:victims]):
        while process.poll() is None and os.fstat(logs[i].fileno()).st_size < 17 * number * (i + 1) // (victims + 1):
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    ends = [process.wait() for process in processes]
    assert ends == [-signal.SIGKILL] * victims + [0] * (writers - victims), ends
    acknowledged = set()
    for log in logs:
        log.seek(0)
        acknowledged |= {line.decode() for line in log.read().split(b"\n")[:-1]}
        log.close()
    there = set(store.summaries(out))
    return len(acknowledged), len(there), len(acknowledged - there)


def main() -> None:
    """Run everything and print the tables."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--small", action="store_true")
    arguments.add_argument("--at", type=Path, help="a folder with room for 6 GB")
    given = arguments.parse_args()
    scale = 100 if given.small else 1
    rows: list[tuple[object, ...]] = []

    def row(what: str, number: int, seconds: float, peak: float) -> None:
        rows.append((what, f"{number:,}", f"{seconds:.2f}", f"{peak:,.0f}"))
        print(*rows[-1], file=sys.stderr)

    with tempfile.TemporaryDirectory(dir=given.at) as folder:
        for number in (100_000 // scale, 1_000_000 // scale):
            out = Path(folder) / str(number)
            fill(out, number, 10)
            row("resume: what is missing", number, *part("resumed", out)[:2])
            seconds, peak, first = part("board", out)
            row("leaderboard", number, seconds, peak)
            row("seal", number, *part("seal", out)[:2])
            size = sum(path.stat().st_size for path in store.sealed_files(out)) / 2**20
            row(f"resume, sealed, {size:.0f} MiB", number, *part("resumed", out)[:2])
            seconds, peak, second = part("board", out)
            assert second == first
            row("leaderboard, sealed", number, seconds, peak)
        acknowledged, there, lost = killed(Path(folder) / "killed", 8, 10_000 // scale, 3)
    print(tabulate(rows, headers=("", "records", "CPU-seconds", "peak MiB"), tablefmt="pipe", disable_numparse=True))
    print(
        f"\n8 writers at once, 3 of them killed: {acknowledged:,} records acknowledged, {there:,} there, {lost} lost."
    )


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] in PARTS:
        PARTS[sys.argv[1]](*sys.argv[2:])
    else:
        main()
