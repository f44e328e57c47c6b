import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from sparsebench.board import columns
from sparsebench.board.board import Row
from sparsebench.board.build import build, columns_of, judge
from sparsebench.board.columns import keys_of
from sparsebench.board.notes import cautions, detectable, failures, inactive, machines, notes_on, other_settings
from sparsebench.board.tables import render
from sparsebench.budget import FULL, Budget
from sparsebench.errors import UserError
from sparsebench.records import store
from sparsebench.records.cell import Cell, Part, canonical, digest
from sparsebench.records.origin import Origin
from sparsebench.records.record import Failure, Metric, Record, pack
from sparsebench.records.row import flatten
from sparsebench.stats.intervals import Successes, sample_complexity

COLUMNS, BY_TASK = keys_of(columns.COLUMNS), keys_of(columns.BY_TASK)
KINDS = {"dense": "baseline", "random": "baseline", "oracle": "oracle", "anti_oracle": "oracle"}
Flat = dict[str, Any]


def flat(strategy: str, seed: int = 0, task: str = "composite", **more: Any) -> Flat:
    """Return one flat record; what is not given is as in most of these tests."""
    return {
        "cell_id": f"{task} {strategy} {seed}", "status": "ok", "reason": "", "task": task, "model": "vit",
        "strategy": strategy, "kind": KINDS.get(strategy, "deployable"),
        "budget": "macs 1" if strategy == "dense" else "macs 0.5", "n_train": 600, "repetition": seed,
        "setting": f"setting of {task}", "device": "cpu", "started": "2026-01-01T00:00:00+00:00", "seconds": 1.0,
    } | more  # fmt: skip


def seeded(strategy: str, values: list[float], metric: str = "accuracy", **more: Any) -> list[Flat]:
    return [flat(strategy, seed, **{metric: value}, **more) for seed, value in enumerate(values)]


def trials(strategy: str, *successes: str, **more: Any) -> list[Flat]:
    """Return theory records at sizes 4, 8, 16, ... from one word of 0 and 1 for each repetition."""
    return [
        flat(strategy, seed, "theory", n_train=4 * 2**j, success=float(x), accuracy=0.5 + float(x) / 2, **more)
        for seed, word in enumerate(successes)
        for j, x in enumerate(word)
    ]


def gaps(strategy: str, values: list[float], **more: Any) -> list[Flat]:
    return [
        flat(strategy, seed, "spurious", spurious_gap=value, worst_group_accuracy=0.9 - value, accuracy=0.9, **more)
        for seed, value in enumerate(values)
    ]


def row_of(rows: list[Row], strategy: str, **more: Any) -> Row:
    (row,) = (r for r in rows if r["strategy"] == strategy and all(r[k] == v for k, v in more.items()))
    return row


WHOLE = [
    *seeded("dense", [0.8, 0.9, 0.7], macs_ratio=1.0, images_per_s=100.0, selection_auroc=0.5),
    *seeded("mine", [0.82, 0.91, 0.75], macs_ratio=0.5, images_per_s=190.0, selection_auroc=0.9),
    *seeded("random", [0.6, 0.7, 0.5], macs_ratio=0.5, images_per_s=200.0, selection_auroc=0.5),
    *seeded("oracle", [0.95, 0.96, 0.97], macs_ratio=0.5, images_per_s=200.0, selection_auroc=1.0),
    *trials("dense", "001", "001", "011"),
    *trials("mine", "011", "001", "111"),
    *trials("random", "000", "000", "001"),
    *trials("oracle", "111", "111", "111"),
    *gaps("dense", [0.3, 0.4, 0.5]),
    *gaps("mine", [0.2, 0.4, 0.3]),
    *gaps("random", [0.5, 0.4, 0.5]),
    *gaps("oracle", [0.1, 0.0, 0.1]),
]


def test_the_columns_are_these_in_this_order() -> None:
    assert list(COLUMNS) == [
        "rank", "strategy", "kind", "trained", "budget", "macs_ratio", "accuracy", "accuracy_low", "accuracy_high",
        "accuracy_delta", "accuracy_delta_low", "accuracy_delta_high", "versus_dense", "random_inside_delta",
        "random_inside_delta_low", "random_inside_delta_high", "versus_random_inside", "pareto", "sample_complexity",
        "sample_complexity_low", "sample_complexity_high", "sample_complexity_ratio", "sample_complexity_ratio_low",
        "sample_complexity_ratio_high", "aligned_gap", "aligned_gap_low", "aligned_gap_high", "aligned_gap_reduction",
        "aligned_gap_reduction_low", "aligned_gap_reduction_high", "worst_group_accuracy", "spurious_gap",
        "spurious_gap_reduction", "spurious_gap_reduction_low", "spurious_gap_reduction_high", "selection_auroc",
        "images_per_s", "device", "pareto_speed", "n_seeds",
    ]  # fmt: skip
    assert all(list(row) == list(COLUMNS) for row in build(WHOLE))
    assert all(list(row) == [*BY_TASK, *COLUMNS] for row in build(WHOLE, "task"))


