import math

import numpy as np
import pytest
from sparsebench_theory.models import Positional
from sparsebench_theory.spatial.figures import MODES, PAPER, put_right, samples_for
from sparsebench_theory.spatial.task import Spatial
from verdicts import NO, OPEN, PARTLY, YES, words

SMALL = {"tokens": 12, "group": 3, "d": 16}


@pytest.fixture(scope="session")
def trial(make_trial):
    def make(n=100, r=0, task=None, **options):
        return make_trial(n, r, task=SMALL | (task or {}), kinds=(Spatial, Positional), **options)

    return make


# ---- association

WATCHED = ("association", "in_group_mass", "in_group_lead", "alignment", "test_accuracy")
GOOD = {"association": 1.0, "alignment": 0.97, "accuracy": 0.995, "in_group_lead": 0.2}


def trained(trial, *values, wobble=1e-4, task=None):
    """Return a trial for each of these final values, watched three times on a straight line from 0."""
    return [
        trial(100, r, task={"watch": 10} | (task or {}), in_group_mass=0.4, **GOOD | dict(some), curves={
            "watched_steps": (0.0, 10.0, 20.0),
            **{f"watched_{name}": tuple(np.linspace(0, (GOOD | some).get(name, 0.4), 3)) for name in WATCHED},
        }) for r, some in enumerate({**v, "in_group_lead": v.get("in_group_lead", 0.2) + wobble * r}
                                    for r, v in enumerate(values))
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        pytest.param([{}, {}, {}], [YES, YES, YES, YES], id="as published"),
        pytest.param([{}, {"association": 0.9}, {}], [PARTLY, YES, YES, YES], id="nearly, in one"),
        pytest.param([{}, {"association": 0.5}, {}], [OPEN, YES, YES, YES], id="not in one"),
        pytest.param([{"association": 0.89}] * 3, [NO, YES, YES, YES], id="in none"),
        pytest.param([{"alignment": 0.94}, {}, {}], [YES, OPEN, YES, YES], id="one v is astray"),
        pytest.param([{"alignment": 0.94}] * 3, [YES, NO, YES, YES], id="each v is astray"),
        pytest.param([{"accuracy": 0.9}, {}, {}], [YES, YES, OPEN, YES], id="one has not learned"),
        pytest.param([{"accuracy": 0.9}] * 3, [YES, YES, NO, YES], id="none has learned"),
        pytest.param(
            [{"in_group_lead": v} for v in (-0.2, 0.2, 0.3)], [YES, YES, YES, OPEN], id="scores here and there"
        ),
        pytest.param([{"in_group_lead": -0.1}] * 3, [YES, YES, YES, NO], id="scores grow across"),
    ],
)
def test_association_is_judged_by_what_came_out_in_each_trial(trial, sound, values, expected):
    result = PAPER.figures["association"](trained(trial, *values))
    sound(result)
    assert words(result) == expected
    table = {(row["quantity"], row["step"]): row for row in result.tables["association"]}
    shares = [(GOOD | v)["association"] for v in values]
    outcome = table["association", 20]
    assert (outcome["min"], outcome["max"], outcome["trials"]) == (min(shares), max(shares), 3)
    assert outcome["mean"] == pytest.approx(np.mean(shares))
    assert table["test_error", 0]["mean"] == 1 and table["test_error", 20]["mean"] == pytest.approx(0.6)
    assert f"1 in {sum(s == 1 for s in shares)} of 3 trials" in result.verdicts[0].measured


def test_association_is_judged_at_each_step_size_apart(trial, sound):
    slow = trained(trial, *[{"association": 0.2}] * 3, task={"lr": 0.02})
    result = PAPER.figures["association"](slow + trained(trial, {}, {}, {}, task={"lr_attention": 20}))
    sound(result)
    assert words(result) == [NO, YES, YES, YES, YES, YES, YES, YES]
    assert ["step size 0.02" in v.claim for v in result.verdicts] == [True] * 4 + [False] * 4
    assert {row["attention at"] for row in result.tables["association"]} == {"step size 0.02", "step size 20"}


