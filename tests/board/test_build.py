import math
import random
from typing import Any

import numpy as np
import pytest
from flats import WHOLE, Flat, build, called, flat, gaps, row_of, seeded, trials

from sparsebench.board.columns import Row, dicts, keys_of
from sparsebench.board.judge import judge
from sparsebench.board.notes import failures, notes_on
from sparsebench.board.reading import frame_of
from sparsebench.errors import UserError
from sparsebench.records.record import canonical

BY_LOSS = [f"sample_complexity_loss{end}" for end in ("", "_low", "_high")]


@pytest.fixture(scope="module")
def whole() -> list[Row]:
    """Return the rows of the board of all records."""
    return build(WHOLE)


@pytest.fixture(scope="module")
def by_task() -> list[Row]:
    """Return the rows of the board of all records by task."""
    return build(WHOLE, "task")


def both_ways(strategy: str, errors: tuple[str, ...], losses: tuple[str, ...]) -> list[Flat]:
    pairs = zip(trials(strategy, *errors), trials(strategy, *losses), strict=True)
    return [record | {"success_loss": other["success"]} for record, other in pairs]


def test_error_criterion_has_its_own_column() -> None:
    """Where trials succeed by their error the paper's criterion has a column of its own."""
    dense = both_ways("dense", ("011", "111"), ("001", "001"))
    judged = judge([*dense, *both_ways("mine", ("111", "111"), ("000", "000")), *trials("old", "001", "001")])
    rows = dicts(judged.rows)
    assert row_of(rows, "dense")["sample_complexity"] == 4
    assert row_of(rows, "dense")["sample_complexity_loss"] == pytest.approx(128**0.5)
    assert (row_of(rows, "mine")["sample_complexity"], row_of(rows, "mine")["sample_complexity_loss"]) == (
        4, math.inf,
    )  # fmt: skip
    assert [row_of(rows, "old")[key] for key in BY_LOSS] == [None] * 3
    keys = [key for key in keys_of(judged.columns) if key.startswith("sample_complexity")]
    assert keys[6:] == BY_LOSS


def test_settings_of_a_task_are_named_with_what_they_differ_in(by_task: list[Row]) -> None:
    def setting(model: dict[str, Any], **params: Any) -> str:
        return canonical([{"name": "theory", "params": params}, {"name": "shallow", "params": model}])

    some = {"a": setting({"m": 8}, tokens=50, d=4), "b": setting({"m": 8}, tokens=100, d=4),
            "c": setting({"m": 8, "repacked": True}, tokens=50, d=4, criterion="error")}  # fmt: skip
    records = [r for text in some.values() for r in trials("mine", "011", model="shallow", setting=text)]
    alone = seeded("mine", [0.5], setting=canonical([{"name": "x", "params": {"y": 1}}] * 2))
    rows = build([*records, *alone], "task")
    assert sorted((row["task"], row["model"]) for row in rows) == [
        ("composite", "vit"), ("theory(criterion=error, tokens=50)", "shallow(repacked=True)"),
        ("theory(tokens=100)", "shallow"), ("theory(tokens=50)", "shallow"),
    ]  # fmt: skip
    assert {row["task"] for row in by_task} == {"composite", "spurious", "theory"}


@pytest.mark.parametrize("by", [None, "task"])
def test_the_order_of_records_does_not_matter(by: str | None) -> None:
    """Neither the order of the records nor when they were started matters."""
    records = [
        *WHOLE,
        *gaps("mine", [0.9, 0.9], setting="another setting", started="2025-01-01T00:00:00+00:00"),
        *seeded("dense", [0.1, 0.2], n_train=1200),
        *seeded("mine", [0.7, 0.8, 0.1], budget="keep 0.5 power-floor"),
        flat("mine", 7, status="failed", reason="it broke"),
    ]
    shuffled = random.Random(by).sample(records, len(records))
    later = [record | {"started": "2027"} for record in shuffled]
    judged, judged_later = judge(records, by), judge(later, by)
    assert dicts(judged_later.rows) == dicts(judged.rows)
    assert notes_on(later, judged_later) == notes_on(records, judged)


def test_seeds_that_one_side_lacks_are_not_compared() -> None:
    rows = build([*seeded("dense", [0.5, 0.6, 0.9]), *seeded("mine", [0.7, 0.7, 0.7, 0.1])[1:]])
    row = row_of(rows, "mine")
    assert row["accuracy_delta"] == pytest.approx(np.mean([0.1, -0.2]))
    assert row["accuracy"] == pytest.approx(0.7) and row["n_seeds"] == 2  # those of the difference
    rows = build([*gaps("dense", [0.5, 0.6]), *gaps("mine", [0.1, 0.2, 0.9])[1:]])
    assert row_of(rows, "mine")["spurious_gap_reduction"] == pytest.approx(0.4)
    assert row_of(rows, "mine")["spurious_gap_reduction_low"] is None


