import math

import numpy as np
import pytest
from sparsebench_theory.models import TwoLayer
from sparsebench_theory.overfitting.figures import PAPER, Boundary
from sparsebench_theory.overfitting.task import Overfitting
from sparsebench_theory.trials import crossing
from verdicts import NO, OPEN, PARTLY, YES, words

INFINITY = float("inf")
SNR = (1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0, 17.0, 20.0, 26.0, 32.0, 40.0)
SIZES = (4, 8, 16)


@pytest.fixture(scope="session")
def trial(make_trial):
    """Return a function that makes trials whose signal-to-noise ratio is the length of the signal."""

    def make(n, r, snr=10.0, task=None, **options):
        task = {"signal": snr, "d": 25, "noise": 0.2} | (task or {})
        values = {} if options.get("diverged") else {"fitted": 1.0}
        return make_trial(n, r, task=task, kinds=(Overfitting, TwoLayer), **values | options)

    return make


@pytest.fixture(scope="session")
def map_of(trial):
    """Return a function that makes a map whose loss decreases with SNR, and is 0.2 at law(N, repetition)."""

    def make(law, *, repetitions=3, sizes=SIZES, snr=SNR, **options):
        return [
            trial(n, r, s, test_loss=0.2 * (law(n, r) / s) ** 2, **options)
            for r in range(repetitions) for n in sizes for s in snr
        ]  # fmt: skip

    return make


def at(c, spread=1.05):
    """Return the law N SNR^2 = c with some variation by repetition."""
    return lambda n, r: math.sqrt(c * spread ** (r - 1) / n)


# ---- the boundary


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([0.8, 0.4, 0.1, 0.05], math.sqrt(8)),
        ([0.8, 0.2, 0.1, 0.05], 2.0),
        ([0.1, 0.4, 0.1, 0.05], math.sqrt(8)),  # from there on
        ([0.8, 0.1, 0.8, 0.1], 4 * 2 ** (2 / 3)),
        ([0.1, 0.1, 0.1, 0.1], 1.0),
        ([0.8, 0.8, 0.8, 0.8], INFINITY),
        ([0.1, 0.1, 0.1, 0.2], INFINITY),
        ([math.nan, 0.8, 0.2, 0.1], 4.0),
        ([math.nan, math.nan, 0.1, 0.1], math.nan),
        ([0.1, 0.1, math.nan, 0.1], math.nan),
        ([0.1, 0.1, 0.1, math.nan], math.nan),
        ([math.nan] * 4, math.nan),
        ([0.8, 0.0, 0.0, 0.0], 1.0),
    ],
)
def test_the_crossing_is_where_the_loss_is_low_for_good(losses, expected):
    assert crossing(np.array([1.0, 2.0, 4.0, 8.0]), np.array(losses), 0.2) == pytest.approx(expected, nan_ok=True)


def test_a_boundary_has_its_constant_and_its_slope(map_of):
    boundary = Boundary(map_of(at(1000, 1.0)))
    assert boundary.snr.tolist() == list(SNR)
    for row in boundary.crossings.values():
        assert row == {n: pytest.approx(math.sqrt(1000 / n)) for n in SIZES}
    assert boundary.constant == pytest.approx((1000, 1000, 1000))
    assert boundary.slope() == pytest.approx((-2, -2, -2)) and boundary.ends == (0, 0, 9)
    logs = [math.log(900), math.log(1000), math.log(1210)]
    value, low, high = Boundary(map_of(lambda n, r: math.sqrt((900, 1000, 1210)[r] / n))).constant
    half = 4.302653 * np.std(logs, ddof=1) / math.sqrt(3)
    assert (math.log(value), math.log(low), math.log(high)) == pytest.approx(
        (np.mean(logs), np.mean(logs) - half, np.mean(logs) + half)
    )
    steep = Boundary(map_of(lambda n, r: 60 * n ** (-1 / (1, 2, 3)[r]))).slope()
    assert steep[0] == pytest.approx(-2) and steep[1:] == pytest.approx(
        (-2 - 4.302653 / 3**0.5, -2 + 4.302653 / 3**0.5)
    )


