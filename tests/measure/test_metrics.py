"""What is said of a metric is said in one place."""

from pathlib import Path

import pytest

from sparsebench.board.columns import EVERY, keys_of
from sparsebench.errors import UserError
from sparsebench.measure import metrics
from sparsebench.measure.metrics import RESERVED, MetricKind, Score, check, kind_of, unit_of
from sparsebench.records import store
from sparsebench.records.table import table_of
from sparsebench.runner.results import Result

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
    """If not, put what `table` returns between the markers."""
    text = (ROOT / "docs" / "reference" / "records.md").read_text(encoding="utf-8")
    assert text.partition("<!-- metrics -->\n")[2].partition("<!-- end of metrics -->")[0] == table()


def test_records_have_these_metrics_in_these_units() -> None:
    for record in store.read(GOLDEN).values():
        for name, metric in record.metrics.items():
            assert metric.unit == unit_of(name), name


def test_a_metric_that_the_table_does_not_have_cannot_be_added() -> None:
    result = Result()
    with pytest.raises(KeyError, match="selection_iou"):
        result.add("selection_iou", 0.5, 10)
    with pytest.raises(KeyError, match="selection_iou"):
        Score.of("selection_iou", 0.5, 10)
    with pytest.raises(KeyError, match="loss: 3 on china"):
        result.add("loss: 3 on china", 0.5, 10)
    result.add("macs_ratio", float("nan"), 10)
    result.add_score(Score.of("accuracy: 3 on china", 0.5, 10)._replace(low=0.2, high=0.8, method="by hand"))
    assert {name: metric.model_dump() for name, metric in result.metrics.items()} == {
        "macs_ratio": {"value": None, "unit": "fraction", "n": 10, "low": None, "high": None, "method": ""},
        "accuracy: 3 on china": {
            "value": 0.5, "unit": "fraction", "n": 10, "low": 0.2, "high": 0.8, "method": "by hand"
        },
    }  # fmt: skip


def test_metrics_of_groups_are_known_by_what_they_begin_with() -> None:
    assert kind_of("accuracy: a: b").name == "accuracy: GROUP" and unit_of("train_samples: 3 on china") == "samples"
    assert kind_of("accuracy").what == "test accuracy"
    with pytest.raises(KeyError):
        kind_of("train_samples")


def test_columns_that_are_no_metrics_are_reserved() -> None:
    record = next(iter(store.read(GOLDEN).values())).model_copy(update={"metrics": {}})
    taken = {*keys_of(EVERY), *table_of([(record, 0)]).column_names, "checks_remark"}
    for name in sorted(taken):
        with pytest.raises(UserError, match=f"the name of metric '{name}' is taken"):
            check([MetricKind(name, "loss", "anything")])
    unused = RESERVED - taken - {"macs_ratio_asked", "seed"}
    assert not unused


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("x", "", "anything"), "metric 'x' has no unit; give it one: unit='...'"),
        (("x", " ", "anything"), "metric 'x' has no unit"),
        (("x", "loss", ""), "metric 'x' has no what"),
        (("", "loss", "anything"), "metric '' has no name"),
        (("x", "loss", "anything", "luck"), "decided_by of metric 'x'; got luck; allowed: outcomes, trajectory"),
        (("x", "loss", "anything", "reported", "sum"), "over_seeds of metric 'x'; got sum; allowed: mean, median"),
        (("x", "loss", "anything", "reported", "mean", "more"), "metric 'x': more_is_better is True, False or None"),
    ],
)
def test_a_metric_without_its_facts_is_refused(given: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError) as caught:
        MetricKind(*given)  # type: ignore[arg-type]
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        ([MetricKind("accuracy", "fraction", "mine")], "the name of metric 'accuracy' is taken; rename it"),
        ([MetricKind("accuracy_low", "fraction", "mine")], "the name of metric 'accuracy_low' is taken; rename it"),
        ([MetricKind("x", "loss", "one"), MetricKind("x", "loss", "two")], "the name of metric 'x' is taken"),
        ([MetricKind("accuracy: china", "fraction", "mine")], "name of a metric; got accuracy: china; allowed: small"),
        (["x"], "metrics of a task; got x; allowed: values of sparsebench.measure.metrics.MetricKind"),
    ],
)
def test_names_that_are_taken_are_refused(kinds: list[MetricKind], message: str) -> None:
    with pytest.raises(UserError) as caught:
        check(kinds)
    assert str(caught.value).startswith(message)
