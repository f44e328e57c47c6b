"""Intervals, fronts, marks, items and foregrounds of a board."""

from typing import Any

import numpy as np
import pytest
from flats import WHOLE, Flat, budgeted, build, drawn, flat, in_blocks, row_of, seeded, with_outcomes

from sparsebench.board.columns import Row
from sparsebench.board.judge import judge
from sparsebench.board.notes import machines, notes_on
from sparsebench.board.reading import frame_of
from sparsebench.records.record import bytes_of
from sparsebench.strategy.budget import Budget


def test_the_pareto_front_has_what_nothing_beats_in_accuracy_and_cost() -> None:
    dense = seeded("dense", [0.95, 0.95], macs_ratio=1.0, images_per_s=10.0)
    cheap = seeded("cheap", [0.8, 0.8], macs_ratio=0.3, images_per_s=50.0)
    good = seeded("good", [0.9, 0.9], macs_ratio=0.6, images_per_s=100.0)
    bad = seeded("bad", [0.7, 0.7], macs_ratio=0.4, images_per_s=90.0)
    gpu = seeded("gpu", [0.6, 0.6], macs_ratio=0.7, images_per_s=9000.0, device="cuda:0 H100")
    there = seeded("there", [0.7, 0.7], macs_ratio=0.4, images_per_s=90.0, environment="another machine or version")
    seer = seeded("oracle", [1.0, 1.0], macs_ratio=0.1, images_per_s=999.0)
    rows = build([*dense, *cheap, *good, *bad, *gpu, *there, *seer])
    by_strategy = {row["strategy"]: (row["pareto"], row["pareto_speed"]) for row in rows}
    assert by_strategy == {  # speeds of different devices or machines are not compared
        "cheap": ("yes", "no"), "good": ("yes", "yes"), "bad": ("no", "no"), "gpu": ("no", "yes"),
        "there": ("no", "yes"), "oracle": (None, None), "dense": ("yes", "yes"),
    }  # fmt: skip


def test_several_machines_or_versions_are_said() -> None:
    flats = [flat("a", environment="here"), flat("b", environment="there")]
    assert (
        machines(frame_of(flats)) == [line for line in notes_on(flats, technical=False) if "2 machines" in line] != []
    )
    assert machines(frame_of(flats[:1])) == machines(frame_of(WHOLE)) == []
    assert machines(frame_of([flats[0], flat("b", environment="there", status="failed")])) == []


def test_outcomes_of_the_test_items_decide_what_seeds_alone_would_tell() -> None:
    """Two seeds have the same small difference: Student's t over seeds is significant, items are not."""

    def outcomes(wrong: int, seed: int) -> Flat:
        labels = np.arange(40) % 2
        predicted = labels.copy()
        predicted[:wrong] ^= 1
        return {
            "accuracy": 1 - wrong / 40, "test_items": 40, "test_labels": bytes_of(labels + 10 * seed),
            "test_predictions": bytes_of(predicted + 10 * seed),
        }  # fmt: skip

    rows = [flat(name, seed, **outcomes(wrong, seed)) for seed in range(2) for name, wrong in (("dense", 3), ("b", 4))]
    assert {row["rank"] for row in build(rows)} == {"1-2"}
    alone = [{key: value for key, value in row.items() if "test" not in key} for row in rows]
    assert [row["rank"] for row in build(alone)] == ["1", "2"]


def test_rows_are_marked_against_dense_and_random_tokens() -> None:
    """Rows are marked against dense and against random tokens at their budget."""
    half = budgeted(Budget(macs=0.5))
    both, lower = in_blocks(0.5, 1, 2), {"budget": "macs 0.3"}
    rows = build([
        *with_outcomes("dense", drawn(0.6, 0)), *with_outcomes("random_inside", drawn(0.5, 1), **both),
        *with_outcomes("mine", drawn(0.75, 2), **both), *with_outcomes("input", drawn(0.3, 3), **half),
        *with_outcomes("same", drawn(0.51, 4), **both), *with_outcomes("other", drawn(0.9, 5), **lower),
        *with_outcomes("oracle", drawn(0.95, 6), **half),
    ])  # fmt: skip
    by_strategy = {row["strategy"]: (row["versus_dense"], row["versus_random"]) for row in rows}
    assert by_strategy == {
        "dense": (None, None), "random_inside": ("worse", None), "mine": ("better", "better"),
        "input": ("worse", "worse"), "same": ("worse", "not significant"), "other": ("better", None),
        "oracle": ("better", "better"),
    }  # fmt: skip
    mine, random_inside = row_of(rows, "mine"), row_of(rows, "random_inside")
    difference = mine["accuracy"] - random_inside["accuracy"]
    assert mine["random_delta"] == pytest.approx(difference)
    assert mine["random_delta_low"] < difference < mine["random_delta_high"]
    assert random_inside["random_delta"] == 0 and row_of(rows, "other")["random_delta"] is None


