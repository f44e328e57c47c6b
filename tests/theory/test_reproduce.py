import csv
import json
import subprocess
import sys
from dataclasses import asdict

import pytest
from click.testing import CliRunner
from plugin_files import write_distribution
from samples import SAMPLES
from sparsebench_theory.overfitting import figures as overfitting
from sparsebench_theory.shallow import images
from sparsebench_theory.shallow import paper as theory
from sparsebench_theory.shallow.paper import seconds
from sparsebench_theory.sparse_tokens import figures as sparse_tokens
from sparsebench_theory.spatial import figures as spatial

from sparsebench.cli import main
from sparsebench.errors import UserError
from sparsebench.paper import Paper, Verdict
from sparsebench.paper.reproduce import publish, reproduce
from sparsebench.plan.expand import expand
from sparsebench.plan.request import Execution, Request
from sparsebench.plugin.registry import Registry
from sparsebench.publish.submission import submit
from sparsebench.records import store
from sparsebench.records.record import Failure, Metric, Record
from sparsebench.runner import run as runs
from sparsebench.runner.progress import Callbacks

pytestmark = pytest.mark.usefixtures("no_pictures")
TINY = """
name = "tiny"
version = 1
title = "seconds"
baselines = ["dense"]
seeds = 2

[budget]
keep_rate = 0.8

[[task]]
name = "theory"
figure = "2"
params = {steps = 60, test = 8, tokens = 20, confusion = 0.05, watch = 5}
sweep = {relevant = [0.3, 0.4, 0.6]}
model_params = {m = 16}
n_train = [8]

[[task]]
name = "theory"
figure = "4"
params = {steps = 60, test = 8, tokens = 20, confusion = 0.05, relevant = 0.5, watch = 5}
model_params = {m = 16}
n_train = [8]

[[task]]
name = "theory"
figure = "8"
params = {steps = 60, test = 8, tokens = 20, confusion = 0.05, relevant = 0.5}
model_params = {m = 16}
n_train = [4]
strategies = ["dense", "oracle:keep_rate=0.8", "STRATEGY:keep_rate=0.8"]
"""


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """Return a function that replaces the presets by a suite of three figures that takes a second."""
    path = tmp_path / "tiny.toml"
    some = {name: theory.PAPER.figures[name] for name in ("2", "4", "8")}
    monkeypatch.setattr(
        theory, "PAPER", Paper("theory", "", dict.fromkeys(theory.PAPER.presets, str(path)), some, seconds)
    )

    def write(strategy="noise"):
        path.write_text(TINY.replace("STRATEGY", strategy))
        return path

    write()
    return write


def make(out, *figures, rerun="missing"):
    """Return verdicts, the number of trials without a result, and the cells that were run."""
    ran = []
    verdicts, lost = reproduce(
        theory.PAPER, figures, "quick", out, Execution("cpu", rerun, jobs=0), callbacks=Callbacks(on_record=ran.append)
    )
    return verdicts, lost, ran


def contents(folder, pattern="**/*"):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.glob(pattern) if path.is_file()}


def notes_in(out):
    return json.loads((out / "verdicts.json").read_text())["notes"]


def judged_in(out):
    """Return the figures with verdicts in the table."""
    with (out / "verdicts.csv").open(newline="") as file:
        return sorted({row["figure"] for row in csv.DictReader(file)})


# ---- from a request to figures


def test_the_second_run_computes_nothing(tmp_path, tiny):
    """The first run writes everything and the second runs nothing and writes the same."""
    out = tmp_path / "out"
    verdicts, lost, ran = make(out)
    first = contents(out)
    assert (len(ran), lost) == (6 + 2 + 6, 0) and {record.status for record in ran} == {"ok"}
    assert {name for name in first if "/" not in name and not name.startswith(".")} == {
        *(f"fig{n}.{form}" for n in (2, 4, 8) for form in ("png", "svg", "pdf", "csv")),
        "verdicts.md", "verdicts.csv", "verdicts.json",
    }  # fmt: skip
    assert {verdict.figure for verdict in verdicts} == {"2", "4", "8"}
    assert len(csv_rows(out / "fig2.csv")) == 3
    assert {row["removed"] for row in csv_rows(out / "fig8.csv")} == {"irrelevant", "noisy"}
    again = make(out)
    assert again == (verdicts, 0, []) and contents(out) == first


