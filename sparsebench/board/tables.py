"""The leaderboard as text: terminal, Markdown, CSV, JSON, LaTeX."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from typing import Any

from tabulate import tabulate

from sparsebench.board.build import CHECKS, NOT_RANKED, NOT_REACHED, Row, columns_of
from sparsebench.errors import UserError

FORMATS = ("table", "md", "csv", "json", "latex")

LEGEND = (
    "Accuracy, AUROC and MACs: composite task, where it was run. N50: training samples for half of the trials to "
    "succeed, theory task, where it was run. "
    "Gap: average minus worst-group accuracy, spurious task. [ ]: 95 % intervals over seeds; differences and ratios "
    "are to dense. Oracles see the relevance mask and are not ranked."
)
LEGEND_OF_CHECKS = (
    "Checks: what `sparsebench check` found of this source of the strategy, and this version of sparsebench."
)


def render(rows: Sequence[Row], form: str, notes: Sequence[str] = ()) -> str:
    """Return the leaderboard in one of FORMATS; CSV and JSON have every column, the others join intervals.

    Raises:
        UserError: another format.
    """
    if form not in FORMATS:
        raise UserError("--format", got=f"'{form}'", allowed=FORMATS)
    if form == "json":
        return json.dumps(rows, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    if form == "csv":
        return _csv(rows)
    style = {"table": "simple", "md": "pipe", "latex": "latex_booktabs"}[form]
    headers = _headers(rows)
    body = [[_shown(row, keys) for keys in headers.values()] for row in rows]
    if form == "md":
        body = [[cell.replace("|", "\\|") for cell in line] for line in body]
    text = tabulate(body, headers=list(headers), tablefmt=style, disable_numparse=True, colalign=_alignment(headers))
    legend = f"{LEGEND} {LEGEND_OF_CHECKS}" if CHECKS in columns_of(rows) else LEGEND
    if form == "latex":
        return "\n".join([text, *(f"% {note}" for note in (legend, *notes))]) + "\n"
    return "\n\n".join([text, legend, *(["\n".join(f"- {note}" for note in notes)] if notes else [])]) + "\n"


def _csv(rows: Sequence[Row]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, columns_of(rows), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _headers(rows: Sequence[Row]) -> dict[str, tuple[str, ...]]:
    """Return each heading with the columns that it joins: value, low and high."""
    by_task = {"task": ("task",), "model": ("model",), "N": ("n_train",)} if rows and "task" in rows[0] else {}
    checks = {"checks": (CHECKS,)} if CHECKS in columns_of(rows) else {}
    columns: dict[str, tuple[str, ...]] = {
        "rank": ("rank",),
        "strategy": ("strategy",),
        "kind": ("kind",),
        "budget": ("budget",),
        "MACs / dense": ("macs_ratio",),
        "accuracy": ("accuracy", "accuracy_low", "accuracy_high"),
        "acc. - dense": ("accuracy_delta",),
        "N50": ("sample_complexity", "sample_complexity_low", "sample_complexity_high"),
        "N50 / dense": ("sample_complexity_ratio",),
        "gap": ("spurious_gap",),
        "gap reduction": ("spurious_gap_reduction", "spurious_gap_reduction_low", "spurious_gap_reduction_high"),
        "worst group": ("worst_group_accuracy",),
        "AUROC": ("selection_auroc",),
        "images/s": ("images_per_s",),
        "seeds": ("n_seeds",),
    }
    return by_task | columns | checks


def _alignment(headers: dict[str, tuple[str, ...]]) -> list[str]:
    words = {"strategy", "kind", "budget", "task", "model", "checks"}
    return ["left" if heading in words else "right" for heading in headers]


def _shown(row: Row, keys: tuple[str, ...]) -> str:
    value, *interval = (_number(row[key], key) for key in keys)
    if not interval or row[keys[1]] is None or interval == [NOT_REACHED] * 2:
        return value
    return f"{value} [{interval[0]}, {interval[1]}]"


def _number(value: Any, key: str) -> str:
    if value is None or value == NOT_RANKED:
        return "-"
    if not isinstance(value, float):
        return str(value)
    if key.startswith("sample_complexity"):
        return f"{value:.3g}"
    if key == "images_per_s":
        return f"{value:,.0f}"
    signed = key in ("accuracy_delta",) or key.startswith("spurious_gap_reduction")
    return f"{value:+.3f}" if signed else f"{value:.3f}"
