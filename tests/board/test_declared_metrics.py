"""A metric that a plugin's task declares: from the plugin file to the boards, and errors in it."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner, Result

import sparsebench
from sparsebench.board import reading
from sparsebench.board.board import gather
from sparsebench.board.published import page as render
from sparsebench.cli import main
from sparsebench.measure.metrics import kind_of
from sparsebench.records import manifests, store

pytestmark = pytest.mark.usefixtures("no_picture", "timed_once")

STRIPES = Path(__file__).resolve().parents[1] / "plugins" / "stripes.py"
MEANING = "hesitation, sd: spread of the losses of the test pictures, in loss."


def call(*arguments: object) -> Result:
    return CliRunner().invoke(main, list(map(str, arguments)))


def run(plugin: Path, out: Path, *more: object) -> Result:
    return call(
        "run", "--plugin", plugin, "--task", "stripes", "--model", "vit:dim=16,depth=2,heads=2", "--n-train", 20,
        "--out", out, "--jobs", 0, *more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the folder of a run of stripes, and its table with every column; do not write to the folder."""
    out = tmp_path_factory.mktemp("finished")
    done = run(STRIPES, out, "--seeds", 2, "--wide")
    assert done.exit_code == 0, done.output
    return out, done.stdout


@pytest.fixture(scope="module")
def expected(finished: tuple[Path, str]) -> dict[str, float]:
    """Return the mean of the records' metric over seeds, by strategy."""
    values: dict[str, list[float]] = {}
    for record in store.read(finished[0]).values():
        metric = record.metrics["hesitation"]
        assert (metric.unit, metric.n) == ("loss", 20) and metric.value is not None and record.outcomes is not None
        values.setdefault(record.label, []).append(metric.value)
    assert all(len(seeds) == 2 and seeds[0] != seeds[1] for seeds in values.values())
    return {strategy: float(np.mean(seeds)) for strategy, seeds in values.items()}


