import csv
import io

import numpy as np
import pytest
from flats import build, flatten
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from sparsebench_theory.models import Shallow
from sparsebench_theory.shallow.task import Theory
from sparsebench_theory.trials import Grid, compete, differences, line, mean, resamples_of, slopes, values_of

from sparsebench.paper import Trial, as_csv
from sparsebench.paper.reproduce import has_no_answer, trials_of
from sparsebench.records.record import Cell, Failure, Metric, Origin, Part, Record
from sparsebench.stats.intervals import RESAMPLES
from sparsebench.strategy.budget import FULL, Budget

NAN, INFINITY = float("nan"), float("inf")
X = np.array([2.0, 3.0, 5.0, 8.0, 13.0])
SIX = [6] * len(X)
"""Number of repetitions of each value."""


def record_of(status="ok", *, kind="", budget=FULL, n_train=12, repetition=3, **metrics):
    cell = Cell(
        task=Part.of(Theory(relevant=0.3)), model=Part.of(Shallow(m=16)), strategy=Part(name="noise"), budget=budget,
        n_train=n_train, repetition=repetition, where="test",
    )  # fmt: skip
    return Record(
        cell=cell, cell_id=cell.id, status=status, origin=Origin(plugin="noise", revision="a"), kind="deployable",
        label="noise(seed=1)", metrics={name: Metric(value=v, unit="", n=1) for name, v in metrics.items()},
        samples={"watched_steps": (0.0, 10.0)} if status == "ok" else {},
        failure=None if status == "ok" else Failure(reason="it broke", kind=kind),
    )  # fmt: skip


# ---- from records


def test_a_record_becomes_a_trial_with_its_parameters_and_metrics():
    (trial,) = trials_of([record_of(budget=Budget(keep_rate=0.8), success=1.0, iterations=None)])
    assert trial == Trial(
        task=Theory(relevant=0.3), model=Shallow(m=16), strategy="noise(seed=1)", removed=0.2, where="test", n=12,
        repetition=3, values={"success": 1.0, "iterations": None}, curves={"watched_steps": (0.0, 10.0)},
        diverged=False,
    )  # fmt: skip
    assert trial.success == 1.0
    assert [trials_of([record_of(success=value)])[0].success for value in (0.0, None)] == [0.0, 0.0]
    assert trials_of([record_of(success=1.0)])[0].removed == 0.0  # dense removes nothing


def test_a_diverged_training_is_a_trial_without_success():
    """A training that diverged is a trial without success and any other failure is none."""
    diverged = record_of("failed", kind="DivergedError")
    others = [
        *(record_of(status) for status in ("failed", "crashed", "oom", "skipped", "timeout")),
        record_of("failed", kind="ValueError"), record_of("unsupported", kind="UnsupportedError"),
    ]  # fmt: skip
    assert not has_no_answer(diverged) and not has_no_answer(record_of())
    assert all(has_no_answer(record) for record in others)
    (trial,) = trials_of([diverged, *others])
    assert trial.diverged and trial.success == 0.0


# ---- grids


def grid(*successes, sizes=(4, 8, 16, 32)):
    """Return a grid from strings of 0 and 1, one per repetition; a blank is a missing trial."""
    return Grid({r: {n: float(c) for n, c in zip(sizes, row, strict=True) if c != " "} for r, row in
                 enumerate(successes)})  # fmt: skip


@pytest.mark.parametrize(
    ("successes", "n50", "n95"),
    [
        pytest.param(["1111", "1111"], 4, 4, id="always"),
        pytest.param(["0000", "0000"], INFINITY, INFINITY, id="never"),
        pytest.param(["0011", "0011"], 8 * 2**0.5, 16, id="from 16 on"),
        pytest.param(["0001", "0001"], 16 * 2**0.5, 32, id="at the largest only"),
        pytest.param(["0011", "0111"], 8, 16, id="half of them at 8"),
        pytest.param(["0110", "0110"], INFINITY, INFINITY, id="lost again at the largest"),
        pytest.param(["0101", "0101"], 16 * 2**0.5, 32, id="the last crossing counts"),
        pytest.param(["1011", "1111"], 4, 16, id="half at 8 is not below one half"),
        pytest.param(["0111"] * 19 + ["0000"], 4 * 2 ** (0.5 / 0.95), 8, id="19 of 20 are 95 %"),
        pytest.param(["0111"] * 18 + ["0000"] * 2, 4 * 2 ** (0.5 / 0.9), INFINITY, id="18 of 20 are not"),
        pytest.param(["0011"], 8 * 2**0.5, 16, id="one repetition"),
        pytest.param(["0011", "0011", "111 "], 8 * 2**0.5, 16, id="an incomplete repetition does not count"),
        pytest.param(["0 11", "0 11", "0011"], 4 * 4**0.5, 16, id="a size that few repetitions have is left out"),
        pytest.param([], NAN, NAN, id="no trial"),
        pytest.param(["11  ", "  11"], NAN, NAN, id="no common size"),
        pytest.param(["11 1", "1 11", " 111"], NAN, NAN, id="no complete repetition"),
    ],
)
def test_n50_and_n95_of_a_grid(successes, n50, n95):
    some = grid(*successes)
    assert some.n50[0] == pytest.approx(n50, nan_ok=True)
    assert some.n95 == pytest.approx(n95, nan_ok=True)
    if len(some.wins) < 2:  # no interval, and no error
        assert some.n50[1:] == (None, None) and np.isnan(resamples_of([some])[0]).all() and not some.within(4, 32)
    assert len(some.wins) > 0 or np.isnan([*some.rates, *some.ends]).all()


