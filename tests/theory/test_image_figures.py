import numpy as np
import pytest
from sparsebench_theory.shallow import published
from sparsebench_theory.shallow.images import PAPER, alpha, figure_6a, figure_6b, figure_6c, first_model
from verdicts import NO, OPEN, PARTLY, YES, words

from sparsebench.models.vits import Vit
from sparsebench.tasks.images import Composite, Spurious

REMOVED = (0.0, 0.15625, 0.28125, 0.375, 0.4375)
ALPHAS = (0.5625, 0.6667, 0.7826, 0.9, 1.0)
GRID = {"placement": "grid"}


@pytest.fixture(scope="session")
def trial(make_trial):
    def make(n, r, removed, task=None, **values):
        kind = Composite if "success" in values else Spurious
        strategy = "oracle" if removed else "dense"
        return make_trial(
            n, r, strategy=strategy, removed=removed, task=GRID | (task or {}), kinds=(kind, Vit), **values
        )

    return make


def test_alpha_is_the_foreground_over_what_stays(trial):
    assert [alpha(trial(10, 0, removed)) for removed in REMOVED] == list(ALPHAS)


@pytest.mark.parametrize("preset", PAPER.presets)
@pytest.mark.parametrize("figure", PAPER.figures)
def test_the_suites_have_the_levels_of_the_paper(planned, preset, figure):
    trials = planned(PAPER.suites[preset], figure, lambda job: ({}, {}))
    assert sorted({alpha(t) for t in trials if t.strategy != "random"}) == list(ALPHAS)
    assert {t.removed for t in trials if t.strategy == "random"} == {0.4375}
    for a, level in zip(ALPHAS, published.FIGURE_6C["alpha_*"], strict=True):
        assert abs(a - level) < 0.02
    assert {t.strategy for t in trials} == {"dense", "random", "oracle"} and {t.where for t in trials} == {"both"}
    if figure == "6c":
        assert len({first_model(t) for t in trials}) == 2
        assert {t.task.agreement for t in trials} == {0.9}
    else:
        assert all(t.task.success_accuracy > 0 for t in trials) and len({t.n for t in trials}) >= 3


SIZES = (100, 200, 400, 800)
FINE = tuple(round(100 * 2 ** (k / 8)) for k in range(25))


def accuracies(trial, accuracy, repetitions=3, level=0.5, sizes=SIZES):
    """Return trials of Figures 6a and 6b; repetitions differ slightly."""
    return [
        trial(n, r, removed, {"success_accuracy": level}, accuracy=accuracy(a, n) + 0.001 * r,
              success=float(accuracy(a, n) + 0.001 * r >= level))
        for removed, a in zip(REMOVED, ALPHAS, strict=True) for n in sizes for r in range(repetitions)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("accuracy", "expected"),
    [
        (lambda a, n: 0.3 * a + 0.05 * np.log2(n / 100), [YES, YES]),
        (lambda a, n: 0.3 * a * (n > 100) + 0.05 * np.log2(n / 100), [YES, PARTLY]),
        (lambda a, n: 0.3 * a, [NO, YES]),
        (lambda a, n: 0.3 - 0.1 * a + 0.001 * np.log2(n), [YES, NO]),
    ],
)
def test_accuracy_by_samples_and_share(trial, sound, accuracy, expected):
    result = figure_6a(accuracies(trial, accuracy))
    assert words(result) == expected
    sound(result)
    rows = {(row["tokens"], row["N"]): row for row in result.tables["fig6a"]}
    assert len(rows) == 20 and rows["alpha_* 0.90", 200]["trials"] == 3
    assert rows["alpha_* 0.90", 200]["accuracy"] == pytest.approx(accuracy(0.9, 200) + 0.001)


def needs(constant, power):
    """Return an accuracy that reaches 0.5 at constant * alpha_*^-power samples."""
    return lambda a, n: 0.5 + 0.2 * np.log2(n / (constant * a**-power))


@pytest.mark.parametrize(
    ("accuracy", "expected"),
    [
        (needs(130, 2), [YES, YES]),
        (needs(130, 0), [NO, NO]),
        (needs(5000, 2), [OPEN, OPEN]),  # never reached
        (needs(1, 2), [OPEN, OPEN]),  # always reached
        (lambda a, n: 0.9 if a > 0.7 else 0.1, [YES, OPEN]),  # always reached from an alpha_* on, never below
    ],
)
def test_samples_needed_for_an_accuracy(trial, sound, accuracy, expected):
    result = figure_6b(accuracies(trial, accuracy, repetitions=6, sizes=FINE))
    assert words(result) == expected
    sound(result)
    needed = {row["alpha_*"]: row["N50"] for row in result.tables["fig6b-n50"]}
    assert list(needed) == list(ALPHAS)
    assert "accuracy 0.5; the paper's level is 0.775" in result.verdicts[0].claim


def test_a_level_that_no_training_reaches_is_said_to_be_not_reached(trial):
    result = figure_6b(accuracies(trial, lambda a, n: 0.1))
    assert words(result) == [OPEN, OPEN] and "not reached" in result.verdicts[0].measured


GAPS = (0.4, 0.35, 0.3, 0.2, 0.02)