def test_accuracy_and_cost_are_those_of_the_composite_task() -> None:
    row = row_of(build(WHOLE), "mine")
    values = [0.82, 0.91, 0.75]
    low, high = stats.t.interval(0.95, 2, loc=np.mean(values), scale=stats.sem(values))
    assert row["accuracy"] == pytest.approx(np.mean(values))
    assert (row["accuracy_low"], row["accuracy_high"]) == pytest.approx((low, min(1, high)))
    assert (row["macs_ratio"], row["images_per_s"], row["selection_auroc"]) == pytest.approx((0.5, 190, 0.9))
    assert row["kind"] == "deployable" and row["budget"] == "macs 0.5" and row["n_seeds"] == 3


def test_the_difference_to_dense_is_taken_seed_by_seed() -> None:
    assert row_of(build(WHOLE), "mine")["accuracy_delta"] == pytest.approx(np.mean([0.02, 0.01, 0.05]))
    assert row_of(build(WHOLE), "dense")["accuracy_delta"] == 0


def test_the_gap_columns_are_those_of_the_spurious_task() -> None:
    row = row_of(build(WHOLE), "mine")
    pairs = [0.1, 0.0, 0.2]
    low, high = stats.t.interval(0.95, 2, loc=np.mean(pairs), scale=stats.sem(pairs))
    assert row["spurious_gap"] == pytest.approx(0.3) and row["worst_group_accuracy"] == pytest.approx(0.6)
    assert row["spurious_gap_reduction"] == pytest.approx(0.1)
    assert row["spurious_gap_reduction_low"] == pytest.approx(low)
    assert row["spurious_gap_reduction_high"] == pytest.approx(high)


def test_the_reduction_of_dense_is_zero_without_a_sign() -> None:
    assert math.copysign(1, row_of(build(WHOLE), "dense")["spurious_gap_reduction"]) == 1


def test_the_sample_complexity_is_that_of_the_theory_task() -> None:
    row, dense = row_of(build(WHOLE), "mine"), row_of(build(WHOLE), "dense")
    mine = {0: {4: 0, 8: 1, 16: 1}, 1: {4: 0, 8: 0, 16: 1}, 2: {4: 1, 8: 1, 16: 1}}
    value, low, high = sample_complexity(Successes.of_nested(mine))
    assert (row["sample_complexity"], row["sample_complexity_low"], row["sample_complexity_high"]) == (value, low, high)
    assert row["sample_complexity_ratio"] == pytest.approx(value / dense["sample_complexity"])
    assert dense["sample_complexity_ratio"] == 1


def both_ways(strategy: str, errors: tuple[str, ...], losses: tuple[str, ...]) -> list[Flat]:
    pairs = zip(trials(strategy, *errors), trials(strategy, *losses), strict=True)
    return [record | {"success_loss": other["success"]} for record, other in pairs]


def test_where_trials_succeed_by_their_error_the_papers_criterion_has_a_column_of_its_own() -> None:
    dense = both_ways("dense", ("011", "111"), ("001", "001"))
    rows = build([*dense, *both_ways("mine", ("111", "111"), ("000", "000")), *trials("old", "001", "001")])
    assert row_of(rows, "dense")["sample_complexity"] == 4
    assert row_of(rows, "dense")["sample_complexity_loss"] == pytest.approx(128**0.5)
    assert (row_of(rows, "mine")["sample_complexity"], row_of(rows, "mine")["sample_complexity_loss"]) == (
        4, math.inf,
    )  # fmt: skip
    assert [row_of(rows, "old")[key] for key in columns.BY_LOSS.keys] == [None] * 3
    keys = [key for key in rows[0] if key.startswith("sample_complexity")]
    assert keys[6:] == list(columns.BY_LOSS.keys) and columns.BY_LOSS in columns_of(rows)
    assert keys_of(columns_of(rows)) == list(rows[0])
    text = render(rows, "md")
    assert "N50, loss" in text and "the paper's criterion" in text
    plain = build(WHOLE)
    assert columns.BY_LOSS not in columns_of(plain) and "the paper's criterion" not in render(plain, "md")


def test_settings_of_a_task_are_named_with_what_they_differ_in() -> None:
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
    assert {row["task"] for row in build(WHOLE, "task")} == {"composite", "spurious", "theory"}


