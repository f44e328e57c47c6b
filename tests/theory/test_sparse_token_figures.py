import math

import numpy as np
import pytest
from scipy.stats import norm
from sparsebench_theory.models import OneQuery
from sparsebench_theory.sparse_tokens.figures import PAPER, least_error, random_cosine
from sparsebench_theory.sparse_tokens.task import SparseTokens
from verdicts import NO, OPEN, PARTLY, YES, words

LENGTHS = (16, 32, 64, 128, 256)
THETAS = tuple(2 ** (k / 4) for k in range(-2, 22))
ROOT = 2 * norm.ppf(0.9) / 4
"""The strength over sqrt(L) at which the closed form is 0.1, with 4 relevant tokens."""


@pytest.fixture(scope="session")
def trial(make_trial):
    def make(L, r, attention="trained", n=512, **options):
        task = {"tokens": L} | options.pop("task", {})
        return make_trial(n, r, task=task, model={"attention": attention}, kinds=(SparseTokens, OneQuery), **options)

    return make


# ---- strength


def strengths(trial, attention, pooled, lengths=LENGTHS, repetitions=5):
    """Return trials whose error decreases with theta, and is 0.1 at the strength law(L, repetition)."""
    return [
        trial(L, r, kind, task={"theta": theta}, accuracy=1 - 0.1 * law(L, r) / theta)
        for kind, law in (("trained", attention), ("frozen", pooled))
        for L in lengths for r in range(repetitions) for theta in THETAS
    ]  # fmt: skip


def log(L, r):
    return 0.4 * math.log(L) * 1.01**r


def root(L, r):
    return ROOT * math.sqrt(L) * 1.01 ** (r - 2)


@pytest.mark.parametrize(
    ("attention", "pooled", "expected"),
    [
        pytest.param(log, root, [YES, YES, YES, YES], id="as claimed"),
        pytest.param(lambda L, r: root(L, r) * L**0.25 / 4, root, [NO, PARTLY, YES, YES], id="attention faster"),
        pytest.param(lambda L, r: 2.0, root, [YES, NO, YES, YES], id="attention flat"),
        pytest.param(log, log, [YES, YES, NO, NO], id="the mean as attention"),
        pytest.param(log, lambda L, r: 1.5 * root(L, r), [YES, YES, YES, NO], id="the mean later"),
        pytest.param(
            log, lambda L, r: root(L, r) * (1.5 if L == 32 else 1), [YES, YES, YES, PARTLY], id="the mean once later"
        ),
        pytest.param(
            log, lambda L, r: root(L, r) * (L / 64) ** (0.2 * (r - 2)), [YES, YES, PARTLY, PARTLY], id="runs differ"
        ),
        pytest.param(lambda L, r: 1e9, lambda L, r: 1e9, [OPEN] * 4, id="never reached"),
        pytest.param(lambda L, r: 0.01, lambda L, r: 0.01, [OPEN] * 4, id="always below"),
    ],
)
def test_the_growth_of_the_strength_is_judged(trial, sound, attention, pooled, expected):
    result = PAPER.figures["strength"](strengths(trial, attention, pooled))
    sound(result)
    assert words(result) == expected


def test_the_strengths_are_the_planted_ones(trial):
    result = PAPER.figures["strength"](strengths(trial, log, root))
    rows = {(row["classifier"], row["L"]): row for row in result.tables["strength"]}
    assert set(rows) == {(name, L) for name in ("attention", "mean token") for L in LENGTHS}
    for L in LENGTHS:
        assert rows["attention", L]["theta"] == pytest.approx(np.mean([log(L, r) for r in range(5)]), rel=1e-3)
        assert rows["mean token", L]["closed form"] == pytest.approx(ROOT * math.sqrt(L), rel=1e-9)
        assert math.isnan(rows["attention", L]["closed form"]) and rows["attention", L]["trials"] == 5
    assert "sqrt(L): R2 1.000, exponent 1 " in result.verdicts[2].fits


def test_a_length_that_some_repetition_does_not_cross_counts_in_none(trial):
    def law(L, r):
        return 1e9 if (L, r) == (64, 1) else log(L, r)

    trials = strengths(trial, law, root)
    result = PAPER.figures["strength"](trials)
    rows = {row["L"]: row for row in result.tables["strength"] if row["classifier"] == "attention"}
    assert math.isnan(rows[64]["theta"]) and math.isfinite(rows[32]["theta"])
    assert words(result)[:2] == [YES, YES]  # from the other four
    three = PAPER.figures["strength"]([t for t in trials if t.task.tokens != 16])
    assert words(three)[:2] == [OPEN, OPEN]


