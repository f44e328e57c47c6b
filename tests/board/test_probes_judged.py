"""Boards of probes: images to a target, ties beyond the numbers tried, neighbours, the picture over relevant tokens."""

import json
import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
from flats import Flat, flat, row_of, trials

from sparsebench.board import relevance
from sparsebench.board.board import Board
from sparsebench.board.columns import dicts, frame
from sparsebench.board.comparison import about
from sparsebench.board.judge import Leaderboard, judge
from sparsebench.board.reading import TARGET, frame_of
from sparsebench.board.tables import render
from sparsebench.board.views import report
from sparsebench.records.record import bytes_of

SIZES, ITEMS, CLASSES = (20, 80, 320), 400, 4
SETTING = json.dumps([{"name": "composite", "params": {}}, {"name": "vit", "params": {}}, {"pool": 320}])


def probed(strategy: str, shares: tuple[float, ...], near: float, relevant: float = 0.25, **more: Any) -> list[Flat]:
    """Return the records of a strategy, whose linear probe is correct on these shares of the items at each size."""
    labels = np.arange(ITEMS) % CLASSES
    records = []
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(ITEMS)
        for n, share in zip(SIZES, shares, strict=True):
            hits = np.empty(ITEMS, dtype=bool)
            hits[order] = np.arange(ITEMS) < round(share * ITEMS) + seed
            hits_of_near = np.arange(ITEMS) < round(near * ITEMS)
            about_cell = {
                "cell_id": f"{strategy} {n} {seed}",
                "n_train": n,
                "track": "probe",
                "setting": SETTING,
                "accuracy": hits.mean(),
                "neighbour_accuracy": hits_of_near.mean(),
                "selection_precision": relevant,
                "test_items": ITEMS,
                "test_labels": bytes_of(labels),
                "test_predictions": bytes_of(np.where(hits, labels, 60000)),
                "test_neighbours": bytes_of(np.where(hits_of_near, labels, 60000)),
            }
            records.append(flat(strategy, seed, **(about_cell | more)))
    return records


RECORDS = [
    *probed("dense", (0.4, 0.6, 0.85), 0.6, 0.25),
    *probed("good", (0.6, 0.9, 0.95), 0.7, 0.5),
    *probed("best", (0.9, 0.95, 0.95), 0.8, 0.6),
    *probed("oracle", (0.9, 0.95, 0.95), 0.8, 1.0),
    *probed("bad", (0.3, 0.4, 0.5), 0.4, 0.2),
    *probed("worse", (0.25, 0.3, 0.4), 0.3, 0.1),
]


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    records = pd.DataFrame(RECORDS)
    records.attrs[TARGET] = 0.75
    return frame_of(records)


@pytest.fixture(scope="module")
def judged_table(table: pd.DataFrame) -> Leaderboard:
    return judge(table)


def test_images_to_the_target_of_dense(judged_table: Leaderboard) -> None:
    """Chance is 1/4 and dense reaches .8525, so the target is .79225."""
    rows = dicts(judged_table.rows)
    target = 0.25 + 0.9 * (0.85 + 1 / ITEMS - 0.25)
    good = row_of(rows, "good")
    low, high = 0.6 + 1 / ITEMS, 0.9 + 1 / ITEMS
    assert good["images_to_target"] == pytest.approx(20 * 4 ** ((target - low) / (high - low)))
    assert 20 < good["images_to_target_low"] < good["images_to_target"] < good["images_to_target_high"] < 80
    assert row_of(rows, "best")["images_to_target"] == 0
    assert row_of(rows, "bad")["images_to_target"] == math.inf
    fixed = row_of(rows, "dense")["images_to_fixed_target"]
    low, high = 0.6 + 1 / ITEMS, 0.85 + 1 / ITEMS
    assert fixed == pytest.approx(80 * 4 ** ((0.75 - low) / (high - low)))


def test_what_lies_beyond_the_numbers_tried_is_printed_as_a_bound_and_a_tie(judged_table: Leaderboard) -> None:
    rows = dicts(judged_table.rows)
    ranks = {row["strategy"]: row["images_to_target_rank"] for row in rows}
    assert ranks == {"best": "1", "good": "2", "dense": "3", "bad": "4-5", "worse": "4-5", "oracle": None}
    content = report(judged_table)
    csv = render(content, "csv")
    assert "< 20" in csv and "> 320" in csv
    data = {row["strategy"]: row for row in json.loads(render(content, "json"))}
    assert data["best"]["images_to_target"] == "< 20"
    assert data["worse"]["images_to_target"] == data["worse"]["images_to_target_high"] == "> 320"
    numbers = frame(judged_table.rows, judged_table.columns).set_index("strategy")["images_to_target"]
    assert numbers["best"] == 0 and numbers["worse"] == math.inf
    assert "images to target" in render(content, "md")


def test_accuracies_are_those_with_the_most_images_and_neighbours_have_differences(judged_table: Leaderboard) -> None:
    rows = dicts(judged_table.rows)
    good = row_of(rows, "good")
    assert good["accuracy"] == pytest.approx(0.95 + 1 / ITEMS)
    assert good["accuracy_delta"] == pytest.approx(0.1)
    assert good["versus_dense"] == "better"
    assert good["neighbour_accuracy"] == pytest.approx(0.7)
    assert good["neighbour_delta"] == pytest.approx(0.1)
    assert 0 < good["neighbour_delta_low"] < 0.1 < good["neighbour_delta_high"]
    assert good["linear_delta"] == pytest.approx(0.1)