def test_a_sample_complexity_that_is_not_reached_is_infinite() -> None:
    row = row_of(build(WHOLE), "random")
    assert row["sample_complexity"] == row["sample_complexity_ratio"] == row["sample_complexity_high"] == math.inf
    assert row["sample_complexity_low"] == pytest.approx(128**0.5)


def test_without_a_finite_number_for_dense_there_is_no_ratio() -> None:
    rows = build([*trials("dense", "000", "000"), *trials("mine", "011", "011")])
    assert row_of(rows, "mine")["sample_complexity"] == pytest.approx(32**0.5)
    assert row_of(rows, "mine")["sample_complexity_ratio"] is None
    assert row_of(rows, "dense")["sample_complexity_ratio"] is None


def test_ranks_go_by_accuracy_and_oracles_are_last_and_not_ranked() -> None:
    rows = build(WHOLE)
    assert [(row["rank"], row["strategy"]) for row in rows] == [
        ("1-2", "mine"), ("1-2", "dense"), ("3", "random"), ("not ranked", "oracle")
    ]  # fmt: skip


def test_a_strategy_without_accuracy_is_not_ranked_and_stands_before_the_oracles() -> None:
    rows = build([*WHOLE, *gaps("late", [0.1, 0.2])])
    assert [(row["rank"], row["strategy"]) for row in rows[-2:]] == [("not ranked", "late"), ("not ranked", "oracle")]


def test_equal_accuracies_share_their_ranks() -> None:
    rows = build([r for name, x in zip("abcd", (0.7, 0.9, 0.7, 0.5), strict=True) for r in seeded(name, [x, x])])
    assert [(row["rank"], row["strategy"]) for row in rows] == [("1", "b"), ("2-3", "a"), ("2-3", "c"), ("4", "d")]


@pytest.mark.parametrize("by", [None, "task"])
@pytest.mark.parametrize("started", ["2026-01-01T00:00:00+00:00", "2025-01-01T00:00:00+00:00"], ids=["same", "older"])
def test_the_order_of_the_records_does_not_matter(by: str | None, started: str) -> None:
    records = [
        *WHOLE,
        *gaps("mine", [0.9, 0.9], setting="another setting", started=started),
        *seeded("dense", [0.1, 0.2], n_train=1200, started=started),
        *seeded("mine", [0.7, 0.8, 0.1], budget="keep 0.5 power-floor"),
        flat("mine", 7, status="failed", reason="it broke"),
    ]
    for seed in range(10):
        shuffled = random.Random(seed).sample(records, len(records))
        assert build(shuffled, by) == build(records, by)
        assert failures(shuffled) == failures(records)
        assert other_settings(shuffled) == other_settings(records)


def test_building_changes_no_record() -> None:
    before = [dict(r) for r in WHOLE]
    build(WHOLE)
    build(WHOLE, "task")
    assert before == WHOLE


def test_seeds_that_one_side_lacks_are_not_compared() -> None:
    rows = build([*seeded("dense", [0.5, 0.6, 0.9]), *seeded("mine", [0.7, 0.7, 0.7, 0.1])[1:]])
    row = row_of(rows, "mine")
    assert row["accuracy_delta"] == pytest.approx(np.mean([0.1, -0.2]))
    assert row["accuracy"] == pytest.approx(0.5) and row["n_seeds"] == 3
    rows = build([*gaps("dense", [0.5, 0.6]), *gaps("mine", [0.1, 0.2, 0.9])[1:]])
    assert row_of(rows, "mine")["spurious_gap_reduction"] == pytest.approx(0.4)
    assert row_of(rows, "mine")["spurious_gap_reduction_low"] is None


def test_without_dense_there_are_no_differences() -> None:
    rows = build([r for r in WHOLE if r["strategy"] != "dense"])
    row = row_of(rows, "mine")
    assert row["accuracy_delta"] is row["spurious_gap_reduction"] is row["sample_complexity_ratio"] is None
    assert row["accuracy"] is not None and row["spurious_gap"] is not None


def test_the_number_of_seeds_is_the_smallest_of_the_tasks() -> None:
    rows = build([*seeded("mine", [0.5] * 5), *gaps("mine", [0.1] * 3), *trials("mine", "01", "01")])
    assert row_of(rows, "mine")["n_seeds"] == 2


def test_only_what_is_ok_counts() -> None:
    bad = [flat("mine", seed, status=status, accuracy=0.0) for seed, status in enumerate(("failed", "crashed", "oom"))]
    among = ("rank", "pareto", "pareto_speed", "versus_dense")  # places among those that are ranked
    numbers = [{k: v for k, v in row.items() if k not in among} for row in build([*WHOLE, *bad])]
    whole = {row["strategy"]: {k: v for k, v in row.items() if k not in among} for row in build(WHOLE)}
    assert sorted(numbers, key=str) == sorted(whole.values(), key=str)
    assert build([*WHOLE, flat("broken", 0, status="failed")]) == build(WHOLE)
    assert build([flat("broken", 0, status="failed")]) == build([]) == []


