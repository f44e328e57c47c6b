import json
from typing import Any

import numpy as np
import pytest

from sparsebench.budget import FULL
from sparsebench.look.agreement_table import as_json, as_text, rows
from sparsebench.look.compare import Agreement, Comparison, Side
from sparsebench.records.cell import Cell, Part

CELL = Cell(
    task=Part(name="composite"), model=Part(name="vit"), strategy=Part(name="dense"), budget=FULL, n_train=600,
    repetition=0,
)  # fmt: skip
NAN = float("nan")


def kept(*counts: int) -> np.ndarray:
    return np.arange(16) < np.array(counts)[:, None]


def comparison(**last: Any) -> Comparison:
    given: dict[str, Any] = {
        "kept": (kept(8, 8, 8), kept(4, 4, 5)), "iou": np.array([0.2, 0.4, NAN]), "expected": np.array([0.1, 0.3, NAN]),
        "correlation": np.array([0.5, 0.5, NAN]), "recall": (0.25, 0.125),
    }  # fmt: skip
    first = Agreement(
        0, (kept(8, 8, 8), kept(16, 16, 16)), np.full(3, 0.5), np.full(3, 0.5), np.full(3, NAN), (0.25, 1)
    )
    sides = (Side("attn_topk", "macs 0.5"), Side("tome(x=1)", "keep 0.5"))
    return Comparison(CELL, sides, [first, Agreement(2, **given | last)], np.arange(0), None)


def test_a_row_has_means_and_intervals_over_the_samples_that_have_a_value() -> None:
    first, last = rows(comparison())
    assert (first["block"], first["end"], last["block"], last["end"]) == (0, False, 2, True)
    assert last["kept_a"] == 8 and last["kept_b"] == pytest.approx(13 / 3)
    half = 12.706204736432095 * 0.1 * 2**0.5 / 2**0.5  # Student t, one degree of freedom; s = 0.1 sqrt(2)
    assert [last["iou"], last["iou_low"], last["iou_high"]] == pytest.approx([0.3, 0.3 - half, 0.3 + half])
    assert last["iou_expected"] == pytest.approx(0.2)
    assert (last["rank_correlation"], last["rank_correlation_n"]) == (0.5, 2)
    assert (first["rank_correlation"], first["rank_correlation_n"]) == (None, 0)
    assert (last["relevant_kept_a"], last["relevant_kept_b"]) == (0.25, 0.125)


def cells(text: str) -> list[list[str]]:
    """Return the cells of a Markdown table."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]


def test_the_table_says_it_all() -> None:
    text = as_text(comparison(), markdown=True)
    headers, _, first, last = cells(text)
    found = dict(zip(headers, last, strict=True))
    assert found["after block"] == "2, the end" and first[0] == "0"
    assert (found["A keeps"], found["B keeps"], found["chance"]) == ("8", "4.333", "0.200")
    assert found["IoU"].startswith("0.300 [-0.97") and found["rank correlation"] == "0.500 [0.500, 0.500]"
    assert (found["relevant kept by A"], found["relevant kept by B"]) == ("0.250", "0.125")
    assert first[headers.index("rank correlation")] == "-"
    plain = as_text(comparison())
    for line in ("composite, vit, 600 training samples; 3 test samples of 16 patches", "A: attn_topk, macs 0.5"):
        assert line in plain and line in text
    assert "B: tome(x=1), keep 0.5" in plain and "named after it" in plain


def test_strategies_without_scores_and_tasks_without_a_mask_are_said() -> None:
    text = as_text(comparison(correlation=None), markdown=True)
    assert cells(text)[-1][5] == "no scores" and "relevant" in text
    unknown = comparison(recall=None)
    unknown.stages.pop(0)
    assert "relevant" not in as_text(unknown, markdown=True)
    assert rows(unknown)[0]["relevant_kept_a"] is None


def test_json_holds_the_rows_and_what_was_compared() -> None:
    found = json.loads(as_json(comparison()))
    assert found["rows"] == json.loads(json.dumps(rows(comparison())))
    assert found["a"] == {"label": "attn_topk", "budget": "macs 0.5"} and found["b"]["label"] == "tome(x=1)"
    assert found["task"]["name"] == "composite" and (found["n_train"], found["samples"], found["patches"]) == (
        600,
        3,
        16,
    )
