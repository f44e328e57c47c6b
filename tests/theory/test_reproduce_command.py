import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from sparsebench_theory.overfitting import figures as overfitting
from sparsebench_theory.shallow import images
from sparsebench_theory.shallow import paper as theory
from sparsebench_theory.sparse_tokens import figures as sparse_tokens
from sparsebench_theory.spatial import figures as spatial

from sparsebench.cli import main
from sparsebench.cli import reproduce as command
from sparsebench.paper import Paper
from sparsebench.plan.expand import expand
from sparsebench.plan.request import Request
from sparsebench.plugin.registry import Registry
from sparsebench.records import store
from sparsebench.records.record import Failure, Metric, Record
from sparsebench.runner import run as runs

FIGURE = ["--preset", "quick", "--figure", "4", "--device", "cpu", "--jobs", "0"]


def call(*arguments: Any) -> Result:
    """Return what the command does, called in this process."""
    return CliRunner().invoke(main, ["reproduce", "theory", *map(str, arguments)])


def fill(out: Path, *lost: int) -> Path:
    """Write the records of Figure 4 to a folder, as if it had been run; some repetitions have no answer."""
    writer = store.Writer(out)
    for job in expand(Request(suite="theory-quick", figures=("4",)), Registry()):
        r = job.cell.repetition
        values = {"success": 1.0, "fitted": 1.0}
        record = Record(
            cell=job.cell, cell_id=job.cell.id, status="ok", origin=job.origin, kind=job.kind, label=job.label,
            metrics={name: Metric(value=value, unit="", n=1) for name, value in values.items()},
            samples={
                "watched_steps": (0.0, 10.0), "watched_attention_on_relevant": (0.55, 0.91 + 0.001 * r),
                **{f"trained_singular_{name}": (2.0, 1.0, 0.1) for name in ("W_Q", "W_K", "W_V")},
                **{f"trained_loss_without_{what}": tuple(0.1 * i for i in range(10)) for what in ("short", "long")},
            },
        )  # fmt: skip
        if r in lost:
            failure = Failure(reason="it broke", kind="ValueError")
            record = record.model_copy(update={"status": "failed", "metrics": {}, "samples": {}, "failure": failure})
        writer.append(record)
    writer.close()
    return out


def refused(result: Result, *says: str) -> None:
    """Assert that it left with 2 and one line on standard error that says these things."""
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: ") and "Traceback" not in line
    for text in says:
        assert text in line


pytestmark = pytest.mark.usefixtures("no_pictures")
PAPERS = {one.name: one for one in (theory.PAPER, overfitting.PAPER, spatial.PAPER, images.PAPER, sparse_tokens.PAPER)}


@pytest.mark.parametrize("paper", PAPERS.values(), ids=lambda paper: paper.name)
def test_the_choices_are_the_figures_and_presets_there_are(paper: Paper) -> None:
    made = command.reproduce.get_command(click.Context(command.reproduce), paper.name)
    assert made is not None
    choices = {p.name: tuple(p.type.choices) for p in made.params if isinstance(p.type, click.Choice)}
    assert choices["figures"] == tuple(paper.figures) and choices["preset"] == paper.presets


def test_without_a_paper_the_papers_are_listed() -> None:
    result = CliRunner().invoke(main, ["reproduce"])
    assert result.exit_code == 2 and "Traceback" not in result.output
    assert all(f"  {paper} " in result.output for paper in PAPERS)