def spurious(trial, accuracy=(0.65, 0.7, 0.75, 0.78, 0.85), gap=GAPS, better=0.05, repetitions=3):
    """Return trials of Figure 6c from two initial models, one of which is more accurate by `better`."""
    return [
        trial(2000, r, removed, {"pretrain_samples": samples}, accuracy=a + more + 0.001 * r * (i + 1),
              spurious_gap=g - 0.001 * r * i, worst_group_accuracy=a - g, average_train=a + 0.1)
        for samples, more in ((4000, 0.0), (40000, better))
        for i, (removed, a, g) in enumerate(zip(REMOVED, accuracy, gap, strict=True)) for r in range(repetitions)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [YES, YES, YES, YES]),
        ({"accuracy": (0.78, 0.79, 0.8, 0.81, 0.83)}, [PARTLY, YES, YES, YES]),
        ({"accuracy": (0.68, 0.71, 0.69, 0.69, 0.81)}, [YES, PARTLY, YES, YES]),
        ({"accuracy": (0.9, 0.85, 0.8, 0.7, 0.6)}, [NO, NO, YES, YES]),
        ({"gap": (0.39, 0.40, 0.41, 0.42, 0.03)}, [YES, YES, NO, YES]),
        ({"gap": (0.39, 0.33, 0.35, 0.45, 0.03)}, [YES, YES, PARTLY, YES]),
        ({"gap": (0.4, 0.35, 0.3, 0.2, 0.2)}, [YES, YES, YES, NO]),
        ({"gap": (0.4, 0.39, 0.38, 0.375, 0.37)}, [YES, YES, YES, NO]),  # linear in alpha_*
        ({"gap": (0.02, 0.02, 0.02, 0.02, 0.021)}, [YES, YES, OPEN, OPEN]),  # never open
        ({"repetitions": 1}, [OPEN, OPEN, OPEN, OPEN]),
    ],
)
def test_accuracy_and_gap_by_share(trial, sound, options, expected):
    result = figure_6c(spurious(trial, **options))
    assert words(result)[:4] == expected == words(result)[4:8]
    assert "40,000" in result.verdicts[4].claim and "4,000" in result.verdicts[0].claim
    sound(result)


def test_each_level_stands_beside_the_published_values(trial):
    result = figure_6c(spurious(trial))
    rows = {(row["initial model"], row["alpha_*"]): row for row in result.tables["fig6c"]}
    assert len(rows) == 10
    for start in ("4,000", "40,000"):
        mine = [rows[f"{start} images of the other classes", a] for a in ALPHAS]
        for name, values in published.FIGURE_6C["accuracy"].items():
            assert [row[f"published, {name}"] for row in mine] == list(values)
    assert rows["4,000 images of the other classes", 1.0]["spurious_gap"] == pytest.approx(0.016)
    assert all(row["accuracy_low"] < row["accuracy"] < row["accuracy_high"] for row in rows.values())


@pytest.mark.parametrize(("better", "word"), [(0.05, YES), (0.0, OPEN), (-0.05, NO)])
def test_the_better_initial_model_at_every_level(trial, better, word):
    trials = spurious(trial, better=better)
    last = figure_6c(trials).verdicts[-1]
    assert last.claim.startswith("the better initial model") and last.verdict == (word if better else NO)


def test_one_initial_model_alone_is_compared_with_none(trial, sound):
    result = figure_6c([t for t in spurious(trial) if t.task.pretrain_samples == 40000])
    assert len(result.verdicts) == 4
    sound(result)


@pytest.mark.parametrize(("lead", "word"), [(0.1, YES), (-0.1, NO)])
def test_as_many_tokens_at_random_are_a_control_and_no_level(trial, sound, make_trial, lead, word):
    def control(n, r, start, **values):
        task = GRID | {"pretrain_samples": start}
        kind = Composite if "success" in values else Spurious
        return make_trial(n, r, strategy="random", removed=0.4375, task=task, kinds=(kind, Vit), **values)

    trials = spurious(trial)
    chance = [
        control(2000, r, start, accuracy=0.85 + more - lead + 0.0011 * r, spurious_gap=0.3, worst_group_accuracy=0.4,
                average_train=0.8)
        for start, more in ((4000, 0.0), (40000, 0.05)) for r in range(3)
    ]  # fmt: skip
    result = figure_6c(trials + chance)
    assert result.verdicts[:8] == figure_6c(trials).verdicts[:8]
    assert result.verdicts[8].claim.startswith("it is the background") and result.verdicts[8].verdict == word
    assert [row["alpha_*"] for row in result.tables["fig6c"][10:]] == ["as many at random"] * 2
    sound(result)
    some = accuracies(trial, lambda a, n: 0.3 * a)
    more = [control(n, 0, 4000, accuracy=0.2, success=0.0) for n in SIZES]
    assert figure_6a(some + more).verdicts == figure_6a(some).verdicts
    assert figure_6b(some + more).verdicts == figure_6b(some).verdicts


def test_a_diverged_training_is_left_out_of_the_means(trial, sound):
    lost = trial(2000, 9, REMOVED[2], {"pretrain_samples": 40000}, diverged=True)
    sound(figure_6c([*spurious(trial), lost]))


def test_initial_models_have_names(trial):
    def named(**task):
        return first_model(trial(10, 0, 0.0, task))

    assert named(pretrain_images="cifar100", pretrain_samples=50000) == "50,000 images of CIFAR100"
    assert named(pretrain_samples=4000) == "4,000 images of the other classes"
    assert named(pretrain_epochs=0) == "not pre-trained"