def csv_rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_figures_asked_for_one_after_the_other_gather_in_the_verdicts(tmp_path, tiny):
    out = tmp_path / "out"
    _, _, ran = make(out, "4")
    assert len(ran) == 2 and judged_in(out) == ["4"] and not (out / "fig2.png").exists()
    _, _, ran = make(out, "2")
    assert len(ran) == 6 and judged_in(out) == ["2", "4"]
    (out / "fig2.png").unlink()
    verdicts, _, ran = make(out, "4")
    assert not ran and {verdict.figure for verdict in verdicts} == {"2", "4"} and (out / "fig2.png").exists()
    assert notes_in(out)[0].startswith("figure 2")


def test_a_figure_of_which_a_trial_is_missing_is_not_drawn(tmp_path, tiny):
    make(tmp_path / "whole", "2", "4")
    writer = store.Writer(tmp_path / "part")
    for record in list(store.read(tmp_path / "whole").values())[1:]:  # the first is one of Figure 2
        writer.append(record)
    writer.close()
    _, _, ran = make(tmp_path / "part", "4")
    assert not ran and judged_in(tmp_path / "part") == ["4"] and not (tmp_path / "part" / "fig2.csv").exists()


def test_the_plan_is_told_with_the_time_it_takes_before_anything_runs(tmp_path, tiny):
    told = []

    def begin(plan, workers):
        told.append((len(plan.todo), len(plan.jobs), workers, plan.forecast.time_left(1, now=0.0)))
        told.extend(theory.PAPER.seconds(job) for job in plan.todo)

    for _ in range(2):
        callbacks = Callbacks(on_plan=begin, on_record=lambda _: told.append("ran"))
        reproduce(theory.PAPER, ("4",), "quick", tmp_path / "out", Execution("cpu", jobs=0), callbacks=callbacks)
    (first, *_, again) = told
    assert first[:3] == (2, 2, 0) and again == (0, 2, 0, 0.0) and told[3:-1] == ["ran", "ran"]
    assert first[3] == pytest.approx(sum(told[1:3])) and first[3] > 0


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Install a strategy that raises, and return its name."""
    text = (SAMPLES / "raises.py").read_text()
    entries = {"raises": "a_module_that_raises"}
    monkeypatch.syspath_prepend(write_distribution(tmp_path / "site", entries, a_module_that_raises=text))
    yield "raises"
    sys.modules.pop("a_module_that_raises", None)


def test_failed_trials_are_counted_and_noted(tmp_path, tiny, installed):
    """Trials whose strategy fails are counted and noted and the others drawn."""
    tiny(installed)
    out = tmp_path / "out"
    verdicts, lost, ran = make(out, "8")
    assert (lost, len(ran)) == (2, 6) and {verdict.figure for verdict in verdicts} == {"8"}
    reason = "2 of 6 trials have no answer and are left out; failed: ValueError: no idea which token matters"
    assert (
        any(note.startswith(f"figure 8: {reason}") for note in notes_in(out))
        and reason in (out / "verdicts.md").read_text()
    )
    assert {row["removed"] for row in csv_rows(out / "fig8.csv")} == {"irrelevant"}
    assert make(out, "8") == (verdicts, 2, [])
    _, lost, ran = make(out, "8", rerun="failed")
    assert lost == 2 and [record.label for record in ran] == ["raises", "raises"]


def test_a_strategy_can_be_submitted_from_what_a_paper_is_reproduced_with(tmp_path, tiny):
    """A figure does not have all cells of a suite."""
    make(tmp_path / "out", "8")
    made = submit(tmp_path / "out", tmp_path / "to")
    assert (made.strategy, made.suite, made.wrong, made.records) == ("noise", "", False, 6)


@pytest.mark.parametrize(
    ("figures", "preset", "says"),
    [
        (("6",), "quick", "unknown figure.*'6'.*1a, 1b, 2, 3, 4, 5, 7, 8, neurons, rank"),
        (("4", "strategy"), "quick", "unknown figure.*did you mean 'strategies'"),
        ((), "quik", "unknown preset.*'quik'.*default, full, quick.*did you mean 'quick'"),
    ],
)
def test_an_unknown_figure_or_preset_is_refused_before_anything_is_written(tmp_path, figures, preset, says):
    with pytest.raises(UserError, match=says):
        reproduce(theory.PAPER, figures, preset, tmp_path / "out", Execution("cpu", jobs=0))
    assert not (tmp_path / "out").exists()


# ---- from records to files


def records_of(figure, repetitions=4, **metrics):
    """Return records of the trials of a figure of the quick suite, all with these metrics."""
    values = {"success": 1.0, "steps": 10.0, "iterations": 50.0, "test_loss": 0.1, "fitted": 1.0, "accuracy": 0.9,
              "worst_group_accuracy": 0.7, "spurious_gap": 0.1} | metrics  # fmt: skip
    return [
        Record(
            cell=job.cell, cell_id=job.cell.id, status="ok", origin=job.origin, kind=job.kind, label=job.label,
            metrics={name: Metric(value=value, unit="", n=1) for name, value in values.items()},
            samples={
                "watched_steps": (0.0, 10.0),
                "watched_attention_on_relevant": (0.55, 0.91 + 0.001 * job.cell.repetition),
                **{f"trained_singular_{name}": (2.0, 1.0, 0.1) for name in ("W_Q", "W_K", "W_V")},
                **{f"trained_loss_without_{what}": tuple(0.1 * i for i in range(10)) for what in ("short", "long")},
            },
        )
        for job in expand(Request(suite="theory-quick", figures=(figure,)), Registry())
        if job.cell.repetition < repetitions
    ]  # fmt: skip


def failed(record, kind="ValueError", status="failed"):
    failure = Failure(reason="it broke", kind=kind)
    return record.model_copy(update={"status": status, "metrics": {}, "samples": {}, "failure": failure})


def test_figures_and_verdicts_are_files(tmp_path):
    verdicts = publish(theory.PAPER, {"1a": records_of("1a"), "spurious": records_of("spurious")}, tmp_path)
    assert sorted(contents(tmp_path)) == [
        "fig1a-n50.csv", "fig1a.csv", "fig1a.pdf", "fig1a.png", "fig1a.svg",
        "spurious.csv", "spurious.pdf", "spurious.png", "spurious.svg",
        "verdicts.csv", "verdicts.json", "verdicts.md",
    ]  # fmt: skip
    assert [Verdict(**row) for row in csv_rows(tmp_path / "verdicts.csv")] == verdicts and len(verdicts) == 3
    notes = [f"figure {name}: 4 trials of each setting" for name in ("1a", "spurious")]
    written = {"verdicts": [asdict(verdict) for verdict in verdicts], "notes": notes}
    assert json.loads((tmp_path / "verdicts.json").read_text()) == written
    assert all(f"- {note}\n" in (tmp_path / "verdicts.md").read_text() for note in notes)
    assert {(row["N"], row["successes"]) for row in csv_rows(tmp_path / "fig1a.csv")} == {
        (str(n), "4") for n in (4, 8, 16, 32, 64)
    }


@pytest.mark.parametrize(
    ("lost", "fitted", "says"),
    [
        ({1: ("ValueError", "failed"), 2: ("OutOfMemory", "oom")}, 1.0, [
            "2 trials of each setting",
            "1 of 4 trials have no answer and are left out; failed: it broke",
            "1 of 4 trials have no answer and are left out; oom: it broke",
        ]),
        ({0: ("DivergedError", "failed"), 1: ("DivergedError", "failed")}, 0.0, [
            "4 trials of each setting",
            "2 of 4 trials diverged: they have not succeeded, and have no loss",
            "2 of 4 trials reached the step limit before they fitted their training samples",
        ]),
        ({r: ("ValueError", "failed") for r in range(4)}, 1.0, [
            "4 of 4 trials have no answer and are left out; failed: it broke",
        ]),
    ],
    ids=["some without an answer", "some diverged, others not fitted", "none with an answer"],
)  # fmt: skip
def test_notes_say_how_many_trials_there_are_and_why_some_are_not(tmp_path, lost, fitted, says):
    records = records_of("4", fitted=fitted)
    for r, (kind, status) in lost.items():
        records[r] = failed(records[r], kind, status)
    verdicts = publish(theory.PAPER, {"4": records}, tmp_path)
    assert notes_in(tmp_path) == [f"figure 4: {line}" for line in says]
    assert len(verdicts) == (0 if len(lost) == 4 else 2) and (tmp_path / "fig4.csv").exists() == bool(verdicts)


def test_notes_say_that_some_settings_have_fewer_trials(tmp_path):
    publish(theory.PAPER, {"2": records_of("2", repetitions=3)[1:]}, tmp_path)
    assert notes_in(tmp_path) == ["figure 2: 2 to 3 trials of each setting"]


# ---- expected time


@pytest.mark.parametrize(
    ("less", "more"),
    [
        ("", "n_train=16"), ("", "m=256"), ("", "tokens=100"), ("", "watch=5"), ("", "confusion=0.16"),
        ("steps=10", ""), ("n_train=10", "n_train=20"),
    ],
)  # fmt: skip
def test_a_larger_or_harder_trial_is_expected_to_take_longer(less, more):
    assert 0 < expected(less) < expected(more)


@pytest.mark.parametrize(("one", "other"), [("n_train=20", "n_train=500"), ("", "steps=5000")])
def test_more_samples_than_needed_make_nothing_longer(one, other):
    """More samples than a batch and more steps than it takes make nothing longer."""
    assert expected(one) == expected(other)


def expected(option):
    """Return the expected seconds of a trial with an option of the task, the model or the request."""
    name, _, value = option.partition("=")
    task = "theory" if name in ("", "m", "n_train") else f"theory:{option}"
    request = Request(
        tasks=(task,), model=f"shallow:m={value if name == 'm' else 64}", seeds=1,
        n_train=(int(value) if name == "n_train" else 8,),
    )  # fmt: skip
    return next(seconds(job) for job in expand(request, Registry()) if job.label == "dense")


# ---- the command

FIGURE = ["--preset", "quick", "--figure", "4", "--device", "cpu", "--jobs", "0"]


def call(*arguments):
    """Return the result of the command, called in this process."""
    return CliRunner().invoke(main, ["reproduce", "theory", *map(str, arguments)])


def fill(out, *lost):
    """Write the records of Figure 4 to a folder, as after a run; some repetitions have no result."""
    writer = store.Writer(out)
    for record in records_of("4"):
        writer.append(failed(record) if record.cell.repetition in lost else record)
    writer.close()
    return out


def refused(result, *says):
    """Assert that the exit code is 2, and one line on standard error contains these texts."""
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: ") and "Traceback" not in line
    for text in says:
        assert text in line


PAPERS = {one.name: one for one in (theory.PAPER, overfitting.PAPER, spatial.PAPER, images.PAPER, sparse_tokens.PAPER)}


def test_the_help_names_the_papers_with_their_figures_and_presets():
    result = CliRunner().invoke(main, ["reproduce", "--help"], terminal_width=300)
    words = " ".join(result.output.split())
    for name, paper in PAPERS.items():
        assert (
            f" {name} {paper.title} Presets: {', '.join(paper.presets)}. Figures: {', '.join(paper.figures)}." in words
        )


def test_a_paper_that_is_missing_or_not_there_is_one_line():
    refused(CliRunner().invoke(main, ["reproduce"]), "PAPER")
    refused(CliRunner().invoke(main, ["reproduce", "thery"]), "did you mean 'theory'", *PAPERS)


@pytest.mark.parametrize(("paper", "figure"), [("overfitting", "4"), ("spatial", "1"), ("sparse-tokens", "1")])
def test_a_figure_that_a_paper_does_not_have_is_refused(paper, figure):
    result = CliRunner().invoke(main, ["reproduce", paper, "--figure", figure])
    refused(result, f"'{figure}'", *PAPERS[paper].figures)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--figure", "6"], ["figure", "'6'", "1a", "strategies"]),
        (["--figure", "4", "--figure", "1c"], ["figure", "'1c'"]),
        (["--preset", "quik"], ["preset", "'quik'", "quick", "full"]),
        (["--rerun", "never"], ["--rerun", "'never'", "'missing'"]),
        (["--device", "foo"], ["--device", "'foo'", "auto, cpu, cuda"]),
        (["--jobs", "-1"], ["--jobs", "-1"]),
        (["--figures", "4"], ["--figures"]),
        (["4"], ["4"]),
    ],
    ids=lambda x: " ".join(x)[-40:],
)
def test_a_wrong_option_leaves_with_2_and_one_line(tmp_path, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)
    refused(call("--out", "out", *arguments), *says)
    assert not list(tmp_path.iterdir())


def test_an_unwritable_folder_exits_with_2_before_any_trial(tmp_path):
    """A folder that cannot be written leaves with 2 before anything runs."""
    (tmp_path / "file").write_bytes(b"")
    refused(call(*FIGURE, "--out", tmp_path / "file" / "out"), "cannot write to", "--out")


def test_what_is_complete_is_drawn_again_and_its_verdicts_printed(tmp_path):
    records = store.read(fill(tmp_path))
    result = call(*FIGURE, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines[:2] == ["4 attention concentrates on relevant tokens reproduced", "4 it tends to 1 partly"]
    assert {line.split()[0] for line in lines[2:]} == {"rank", "neurons"}  # from the same trials
    assert "all 4 cells are in the store" in result.stderr and f"written: {tmp_path}/verdicts.md" in result.stderr
    assert {"fig4.png", "rank.svg", "neurons.pdf"} <= {path.name for path in tmp_path.iterdir()}
    assert store.read(tmp_path) == records


def test_trials_without_an_answer_leave_1_and_where_to_read_why(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = fill(tmp_path / "sparsebench-theory-quick", 1, 3)  # the default folder
    result = call(*FIGURE)
    assert result.exit_code == 1 and "Traceback" not in result.output
    assert "attention concentrates" in result.stdout  # the others are judged
    assert "2 trials have no answer, see the notes in verdicts.md" in result.stderr
    assert "2 of 4 trials have no answer and are left out; failed: it broke" in (out / "verdicts.md").read_text()


@pytest.mark.integration
def test_help_imports_nothing_large_and_drawing_again_no_torch(tmp_path):
    code = f"""
