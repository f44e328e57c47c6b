"""Time the commands that must respond at once.

python benchmarks/runtime.py            # a few seconds; prints a table of RESULTS.md
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

from timing import table


def start_up(rounds: int) -> str:
    """Time commands in wall seconds."""
    rows = []
    for words in (["--help"], ["list"], ["list", "suites", "--json"]):
        times = []
        for _ in range(rounds + 1):
            start = time.perf_counter()
            subprocess.run([sys.executable, "-m", "sparsebench", *words], check=True, capture_output=True)
            times.append(time.perf_counter() - start)
        rows.append((f"sparsebench {' '.join(words)}", f"{statistics.median(times[1:]):.2f}"))
    return table(("command", "seconds"), rows)


if __name__ == "__main__":
    print(start_up(5))