def test_a_strategy_of_which_a_cell_failed_is_not_ranked() -> None:
    rows = build([*WHOLE, flat("mine", 9, status="failed")])
    assert row_of(rows, "mine")["rank"] == "not ranked" and row_of(rows, "dense")["rank"] == "1"


def test_failures_are_counted_by_their_reason() -> None:
    broken = [flat("broken", seed, status="failed", reason="it broke") for seed in range(2)]
    other = flat("broken", 2, status="crashed", reason="SIGSEGV")
    assert failures([*WHOLE, other, *broken]) == [
        "broken on composite: 1 cell crashed: SIGSEGV",
        "broken on composite: 2 cells failed: it broke",
    ]


def test_pretraining_is_on_no_board_over_all_tasks() -> None:
    plain = flat("dense", 0, "plain", accuracy=1.0, n_train=4000, started="2027")
    assert build([*WHOLE, plain]) == build(WHOLE)
    assert [row["strategy"] for row in build([plain])] == ["dense"]
    assert "plain" in {row["task"] for row in build([*WHOLE, plain], "task")}


@pytest.mark.parametrize("started", ["2025", "2027"])
def test_settings_are_not_mixed_and_the_one_with_most_records_is_shown(started: str) -> None:
    other = {"setting": "another", "started": started}
    more = [
        r for k in range(9) for name in ("dense", "mine") for r in [flat(name, k, accuracy=0.1 * (name > "e"), **other)]
    ]
    for records in ([*WHOLE, *more], [*more, *WHOLE]):
        row = row_of(build(records), "mine")
        assert row["accuracy"] == pytest.approx(0.1) and row["accuracy_delta"] == pytest.approx(0.1)
        assert row["spurious_gap"] == pytest.approx(0.3)
        assert row_of(build(records), "random")["accuracy"] is None
        assert other_settings(records) == {"composite": 1}


def test_sizes_of_a_task_without_a_success_criterion_are_settings() -> None:
    larger = seeded("mine", [0.99, 0.99], n_train=1200)
    alone = seeded("mine", [0.5, 0.5])
    assert row_of(build([*alone, *larger]), "mine")["accuracy"] == pytest.approx(0.99)
    rows = build([*WHOLE, *larger], "task")
    by_size = {
        row["n_train"]: row["accuracy"] for row in rows if row["strategy"] == "mine" and row["task"] == "composite"
    }
    assert by_size == pytest.approx({600: np.mean([0.82, 0.91, 0.75]), 1200: 0.99})


def test_budgets_have_a_row_each_and_share_the_baseline() -> None:
    half, more = seeded("mine", [0.5, 0.5]), seeded("mine", [0.7, 0.7], budget="macs 0.7")
    rows = build([*seeded("dense", [0.8, 0.8]), *half, *more])
    assert row_of(rows, "mine", budget="macs 0.5")["accuracy_delta"] == pytest.approx(-0.3)
    assert row_of(rows, "mine", budget="macs 0.7")["accuracy_delta"] == pytest.approx(-0.1)


def test_a_board_of_theory_alone_ranks_by_its_largest_size() -> None:
    rows = build([*trials("dense", "011", "001"), *trials("mine", "110", "110")])
    assert [(row["rank"], row["strategy"], row["accuracy"]) for row in rows] == [
        ("1", "dense", 1.0),
        ("2", "mine", 0.5),
    ]


def test_a_board_by_task_has_the_columns_of_each_task() -> None:
    rows = build(WHOLE, "task")
    assert [row["task"] for row in rows] == ["composite"] * 4 + ["spurious"] * 4 + ["theory"] * 4
    mine = {row["task"]: row for row in rows if row["strategy"] == "mine"}
    assert mine["composite"]["spurious_gap"] is None and mine["composite"]["sample_complexity"] is None
    assert mine["spurious"]["spurious_gap_reduction"] == pytest.approx(0.1) and mine["spurious"]["accuracy"] == 0.9
    assert mine["theory"]["sample_complexity"] is not None and mine["theory"]["n_train"] == 16
    assert [row["rank"] for row in rows if row["task"] == "spurious"] == ["1-3", "1-3", "1-3", "not ranked"]


def test_a_board_by_anything_else_is_refused() -> None:
    with pytest.raises(UserError, match="--by; got 'model'; allowed: task"):
        build(WHOLE, "model")


def test_intervals_of_accuracies_stay_between_zero_and_one() -> None:
    row = row_of(build(seeded("mine", [0.99, 0.8])), "mine")
    assert row["accuracy_high"] == 1 and 0 <= row["accuracy_low"] < 0.9