def test_a_grid_does_not_depend_on_the_order_of_trials(make_trial):
    """A grid is of its trials whatever their order and one that diverged is a failure."""
    places = [(n, r) for r in range(3) for n in (4, 8, 16)]
    trials = [make_trial(n, r, success=float(n > 4 * r), diverged=(n, r) == (16, 1)) for n, r in places]
    assert Grid.of(trials[::-1]).wins.tolist() == Grid.of(trials).wins.tolist() == [[1, 1, 1], [0, 1, 0], [0, 0, 1]]


def test_resampled_n50_come_from_whole_repetitions():
    rows = "0111", "0011", "0001", "0000"
    (values, doubled), (n, _) = resamples_of([grid(*rows), grid(*rows, sizes=(8, 16, 32, 64))])
    assert values.shape == (RESAMPLES,) and n == 4
    np.testing.assert_allclose(doubled, 2 * values)  # equal numbers of repetitions have equal resamples
    possible = {grid(*(["0111"] * i + ["0011"] * j + ["0001"] * k + ["0000"] * (4 - i - j - k))).n50[0]
                for i in range(5) for j in range(5 - i) for k in range(5 - i - j)}  # fmt: skip
    assert set(np.round(values, 6)) <= set(np.round(list(possible), 6))


@pytest.mark.parametrize("n", [2, 5, 10])
def test_the_interval_of_n50_is_that_of_the_board(n):
    thresholds = np.random.default_rng(n).integers(5, 130, n)
    records = [
        record_of(n_train=size, repetition=seed, success=float(size >= threshold))
        for seed, threshold in enumerate(thresholds)
        for size in (4, 8, 16, 32, 64, 128, 256)
    ]
    (row,) = build([flatten(record) for record in records])
    assert Grid.of(trials_of(records)).n50 == tuple(
        row[f"sample_complexity{end}"] for end in ("", "_low", "_high")
    )  # fmt: skip


@pytest.mark.parametrize(
    ("successes", "inside"),
    [(["0011", "0011"], True), (["0111", "0001"], True), (["1111", "1111"], False), (["0011", "1111"], False),
     (["0011", "0000"], False), (["0000", "0000"], False)],
)  # fmt: skip
def test_an_interval_that_reaches_the_end_of_the_sizes_is_not_within_them(successes, inside):
    assert grid(*successes).within(*grid(*successes).ends) is inside


# ---- lines and powers


@given(st.floats(-5, 5), st.floats(-100, 100))
def test_a_line_is_recovered(slope, intercept):
    result = line(X, slope * X + intercept)
    assert result[:2] == pytest.approx((slope, intercept), abs=1e-6)
    if abs(slope) > 1e-2:
        assert result[2] == pytest.approx(1)


def test_a_constant_is_no_line_that_explains_anything():
    for value in (0.1, 7.0, 1 / 3):
        assert line(X, np.full(5, value) * (1 + 1e-16))[2] == 0.0


def test_r2_is_the_share_of_the_variance_that_a_line_explains():
    y = np.array([1.0, 4.0, 2.0, 6.0, 3.0])
    assert line(X, y)[2] == pytest.approx(np.corrcoef(X, y)[0, 1] ** 2)


@given(st.floats(-3, 3), st.floats(0.1, 100))
def test_the_exponent_of_a_power_law_is_recovered(power, factor):
    y = factor * X**power
    (fit,) = compete({"x": X}, y, np.repeat(y[:, None], 7, axis=1), SIX)
    assert (fit.exponent, fit.low, fit.high) == pytest.approx((power, power, power), abs=1e-9)
    assert (fit.points, fit.range) == (5, 6.5)
    others = compete({"other": np.exp(-X), "x": X}, 3 * X + 1, np.repeat(X[:, None], 3, axis=1), SIX)
    assert [one.name for one in others] == ["x", "other"] and others[0].r2 == pytest.approx(1) and others[1].r2 < 0.999


