"""Whatever a board says of a task, it says of the one that was run."""

from pathlib import Path

import pytest
from click.testing import CliRunner
from matplotlib.text import Text

from sparsebench import page
from sparsebench.board import picture_input, tables
from sparsebench.board.board import Board
from sparsebench.board.build import Leaderboard, judge
from sparsebench.board.columns import FORMATS
from sparsebench.board.gather import gather
from sparsebench.cli import main
from sparsebench.page.files import files

STRIPES = Path(__file__).resolve().parents[1] / "plugins" / "stripes.py"
RUNS = {
    "stripes": ["--plugin", STRIPES, "--task", "stripes", "--n-train", 50, "--model", "vit:dim=16,depth=2,heads=2"],
    "overfitting": ["--suite", "quick-scratch", "--task", "overfitting:tokens=5,d=16,steps=10,test=20", "--n-train", 4],
    "sparse_tokens": [
        "--suite",
        "quick-scratch",
        "--task",
        "sparse_tokens:tokens=5,d=4,steps=9,test=9",
        "--n-train",
        9,
    ],
    "theory": ["--suite", "quick-scratch", "--task", "theory:steps=40,test=20,tokens=20", "--n-train", 4],
}


@pytest.fixture(scope="module", params=list(RUNS))
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, str]:
    """Return a task, the folder of a run of it alone, and what the command said; do not write to the folder."""
    out = tmp_path_factory.mktemp(request.param)
    line = ["run", *RUNS[request.param], "--seeds", 2, "--out", out, "--jobs", 0, "--format", "md"]
    done = CliRunner().invoke(main, list(map(str, line)))
    assert done.exit_code == 0, done.output
    return request.param, out, done.stdout


def others(task: str) -> set[str]:
    return {"composite", "theory", "spurious task", "(spurious)"} - {task}


def texts_of(board: Board) -> list[str]:
    """Return all that is written in the pictures of a board."""
    figures = [picture_input.draw(board, what) for what in picture_input.measured(board)]
    return [text.get_text() for figure in figures for text in figure.findobj(Text)]


def test_no_output_of_a_task_names_another(alone: tuple[str, Path, str]) -> None:
    task, out, said = alone
    board = gather(out)
    made = {name: content.decode() for name, content in files(board).items() if not name.endswith(".png")}
    made |= {"said": said, "picture": "\n".join(texts_of(board))}
    for form in (*FORMATS, "html"):
        line = ["leaderboard", str(out), "--format", form, "--by", "task"]
        made[f"by task, {form}"] = CliRunner().invoke(main, line).stdout
    assert len(made) == 12 and all(made.values())
    assert [(name, word) for name, text in made.items() for word in others(task) if word in text] == []


def test_figure_page_and_legend_name_the_task_that_was_run(alone: tuple[str, Path, str]) -> None:
    task, out, said = alone
    board = gather(out)
    trials = task != "stripes"
    tasks = {column.key: column.task for column in board.columns}
    assert tasks["accuracy"] == task and tasks["sample_complexity"] == (task if trials else "")
    assert tasks["aligned_gap"] == tasks["macs_ratio"] == ""
    titles = " ".join(" ".join(texts_of(board)).split())
    assert f"Test accuracy. Task {task}." in titles
    assert (f"fewer are better. Task {task}." in titles) == trials
    assert f"Accuracy, AUROC and MACs: {task} task, where it was run." in said
    assert (f"trials to succeed, {task} task, where it was run." in said) == trials and "Gap:" not in said
    assert f"test accuracy, mean over seeds ({task} task)" in page.render(board).decode()


def record(task: str, strategy: str, **more: float) -> dict[str, object]:
    return {
        "cell_id": f"{task} {strategy}", "status": "ok", "reason": "", "task": task, "model": "vit",
        "strategy": strategy, "kind": "baseline", "budget": "macs 1", "n_train": 600, "repetition": 0,
        "setting": f"setting of {task}", "device": "cpu", "environment": "",
    } | more  # fmt: skip


WORLD = [
    record("composite", "dense", accuracy=0.9, macs_ratio=1.0),
    record("theory", "dense", accuracy=0.8, success=1.0),
    record("spurious", "dense", accuracy=0.7, spurious_gap=0.2, worst_group_accuracy=0.5),
]


def tasks_of(judged: Leaderboard) -> dict[str, str]:
    return {column.key: column.task for column in judged.columns}


def test_each_column_of_a_board_over_all_tasks_is_of_one_task() -> None:
    judged = judge(WORLD)
    keys = ("accuracy", "sample_complexity", "spurious_gap", "worst_group_accuracy", "macs_ratio", "strategy")
    assert [tasks_of(judged)[key] for key in keys] == ["composite", "theory", "spurious", "spurious", "", ""]
    assert set(tasks_of(judge(WORLD, "task")).values()) == {""}  # its rows say theirs
    legend = tables.legend_of(judged.rows, tables.shown_columns(judged.rows, judged.columns))
    assert legend.startswith(
        "Accuracy, AUROC and MACs: composite task, where it was run. N50: training samples for half of the trials to "
        "succeed, theory task, where it was run. Gap: accuracy where the background fits the class minus that where it "
        "does not, spurious task. [ ]: 95 % intervals, of seeds and items, each for itself; "
    )


def test_gaps_are_of_the_task_that_has_them() -> None:
    judged = judge([record("waterbirds", "dense", accuracy=0.7, spurious_gap=0.2, worst_group_accuracy=0.5)])
    assert tasks_of(judged)["spurious_gap"] == tasks_of(judged)["accuracy"] == "waterbirds"
    assert tasks_of(judge(WORLD[:2]))["spurious_gap"] == ""