def test_a_metric_that_nothing_was_measured_for_is_left_out() -> None:
    for nothing in (None, math.nan):
        records = seeded("mine", [0.5, 0.6], selection_auroc=nothing, images_per_s=nothing)
        row = row_of(build(records), "mine")
        assert row["selection_auroc"] is None and row["images_per_s"] is None


def test_speed_is_the_median() -> None:
    records = [flat("mine", k, accuracy=0.5, images_per_s=x) for k, x in enumerate((1.0, 100.0, 101.0))]
    assert row_of(build(records), "mine")["images_per_s"] == 100


@pytest.fixture
def record() -> Callable[..., Record]:
    def make(**more: Any) -> Record:
        cell = Cell(
            task=Part(name="theory", params={"tokens": 20}), model=Part(name="shallow"), strategy=Part(name="mine"),
            budget=more.pop("budget", Budget(keep_rate=0.5)), n_train=8, repetition=3, where=more.pop("where", "both"),
        )  # fmt: skip
        given = {"status": "ok", "metrics": {"accuracy": Metric(value=0.25, unit="fraction", n=20)}} | more
        return Record(
            cell=cell, cell_id=cell.id, origin=Origin(plugin="mine"), kind="deployable", label="mine(a=1)", **given
        )

    return make


def test_a_flat_record_says_what_it_is_about_and_each_metric(record: Callable[..., Record]) -> None:
    row = flatten(record())
    assert (row["task"], row["model"], row["strategy"], row["kind"]) == ("theory", "shallow", "mine(a=1)", "deployable")
    assert (row["n_train"], row["repetition"], row["status"], row["accuracy"]) == (8, 3, "ok", 0.25)
    assert row["budget"] == "keep 0.5 power-floor" and row["cell_id"] == record().cell.id


def test_the_budget_of_a_flat_record_says_where_tokens_are_removed(record: Callable[..., Record]) -> None:
    assert flatten(record(budget=FULL))["budget"] == "macs 1"
    assert flatten(record(where="train"))["budget"] == "keep 0.5 power-floor, in training only"
    assert flatten(record(where="test"))["budget"] == "keep 0.5 power-floor, in the test only"


def test_a_flat_failure_has_its_reason(record: Callable[..., Record]) -> None:
    row = flatten(record(status="failed", metrics={}, failure=Failure(reason="it broke")))
    assert (row["status"], row["reason"]) == ("failed", "it broke")
    assert "accuracy" not in row


def test_the_setting_is_the_task_and_model_and_neither_strategy_nor_seed(record: Callable[..., Record]) -> None:
    one = record()
    other = one.model_copy(update={"cell": one.cell.model_copy(update={"repetition": 4, "strategy": Part(name="x")})})
    assert flatten(one)["setting"] == flatten(other)["setting"]
    task = Part(name="theory", params={"tokens": 30})
    changed = one.model_copy(update={"cell": one.cell.model_copy(update={"task": task})})
    assert flatten(one)["setting"] != flatten(changed)["setting"]


def test_cautions_name_unfinished_training_missed_budgets_and_mixed_devices() -> None:
    assert cautions(WHOLE) == []
    stuck = flat("mine", 0, "theory", success=0.0, fitted=0.0, n_train=4)
    fitted = flat("mine", 1, "theory", success=0.0, fitted=1.0, n_train=4)
    dear = flat("mine", 0, macs_ratio=0.52, macs_ratio_planned=0.5, device="cuda:0 X")
    near = flat("mine", 1, macs_ratio=0.505, macs_ratio_planned=0.5)
    lines = cautions([stuck, fitted, dear, near])
    assert lines[0].startswith("mine: 1 of 2 trials reached the step limit")
    assert lines[1] == "mine, macs 0.5, on composite: realised MACs 0.520 of dense, planned 0.500"
    assert "several devices" in lines[2] and "cuda:0 X" in lines[2] and len(lines) == 3


def test_terms_that_were_not_in_a_loss_are_named_by_strategy_and_task(record: Callable[..., Record]) -> None:
    noted = record(notes={"inactive": "ratio, kl: weight 0; distillation: no teacher", "memory": "2 parts"})
    assert flatten(noted)["inactive"] == "ratio, kl: weight 0; distillation: no teacher"
    assert flatten(record())["inactive"] == "" and inactive(WHOLE) == inactive([flatten(record())]) == []
    (line,) = inactive([flatten(noted), flatten(noted), flatten(record())])
    assert line == "mine(a=1) on theory: published terms inactive: ratio, kl (weight 0), distillation (no teacher)"
    more = [flat("mine", 0, inactive="kl: weight 0"), flat("mine", 1, "spurious", inactive="kl: weight 0")]
    assert [line.partition(":")[0] for line in inactive(more)] == ["mine on composite", "mine on spurious"]
    assert line in notes_on([flatten(noted)])