def test_what_is_not_reached_is_left_out_of_values_and_of_resamples():
    y = np.array([2.0, INFINITY, 5.0, 8.0, NAN])
    (fit,) = compete({"x": X}, y, np.repeat(y[:, None], 3, axis=1), SIX)
    assert (fit.exponent, fit.r2, fit.points, fit.range) == pytest.approx((1, 1, 3, 4))
    resamples = np.repeat(X[:, None], 4, axis=1)
    resamples[4, 0] = resamples[3:, 1] = INFINITY
    resamples[1:, 2] = INFINITY  # too few for a slope
    (fit,) = compete({"x": X}, X, resamples, SIX)
    assert (fit.low, fit.high) == pytest.approx((1, 1))


def test_the_fewest_repetitions_decide_the_interval():
    """The fewest repetitions of what is fitted decide how wide an exponent's interval is."""
    y, resamples = X.copy(), X[:, None] ** np.linspace(0.5, 1.5, 1001)

    def ends(*repetitions):
        (fit,) = compete({"x": X}, y, resamples, repetitions)
        return fit.low, fit.high

    for n in (3, 6, 40):
        tail = stats.norm.cdf(-stats.t.ppf(0.975, n - 1) * (n / (n - 1)) ** 0.5)
        assert ends(n, 50, 50, 1, n) == pytest.approx((0.5 + tail, 1.5 - tail), abs=1e-3)
    y[0] = INFINITY
    assert ends(3, 40, 40, 40, 40) == ends(40, 40, 40, 40, 40)


@pytest.mark.parametrize("y", [[], [2.0, 3.0, *[INFINITY] * 3], [NAN] * 5, [INFINITY] * 5])
def test_fewer_than_three_points_give_no_fit(y):
    assert compete({"x": X[: len(y)]}, np.array(y), np.ones((len(y), 3)), SIX[: len(y)]) == []


def test_a_fit_without_intervals_decides_nothing():
    """Without intervals a fit says neither that it rises nor that it is flat."""
    (fit,) = compete({"x": X}, X, np.full((5, 3), NAN), [1] * 5)
    assert not fit.rises and not fit.flat and fit.text == "x: R2 1.000, exponent 1"


@pytest.mark.parametrize(
    ("ends", "rises", "flat"),
    [((0.2, 0.3), True, False), ((-0.2, 0.3), False, True), ((-0.2, 0.4), False, False), ((-0.4, -0.2), False, True)],
)
def test_flat_is_less_than_a_doubling_over_the_range(ends, rises, flat):
    resamples = X[:, None] ** np.array(ends)  # a power of 0.37 doubles from x = 2 to 13
    (fit,) = compete({"x": X}, X ** np.mean(ends), resamples, SIX)
    assert (fit.rises, fit.flat) == (rises, flat)


@pytest.mark.parametrize("points", range(3, 11))
def test_a_constant_neither_rises_nor_falls_by_rounding(points):
    x = np.linspace(0.1, 0.5, points)
    for value in np.exp(np.linspace(0.7, 5, 50)):
        y = np.full((points, 4), value)
        (fit,) = compete({"x": x}, y[:, 0], y, [6] * points)
        assert (fit.exponent, fit.low, fit.high) == (0, 0, 0) and fit.flat
        assert (slopes(x, np.log(y)) == 0).all()


# ---- pairs and means


def test_differences_pair_by_repetition_what_has_a_value_in_both(make_trial):
    mine = [make_trial(repetition=2, test_loss=2.5), make_trial(repetition=0, test_loss=0.5),
            make_trial(repetition=1, diverged=True), make_trial(repetition=3, test_loss=None),
            make_trial(repetition=4, test_loss=9.0)]  # fmt: skip
    other = [make_trial(repetition=r, test_loss=float(r) - 1) for r in range(4)]
    assert values_of(mine, "test_loss") == [0.5, 2.5, 9.0]
    assert differences(mine, other, "test_loss") == [1.5, 1.5] and differences(other, mine, "test_loss") == [-1.5] * 2
    assert differences(mine, [], "test_loss") == []


def test_the_mean_of_no_values_is_no_number_and_warns_of_nothing():
    value, low, high = mean([])
    assert np.isnan(value) and low is high is None
    assert mean(np.array([2.0])) == (2.0, None, None)
    assert list(csv.reader(io.StringIO(as_csv([{"mean": value, "low": low}])))) == [["mean", "low"], ["", ""]]
