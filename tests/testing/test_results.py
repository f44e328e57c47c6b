"""`sparsebench check --results`: the checked strategies of a results folder, the stored reports, and the board."""

import csv
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import call
from measured import TINY
from samples import SAMPLES

from sparsebench import UserError, api
from sparsebench.records import reports
from sparsebench.records.record import Origin
from sparsebench.testing import Report, process

pytestmark = pytest.mark.usefixtures("no_picture", "timed_once")

SMALL = ["--suite", TINY, "--n-train", "4", "--seeds", "1", "--jobs", "0"]


def badges_of(folder):
    """Return the column `checks` of the folder's board by strategy; values are None without the column."""
    with (folder / "leaderboard.csv").open(newline="") as file:
        return {row["strategy"]: row.get("checks") for row in csv.DictReader(file)}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a folder with the run of a plugin file, with two values of its parameter, and of an installed strategy."""
    root = tmp_path_factory.mktemp("made")
    file = root / "own.py"
    file.write_text((SAMPLES / "good.py").read_text())
    done = call("run", *SMALL, "--plugin", f"{file}:largest=true,false", "--plugin", "noise", "--out", root / "out")
    assert done.exit_code == 0, done.output
    return root


@pytest.fixture
def folder(made, tmp_path):
    """Return a copy of the run's folder beside the plugin file, which a test may change."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return tmp_path / "out"


@pytest.fixture
def checked(monkeypatch):
    """Record the requested checks instead of running them in processes; reports have no outcomes."""
    calls = []

    def check(target, limit, part=None):
        calls.append((Path(target).name, None if part is None else (part.name, part.params)))
        name, params = (Path(target).stem, {}) if part is None else (part.name, part.params)
        return [Report(strategy=name, params=params, origin=Origin(plugin=name), outcomes=())]

    monkeypatch.setattr(process, "check", check)
    monkeypatch.setattr(api, "refresh", lambda out: False)
    return calls


NORMS = [("norm", {"disposal": "drop", "largest": largest}) for largest in (True, False)]


@pytest.mark.slow
def test_a_whole_check_puts_badges_on_the_board(folder):
    file = folder.parent / "own.py"
    assert set(badges_of(folder).values()) == {None}
    line = [sys.executable, "-W", "error", "-m", "sparsebench", "check", file, "--results", folder]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "same_seed_same_bits" in done.stdout and done.stderr.endswith(
        f"written: {folder}/leaderboard.md, .csv, .json, .png, .html\n"
    )
    badges = badges_of(folder)
    assert badges["norm"] == badges["norm(largest=False)"] == "passes" and badges["noise"] == "unchecked"
    names = [f"leaderboard.{form}" for form in ("md", "csv", "json", "html")]  # pictures are empty in this process
    before = [(folder / name).read_bytes() for name in names]
    assert call("run", *SMALL, "--plugin", f"{file}:largest=true,false", "--plugin", "noise", "--out", folder)
    assert before == [(folder / name).read_bytes() for name in names]
    file.write_text(file.read_text() + "\nCHANGED = True\n")
    call("run", *SMALL, "--plugin", f"{file}:largest=true", "--out", folder)
    assert badges_of(folder)["norm"] == "unchecked (changed since)"
    assert "another revision was checked" in (folder / "leaderboard.md").read_text()


def test_without_a_name_all_installed_strategies_are_checked(folder, checked):
    """Without a name all installed strategies are checked and files are named."""
    done = call("check", "--results", folder)
    assert done.exit_code == 1
    assert [name for name, _ in checked] == ["anti_oracle", "dense", "noise", "oracle", "random"]
    assert "not checked: norm: it comes from the file own.py; name the file" in done.stderr
    assert len(reports.read(folder)) == 5
    assert dict(checked)["random"] == ("random", {"cell": 2, "disposal": "drop", "stratified": False})


@pytest.mark.parametrize(("says", "parameters"), [("", NORMS), (":largest=false", [None])])
def test_a_file_is_checked_with_the_records_parameters(folder, checked, says, parameters):
    """A file is checked with the parameters of the records unless some are given."""
    assert call("check", f"{folder.parent / 'own.py'}{says}", "--results", folder).exit_code == 0
    assert [value for _, value in checked] == parameters


def test_a_name_is_checked_with_the_parameters_of_its_records(folder, checked):
    call("check", "noise", "tome", SAMPLES / "good.py", SAMPLES / "prints.py", "--results", folder)
    assert [value for _, value in checked] == [("noise", {"by": "sigma", "disposal": "drop"}), None, *NORMS, None]


def test_a_missing_strategy_does_not_prevent_the_checks_of_others(folder, monkeypatch):
    def check(target, limit, part=None):
        if target == "noise":
            raise UserError("unknown strategy")
        return []

    monkeypatch.setattr(process, "check", check)
    done = call("check", "--results", folder)
    assert done.exit_code == 1 and "not checked: noise: unknown strategy\n" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [([], "name a strategy or a file"), (["--results", "nowhere"], "no records in nowhere")],
)
def test_a_command_that_names_nothing_to_check_is_one_line(arguments, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = call("check", *arguments)
    assert done.exit_code == 2 and says in done.stderr and len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
