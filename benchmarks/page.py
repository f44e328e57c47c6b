"""Time the leaderboard's page with many rows, in a headless browser.

python benchmarks/page.py              # a minute; needs playwright and chromium
python benchmarks/page.py --rows 500

The rows are invented, because times do not depend on the numbers in a page.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
from playwright.sync_api import Browser, sync_playwright
from tabulate import tabulate

from sparsebench.board.board import Board
from sparsebench.board.columns import ALWAYS_SHOWN, Row
from sparsebench.board.judge import Leaderboard
from sparsebench.board.published import page as render

WATCH = """
(() => {
  const seen = (what, ready) => requestAnimationFrame(() => ready() ? setTimeout(() => window[what] = performance.now())
                                                                   : seen(what, ready));
  seen("first", () => document.querySelector("#table tbody tr"));
  seen("ready", () => document.documentElement.dataset.ready);
})()
"""
"""Script that stores in the page the milliseconds until the table, and until the whole page, is on the screen."""
DO = """([selector, value]) => new Promise((done) => {
  const from = performance.now();
  const element = document.querySelector(selector);
  if (value === null) element.click();
  else {
    element.value = value;
    element.dispatchEvent(new Event(element.tagName === "INPUT" ? "input" : "change"));
  }
  requestAnimationFrame(() => setTimeout(() => done(performance.now() - from)));
})"""
"""Script that returns the milliseconds from a click or a choice until the result is on the screen."""


def made_up(n: int) -> list[Row]:
    """Return n rows with a value in every column."""
    draw = random.Random(0)
    texts: dict[str, list[str]] = {
        "kind": ["baseline", "deployable", "oracle"], "trained": ["yes", "no"], "pareto": ["yes"] + ["no"] * 60,
        "pareto_speed": ["no"], "device": ["cpu", "NVIDIA H100"], "budget": [f"macs 0.{k} @0,1,2" for k in range(3, 9)],
    }  # fmt: skip
    rows = []
    for k in range(n):
        row: Row = {key: draw.uniform(0, 1) for column in ALWAYS_SHOWN for key in column.keys}
        row |= {key: draw.choice(values) for key, values in texts.items()}
        rows.append(row | {"rank": f"{k + 1}-{k + 9}", "strategy": f"strategy_{k % 60}(power={k})", "n_seeds": 5})
    return rows


def times(browser: Browser, path: Path) -> dict[str, float]:
    """Open a page and use it once; return milliseconds by action."""
    context = browser.new_context(viewport={"width": 1400, "height": 900})
    shown = context.new_page()
    shown.add_init_script(WATCH)
    shown.goto(path.as_uri())
    while not shown.evaluate("window.ready ?? 0"):
        shown.wait_for_timeout(50)
    found = {"chart and table": shown.evaluate("window.first"), "all charts": shown.evaluate("window.ready")}
    steps: dict[str, list[Any]] = {
        "sort by accuracy": ["[data-sort=accuracy]", None],
        "sort by strategy": ["[data-sort=strategy]", None],
        "filter, first letter": ["#search", "s"],
        "filter, a name": ["#search", "strategy_7"],
        "filter, none": ["#search", ""],
        "all rows": ["#more", None],
    }
    for name, step in steps.items():
        found[name] = shown.evaluate(DO, step)
    context.close()
    return found


def main() -> None:
    """Print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    rows = pd.DataFrame(made_up(given.rows))
    render(Board(Leaderboard(), Leaderboard()))
    begun = time.perf_counter()
    ranking: Any = SimpleNamespace(setting=SimpleNamespace(title="made up"), every=rows, curves=None)
    content = render(Board(Leaderboard(), Leaderboard([ranking])))
    made = 1000 * (time.perf_counter() - begun)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        path = Path(folder) / "leaderboard.html"
        path.write_bytes(content)
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        rounds = [times(browser, path) for _ in range(given.rounds)]
        browser.close()
    print(f"{given.rows} rows, {len(content) / 1e6:.2f} MB, made in {made:.0f} ms")
    print(f"median and largest of {given.rounds} rounds\n")
    table = [(name, statistics.median(r[name] for r in rounds), max(r[name] for r in rounds)) for name in rounds[0]]
    print(tabulate(table, headers=["", "ms", "largest"], floatfmt=".0f", tablefmt="pipe"))


if __name__ == "__main__":
    main()
