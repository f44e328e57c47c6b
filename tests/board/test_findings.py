from typing import Any

import pytest

from sparsebench.board.findings import findings


def row(strategy: str, accuracy: float, kind: str = "deployable", **more: Any) -> dict[str, Any]:
    """Return a row of a board, with differences of accuracy as (mean, low, high, mark)."""
    made: dict[str, Any] = {
        "strategy": strategy, "kind": kind, "budget": "macs 0.5", "macs_ratio": 0.5, "accuracy": accuracy, "rank": "1",
    }  # fmt: skip
    for name, mark in (("accuracy_delta", "versus_dense"), ("random_inside_delta", "versus_random_inside")):
        mean, low, high, word = more.pop(name, (None, None, None, None))
        made |= {name: mean, f"{name}_low": low, f"{name}_high": high, mark: word}
    return made | more


ORACLE = row("oracle", 0.9, "oracle", accuracy_delta=(0.116, 0.09, 0.142, "better"))
TOPK = row(
    "attn_topk", 0.469, accuracy_delta=(-0.018, -0.03, -0.0001, "worse"),
    random_inside_delta=(0.007, -0.008, 0.022, "not significant"),
)  # fmt: skip


def test_three_sentences_answer_three_questions_with_intervals() -> None:
    assert findings([TOPK, ORACLE]) == [
        "attn_topk at macs 0.5: +0.7 points [-0.8, +2.2], not significant, against random tokens inside the network "
        "(random_inside).",
        "Against dense: -1.8 points [-3.0, +0.0], worse, for 0.50 of its MACs.",
        "An oracle, which knows the relevant tokens, at macs 0.5: +11.6 points [+9.0, +14.2], better, against dense.",
    ]


def test_only_deployable_strategies_are_spoken_of_and_three_at_most() -> None:
    assert findings([row("random", 0.3, "baseline"), ORACLE]) == []
    four = [row(f"s{i}", 0.5 - i / 100) for i in range(4)]
    assert [line.split()[0] for line in findings(four) if line.startswith("s")] == ["s0", "s1", "s2"]


def test_of_several_budgets_the_one_nearest_to_half_the_macs_is_spoken_of() -> None:
    rows = [TOPK | {"budget": f"macs {x}", "macs_ratio": x} for x in (0.85, 0.48, 0.4)]
    assert findings(rows)[0].startswith("attn_topk at macs 0.48: ")


def test_the_oracle_is_that_of_the_budget_or_of_the_nearest_cost() -> None:
    dear = ORACLE | {"budget": "macs 0.85", "macs_ratio": 0.85}
    assert "at macs 0.5:" in findings([TOPK, dear, ORACLE])[-1]
    assert "at macs 0.85:" in findings([TOPK, dear])[-1]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([row("a", 0.5), ORACLE], "not compared with random tokens inside the network; run random_inside beside it"),
        ([TOPK], "No oracle was run"),
        ([TOPK | {"rank": "not ranked"}], "cells failed or are missing, so it is not ranked and nothing is concluded"),
    ],
)
def test_what_is_not_known_is_said(rows: list[dict[str, Any]], says: str) -> None:
    assert any(says in line for line in findings(rows))


def test_a_row_without_an_accuracy_says_nothing() -> None:
    assert findings([row("a", 0.5) | {"accuracy": None}]) == []