def test_a_budget_that_was_planned_but_not_reached_is_named_with_what_was_asked_for(
    record: Callable[..., Record],
) -> None:
    def made(real: float, planned: float, **more: Any) -> Record:
        ratios = {"macs_ratio": real, "macs_ratio_planned": planned}
        return record(metrics={k: Metric(value=v, unit="fraction", n=20) for k, v in ratios.items()}, **more)

    def said(*records: Record) -> list[str]:
        return cautions([flatten(each) for each in records])

    asked = Budget(macs=0.37)
    (line,) = said(made(0.4963, 0.4963, budget=asked))
    assert line == "mine(a=1), macs 0.37, on theory: realised MACs 0.496 of dense, asked for 0.370"
    assert said(made(0.3773, 0.3773, budget=asked)) == [] != said(made(0.3775, 0.3775, budget=asked))
    assert said(made(0.3627, 0.3627, budget=asked)) == [] != said(made(0.3625, 0.3625, budget=asked))
    # Keep rates promise no fraction of MACs, and a dense test of what was pruned in training costs what it costs.
    assert said(made(0.6, 0.6)) == said(made(1.0, 1.0, budget=asked, where="train")) == []
    near, far = made(0.4, 0.4, budget=asked), made(0.5, 0.5, budget=asked)
    assert said(near, far) == said(far, near) == said(far)


def test_the_interval_of_the_difference_to_dense_is_students() -> None:
    row, pairs = row_of(build(WHOLE), "mine"), [0.02, 0.01, 0.05]
    low, high = stats.t.interval(0.95, 2, loc=np.mean(pairs), scale=stats.sem(pairs))
    assert (row["accuracy_delta_low"], row["accuracy_delta_high"]) == pytest.approx((low, high))


def test_the_ratio_to_dense_has_an_interval() -> None:
    row = row_of(build(WHOLE), "oracle")
    assert row["sample_complexity_ratio_low"] <= row["sample_complexity_ratio"] <= row["sample_complexity_ratio_high"]


def test_the_pareto_front_has_what_nothing_beats_in_accuracy_and_cost() -> None:
    cheap = seeded("cheap", [0.8, 0.8], macs_ratio=0.3, images_per_s=50.0)
    good = seeded("good", [0.9, 0.9], macs_ratio=0.6, images_per_s=100.0)
    bad = seeded("bad", [0.7, 0.7], macs_ratio=0.4, images_per_s=90.0)
    gpu = seeded("gpu", [0.6, 0.6], macs_ratio=0.7, images_per_s=9000.0, device="cuda:0 H100")
    seer = seeded("oracle", [1.0, 1.0], macs_ratio=0.1, images_per_s=999.0)
    rows = build([*cheap, *good, *bad, *gpu, *seer])
    found = {row["strategy"]: (row["pareto"], row["pareto_speed"]) for row in rows}
    assert found == {  # speeds of two devices do not compare
        "cheap": ("yes", "no"), "good": ("yes", "yes"), "bad": ("no", "no"), "gpu": ("no", "yes"),
        "oracle": (None, None),
    }  # fmt: skip


def test_speeds_of_another_machine_or_version_take_nobody_off_the_front() -> None:
    here, there = {"environment": "a" * 16}, {"environment": "b" * 16}
    good = seeded("good", [0.9, 0.9], macs_ratio=0.6, images_per_s=100.0, **here)
    beside = seeded("beside", [0.7, 0.7], macs_ratio=0.4, images_per_s=90.0, **here)
    other = seeded("other", [0.7, 0.7], macs_ratio=0.4, images_per_s=90.0, **there)
    found = {row["strategy"]: row["pareto_speed"] for row in build([*good, *beside, *other])}
    assert found == {"good": "yes", "beside": "no", "other": "yes"}


def test_several_machines_or_versions_are_said_with_what_they_differ_in(tmp_path: Path) -> None:
    here, there = {"torch": "2.15", "processor": "x", "cores": "2"}, {"torch": "1.13", "processor": "y", "cores": "2"}
    for one in (here, there):
        store.keep(tmp_path / "environments", one)
    flats = [flat("a", environment=digest(here)), flat("b", environment=digest(there))]
    (line,) = machines(flats, tmp_path)
    assert line.startswith("made on 2 machines, or with other versions, which differ in processor, torch: speeds are")
    assert line in notes_on(flats, folder=tmp_path, technical=False)
    assert machines(flats[:1], tmp_path) == machines(WHOLE) == []
    assert machines(flats, tmp_path / "none") == machines(flats) != []
    assert machines([flats[0], flat("b", environment=digest(there), status="failed")]) == []


