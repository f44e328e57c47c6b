"""Metrics: one definition for code, records and documentation."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from scipy.stats import binomtest

from sparsebench.board.columns import ALL_COLUMNS, keys_of
from sparsebench.measure import metrics
from sparsebench.measure.metrics import (
    METRICS,
    RESERVED,
    Items,
    Metric,
    MetricKind,
    group_summary,
    kind_of,
    scores,
    share,
    value_of,
)
from sparsebench.records import store
from sparsebench.records.table import table_of
from sparsebench.runner.run_cell import Result

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden" / "store"


def table() -> str:
    """Return METRICS as a table in Markdown."""
    better = {None: "", True: "more", False: "less"}
    lines = ["| metric | unit | what it is | better | on boards | decided by |", "|---|---|---|---|---|---|"]
    for kind in metrics.METRICS:
        over = "" if kind.over_seeds == "none" else f"{kind.over_seeds} over seeds"
        decider = "" if kind.decided_by == "reported" else kind.decided_by
        lines.append(
            f"| `{kind.name}` | {kind.unit} | {kind.what} | {better[kind.more_is_better]} | {over} | {decider} |"
        )
    return "\n".join(lines) + "\n"


def test_the_documented_table_is_this_one() -> None:
    """If this fails, write the result of `table` between the markers."""
    text = (ROOT / "docs" / "reference" / "records.md").read_text(encoding="utf-8")
    assert text.partition("<!-- metrics -->\n")[2].partition("<!-- end of metrics -->")[0] == table()


def test_records_have_these_metrics_in_these_units() -> None:
    for record in store.read(GOLDEN).values():
        for name, metric in record.metrics.items():
            assert metric.unit == kind_of(name).unit, name


def test_a_metric_that_the_table_does_not_have_cannot_be_added() -> None:
    result = Result()
    with pytest.raises(KeyError, match="selection_iou"):
        result.add("selection_iou", 0.5, 10)
    with pytest.raises(KeyError, match="loss: 3 on china"):
        result.add("loss: 3 on china", 0.5, 10)
    result.add("macs_ratio", float("nan"), 10)
    result.add("accuracy: 3 on china", 0.5, 10)
    values = {"macs_ratio": None, "accuracy: 3 on china": 0.5}
    assert result.metrics == {name: Metric(value=v, unit="fraction", n=10) for name, v in values.items()}


def test_metrics_of_groups_are_known_by_their_prefix() -> None:
    assert kind_of("accuracy: a: b").name == "accuracy: GROUP"
    assert kind_of("train_samples: 3 on china").unit == "samples"
    assert kind_of("accuracy").what == "test accuracy"
    with pytest.raises(KeyError):
        kind_of("train_samples")


def test_columns_that_are_no_metrics_are_reserved() -> None:
    record = next(iter(store.read(GOLDEN).values())).model_copy(update={"metrics": {}})
    names = {*keys_of(ALL_COLUMNS), *table_of([(record, 0)]).column_names, "checks_remark"}
    columns = {name for name in names if value_of(name) not in {kind.name for kind in METRICS}}
    for name in sorted(columns):
        with pytest.raises(ValidationError, match=f"'{name}' is the name of a column"):
            MetricKind(name, "loss", "anything")
    assert RESERVED - names == {"seed"}


@pytest.mark.parametrize(
    "fields",
    [("x", " ", "anything"), ("x", "loss", "what", "luck"), ("x", "loss"), ("accuracy: china", "loss", "what")],
)
def test_a_metric_without_its_facts_is_refused(fields: tuple[str, ...]) -> None:
    with pytest.raises(ValidationError):
        MetricKind(*fields)  # type: ignore[arg-type,call-arg]


def items(n: int, classes: int, groups: int, seed: int = 0) -> Items:
    rng = np.random.default_rng(seed)
    labels, ranks = rng.integers(0, classes, n), rng.integers(0, classes, n)
    predicted = np.where(ranks == 0, labels, (labels + ranks) % classes)
    return Items(predicted, labels, rng.integers(0, groups, n), ranks, rng.random(n).astype(np.float32))


@given(st.integers(1, 60), st.sampled_from([2, 10]), st.integers(1, 4), st.integers(0, 9))
def test_scores_are_counted_item_by_item(n: int, classes: int, groups: int, seed: int) -> None:
    test, names, sizes = items(n, classes, groups, seed), [f"g{k}" for k in range(groups)], list(range(1, groups + 1))
    actual = scores(test, classes, names, sizes)
    hits = [p == label for p, label in zip(test.predicted, test.labels, strict=True)]
    assert actual["accuracy"].value == sum(hits) / n and actual["accuracy"].n == n
    assert actual["test_loss"].value == pytest.approx(sum(map(float, test.losses)) / n)
    assert ("accuracy_top5" in actual) == (classes >= 10)
    if classes >= 10:
        assert actual["accuracy_top5"].value == sum(rank < 5 for rank in test.ranks) / n
    assert ("spurious_gap" in actual) == (groups > 1)
    if groups > 1:
        by_group = [[h for h, g in zip(hits, test.groups, strict=True) if g == k] for k in range(groups)]
        worst = min(sum(some) / len(some) for some in by_group if some)
        assert actual["worst_group_accuracy"].value == pytest.approx(worst)
        assert actual["spurious_gap"].value == pytest.approx(sum(hits) / n - worst)
        assert actual["train_samples: g1"].value == 2
        assert [actual[f"accuracy: {name}"].n for name in names] == [len(some) for some in by_group]


def test_a_share_has_its_wilson_interval_and_no_interval_without_items() -> None:
    actual = share(np.array([True, True, False]))
    low, high = binomtest(2, 3).proportion_ci(method="wilson")
    assert (actual.value, actual.unit, actual.n) == (2 / 3, "fraction", 3) and actual.method == "Wilson 95 %"
    assert (actual.low, actual.high) == pytest.approx((low, high), abs=1e-12)
    assert share(np.empty(0, bool)) == Metric(value=None, unit="fraction", n=0)


@given(st.lists(st.floats(0, 200, width=32), min_size=1, max_size=60))
def test_the_probability_of_the_label_follows_from_the_cross_entropies(losses: list[float]) -> None:
    zeros = np.zeros(len(losses), int)
    actual = Items(zeros, zeros, zeros, zeros, np.array(losses, np.float32)).p_label
    assert actual == pytest.approx(sum(math.exp(-loss) for loss in losses) / len(losses), rel=1e-13)


def outcomes(*groups):
    """Return correct and groups arrays from (hits, misses) of each group."""
    correct = [c for hits, misses in groups for c in [1] * hits + [0] * misses]
    number = [g for g, (hits, misses) in enumerate(groups) for _ in range(hits + misses)]
    return np.array(correct, dtype=bool), np.array(number)


@pytest.mark.parametrize(
    ("groups", "train", "test_average", "train_average", "worst"),
    [
        ([(10, 0), (2, 8), (6, 4), (9, 1)], [90, 10, 10, 90], 27 / 40, (90 * 1 + 10 * 0.2 + 10 * 0.6 + 90 * 0.9) / 200,
         0.2),
        ([(1, 0), (0, 1)], [1, 1], 0.5, 0.5, 0.0),
        ([(9, 0), (0, 1)], [1, 1], 0.9, 0.5, 0.0),  # unequal groups in the test only change the average of the test
        ([(4, 0), (0, 0), (3, 1)], [1, 3, 1], 7 / 8, (1 + 0.75) / 2, 0.75),  # a group without test items has no weight
        ([(3, 1), (0, 0)], [0, 2], 0.75, 0.75, 0.75),  # no group of the test has training samples
        ([(7, 3)], [5], 0.7, 0.7, 0.7),
    ],
)  # fmt: skip
def test_averages_weigh_groups_by_test_or_training(groups, train, test_average, train_average, worst):
    """Averages weigh groups by test or training and the gap is to the worst."""
    actual = group_summary(*outcomes(*groups), np.array(train))
    expected = {"average_test": test_average, "average_train": train_average, "worst_group_accuracy": worst,
                "spurious_gap": test_average - worst}  # fmt: skip
    assert actual == pytest.approx(expected)
