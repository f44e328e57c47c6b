from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sparsebench_theory.models import PRUNED
from sparsebench_theory.shallow.paper import PAPER

from sparsebench.paper import Result, Trial

YES, PARTLY, NO, OPEN = "reproduced", "partly", "not reproduced", "undecided"
MATRICES = ("W_Q", "W_K", "W_V")
TWO, NEARLY, NONE = (3.0, 2.0, 0.2, 0.1), (5.0, 1.0, 0.75, 0.5), (2.0, 1.9, 1.8, 1.7)
"""The two largest hold 0.996, 0.970 and 0.556 of the square; the third over the second is 0.1, 0.75 and 0.95."""


def words(result: Result) -> list[str]:
    return [v.verdict for v in result.verdicts]


def ranks(make_trial: Any, *values: tuple[float, ...], trials: int = 4, scale: float = 5.0) -> list[Trial]:
    """Return trials whose updates of W_Q, W_K, W_V have these singular values, times a factor of each trial's own."""
    return [
        make_trial(200, r, curves={
            f"trained_singular_{name}": tuple(scale**r * v * (1 + 0.01 * r * (i == 1)) for i, v in enumerate(some))
            for name, some in zip(MATRICES, values, strict=True)
        }) for r in range(trials)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((TWO, TWO, TWO), [YES, YES, YES]),
        ((TWO, NEARLY, NONE), [YES, PARTLY, NO]),
        ((NONE, TWO, NEARLY), [NO, YES, PARTLY]),
    ],
)
def test_each_matrix_is_judged_by_what_two_directions_hold(
    make_trial: Any, sound: Any, values: Any, expected: list[str]
) -> None:
    result = PAPER.figures["rank"](ranks(make_trial, *values))
    sound(result)
    assert [v.claim.split()[3] for v in result.verdicts] == list(MATRICES)
    assert words(result) == expected
    for name, some in zip(MATRICES, values, strict=True):
        rows = [row for row in result.tables["rank"] if row["matrix"] == name]
        assert [row["number"] for row in rows] == [1, 2, 3, 4]
        means = [row["over the largest"] for row in rows]
        assert means == pytest.approx([v * (1.015 if i == 1 else 1) / some[0] for i, v in enumerate(some)])
        assert rows[0]["std"] == 0 < rows[1]["std"]
    share = 1 - (0.2**2 + 0.1**2) / (3**2 + 2**2 + 0.2**2 + 0.1**2)
    if values[0] == TWO:
        assert f"two hold {share:.3g}" in result.verdicts[0].measured


def test_a_share_that_differs_between_trials_is_not_certain(make_trial: Any) -> None:
    other = make_trial(200, 1, curves={f"trained_singular_{name}": NONE for name in MATRICES})
    assert words(PAPER.figures["rank"]([*ranks(make_trial, TWO, TWO, TWO, trials=1), other])) == [OPEN] * 3


# ---- neurons


def pruned(
    make_trial: Any, short: Callable[[float], float], long: Callable[[float], float], M: int = 5, trials: int = 4,
    wobble: float = 1e-4,
) -> list[Trial]:  # fmt: skip
    """Return trials whose losses without the shortest and the longest rows are these, by share, and the trial's own."""
    return [
        make_trial(200, r, task={"patterns": M, "d": 20}, curves={
            f"trained_loss_without_{what}": tuple(0.1 * r + law(share) + wobble * r * (share > 0) for share in PRUNED)
            for what, law in (("short", short), ("long", long))
        }) for r in range(trials)
    ]  # fmt: skip


def flat(share: float) -> float:
    return 0.1


def rises(share: float) -> float:
    return 0.1 + share


def late(share: float) -> float:
    return 0.1 + 0.3 * (share > 0.65)


def jumps(share: float) -> float:
    return 0.1 + share * (1 - 1.2 * (share > 0.75))


@pytest.mark.parametrize(
    ("short", "long", "M", "expected"),
    [
        pytest.param(flat, rises, 5, [YES, YES], id="as published"),
        pytest.param(late, rises, 5, [YES, YES], id="short rows matter beyond the share"),
        pytest.param(late, rises, 10, [NO, YES], id="short rows matter within the larger share"),
        pytest.param(rises, jumps, 5, [NO, PARTLY], id="the loss falls again"),
        pytest.param(flat, flat, 5, [YES, OPEN], id="nothing matters, with some rise"),
        pytest.param(flat, lambda share: 0.1 + 0.3 * (0.05 < share < 0.45), 5, [YES, OPEN], id="only few matter"),
        pytest.param(flat, lambda share: 0.5 - 0.5 * share, 5, [YES, NO], id="the loss falls"),
        pytest.param(lambda share: 0.1 + 0.04 * (share > 0), rises, 5, [YES, YES], id="a small change is none"),
        pytest.param(lambda share: 0.5 - 0.3 * share, rises, 5, [OPEN, YES], id="short rows do harm"),
    ],
)
def test_neurons_are_judged_by_what_goes_without_them(
    make_trial: Any, sound: Any, short: Any, long: Any, M: int, expected: list[str]
) -> None:
    trials = pruned(make_trial, short, long, M)
    if long is flat:  # as often up as down
        trials = [
            make_trial(200, r, task={"patterns": M, "d": 20}, curves={
                "trained_loss_without_short": (0.1,) * 10,
                "trained_loss_without_long": (0.1,) + (0.1 + 0.01 * sign,) * 9,
            }) for r, sign in enumerate((1, -1, 1, -1))
        ]  # fmt: skip
    result = PAPER.figures["neurons"](trials)
    sound(result)
    assert words(result) == expected
    assert f"the {1 - 2 / M:.0%} of neurons with the shortest" in result.verdicts[0].claim
    assert f"(M={M})" in result.verdicts[1].claim
    rows = {(row["removed"], row["share"]): row for row in result.tables["neurons"]}
    assert len(rows) == 20 and {row["M"] for row in rows.values()} == {M}
    if long is rises:
        assert rows["longest", 0.5]["test loss"] == pytest.approx(0.6 + 0.15, abs=1e-3)
        assert rows["shortest", 0.9]["test loss"] == pytest.approx(short(0.9) + 0.15, abs=1e-3)


def test_a_change_of_exactly_nought_is_no_rise(make_trial: Any) -> None:
    assert words(PAPER.figures["neurons"](pruned(make_trial, flat, flat, wobble=0.0))) == [YES, NO]


@pytest.mark.parametrize(("M", "share"), [(3, "30%"), (4, "50%"), (5, "60%"), (10, "80%"), (15, "80%"), (20, "90%")])
def test_the_share_is_that_of_the_patterns_rounded_down(make_trial: Any, M: int, share: str) -> None:
    assert f"the {share} of neurons" in PAPER.figures["neurons"](pruned(make_trial, flat, rises, M)).verdicts[0].claim


def test_each_number_of_patterns_is_judged_apart(make_trial: Any, sound: Any) -> None:
    result = PAPER.figures["neurons"](pruned(make_trial, late, rises, 5) + pruned(make_trial, late, rises, 10))
    sound(result)
    assert words(result) == [YES, YES, NO, YES] and len(result.panels) == 2