@pytest.mark.parametrize(("theta", "R", "L"), [(2.0, 4, 64), (5.0, 1, 16), (0.0, 3, 9)])
def test_the_closed_form_is_the_error_of_the_best_cut_along_the_signal(theta, R, L):
    """The mean token along xi is N(theta R / L, 1 / L) or N(0, 1 / L); any other cut errs more."""
    cuts = np.linspace(-1, 3, 400_001)
    errors = (norm.sf(cuts, 0, L**-0.5) + norm.cdf(cuts, theta * R / L, L**-0.5)) / 2
    assert least_error(theta, R, L) == pytest.approx(errors.min(), abs=1e-9)


def test_the_closed_form_is_the_error_on_data_of_the_task():
    task = SparseTokens(tokens=32, d=3, theta=3.0, test=20_000)
    data = task.draw(1, 0, {})
    along = data.test.inputs.mean(axis=1) @ data.patterns[:, 0]
    wrong = (along > 3.0 * 4 / 32 / 2) != data.test.labels
    assert wrong.mean() == pytest.approx(least_error(3.0, 4, 32), abs=0.01)


# ---- alignment


def aligned(trial, by_n):
    return [
        trial(64, r, n=n, task={"d": 64, "steps": 2}, alignment=value)
        for n, values in by_n.items() for r, value in enumerate(values)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("by_n", "expected"),
    [
        ({64: (0.3, 0.35, 0.4), 256: (0.97, 0.98, 0.99)}, [YES, YES]),
        ({64: (0.1, 0.2, 0.0), 256: (0.97, 0.98, 0.99)}, [PARTLY, YES]),
        ({64: (0.3, 0.35, 0.4), 256: (0.99, 0.99, 0.75)}, [YES, PARTLY]),
        ({64: (0.3, 0.35, 0.4), 256: (0.5, 0.5, 0.51)}, [YES, NO]),
        ({64: (0.05, 0.06, 0.04), 256: (0.05, 0.06, 0.04)}, [NO, NO]),
        ({64: (0.1, 0.2, 0.0), 256: (0.0, 0.1, 0.9)}, [OPEN, OPEN]),
        ({64: (0.5,), 256: (0.95,)}, [OPEN, PARTLY]),
    ],
)
def test_alignment_is_judged_against_chance_and_against_1(trial, sound, by_n, expected):
    result = PAPER.figures["alignment"](aligned(trial, by_n))
    sound(result)
    assert words(result) == expected
    assert [row["alignment"] for row in result.tables["alignment"]] == pytest.approx([*map(np.mean, by_n.values())])
    assert "after 2 steps" in result.verdicts[0].claim


@pytest.mark.parametrize("d", [1, 2, 3, 64])
def test_chance_is_the_mean_cosine_of_random_directions(d):
    drawn = np.random.default_rng(0).standard_normal((200_000, d))
    cosines = np.abs(drawn[:, 0]) / np.linalg.norm(drawn, axis=1)
    assert random_cosine(d) == pytest.approx(cosines.mean(), rel=0.01)


# ---- removal


def cut(trial, errors, spread=0.002, repetitions=5):
    """Return trials of both classifiers by strategy and L; all but dense keep a quarter of the tokens."""
    return [
        trial(L, r, kind, strategy=strategy, removed=0.0 if strategy == "dense" else 0.75, task={"theta": 2.0},
              accuracy=1 - error - spread * ((r + len(strategy)) % repetitions - repetitions // 2))
        for kind in ("trained", "frozen") for (strategy, L), error in errors.items() for r in range(repetitions)
    ]  # fmt: skip


DENSE = {("dense", 16): 0.12, ("dense", 64): 0.24}


@pytest.mark.parametrize(
    ("oracle", "random", "expected"),
    [(0.12, 0.38, [YES, YES]), (0.13, 0.12, [PARTLY, NO]), (0.24, 0.14, [NO, YES]), (0.06, 0.05, [NO, NO])],
)
def test_removal_is_judged_beside_data_of_as_many_tokens(trial, sound, oracle, random, expected):
    trials = cut(trial, DENSE | {("oracle", 64): oracle, ("random", 64): random, ("attn_topk", 64): 0.3})
    result = PAPER.figures["removal"](trials)
    sound(result)
    assert words(result) == expected * 2
    assert all("from 64 to 16" in v.claim for v in result.verdicts)
    rows = {(row["classifier"], row["strategy"], row["L"]): row for row in result.tables["removal"]}
    assert len(rows) == 10 and rows["attention", "oracle", 64]["M"] == 16
    assert rows["attention", "oracle", 64]["over dense at M"] == pytest.approx(oracle - 0.12)
    assert rows["mean token", "random", 64]["error"] == pytest.approx(random)
    assert rows["mean token", "oracle", 64]["closed form at M"] == pytest.approx(norm.cdf(-1))
    assert rows["mean token", "dense", 64]["closed form at M"] == pytest.approx(norm.cdf(-0.5))


def test_differences_that_are_uncertain_decide_nothing(trial):
    trials = cut(trial, DENSE | {("oracle", 64): 0.18, ("random", 64): 0.15}, spread=0.05)
    assert words(PAPER.figures["removal"](trials)) == [OPEN, OPEN] * 2
