"""Where two strategies keep the same tokens, as text: terminal, Markdown, JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
from tabulate import tabulate

from sparsebench.stats.intervals import mean_interval

if TYPE_CHECKING:
    from sparsebench.look.compare import Agreement, Comparison

LEGEND = (
    "IoU: patches that both keep over those that either keeps, mean over test samples. Chance: that of independent "
    "random choices of as many. Rank correlation: Spearman's, of the scores that each gave last, over the patches that "
    "were there for both; - where there is none. [ ]: 95 % intervals over test samples. A patch is kept if a token is "
    "named after it: of merged patches the first is, a fused or mixed token is named after none."
)
Row = dict[str, Any]


def rows(comparison: Comparison) -> list[Row]:
    """Return a row a block in which one of them acted, the last of them the end.

    Its keys: block, end; kept_a, kept_b (patches, mean); iou, iou_low, iou_high, iou_expected; rank_correlation, _low,
    _high and _n (samples that have one); relevant_kept_a, relevant_kept_b (fractions). None for what there is not.
    """
    return [_row(stage, stage is comparison.stages[-1]) for stage in comparison.stages]


def _row(stage: Agreement, end: bool) -> Row:
    kept_a, kept_b = (float(kept.sum(axis=1).mean()) for kept in stage.kept)
    correlation = np.empty(0) if stage.correlation is None else stage.correlation
    recall = (None, None) if stage.recall is None else stage.recall
    return {
        "block": stage.block, "end": end, "kept_a": kept_a, "kept_b": kept_b, **_interval("iou", stage.iou),
        "iou_expected": _interval("iou", stage.expected)["iou"], **_interval("rank_correlation", correlation),
        "rank_correlation_n": int((~np.isnan(correlation)).sum()),
        "relevant_kept_a": recall[0], "relevant_kept_b": recall[1],
    }  # fmt: skip


def _interval(name: str, values: np.ndarray) -> Row:
    """Return the mean of what is not NaN, with its interval."""
    known = values[~np.isnan(values)]
    interval = mean_interval(known.tolist()) if len(known) else (None, None, None)
    return dict(zip((name, f"{name}_low", f"{name}_high"), interval, strict=True))


def as_json(comparison: Comparison) -> str:
    """Return what was compared, and the rows."""
    cell, (n, N) = comparison.cell, comparison.stages[0].kept[0].shape
    a, b = (vars(side) for side in comparison.sides)
    about: Row = {"task": cell.task.model_dump(mode="json"), "model": cell.model.model_dump(mode="json")}
    about |= {"n_train": cell.n_train, "samples": n, "patches": N, "a": a, "b": b}
    return json.dumps({**about, "rows": rows(comparison)}, indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def as_text(comparison: Comparison, *, markdown: bool = False) -> str:
    """Return it as a table for a terminal, or in Markdown, under what A and B are."""
    cell, (n, N) = comparison.cell, comparison.stages[0].kept[0].shape
    sample = "test sample" if n == 1 else "test samples"
    lines = [f"{cell.task.name}, {cell.model.name}, {cell.n_train} training samples; {n} {sample} of {N} patches"]
    lines += [f"{side}: {of.label}, {of.budget}" for side, of in zip("AB", comparison.sides, strict=True)]
    body = [_cells(row, stage) for row, stage in zip(rows(comparison), comparison.stages, strict=True)]
    table = tabulate(
        body, headers="keys", tablefmt="pipe" if markdown else "simple", disable_numparse=True,
        colalign=["right"] * len(body[0]),
    )  # fmt: skip
    return "\n\n".join(["  \n".join(lines) if markdown else "\n".join(lines), table, LEGEND]) + "\n"


def _cells(row: Row, stage: Agreement) -> Row:
    correlation = "no scores" if stage.correlation is None else _number(row, "rank_correlation")
    cells = {
        "after block": f"{row['block']}, the end" if row["end"] else str(row["block"]),
        "A keeps": f"{row['kept_a']:.4g}", "B keeps": f"{row['kept_b']:.4g}",
        "IoU": _number(row, "iou"), "chance": _number(row, "iou_expected"), "rank correlation": correlation,
    }  # fmt: skip
    if stage.recall is not None:
        cells |= {f"relevant kept by {side}": f"{row[f'relevant_kept_{side.lower()}']:.3f}" for side in "AB"}
    return cells


def _number(row: Row, key: str) -> str:
    if row[key] is None:
        return "-"
    low, high = row.get(f"{key}_low"), row.get(f"{key}_high")
    return f"{row[key]:.3f}" + ("" if low is None else f" [{low:.3f}, {high:.3f}]")
