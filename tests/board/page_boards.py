"""Boards for tests of the page."""

import functools
import math
from itertools import groupby
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

import pandas as pd
from flats import flat

from sparsebench.board.board import Board
from sparsebench.board.columns import Row
from sparsebench.board.judge import Leaderboard, judge

KINDS = {"dense": "baseline", "random": "baseline", "random_inside": "baseline", "oracle": "oracle"}
HOSTILE = [
    "<script>alert(1)</script>", "</script><script>alert(2)</script>", "<!--<script>",
    "\"'><img src=x onerror=alert(3)>", "{{ 7 * 7 }}", "a\u202eb\u2066c", "\u2028\u2029", "x" * 10_000, "\\u003c",
    "&lt;b&gt;", "javascript:alert(4)", "${alert(5)}", "constructor", "__proto__", "url(#inside)",
]  # fmt: skip
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010806000000"
    "1f15c4890000000d49444154789c6360606060000000050001a5f645400000000049454e44ae426082"
)
"""A PNG file of one pixel."""


def row(strategy: str, accuracy: float | None, macs: float = 0.5, **more: Any) -> Row:
    """Return one row of a board by task, with defaults for these tests."""
    kind = KINDS.get(strategy, "deployable")
    known = accuracy is not None
    return {
        "task": "composite", "model": "vit", "n_train": 600,
        "rank": "not ranked" if kind == "oracle" else "1-2", "strategy": strategy, "kind": kind, "trained": "no",
        "budget": f"macs {macs:g}", "macs_ratio": macs, "macs": 2e9 * macs,
        "accuracy": accuracy,
        "accuracy_low": accuracy - 0.01 if known else None, "accuracy_high": accuracy + 0.01 if known else None,
        "accuracy_delta": accuracy - 0.8 if known else None, "accuracy_delta_low": accuracy - 0.82 if known else None,
        "accuracy_delta_high": accuracy - 0.78 if known else None, "n_seeds": 5,
    } | more  # fmt: skip


def board_of(rows: list[Row], **more: Any) -> Board:
    """Return a board with these rows by task, and with notes, citations, environments, suites and pictures."""
    groups = [list(group) for _, group in groupby(rows, key=itemgetter("task", "model", "n_train"))]
    titles = [f"{group[0]['task']}, {group[0]['model']}" for group in groups]
    rankings: Any = [
        SimpleNamespace(comparison=SimpleNamespace(title=title), every=pd.DataFrame(group), curves=None)
        for title, group in zip(titles, groups, strict=True)
    ]
    return Board(Leaderboard(), Leaderboard(rankings), **BESIDE | more)


BESIDE: dict[str, Any] = {
    "notes": ["something to know"], "bibtex": ["@article{one,\n title={A & B},\n}"],
    "environments": {"abc": {"python": "3.11", "cores": "2"}}, "suites": ["quick, version 1"],
    "pictures": {"tokens": PNG}, "papers": {"mine": ("A paper", "https://example.org/mine")},
}  # fmt: skip


def single() -> Board:
    """Return a board of one budget, with rows of two tasks."""
    rows = [
        row("dense", 0.8, 1.0),
        row("mine", 0.6, rank="1"),
        row("random", 0.4, rank="3"),
        row("oracle", 0.9),
        row("dear", 0.95, 60.0, rank="1"),
    ]
    trials = {"dense": 10.0, "mine": 2.0, "random": "not reached", "noise": None}
    rows += [
        row(name, 1.0, task="theory", model="shallow", n_train=64, sample_complexity=n) for name, n in trials.items()
    ]
    return board_of(rows)


@functools.cache
def over_budgets(*names: str) -> Board:
    """Return a board of three budgets: dense, strategies, references, one that costs more than dense. Read-only."""
    heights = {name: 0.8 - 0.01 * k for k, name in enumerate(names or [f"mine_{k}" for k in range(30)])}
    heights |= {"random_inside": 0.5, "random": 0.3, "oracle": 0.83, "dear": 0.9}
    cells = [("dense", 1.0, 1.0, 0.8, 100.0)]
    for place, (name, height) in enumerate(heights.items()):
        for budget in (0.7, 0.5, 0.3):
            spent = budget * (64 if name == "dear" else 1)
            accuracy = height - (0.7 - budget) * (0.02 + 0.01 * place)
            cells.append((name, budget, spent, accuracy, math.nan if place == 1 else 100 * max(2 - spent, 0.1)))
    records = [
        flat(name, seed, cell_id=f"{name} {budget} {seed}", kind=KINDS.get(name, "deployable"),
             budget=f"macs {budget:g}", macs_ratio_asked=budget, macs_ratio=spent, macs=2e9 * spent,
             accuracy=accuracy + seed / 1000, images_per_s=speed, how="drop")
        for name, budget, spent, accuracy, speed in cells for seed in range(2)
    ]  # fmt: skip
    return Board(judge(records), judge(records, "task"), **BESIDE)