def test_outcomes_of_the_test_items_decide_what_seeds_alone_would_tell() -> None:
    """Two seeds that differ by the same little: Student's t would be sure, the items are not."""

    def outcomes(wrong: int, seed: int) -> Flat:
        labels = np.arange(40) % 2
        predicted = labels.copy()
        predicted[:wrong] ^= 1
        return {
            "accuracy": 1 - wrong / 40, "test_items": 40, "test_labels": pack(labels + 10 * seed),
            "test_predictions": pack(predicted + 10 * seed),
        }  # fmt: skip

    rows = [flat(name, seed, **outcomes(wrong, seed)) for seed in range(2) for name, wrong in (("a", 3), ("b", 4))]
    assert {row["rank"] for row in build(rows)} == {"1-2"}
    alone = [{key: value for key, value in row.items() if "test" not in key} for row in rows]
    assert [row["rank"] for row in build(alone)] == ["1", "2"]


def with_outcomes(strategy: str, hits: np.ndarray, groups: np.ndarray | None = None, **more: Any) -> list[Flat]:
    """Return flat records of (S, I) outcomes, and of the groups of these items."""
    S, I = hits.shape
    labels = [np.arange(I) % 2 + 2 * seed for seed in range(S)]
    packed = [{} if groups is None else {"test_groups": pack(groups)} for _ in range(S)]
    return [
        flat(strategy, seed, accuracy=float(one.mean()), test_items=I, test_labels=pack(labels[seed]),
             test_predictions=pack(np.where(one, labels[seed], 60000)), **packed[seed] | more)
        for seed, one in enumerate(hits)
    ]  # fmt: skip


def drawn(rate: float, seed: int, I: int = 400) -> np.ndarray:
    return np.random.default_rng(seed).random((3, I)) < rate


def test_the_front_leaves_out_only_what_is_told_to_be_less_accurate_than_something_no_dearer() -> None:
    dear, near, cheap, poor = drawn(0.8, 0), drawn(0.79, 1), drawn(0.6, 2), drawn(0.3, 3)
    rows = build([
        *with_outcomes("dear", dear, macs_ratio=0.9, images_per_s=10.0),
        *with_outcomes("near", near, macs_ratio=0.9, images_per_s=9.0),
        *with_outcomes("cheap", cheap, macs_ratio=0.5, images_per_s=30.0),
        *with_outcomes("poor", poor, macs_ratio=0.6, images_per_s=20.0),
    ])  # fmt: skip
    found = {row["strategy"]: (row["pareto"], row["pareto_speed"]) for row in rows}
    assert row_of(rows, "dear")["accuracy"] > row_of(rows, "near")["accuracy"]
    assert found == {"dear": ("yes", "yes"), "near": ("yes", "yes"), "cheap": ("yes", "yes"), "poor": ("no", "no")}


def test_rows_are_marked_against_dense_and_against_random_tokens_at_their_budget() -> None:
    both, lower = {"budget": "macs 0.5 @1,2"}, {"budget": "macs 0.3"}
    rows = build([
        *with_outcomes("dense", drawn(0.6, 0)), *with_outcomes("random_inside", drawn(0.5, 1), **both),
        *with_outcomes("mine", drawn(0.75, 2), **both), *with_outcomes("input", drawn(0.3, 3), budget="macs 0.5"),
        *with_outcomes("same", drawn(0.51, 4), **both), *with_outcomes("other", drawn(0.9, 5), **lower),
        *with_outcomes("oracle", drawn(0.95, 6), budget="macs 0.5"),
    ])  # fmt: skip
    found = {row["strategy"]: (row["versus_dense"], row["versus_random_inside"]) for row in rows}
    assert found == {
        "dense": (None, None), "random_inside": ("worse", None), "mine": ("better", "better"),
        "input": ("worse", "worse"), "same": ("worse", "not significant"), "other": ("better", None),
        "oracle": ("better", "better"),
    }  # fmt: skip
    mine, random_inside = row_of(rows, "mine"), row_of(rows, "random_inside")
    difference = mine["accuracy"] - random_inside["accuracy"]
    assert mine["random_inside_delta"] == pytest.approx(difference)
    assert mine["random_inside_delta_low"] < difference < mine["random_inside_delta_high"]
    assert random_inside["random_inside_delta"] == 0 and row_of(rows, "other")["random_inside_delta"] is None


def test_random_tokens_in_the_same_blocks_come_before_those_in_others() -> None:
    hits = {"macs 0.5 @1": drawn(0.2, 0), "macs 0.5 @2": drawn(0.7, 1)}
    rows = build([row for budget, one in hits.items() for row in (
        *with_outcomes("random_inside", one, budget=budget), *with_outcomes("mine", one, budget=budget)
    )])  # fmt: skip
    assert [row["random_inside_delta"] for row in rows if row["strategy"] == "mine"] == [0, 0]