# ---- permutation


def test_scores_are_put_right():
    plain, order = np.random.default_rng(0).standard_normal((12, 12)), Spatial(**SMALL, permuted=True).order()
    learned = np.array([[plain[order[i], order[j]] for j in range(12)] for i in range(12)])
    np.testing.assert_array_equal(put_right(learned, order), plain)


def with_scores(trial, *strengths, wrong=0):
    """Return trials, permuted or not, whose scores show their sets, except for `wrong` positions."""
    result = []
    for r, (permuted, strength) in enumerate(strengths):
        task = Spatial(**SMALL, permuted=permuted)
        sets = task.sets()[task.order()]
        scores = strength * (sets[:, None] == sets) + np.random.default_rng(r).random((12, 12))
        scores[:wrong] *= -1
        result.append(trial(100, r, task={"permuted": permuted}, curves={"trained_scores": tuple(scores.ravel())}))
    return result


@pytest.mark.parametrize(
    ("strengths", "wrong", "word"),
    [
        (((False, 2.0), (True, 2.0), (True, 2.0)), 0, YES),
        (((False, 2.0), (True, 2.0), (True, 2.0)), 1, PARTLY),
        (((False, 2.0), (True, 2.0), (True, -2.0)), 0, OPEN),
        (((False, 2.0), (True, -2.0), (True, -2.0)), 0, NO),
        (((False, -2.0), (True, 2.0)), 0, YES),
        (((False, 2.0),), 0, OPEN),
    ],
)
def test_association_is_recovered_where_the_patches_are_in_another_order(trial, sound, strengths, wrong, word):
    result = PAPER.figures["permutation"](with_scores(trial, *strengths, wrong=wrong))
    sound(result)
    assert words(result) == [word] and len(result.panels) == 1 + 2 * any(permuted for permuted, _ in strengths)
    for row, (permuted, strength) in zip(result.tables["permutation"], strengths, strict=True):
        assert row["association"] == pytest.approx(1 - wrong / 12 if strength > 0 else 0)
        assert row["permuted"] == permuted
        same = row["association"] == row["association without putting right"]
        assert same or (permuted and row["association without putting right"] < 0.5)


# ---- transfer

N = (8, 16, 32, 64, 256)
KINDS = (
    ({"start": "pretrained"}, {"attention": "frozen"}),
    ({"start": "pretrained", "permuted": True}, {"attention": "frozen"}),
    ({}, {"attention": "frozen"}),
    ({}, {"attention": "trained"}),
)
"""The parameters of each of MODES."""


def transfers(trial, *needed, sizes=N, trials=3):
    """Return trials of each mode with an error of 1 % from a number of samples on; no trials for None."""
    return [
        trial(n, r, task=task | {"feature": 1, "structure": r}, model=model,
              accuracy=(0.99 if n >= least else 0.8) - r / 1e3)
        for (task, model), least in zip(KINDS, needed, strict=True) if least is not None
        for n in sizes for r in range(trials)
    ]  # fmt: skip


NEVER = math.inf