def test_only_crossings_inside_the_map_count(map_of):
    boundary = Boundary(map_of(lambda n, r: {4: 1e3, 8: 11.0, 16: 0.1}[n]))
    assert boundary.crossings[0] == {4: INFINITY, 8: pytest.approx(11), 16: 1.0}
    assert boundary.ends == (3, 3, 9)
    assert boundary.constant[0] == pytest.approx(8 * 121)
    assert math.isnan(boundary.slope()[0])  # a line needs three N


def test_an_n_that_some_run_does_not_cross_counts_in_none(map_of):
    def law(n, r):
        c = {4: 2000.0, 8: 1000.0, 16: 1000.0}[n]
        return 1e3 if (n, r) == (4, 2) else math.sqrt(c / n)

    boundary, dense = Boundary(map_of(law)), Boundary(map_of(at(500, 1.0)))
    assert boundary.constant[0] == pytest.approx(1000) and math.isnan(boundary.slope()[0])
    assert boundary.shift(dense)[0][0] == pytest.approx(2) and boundary.shift(dense)[1] == 3
    assert dense.shift(boundary)[0][0] == pytest.approx(0.5)


def test_below_the_map_a_shift_counts_to_its_edge(map_of):
    below, dense = Boundary(map_of(lambda n, r: 0.1)), Boundary(map_of(lambda n, r: 5.0))
    assert below.shift(dense)[0][0] == pytest.approx(1 / 25) and math.isnan(below.constant[0])


def test_a_row_without_a_trial_at_each_ratio_has_no_crossing(map_of):
    trials = map_of(at(1000))
    lost = next(i for i, t in enumerate(trials) if (t.repetition, t.n, t.task.signal) == (1, 8, 12.0))
    boundary = Boundary(trials[:lost] + trials[lost + 1 :])
    assert {r: sorted(row) for r, row in boundary.crossings.items()} == {0: [4, 8, 16], 1: [4, 16], 2: [4, 8, 16]}


def test_the_shift_is_paired_by_repetition_and_n(map_of):
    dense, other = Boundary(map_of(at(1000, 2.0))), Boundary(map_of(at(250, 2.0)))
    (shift, low, high), runs = other.shift(dense)
    assert (shift, low, high, runs) == (pytest.approx(0.25), pytest.approx(0.25), pytest.approx(0.25), 3)
    (back, _, _), _ = dense.shift(other)
    assert back == pytest.approx(4)
    partial_ = Boundary(map_of(lambda n, r: INFINITY if n == 4 else at(n * 100)(n, r), repetitions=2))
    (shift, *_), runs = partial_.shift(Boundary(map_of(at(1000, 1.05), repetitions=5)))
    assert runs == 2 and shift == pytest.approx(math.sqrt(0.8 * 1.6))
    assert math.isnan(Boundary(map_of(at(1e9))).shift(dense)[0][0])


# ---- Figure 1


@pytest.mark.parametrize(
    ("law", "expected"),
    [
        pytest.param(at(1000), [YES, YES, YES, YES], id="as published"),
        pytest.param(at(1350), [YES, YES, YES, YES], id="somewhat later"),
        pytest.param(at(550), [PARTLY, YES, YES, PARTLY], id="much sooner"),
        pytest.param(at(1800), [YES, PARTLY, YES, PARTLY], id="much later"),
        pytest.param(at(200), [NO, YES, YES, NO], id="too soon"),
        pytest.param(at(5000), [YES, NO, YES, NO], id="too late"),
        pytest.param(lambda n, r: 80 / n, [PARTLY, PARTLY, NO, YES], id="slope -1"),
        pytest.param(
            lambda n, r: 40 / n ** (1 / (1.1, 1.5, 2)[r]), [PARTLY, PARTLY, PARTLY, YES], id="slopes about -1.5"
        ),
        pytest.param(at(1e-4), [NO, YES, OPEN, OPEN], id="benign everywhere"),
        pytest.param(at(1e9), [YES, NO, OPEN, OPEN], id="harmful everywhere"),
        pytest.param(lambda n, r: 11.0, [PARTLY, PARTLY, NO, YES], id="the same at each N"),
    ],
)
def test_figure_1_says_where_the_boundary_is(map_of, sound, law, expected):
    result = PAPER.figures["1"](map_of(law))
    assert [v.claim.split()[0] for v in result.verdicts[:2]] == ["harmful:", "benign:"]
    sound(result)
    assert words(result) == expected