def test_probes_have_differences_to_random_tokens(table: pd.DataFrame) -> None:
    random = probed("random_inside", (0.3, 0.4, 0.45), 0.5, 0.25)
    rows = dicts(judge(pd.DataFrame([*RECORDS, *random])).rows)
    good = row_of(rows, "good")
    assert good["linear_random_delta"] == pytest.approx(0.5)
    assert good["linear_random_delta_low"] < 0.5 < good["linear_random_delta_high"]
    assert good["neighbour_random_delta"] == pytest.approx(0.2)
    assert row_of(rows, "random_inside")["linear_random_delta"] is None


def test_a_strategy_that_lacks_a_number_of_images_is_not_ranked() -> None:
    lacks = [record for record in RECORDS if not (record["strategy"] == "good" and record["n_train"] == 80)]
    rows = dicts(judge(pd.DataFrame(lacks)).rows)
    assert row_of(rows, "good")["rank"] == "not ranked"
    assert row_of(rows, "good")["images_to_target"] is None
    assert row_of(rows, "best")["images_to_target"] == 0


def test_strategies_that_are_not_ranked_have_no_rank_by_images_either() -> None:
    """A cell of `best` failed, and `good` lacks one: the next ones move up."""
    failed = flat("best", 7, status="failed", track="probe", setting=SETTING, n_train=20, cell_id="failed")
    lacks = [record for record in RECORDS if (record["strategy"], record["repetition"]) != ("good", 2)]
    rows = dicts(judge(pd.DataFrame([*lacks, failed])).rows)
    ranks = {row["strategy"]: row["images_to_target_rank"] for row in rows}
    assert {row_of(rows, name)["rank"] for name in ("best", "good")} == {"not ranked"}
    assert ranks == {"best": None, "good": None, "oracle": None, "dense": "1", "bad": "2-3", "worse": "2-3"}


def test_records_without_test_items_have_no_target_of_dense() -> None:
    """Chance is not known without labels; the fixed target needs none."""
    outcomes = ("test_items", "test_labels", "test_predictions", "test_neighbours")
    records = pd.DataFrame(RECORDS).drop(columns=list(outcomes))
    records.attrs[TARGET] = 0.75
    good = row_of(dicts(judge(frame_of(records)).rows), "good")
    assert good.get("images_to_target") is None
    assert 20 < good["images_to_fixed_target"] < 80


def test_boards_say_whether_the_networks_learned_these_classes() -> None:
    trained = json.dumps([*json.loads(SETTING)[:2], [{"name": "composite"}, {"name": "vit"}, 100], {"pool": 320}])
    own = judge(pd.DataFrame(RECORDS)).rankings[0].comparison
    shipped = judge(pd.DataFrame([record | {"setting": trained} for record in RECORDS])).rankings[0].comparison
    assert "no test of what their features represent" in about(shipped)
    assert "no test" not in about(own)
    assert "3 repetitions" in about(own)


def test_probes_are_never_compared_with_other_tracks() -> None:
    tested = [record | {"track": "frozen", "cell_id": f"frozen {record['cell_id']}"} for record in RECORDS]
    judged = judge(pd.DataFrame([*RECORDS, *tested]), "task")
    tracks = {ranking.comparison.track for ranking in judged.rankings}
    assert tracks == {"frozen", "probe"}


def board_of(table: pd.DataFrame) -> Board:
    judged = judge(table)
    return Board(judged, judge(table, "task", judged))


class TestRelevance:
    """The picture of samples over the share of relevant tokens."""

    def points(self, records: list[Flat]) -> list[relevance.Points]:
        table = frame_of(pd.DataFrame(records))
        board = board_of(table)
        relevance.draw(board, ["good"] if any(record["strategy"] == "good" for record in records) else [])
        return relevance.points_of(board)

    def test_fewer_images_with_more_relevant_tokens_correlate(self) -> None:
        (points,) = self.points(RECORDS)
        assert points.quantity == "images to target"
        rows = points.rows.set_index("strategy")
        assert rows["relevant"].to_dict() == pytest.approx(
            {"dense": 0.25, "good": 0.5, "best": 0.6, "oracle": 1.0, "bad": 0.2, "worse": 0.1}
        )
        rho, low, high = points.correlation
        # Ranks of images: oracle and best tie as 1.5, good 3, dense 4, bad and worse tie as 5.5.
        expected = np.corrcoef([6, 5, 4, 3, 2, 1], [1.5, 1.5, 3, 4, 5.5, 5.5])[0, 1]
        assert rho == pytest.approx(expected)
        assert low is not None and high is not None and -1 <= low <= rho <= high <= 1

    def test_a_named_strategy_has_one_text_for_each_budget(self) -> None:
        records = [
            *probed("dense", (0.9, 0.92, 0.95), 0.6, 0.25),
            *probed("good", (0.9, 0.95, 0.95), 0.7, 0.5),
        ]
        figure = relevance.draw(board_of(frame_of(pd.DataFrame(records))), ["good"])
        texts = [text.get_text() for text in figure.axes[0].texts]
        assert len(texts) == 2 and texts.count("dense") == 1
        assert any(text.startswith("good ") for text in texts)

    def test_trials_have_n50(self) -> None:
        records = [
            *trials("dense", "001", "001", "011", selection_precision=0.2),
            *trials("mine", "011", "001", "111", selection_precision=0.4),
            *trials("random", "000", "000", "001", selection_precision=0.2),
        ]
        (points,) = self.points(records)
        assert points.quantity == "N50 of trials"
        assert points.limits == (4, 16)
        assert points.correlation[0] < 0