def test_random_tokens_in_the_same_blocks_come_before_those_in_others() -> None:
    hits = {1: drawn(0.2, 0), 2: drawn(0.7, 1)}
    rows = build([row for block, one in hits.items() for name in ("random_inside", "mine")
                  for row in with_outcomes(name, one, **in_blocks(0.5, block))])  # fmt: skip
    assert [row["random_delta"] for row in rows if row["strategy"] == "mine"] == [0, 0]


def test_a_strategy_of_which_a_cell_failed_is_not_marked() -> None:
    records = [*with_outcomes("dense", drawn(0.5, 0)), *with_outcomes("mine", drawn(0.9, 1))]
    assert row_of(build(records), "mine")["versus_dense"] == "better"
    nothing = {"test_items": 0, "test_labels": "", "test_predictions": ""}
    row = row_of(build([*records, flat("mine", 9, status="failed", **nothing)]), "mine")
    assert row["versus_dense"] is None and row["accuracy_delta"] > 0.3


def test_the_gap_is_that_of_groups_whose_background_fits() -> None:
    """The gap is that of groups whose background fits and the worst group that of all seeds."""
    groups, rng = np.arange(400) % 4, np.random.default_rng(0)
    rates = np.array([[0.9, 0.5, 0.6, 0.9], [0.9, 0.6, 0.5, 0.9], [0.9, 0.5, 0.6, 0.9]])
    hits = rng.random((3, 400)) < rates[:, groups]
    names = [f"accuracy: {digit} on {place}" for digit in (3, 8) for place in ("land", "sea")]
    more = {"task": "spurious", "spurious_gap": 0.2, "worst_group_accuracy": 0.5} | dict.fromkeys(names, 0.5)
    (row,) = build(with_outcomes("mine", hits, groups, **more))
    by_group = np.array([[one[groups == g].mean() for g in range(4)] for one in hits])
    expected = (by_group[:, [0, 3]].mean(axis=1) - by_group[:, [1, 2]].mean(axis=1)).mean()
    assert row["aligned_gap"] == pytest.approx(expected)
    assert row["worst_group_accuracy"] == pytest.approx(by_group.mean(axis=0).min())
    assert row["worst_group_accuracy"] > by_group.min(axis=1).mean()
    assert row["spurious_gap"] == pytest.approx(0.2)  # as the records have it
    unknown = build(with_outcomes("mine", hits, None, **more))[0]
    assert unknown["aligned_gap"] is None and unknown["worst_group_accuracy"] == 0.5
    others = more | dict.fromkeys(names)  # groups that are no class on a background
    assert build(with_outcomes("mine", hits, groups, **others), "task")[0]["aligned_gap"] is None


def test_a_note_says_which_differences_would_be_found() -> None:
    (line,) = (line for line in notes_on(WHOLE, judge(WHOLE)) if "significant in 80 % of cases" in line)
    assert line.startswith("composite: a difference of 0.") and "3 seeds" in line and "3 pairs" in line
    alone = seeded("mine", [0.5])
    assert not any("significant" in line for line in notes_on(alone, judge(alone)))


def on_foregrounds(shown: list[Any]) -> list[Row]:
    """Return a board with these foregrounds for each seed. Groups of five items and all seeds have equal results."""
    records = []
    for k, (name, rate) in enumerate([("dense", 0.8), ("mine", 0.7), ("other", 0.6), ("random", 0.4)]):
        rows = with_outcomes(name, np.tile(np.repeat(drawn(rate, k, 80)[:1], 5, axis=1), (3, 1)))
        records += [row | {"test_foregrounds": text} for row, text in zip(rows, shown, strict=True)]
    return build(records)


def test_items_that_show_one_foreground_count_as_one_draw() -> None:
    unknown, wider = on_foregrounds(["", "", ""]), 0
    for offset in (0, 80):  # the same foregrounds in all seeds, and others
        known = on_foregrounds([bytes_of(np.repeat(np.arange(80), 5) + offset * seed) for seed in range(3)])
        for row in known:
            without = row_of(unknown, row["strategy"])
            assert row["accuracy"] == without["accuracy"]
            for name in ("accuracy", "accuracy_delta"):
                width, width_without = (each[f"{name}_high"] - each[f"{name}_low"] for each in (row, without))
                assert width >= width_without - 1e-12
                wider += width > 1.1 * width_without
    assert wider >= 6
    assert on_foregrounds([bytes_of(np.arange(400) + 400 * seed) for seed in range(3)]) == unknown