import sys
from sparsebench.cli import main
from sparsebench.paper import Result
Result.pictures = lambda result: {{'png': b''}}  # rendering takes seconds
large = {{'torch', 'timm', 'torchvision', 'numba', 'matplotlib'}}
papers = "overfitting", "spatial", "images", "sparse-tokens"
draw = {["theory", *FIGURE, "--out", str(fill(tmp_path))]!r}
for given in [*([paper, "--help"] for paper in papers), draw]:
    try:
        main(["reproduce", *given])
    except SystemExit as leave:
        assert not leave.code, (given, leave.code)
    imported = large & set(sys.modules)
    assert imported <= ({{'matplotlib'}} if given is draw else set()), (given, imported)
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "fig4.png").exists()


def test_it_can_be_said_how_often_a_training_is_saved(tmp_path, monkeypatch):
    given, out = [], fill(tmp_path)
    monkeypatch.setattr(runs, "carry_out", lambda plan, execution, *_: given.append(execution.checkpoint))
    for extra in ([], ["--checkpoint", "7"]):
        assert call(*FIGURE, *extra, "--out", out).exit_code == 0
    assert given == [60, 7]


def test_a_dry_run_says_what_there_is_to_do_and_writes_nothing(tmp_path):
    result = call(*FIGURE, "--dry-run", "--shard", "0/1", "--out", tmp_path / "out")
    assert result.exit_code == 0 and result.stdout.startswith("4 of 4 cells to run\n"), result.output
    refused(call(*FIGURE, "--dry-run", "--shard", "1/1", "--out", tmp_path / "out"), "--shard", "'1/1'")
    refused(call(*FIGURE, "--dask", "x", "--out", tmp_path / "out"), "leave --jobs out")
    assert not list(tmp_path.iterdir())


def test_a_paper_whose_name_has_two_words_is_made(tmp_path):
    line = ["reproduce", "sparse-tokens", "--preset", "quick", "--dry-run", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(main, line)
    assert result.exit_code == 0 and "cells to run" in result.stdout, result.output