def test_figure_1_has_the_planted_numbers_in_its_tables(map_of, trial):
    trials = [t for t in map_of(at(1000, 1.0)) if (t.repetition, t.n, t.task.signal) != (0, 4, 6.0)]
    trials += [trial(4, 0, 6.0, fitted=0.0, test_loss=9.0)]  # never fitted
    result = PAPER.figures["1"](trials)
    assert len(result.tables["fig1"]) == len(SIZES) * len(SNR)
    (outcome,) = (row for row in result.tables["fig1"] if (row["N"], row["SNR"]) == (4, 6.0))
    assert (outcome["trials"], outcome["fitted"], outcome["N SNR^2"]) == (3, 2, 144)
    assert outcome["test loss"] == pytest.approx(0.2 * 250 / 36)
    assert [row["N SNR^2"] for row in result.tables["fig1-boundary"]] == pytest.approx([1000] * 9)
    cells = sum(n * s**2 <= 600 for n in SIZES for s in SNR)
    assert f"100.0% of {3 * cells - 1} trials" in result.verdicts[0].measured


def test_figure_1_counts_the_trials_on_either_side(trial):
    """Of 20 trials on each side, the given number are right."""
    for right, word in ((20, YES), (19, YES), (18, PARTLY), (16, PARTLY), (15, NO)):
        trials = [trial(4, r, 5.0, test_loss=0.5 if r < right else 0.1) for r in range(20)]
        trials += [trial(4, r, 25.0, test_loss=0.1 if r < right else 0.2) for r in range(20)]
        assert words(PAPER.figures["1"](trials))[:2] == [word, word]


# ---- Figures 2 and 3

STEPS = (0.0, 10.0, 20.0)
NAMES = (
    "train_loss_then", "test_loss", "attention_on_relevant", "attention_on_noise", "value_of_signal", "value_of_noise",
    "score_of_signal", "score_of_noise",
)  # fmt: skip
BENIGN = {
    "attention_on_relevant": (0.3, 0.6, 0.9), "attention_on_noise": (0.4, 0.2, 0.05),
    "value_of_signal": (0.0, 2.0, 5.0), "value_of_noise": (0.0, 1.0, 2.0),
    "train_loss_then": (0.7, 0.1, 0.01), "test_loss": (0.7, 0.2, 0.05),
}  # fmt: skip
HARMFUL = {
    "attention_on_relevant": (0.3, 0.2, 0.05), "attention_on_noise": (0.4, 0.6, 0.9),
    "value_of_signal": (0.0, 0.1, 0.1), "value_of_noise": (0.0, 1.0, 2.0),
    "train_loss_then": (0.7, 0.1, 0.01), "test_loss": (0.7, 0.7, 0.8),
}  # fmt: skip
STILL = {"attention_on_relevant": (0.3,) * 3, "attention_on_noise": (0.4,) * 3, "value_of_signal": (1.0,) * 3,
         "value_of_noise": (1.0,) * 3}  # fmt: skip
GROW = {"attention_on_noise": (0.2, 0.3, 0.4), "attention_on_relevant": (0.2, 0.3, 0.4)}