def test_a_strategy_of_which_a_cell_failed_is_not_marked() -> None:
    records = [*with_outcomes("dense", drawn(0.5, 0)), *with_outcomes("mine", drawn(0.9, 1))]
    assert row_of(build(records), "mine")["versus_dense"] == "better"
    nothing = {"test_items": 0, "test_labels": "", "test_predictions": ""}
    row = row_of(build([*records, flat("mine", 9, status="failed", **nothing)]), "mine")
    assert row["versus_dense"] is None and row["accuracy_delta"] > 0.3


def test_the_gap_is_that_of_groups_whose_background_fits_and_the_worst_group_that_of_all_seeds() -> None:
    groups, rng = np.arange(400) % 4, np.random.default_rng(0)
    rates = np.array([[0.9, 0.5, 0.6, 0.9], [0.9, 0.6, 0.5, 0.9], [0.9, 0.5, 0.6, 0.9]])
    hits = rng.random((3, 400)) < rates[:, groups]
    more = {"task": "spurious", "spurious_gap": 0.2, "worst_group_accuracy": 0.5}
    (row,) = build(with_outcomes("mine", hits, groups, **more))
    by_group = np.array([[one[groups == g].mean() for g in range(4)] for one in hits])
    expected = (by_group[:, [0, 3]].mean(axis=1) - by_group[:, [1, 2]].mean(axis=1)).mean()
    assert row["aligned_gap"] == pytest.approx(expected)
    assert row["worst_group_accuracy"] == pytest.approx(by_group.mean(axis=0).min())
    assert row["worst_group_accuracy"] > by_group.min(axis=1).mean()
    assert row["spurious_gap"] == pytest.approx(0.2)  # as the records have it
    unknown = build(with_outcomes("mine", hits, None, **more))[0]
    assert unknown["aligned_gap"] is None and unknown["worst_group_accuracy"] == 0.5
    assert build(with_outcomes("mine", hits, groups, **more | {"task": "celeba"}), "task")[0]["aligned_gap"] is None


def test_the_accuracys_interval_is_not_narrower_than_its_items_allow() -> None:
    even = np.zeros((3, 400), bool)
    even[:, :120] = True
    (row,) = build(with_outcomes("mine", even))
    low, high = stats.binomtest(360, 1200).proportion_ci(method="wilson")
    assert row["accuracy_low"] <= low and row["accuracy_high"] >= high


def test_a_note_says_which_differences_would_be_found() -> None:
    judged = judge(WHOLE)
    (line,) = detectable(judged.rankings)
    assert (
        line.startswith("composite: of pairs of strategies that differ by 0.")
        and "3 seeds" in line
        and "3 pairs" in line
    )
    assert line in notes_on(WHOLE, judged.rankings)
    assert detectable(judge(seeded("mine", [0.5])).rankings) == []


def on_foregrounds(shown: list[Any]) -> list[Row]:
    """Return a board whose items show these foregrounds in each seed; five at a time, and the seeds, are alike."""
    records = []
    for k, (name, rate) in enumerate([("dense", 0.8), ("mine", 0.7), ("other", 0.6), ("random", 0.4)]):
        one = with_outcomes(name, np.tile(np.repeat(drawn(rate, k, 80)[:1], 5, axis=1), (3, 1)))
        records += [row | {"test_foregrounds": text} for row, text in zip(one, shown, strict=True)]
    return build(records)


def test_items_that_show_one_foreground_count_as_one_draw() -> None:
    unknown, wider = on_foregrounds(["", "", ""]), 0
    for offset in (0, 80):  # the same foregrounds in all seeds, and others
        known = on_foregrounds([pack(np.repeat(np.arange(80), 5) + offset * seed) for seed in range(3)])
        for row in known:
            without = row_of(unknown, row["strategy"])
            assert row["accuracy"] == without["accuracy"]
            for name in ("accuracy", "accuracy_delta"):
                one, other = (each[f"{name}_high"] - each[f"{name}_low"] for each in (row, without))
                assert one >= other - 1e-12
                wider += one > 1.1 * other
    assert wider >= 6


@pytest.mark.parametrize(
    "shown",
    [
        [pack(np.arange(400) + 400 * seed) for seed in range(3)],
        [pack(np.repeat(np.arange(80), 5)), "", pack(np.arange(400))],
    ],
    ids=["none twice", "unknown in a seed"],
)
def test_a_board_on_which_no_foreground_is_known_to_be_shown_twice_is_as_without(shown: list[str]) -> None:
    assert on_foregrounds(shown) == on_foregrounds(["", "", ""])