def test_boards_have_a_column_of_it(finished: tuple[Path, str], expected: dict[str, float]) -> None:
    out, _ = finished
    with (out / "leaderboard.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0])[-1] == "hesitation"
    assert {row["strategy"]: float(row["hesitation"]) for row in rows} == pytest.approx(expected)
    rows = json.loads((out / "leaderboard.json").read_bytes())
    assert {row["strategy"]: row["hesitation"] for row in rows} == pytest.approx(expected)
    for by in (None, "task"):
        table = sparsebench.leaderboard(sparsebench.load_records(out), by=by)
        assert dict(zip(table["strategy"], table["hesitation"], strict=True)) == pytest.approx(expected)


@pytest.mark.parametrize("form", ["parquet", "feather", "pickle"])
def test_a_table_of_records_that_pandas_wrote_gives_the_same_board(
    finished: tuple[Path, str], tmp_path: Path, form: str
) -> None:
    records = sparsebench.load_records(finished[0])
    getattr(records, f"to_{form}")(tmp_path / "records")
    again = getattr(pd, f"read_{form}")(tmp_path / "records")
    now, before = sparsebench.leaderboard(again), sparsebench.leaderboard(records)
    pd.testing.assert_frame_equal(now, before, check_dtype=False)
    assert now.attrs == before.attrs and "hesitation" in now


def test_a_metric_taken_over_seeds_has_a_column(finished: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Boards have a column of a metric of sparsebench that is taken over seeds."""
    kind = replace(kind_of("epochs"), over_seeds="mean")
    monkeypatch.setattr(reading, "WITH_COLUMN", (*reading.WITH_COLUMN, kind))
    monkeypatch.setattr(reading, "METRICS", (*reading.METRICS, kind.name))
    assert set(sparsebench.leaderboard(finished[0])["epochs"]) == {1.0}


def test_people_see_its_title_and_its_meaning(finished: tuple[Path, str], expected: dict[str, float]) -> None:
    out, wide = finished
    assert "hesitation, sd" in wide and MEANING in wide
    assert all(f"{value:.3g}" in wide for value in expected.values())
    assert MEANING in (out / "leaderboard.md").read_text()
    again = call("leaderboard", out, "--wide", "--by", "task").stdout
    assert "hesitation, sd" in again.splitlines()[0] and MEANING in again
    page = render(gather(out)).decode()
    assert "hesitation, sd" in page and "spread of the losses of the test pictures, in loss" in page
    assert "hesitation" in call("leaderboard", out, "--format", "latex").stdout


def test_what_a_folder_says_of_metrics_is_checked(
    finished: tuple[Path, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "metrics"
    folder.mkdir()
    (text,) = store.sidecars(finished[0], "metrics").values()
    about = json.loads(text)
    wrong = [b"[", b"[]", b"7", *(json.dumps(about | more).encode() for more in (
        {"name": "rank"}, {"unit": ""}, {"what": 7}, {"over_seeds": "sum"}, {"title": None}))]  # fmt: skip
    for number, content in enumerate(wrong):
        (folder / f"{number}.json").write_bytes(content)
    (folder / "right.json").write_text(text)
    assert manifests.metrics(tmp_path) == manifests.metrics(finished[0])
    assert len([line for line in caplog.messages if "is left out" in line]) == len(wrong)


def changed(folder: Path, old: str, new: str) -> Path:
    """Return the plugin with `old` replaced by `new`."""
    text = STRIPES.read_text()
    assert old in text
    path = folder / "stripes.py"
    path.write_text(text.replace(old, new))
    return path


UNDECLARED = (
    "task 'stripes' returns a metric that it does not declare; got 'doubt'; allowed: hesitation; "
    "add it to the task's `metrics`"
)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('"hesitation", "loss"', '"kept_accuracy_low", "loss"', "'kept_accuracy_low' is the name of a column"),
        ('"hesitation", "loss"', '"accuracy", "loss"', "there is another metric 'accuracy', which is not the same"),
        (
            '"hesitation", "loss"',
            '"accuracy_high", "loss"',
            "there is another metric 'accuracy', which is not the same",
        ),
        ("def measure(", "def other(", "task 'stripes' declares metrics, and nothing gives their values"),
        ("metrics: ClassVar", "metrics: ClassVar = (7,)\n    others: ClassVar", "metrics of a task; got 7; allowed: "),
        (
            "def known_classes(",
            "def recipe(self):\n        return {'lr': 1}\n\n    def known_classes(",
            "`recipe` of task 'stripes' must return a sparsebench.Recipe; got {'lr': 1}",
        ),
    ],
)
def test_a_task_that_cannot_be_used_is_refused_in_one_line(tmp_path: Path, old: str, new: str, reason: str) -> None:
    done = run(changed(tmp_path, old, new), tmp_path / "out")
    assert done.exit_code == 2 and reason in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('return {"hesitation"', 'return {"doubt"', UNDECLARED),
        ("    def measure(", "    def successes(self, test_loss, accuracy):\n"
         '        return {"doubt": True}\n\n    def measure(', UNDECLARED),
        ("items.losses.std()", "float('inf')",
         "metric 'hesitation' of task 'stripes'; got inf; allowed: a finite number, or NaN"),
        ("items.losses.std()", "'high'",
         "metric 'hesitation' of task 'stripes'; got 'high'; allowed: a finite number, or NaN"),
    ],
    ids=["measure", "successes", "infinite", "no number"],
)  # fmt: skip
def test_a_metric_that_cannot_be_fails_the_cell_in_one_line(tmp_path: Path, old: str, new: str, reason: str) -> None:
    done = run(changed(tmp_path, old, new), tmp_path / "out", "--seeds", 1)
    assert done.exit_code == 1
    for record in store.read(tmp_path / "out").values():
        assert record.failure is not None and record.failure.traceback == ""
        assert record.failure.reason == reason