def test_without_dense_there_are_no_differences() -> None:
    rows = build([r for r in WHOLE if r["strategy"] != "dense"])
    row = row_of(rows, "mine")
    assert row["accuracy_delta"] is row["spurious_gap_reduction"] is row["sample_complexity_ratio"] is None
    assert row["accuracy"] is not None and row["spurious_gap"] is not None


def test_only_what_is_ok_counts(whole: list[Row]) -> None:
    bad = [flat("mine", seed, status=status, accuracy=0.0) for seed, status in enumerate(("failed", "crashed", "oom"))]
    among = (
        "rank",
        "rank_low",
        "rank_high",
        "pareto",
        "pareto_speed",
        "versus_dense",
    )  # places among those that are ranked
    numbers = [{k: v for k, v in row.items() if k not in among} for row in build([*WHOLE, *bad])]
    expected = [{k: v for k, v in row.items() if k not in among} for row in whole]
    assert sorted(numbers, key=str) == sorted(expected, key=str)
    assert build([*WHOLE, flat("broken", 0, status="failed")]) == whole
    assert build([flat("broken", 0, status="failed")]) == build([]) == []


def test_strategies_that_lack_the_same_have_one_line_a_task() -> None:
    lacking = [
        flat(name, seed, task, status="unsupported", reason=f"'{name}' must be trained") | called(name, **params)
        for name, params, task, n in (
            ("sit", {}, "spatial", 2),
            ("a_vit", {"b": 1}, "spatial", 2),
            ("a_vit", {}, "spatial", 1),
            ("sit", {}, "theory", 2),
        )
        for seed in range(n)
    ]
    other = [flat("far", seed, "spatial", status="unsupported", reason="far: no grid") for seed in range(2)]
    assert failures(frame_of([*lacking, *other])) == [
        "a_vit on spatial: 1 cell unsupported: must be trained",
        "a_vit(b=1), sit on spatial: 2 cells each unsupported: must be trained",
        "far on spatial: 2 cells unsupported: no grid",
        "sit on theory: 2 cells unsupported: must be trained",
    ]


def test_pretraining_is_on_no_board_over_all_tasks(whole: list[Row]) -> None:
    plain = flat("dense", 0, "plain", accuracy=1.0, n_train=4000, started="2027")
    assert build([*WHOLE, plain]) == whole
    assert [row["strategy"] for row in build([plain])] == ["dense"]
    assert "plain" in {row["task"] for row in build([*WHOLE, plain], "task")}


def test_settings_are_not_mixed() -> None:
    """Settings are not mixed and of those with most strategies the one with most records is shown."""
    other = {"setting": "another", "started": "2025"}  # not the latest
    names = ("dense", "mine", "oracle", "yours")
    more = [flat(name, k, accuracy=0.1 * (name > "e"), **other) for k in range(9) for name in names]
    records = [*WHOLE, *more]
    judged = judge(records)
    rows = dicts(judged.rows)
    row = row_of(rows, "mine")
    assert row["accuracy"] == pytest.approx(0.1) and row["accuracy_delta"] == pytest.approx(0.1)
    assert row["spurious_gap"] == pytest.approx(0.3)
    assert row_of(rows, "random")["accuracy"] is None
    assert any(line.startswith("composite: 1 other setting ") for line in notes_on(records, judged))


def test_sizes_of_a_task_without_a_success_criterion_are_settings() -> None:
    larger = seeded("mine", [0.99, 0.99], n_train=1200)
    alone = seeded("mine", [0.5, 0.5])
    assert row_of(build([*alone, *larger]), "mine")["accuracy"] == pytest.approx(0.99)
    rows = build([*WHOLE, *larger], "task")
    by_size = {
        row["n_train"]: row["accuracy"] for row in rows if row["strategy"] == "mine" and row["task"] == "composite"
    }
    assert by_size == pytest.approx({600: np.mean([0.82, 0.91, 0.75]), 1200: 0.99})


def test_a_board_by_task_has_the_columns_of_each_task(by_task: list[Row]) -> None:
    rows = by_task
    assert [row["task"] for row in rows] == ["composite"] * 4 + ["spurious"] * 4 + ["theory"] * 4
    mine = {row["task"]: row for row in rows if row["strategy"] == "mine"}
    assert mine["composite"]["spurious_gap"] is None and mine["composite"]["sample_complexity"] is None
    assert mine["spurious"]["spurious_gap_reduction"] == pytest.approx(0.1) and mine["spurious"]["accuracy"] == 0.9
    assert mine["theory"]["sample_complexity"] is not None and mine["theory"]["n_train"] == 16
    assert [row["rank"] for row in rows if row["task"] == "spurious"] == ["1-3", "1-3", "1-3", "not ranked"]


def test_a_board_by_anything_else_is_refused() -> None:
    with pytest.raises(UserError, match="--by; got 'model'; allowed: task"):
        build(WHOLE, "model")
