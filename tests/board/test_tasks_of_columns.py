"""Boards name only the tasks that were run."""

from pathlib import Path

import pandas as pd
import pytest
from click.testing import CliRunner
from flats import flat
from matplotlib.text import Text

from sparsebench.board import picture
from sparsebench.board.board import Board, gather
from sparsebench.board.columns import dicts
from sparsebench.board.judge import Leaderboard, judge
from sparsebench.board.published import files
from sparsebench.board.reading import MAIN, SUCCESS
from sparsebench.board.tables import FORMATS, Table, render
from sparsebench.board.views import report
from sparsebench.cli import main

pytestmark = pytest.mark.usefixtures("timed_once")

STRIPES = Path(__file__).resolve().parents[1] / "plugins" / "stripes.py"
RUNS = {
    "stripes": ["--plugin", STRIPES, "--task", "stripes", "--n-train", 50, "--model", "vit:dim=16,depth=2,heads=2"],
    "theory": ["--suite", "quick-scratch", "--task", "theory:steps=40,test=20,tokens=20", "--n-train", 4],
}


@pytest.fixture(
    scope="module", params=["stripes", pytest.param("theory", marks=[pytest.mark.theory, pytest.mark.slow])]
)
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, str]:
    """Return a task, the folder of a run of this task alone, and the command's output; do not write to the folder."""
    out = tmp_path_factory.mktemp(request.param)
    line = ["run", *RUNS[request.param], "--seeds", 2, "--out", out, "--jobs", 0, "--format", "md"]
    done = CliRunner().invoke(main, list(map(str, line)))
    assert done.exit_code == 0, done.output
    return request.param, out, done.stdout


def others(task: str) -> set[str]:
    return {"composite", "theory", "spurious task", "(spurious)"} - {task}


def texts_of(board: Board) -> list[str]:
    """Return all texts in the pictures of a board."""
    figures = [picture.draw(board, what) for what in picture.quantities(board)]
    return [text.get_text() for figure in figures for text in figure.findobj(Text)]


def test_no_output_of_a_task_names_another(alone: tuple[str, Path, str]) -> None:
    task, out, output = alone
    board = gather(out)
    made = {name: content.decode() for name, content in files(board).items() if not name.endswith(".png")}
    made |= {"output": output, "picture": "\n".join(texts_of(board))}
    made |= {f"by task, {form}": render(report(board.by_task, board.notes), form) for form in FORMATS}
    line = ["leaderboard", str(out), "--format", "html", "--by", "task"]
    made["by task, html"] = CliRunner().invoke(main, line).stdout
    assert len(made) == 12 and all(made.values())
    assert [(name, word) for name, text in made.items() for word in others(task) if word in text] == []


WORLD = [
    flat("dense", 0, "composite", accuracy=0.9, macs_ratio=1.0),
    flat("dense", 0, "theory", accuracy=0.8, success=1.0),
    flat("dense", 0, "spurious", accuracy=0.7, spurious_gap=0.2, worst_group_accuracy=0.5),
]


def tasks_of(judged: Leaderboard) -> dict[str, str]:
    return {column.key: column.task for column in judged.columns}


def test_each_column_of_a_board_over_all_tasks_is_of_one_task() -> None:
    judged = judge(WORLD)
    keys = ("accuracy", "sample_complexity", "spurious_gap", "worst_group_accuracy", "macs_ratio", "strategy")
    assert [tasks_of(judged)[key] for key in keys] == ["composite", "theory", "spurious", "spurious", "", ""]
    assert set(tasks_of(judge(WORLD, "task")).values()) == {""}  # its rows say theirs
    legend = render(Table(dicts(judged.rows), judged.columns, explained=True), "table")
    assert (
        "Of task composite, where it was run: accuracy" in legend and "Of task theory, where it was run: N50" in legend
    )


def test_gaps_are_of_the_task_that_has_them() -> None:
    judged = judge([flat("dense", 0, "waterbirds", accuracy=0.7, spurious_gap=0.2, worst_group_accuracy=0.5)])
    assert tasks_of(judged)["spurious_gap"] == tasks_of(judged)["accuracy"] == "waterbirds"
    assert tasks_of(judge(WORLD[:2]))["spurious_gap"] == ""


def test_a_suite_says_which_task_stands_first_and_what_counts_as_success() -> None:
    world = pd.DataFrame(WORLD).rename(columns={"success": "solved"})
    judged = judge(world)
    assert tasks_of(judged)["accuracy"] == "composite" and tasks_of(judged)["sample_complexity"] == ""
    world.attrs |= {MAIN: ("spurious",), SUCCESS: "solved"}
    judged = judge(world)
    assert tasks_of(judged)["accuracy"] == "spurious" and tasks_of(judged)["sample_complexity"] == "theory"
    wider = judge(world.assign(solved=3 * world["solved"] - 1))  # a success is 0 or 1, whatever a task returns
    assert wider.rows["sample_complexity"].equals(judged.rows["sample_complexity"])