def watched(trial, curves, repetitions=4, wobble=1e-3):
    rest = dict.fromkeys(NAMES, (0.5, 0.4, 0.3)) | curves
    return [
        trial(10, r, task={"fitted": 0.0, "watch": 10}, curves={
            "watched_steps": STEPS,
            **{f"watched_{name}": tuple(v + wobble * r * (i > 0) for i, v in enumerate(curve))
               for name, curve in rest.items()},
        }) for r in range(repetitions)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("figure", "curves", "expected"),
    [
        pytest.param("3", BENIGN, [YES, YES, YES], id="benign as drawn"),
        pytest.param("3", HARMFUL | {"train_loss_then": (0.7, 0.7, 0.6)}, [NO, NO, NO], id="benign the other way"),
        pytest.param("3", BENIGN | GROW, [PARTLY, YES, YES], id="both attentions grow"),
        pytest.param("3", BENIGN | {"test_loss": (0.7, 0.5, 0.3)}, [YES, YES, PARTLY], id="the test loss stays high"),
        pytest.param("3", BENIGN | {"train_loss_then": (0.7, 0.5, 0.3)}, [YES, YES, PARTLY], id="does not fit"),
        pytest.param("2", HARMFUL, [YES, YES, YES], id="harmful as drawn"),
        pytest.param("2", BENIGN | {"train_loss_then": (0.7, 0.5, 0.3)}, [NO, NO, NO], id="harmful the other way"),
        pytest.param("2", HARMFUL | GROW, [PARTLY, YES, YES], id="both attentions grow harmfully"),
        pytest.param("2", HARMFUL | {"test_loss": (0.7, 0.6, 0.5)}, [YES, YES, PARTLY], id="the test loss falls"),
        pytest.param("2", HARMFUL | {"test_loss": (0.7, 0.6, 0.665)}, [YES, YES, YES], id="the test loss is log 2"),
    ],
)
def test_figures_2_and_3_say_which_way_things_go(trial, sound, figure, curves, expected):
    result = PAPER.figures[figure](watched(trial, curves))
    sound(result)
    assert words(result) == expected
    table = {(row["quantity"], row["step"]): row["mean"] for row in result.tables[f"fig{figure}"]}
    assert len(table) == 8 * 3
    for name, curve in curves.items():
        assert [table[name, step] for step in (0, 10, 20)] == pytest.approx(curve, abs=0.002)


@pytest.mark.parametrize("figure", ["2", "3"])
def test_what_stands_still_decides_nothing(trial, figure):
    assert words(PAPER.figures[figure](watched(trial, BENIGN | STILL, wobble=0.0)))[:2] == [OPEN, OPEN]


def test_one_repetition_has_losses_and_no_directions(trial, sound):
    for figure, curves in (("2", HARMFUL), ("3", BENIGN)):
        result = PAPER.figures[figure](watched(trial, curves, repetitions=1))
        sound(result)
        assert words(result) == [OPEN, OPEN, YES]


# ---- strategies


def test_each_strategy_is_judged_by_the_shift_of_its_boundary(map_of, sound):
    options = {"removed": 0.5}
    trials = map_of(at(1000)) + map_of(lambda n, r: at(600)(n, r) * 1.01**r, strategy="oracle", **options)
    trials += map_of(lambda n, r: at(2000)(n, r) * 1.01**r, strategy="noise", **options)
    trials += map_of(lambda n, r: at(1000)(n, r) * (0.8, 1, 1.25)[r], strategy="random", **options)
    trials += map_of(at(1e9), strategy="anti_oracle", **options)
    trials += map_of(at(1e9), strategy="attn_topk", fitted=0.0, **options)
    result = PAPER.figures["strategies"](trials)
    sound(result)
    outcome = {v.claim.partition("(")[2].rstrip(")"): v for v in result.verdicts}
    expected = {"oracle 50%": YES, "noise 50%": NO, "random 50%": OPEN, "anti_oracle 50%": NO, "attn_topk 50%": OPEN}
    assert {name: v.verdict for name, v in outcome.items()} == expected
    assert "removing noise tokens" in outcome["oracle 50%"].claim and "noise tokens" not in outcome["noise 50%"].claim
    assert "0 of 117 trials fitted" in outcome["attn_topk 50%"].measured
    rows = {row["strategy"]: row for row in result.tables["strategies"]}
    assert next(iter(rows)) == "dense" and rows["dense"]["over dense"] == pytest.approx(1)
    assert rows["oracle 50%"]["over dense"] == pytest.approx(0.6 * 1.01**2, rel=1e-6)
    assert (rows["oracle 50%"]["runs"], rows["oracle 50%"]["fitted"], rows["oracle 50%"]["trials"]) == (3, 117, 117)
    assert (rows["anti_oracle 50%"]["beyond the map"], rows["anti_oracle 50%"]["crossings"]) == (9, 9)
    assert len(result.tables["strategies-boundary"]) == 5 * 9


def test_figure_1_of_one_signal_can_be_drawn(trial, sound):
    sound(PAPER.figures["1"]([trial(4, 0, 5.0, test_loss=0.4)]))
