import inspect
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from measured import TINY
from pandas.testing import assert_frame_equal

import sparsebench
from sparsebench.board.columns import BY_TASK, COLUMNS, keys_of
from sparsebench.cli.run import run as command
from sparsebench.records.record import Record

GOOD = str(Path(__file__).resolve().parent / "plugins" / "good.py")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, pd.DataFrame, list[Record]]:
    """Return the folder of a run, what it returned, and the records that it showed; do not write to the folder."""
    out = tmp_path_factory.mktemp("finished")
    seen: list[Record] = []
    table = sparsebench.run(
        ["attn_topk:keep_rate=0.5", GOOD], suite=TINY, n_train=[4, 8], seeds=3, out=out, jobs=0,
        on_record=seen.append,
    )  # fmt: skip
    return out, table, seen


def test_a_run_returns_the_leaderboard(finished: tuple[Path, pd.DataFrame, list[Record]]) -> None:
    table = finished[1]
    assert list(table.columns)[: len(keys_of(COLUMNS))] == keys_of(COLUMNS)
    assert set(table["strategy"]) == {"dense", "random", "oracle", "anti_oracle", "attn_topk", "norm"}
    ranks = [rank for rank in table["rank"] if rank != "not ranked"]
    assert ranks == sorted(ranks) and list(table["kind"][-2:]) == ["oracle", "oracle"]


def test_every_record_is_shown_as_it_comes(finished: tuple[Path, pd.DataFrame, list[Record]]) -> None:
    out, _, seen = finished
    assert {record.cell_id for record in seen} == set(sparsebench.load_records(out)["cell_id"])
    assert all(isinstance(record, Record) for record in seen)


def test_records_are_a_row_a_cell_and_a_column_a_metric(finished: tuple[Path, pd.DataFrame, list[Record]]) -> None:
    out, _, seen = finished
    records = sparsebench.load_records(out)
    assert len(records) == len(seen)
    assert set(records.columns) >= {"cell_id", "status", "strategy", "n_train", "repetition", "accuracy", "macs_ratio"}
    by_id = records.set_index("cell_id")
    for record in seen:
        assert by_id.loc[record.cell_id, "accuracy"] == record.metrics["accuracy"].value


def test_the_leaderboard_of_the_records_is_what_the_run_returned(
    finished: tuple[Path, pd.DataFrame, list[Record]],
) -> None:
    out, table, _ = finished
    assert_frame_equal(sparsebench.leaderboard(sparsebench.load_records(out)), table, check_exact=True)


def test_the_order_of_the_rows_does_not_matter(finished: tuple[Path, pd.DataFrame, list[Record]]) -> None:
    out, table, _ = finished
    records = sparsebench.load_records(out)
    for seed in range(5):
        shuffled = records.sample(frac=1, random_state=seed)
        assert_frame_equal(sparsebench.leaderboard(shuffled), table, check_exact=True)


def test_the_leaderboard_of_some_records_is_theirs_alone(finished: tuple[Path, pd.DataFrame, list[Record]]) -> None:
    records = sparsebench.load_records(finished[0])
    table = sparsebench.leaderboard(records[records["strategy"].isin(["dense", "norm"])])
    assert set(table["strategy"]) == {"dense", "norm"}


def test_records_of_tasks_with_other_metrics_stand_side_by_side(
    finished: tuple[Path, pd.DataFrame, list[Record]], tmp_path: Path
) -> None:
    shutil.copytree(finished[0] / "records", tmp_path / "records")
    both = sparsebench.run(
        GOOD, suite=TINY, tasks=["composite", "spurious:epochs=1,test=20,pretrain_epochs=0"], n_train=[20], seeds=2,
        out=tmp_path, jobs=0,
    )  # fmt: skip
    assert both["spurious_gap"].notna().all()
    records = sparsebench.load_records(tmp_path)
    assert records.loc[records["task"] == "composite", "spurious_gap"].isna().all()
    table = sparsebench.leaderboard(records, by="task")
    expected = keys_of([*BY_TASK, *COLUMNS])
    assert list(table.columns)[: len(expected)] == expected and set(table["task"]) == {"composite", "spurious"}


def test_a_run_of_what_is_there_runs_nothing_and_returns_the_same(
    finished: tuple[Path, pd.DataFrame, list[Record]],
) -> None:
    out, table, _ = finished
    seen: list[Record] = []
    options: dict[str, Any] = {
        "suite": TINY,
        "n_train": (8, 4),
        "seeds": 3,
        "out": str(out),
        "jobs": 0,
    }
    again = sparsebench.run(("attn_topk:keep_rate=0.5", GOOD), on_record=seen.append, **options)
    assert seen == []
    assert_frame_equal(again, table, check_exact=True)


def test_a_folder_without_records_is_the_users_mistake(tmp_path: Path) -> None:
    for path in (tmp_path, str(tmp_path / "nowhere")):
        with pytest.raises(sparsebench.UserError, match="no records"):
            sparsebench.load_records(path)


def test_mistakes_are_user_errors(tmp_path: Path) -> None:
    with pytest.raises(sparsebench.UserError, match="did you mean 'attn_topk'"):
        sparsebench.run("atn_topk", suite=TINY, n_train=[4], out=tmp_path)
    with pytest.raises(sparsebench.UserError, match="--device"):
        sparsebench.run(suite=TINY, n_train=[4], device="tpu", out=tmp_path)
    nowhere: Any = None
    for call in (sparsebench.run, sparsebench.show_tokens):
        with pytest.raises(sparsebench.UserError, match="out; got None; allowed: the path of a folder"):
            call("attn_topk", out=nowhere)


def test_a_board_by_anything_else_is_a_user_error(finished: tuple[Path, pd.DataFrame, list[Record]]) -> None:
    with pytest.raises(sparsebench.UserError, match="--by"):
        sparsebench.leaderboard(sparsebench.load_records(finished[0]), by="model")


def test_the_function_and_the_command_have_the_same_options() -> None:
    options = {parameter.name for parameter in command.params} - {
        "form",
        "wide",
        "columns",
        "dry_run",
        "notes",
        "named",
    }  # how it is printed
    assert options == set(inspect.signature(sparsebench.run).parameters) - {"on_record", "progress"}