def test_help_of_each_paper_names_its_figures_and_imports_nothing_large(tmp_path: Path) -> None:
    code = """
import sys
from sparsebench.cli import main
for paper in ("overfitting", "spatial", "images", "sparse-tokens"):
    try:
        main(["reproduce", paper, "--help"])
    except SystemExit as leave:
        assert not leave.code, leave.code
print(sorted({'torch', 'timm', 'torchvision', 'numba', 'matplotlib'} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]" and not list(tmp_path.iterdir())
    for paper in ("overfitting", "spatial"):
        said = " ".join(CliRunner().invoke(main, ["reproduce", paper, "--help"]).output.split())
        assert all(figure in said for figure in PAPERS[paper].figures) and f"sparsebench-{paper}-PRESET" in said
        assert "[quick|full]" in said


@pytest.mark.parametrize(("paper", "figure"), [("overfitting", "4"), ("spatial", "1"), ("sparse-tokens", "1")])
def test_a_figure_that_a_paper_does_not_have_is_refused(paper: str, figure: str) -> None:
    result = CliRunner().invoke(main, ["reproduce", paper, "--figure", figure])
    refused(result, f"'{figure}'", *(f"'{known}'" for known in PAPERS[paper].figures))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--figure", "6"], ["--figure", "'6'", "'1a'", "'strategies'"]),
        (["--figure", "4", "--figure", "1c"], ["--figure", "'1c'"]),
        (["--preset", "quik"], ["--preset", "'quik'", "'quick'", "'full'"]),
        (["--rerun", "never"], ["--rerun", "'never'", "'missing'"]),
        (["--device", "foo"], ["--device", "'foo'", "auto, cpu, cuda"]),
        (["--jobs", "-1"], ["--jobs", "-1"]),
        (["--figures", "4"], ["--figures"]),
        (["4"], ["4"]),
    ],
    ids=lambda x: " ".join(x)[-40:],
)
def test_a_wrong_option_leaves_with_2_and_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], says: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    refused(call("--out", "out", *arguments), *says)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_leaves_with_2_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    refused(call(*FIGURE, "--out", tmp_path / "file" / "out"), "cannot write to", "--out")


def test_what_is_complete_is_drawn_again_and_its_verdicts_printed(tmp_path: Path) -> None:
    records = store.read(fill(tmp_path))
    result = call(*FIGURE, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines[:2] == ["4 attention concentrates on relevant tokens reproduced", "4 it tends to 1 partly"]
    assert {line.split()[0] for line in lines[2:]} == {"rank", "neurons"}  # of the same trials
    assert "all 4 cells are in the store" in result.stderr and f"written: {tmp_path}/verdicts.md" in result.stderr
    assert {"fig4.png", "rank.svg", "neurons.pdf"} <= {path.name for path in tmp_path.iterdir()}
    assert store.read(tmp_path) == records


@pytest.mark.parametrize("lost", [(1, 3), (0, 1, 2, 3)])
def test_trials_without_an_answer_leave_1_and_where_to_read_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: tuple[int, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    out = fill(tmp_path / "sparsebench-theory-quick", *lost)  # the folder's name unless it is given
    result = call(*FIGURE)
    assert result.exit_code == 1 and "Traceback" not in result.output
    assert ("attention concentrates" in result.stdout) == (len(lost) < 4)  # the others are judged all the same
    assert f"{len(lost)} trials have no answer, see the notes in verdicts.md" in result.stderr
    says = f"{len(lost)} of 4 trials have no answer and are left out; failed: it broke"
    assert says in (out / "verdicts.md").read_text()


def test_drawing_again_imports_no_torch(tmp_path: Path) -> None:
    code = f"""
import sys
from sparsebench.cli import main
try:
    main({["reproduce", "theory", *FIGURE, "--out", str(fill(tmp_path))]!r})
except SystemExit as leave:
    assert not leave.code, leave.code
print(sorted({{'torch', 'timm', 'torchvision', 'numba'}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]" and (tmp_path / "fig4.png").exists()


def test_it_can_be_said_how_often_a_training_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given, out = [], fill(tmp_path)
    monkeypatch.setattr(runs, "collect", lambda *arguments: given.append(arguments[2].checkpoint))
    for extra in ([], ["--checkpoint", "7"], ["--checkpoint", "0"]):
        assert call(*FIGURE, *extra, "--out", out).exit_code == 0
    assert given == [60, 7, 0]


def test_a_dry_run_says_what_there_is_to_do_and_writes_nothing(tmp_path: Path) -> None:
    result = call(*FIGURE, "--dry-run", "--shard", "0/1", "--out", tmp_path / "out")
    assert result.exit_code == 0 and result.stdout.startswith("4 of 4 cells to run\n"), result.output
    refused(call(*FIGURE, "--dry-run", "--shard", "1/1", "--out", tmp_path / "out"), "--shard", "'1/1'")
    refused(call(*FIGURE, "--dask", "x", "--out", tmp_path / "out"), "leave --jobs out")
    assert not list(tmp_path.iterdir())


def test_a_paper_whose_name_has_two_words_is_made(tmp_path: Path) -> None:
    line = ["reproduce", "sparse-tokens", "--preset", "quick", "--dry-run", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(main, line)
    assert result.exit_code == 0 and "cells to run" in result.stdout, result.output