@pytest.mark.parametrize(
    ("needed", "expected"),
    [
        pytest.param((8, NEVER, NEVER, 256), [YES, YES, YES], id="as published"),
        pytest.param((16, NEVER, NEVER, 64), [YES, YES, YES], id="four times as many"),
        pytest.param((16, NEVER, NEVER, 32), [YES, PARTLY, YES], id="twice as many"),
        pytest.param((8, NEVER, NEVER, NEVER), [YES, YES, YES], id="scratch never gets there"),
        pytest.param((16, NEVER, NEVER, 16), [YES, NO, YES], id="as many from scratch"),
        pytest.param((32, NEVER, NEVER, 256), [NO, PARTLY, YES], id="transfer takes more"),
        pytest.param((NEVER, NEVER, NEVER, 64), [NO, NO, YES], id="transfer never gets there"),
        pytest.param((8, 64, NEVER, 256), [YES, YES, OPEN], id="shuffled attention gets there"),
        pytest.param((8, NEVER, 8, 256), [YES, YES, NO], id="initial attention is as good"),
        pytest.param((None, NEVER, NEVER, 64), [OPEN, OPEN, YES], id="no learned attention"),
        pytest.param((8, NEVER, NEVER, None), [YES, OPEN, YES], id="nothing from scratch"),
        pytest.param((8, None, NEVER, 256), [YES, YES, OPEN], id="no shuffled attention"),
    ],
)
def test_transfer_is_judged_by_the_samples_needed(trial, sound, needed, expected):
    result = PAPER.figures["transfer"](transfers(trial, *needed))
    sound(result)
    assert words(result) == expected
    for mode, least in zip(MODES, needed, strict=True):
        rows = {row["N"]: row for row in result.tables["transfer"] if row["attention"] == mode}
        assert list(rows) == (list(N) if least is not None else [])
        for n, row in rows.items():
            assert row["test error"] == pytest.approx((0.01 if n >= least else 0.2) + 1e-3) and row["trials"] == 3
            assert row["low"] < row["test error"] < row["high"]
        if least is not None:
            assert f"{mode} {'not reached' if least == NEVER else f'{least:.3g}'}" in result.verdicts[0].measured


@pytest.mark.parametrize(
    ("errors", "needed"),
    [
        ({8: [0.05], 16: [0.01]}, 8),
        ({8: [0.06], 16: [0.05], 64: [0.0]}, 16),
        ({8: [0.01], 16: [0.2], 64: [0.01]}, 64),
        ({8: [0.01], 16: [0.2]}, NEVER),
        ({16: [0.0, 0.08], 8: [0.0, 0.12]}, 16),
        ({8: []}, NEVER),
        ({}, NEVER),
    ],
)
def test_samples_needed_are_those_from_which_on_the_error_is_small(errors, needed):
    assert samples_for(errors) == needed


# ---- strategies


def kept(trial, strategy, removed, *shares, where="both"):
    return [
        trial(100, r, strategy=strategy, removed=removed, where=where, association=share, accuracy=0.9 - removed / 10,
              in_group_mass=0.4) for r, share in enumerate(shares)
    ]  # fmt: skip


def test_strategies_are_judged_by_learned_association(trial, sound):
    """Strategies are judged by the association that is learned with them."""
    trials = kept(trial, "dense", 0.0, 1.0, 1.0, 1.0) + kept(trial, "random", 0.25, 1.0, 1.0, 1.0)
    trials += kept(trial, "random", 0.5, 0.95, 1.0, 0.9) + kept(trial, "oracle", 0.5, 0.1, 0.2, 0.3)
    trials += kept(trial, "attn_topk", 0.5, 0.1, 1.0, 1.0) + kept(trial, "oracle", 0.5, 1.0, 1.0, 1.0, where="test")
    result = PAPER.figures["strategies"](trials)
    sound(result)
    outcome = {v.claim.partition(" with ")[2]: v for v in result.verdicts}
    assert {claim: v.verdict for claim, v in outcome.items()} == {
        "25% of the tokens removed (random)": YES, "50% of the tokens removed (random)": PARTLY,
        "50% of the tokens removed (oracle)": NO, "50% of the tokens removed (attn_topk)": OPEN,
    }  # fmt: skip
    assert "association 0.2" in outcome["50% of the tokens removed (oracle)"].measured
    assert "change -0.8" in outcome["50% of the tokens removed (oracle)"].measured
    rows = {(row["where"], row["strategy"], row["removed"]): row for row in result.tables["strategies"]}
    assert len(rows) == 6 and rows["test", "oracle", 0.5]["association"] == 1
    assert rows["both", "dense", 0.0]["accuracy"] == pytest.approx(0.9)
    assert rows["both", "oracle", 0.5]["accuracy"] == pytest.approx(0.85)
    assert rows["both", "oracle", 0.5]["association low"] < 0.2 < rows["both", "oracle", 0.5]["association high"]
