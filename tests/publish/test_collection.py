"""The board of all submissions: whose rows it has, what says who reported them, and what is ranked with what."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
from pathlib import Path

import forge
import pytest
from commands import call
from forge import PLUGIN, changed, put, worsen
from running import run_without_board

from sparsebench.publish.about import About
from sparsebench.publish.submission import manifest_of, submit, write_manifest

pytestmark = pytest.mark.usefixtures("no_picture", "timed_once")

HOSTILE = '<img src=x onerror=alert(1)>|[x](https://bad.example)`$\\alert{1}$=1+1"&'
FIRST = About(
    authors=("Ada | One", HOSTILE), affiliation=HOSTILE[:90], paper="https://a.example/paper", note="=1+1;" + HOSTILE
)
SECOND = About(authors=("Bo Two",), code="https://b.example/code", licence="MIT")


def rows_of(folder: Path, *words: str) -> list[dict[str, str]]:
    made = call("leaderboard", folder, "--format", "json", *words)
    assert made.exit_code == 0, made.output
    return list(json.loads(made.stdout))


@pytest.fixture(scope="module")
def place(out: Path, suite: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a board of maintainers, and the submissions of two groups; do not write to it."""
    root = tmp_path_factory.mktemp("boards")
    run_without_board("value_norm", suite=str(suite), out=root / "tiny")
    assert call("leaderboard", root / "tiny", "--update").exit_code == 0
    submit(out, root / "submissions", about=FIRST)
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    plugin = elsewhere / "theirs.py"
    plugin.write_text(PLUGIN.read_text().replace('"norm"', '"theirs"').replace("(1 if", "(-1 if"))
    run_without_board(str(plugin), suite=str(suite), out=elsewhere / "run")
    submit(elsewhere / "run", root / "submissions", about=SECOND)
    return root


def test_rows_of_all_groups_and_of_the_maintainers_are_ranked_together(place: Path) -> None:
    rows = {row["strategy"]: row for row in rows_of(place / "submissions")}
    assert rows.keys() == {"norm", "theirs", "value_norm", "dense", "random", "oracle"}
    assert {name: row["badge"] for name, row in rows.items() if row["badge"]} == dict.fromkeys(
        ("norm", "theirs"), "reported"
    )
    assert rows["value_norm"]["authors"] == rows["dense"]["authors"] == "maintainers"
    assert rows["norm"]["paper"] == FIRST.paper and rows["theirs"]["code"] == SECOND.code
    assert rows["theirs"]["authors"] == "Bo Two" and rows["norm"]["authors"].startswith("Ada | One, ")
    assert all(rows[name]["date"] for name in ("norm", "theirs"))
    assert all(row["rank"] != "not ranked" for name, row in rows.items() if name != "oracle")
    alone = {row["strategy"]: row for row in rows_of(place / "tiny")}
    for name in alone.keys() - {"oracle"}:
        assert rows[name]["accuracy"] == alone[name]["accuracy"]
        assert rows[name]["accuracy_delta"] == alone[name]["accuracy_delta"]


def copied(place: Path, to: Path) -> Path:
    return Path(shutil.copytree(place, to / "copy")) / "submissions"


def folder_of(submissions: Path, strategy: str) -> Path:
    (folder,) = (submissions / strategy).iterdir()
    return folder


def test_another_dense_network_is_not_ranked_with_the_others(place: Path, tmp_path: Path) -> None:
    """Its rows have the differences to its own dense network, and no rank."""
    submissions = copied(place, tmp_path)
    theirs = folder_of(submissions, "theirs")
    spurious = [row for row in rows_of(theirs, "--by", "task") if row["task"] == "spurious"]
    (before,) = [row for row in spurious if row["strategy"] == "theirs"]

    def wrong_on_spurious(raw: forge.Raw) -> None:
        if raw["cell"]["task"]["name"] == "spurious":
            worsen(raw)

    forged = changed(theirs, tmp_path / "forged", wrong_on_spurious, "dense")
    shutil.rmtree(theirs)
    shutil.move(forged, theirs)
    rows = [row for row in rows_of(submissions, "--by", "task") if row["task"] == "spurious"]
    (one,) = [row for row in rows if row["strategy"] == "theirs"]
    assert one["rank"] == "not ranked" and one["accuracy"] == before["accuracy"]
    assert one["accuracy_delta"] == one["accuracy"] > before["accuracy_delta"]  # its dense is always wrong
    (other,) = [row for row in rows if row["strategy"] == "norm"]
    assert other["rank"] != "not ranked" and other["suite"] != one["suite"]
    assert "theirs" in call("leaderboard", submissions).stdout


def test_two_groups_may_submit_the_same_name(place: Path, tmp_path: Path) -> None:
    submissions = copied(place, tmp_path)
    text = PLUGIN.read_text().replace("(1 if", "(-2 if")
    run = forge.sourced(folder_of(submissions, "norm"), tmp_path / "other", text)
    write_manifest(run, manifest_of(run).model_copy(update={"about": SECOND}))
    shutil.move(run, submissions / "norm")
    names = {row["strategy"]: row["authors"] for row in rows_of(submissions) if "norm" in row["strategy"]}
    del names["value_norm"]
    assert len(names) == 2 and "Bo Two" in names.values() and all(name.startswith("norm by ") for name in names)
    assert {row["strategy"] for row in rows_of(submissions, "--strategies", "norm")} == {"dense", *names}


def test_what_is_replaced_withdrawn_or_rejected_has_no_rows_and_is_named(place: Path, tmp_path: Path) -> None:
    submissions = copied(place, tmp_path)
    norm, theirs = folder_of(submissions, "norm"), folder_of(submissions, "theirs")
    newer = forge.sourced(norm, tmp_path / "newer", PLUGIN.read_text().replace("(1 if", "(-2 if"))
    newer = Path(shutil.move(newer, submissions / "norm"))
    about = manifest_of(newer).model_copy(update={"replaces": norm.name})
    write_manifest(newer, about)
    assert call("withdraw", theirs, "--reason", f"a wrong | seed {HOSTILE}").exit_code == 0
    shutil.copytree(newer, submissions / "norm" / "elsewhere")
    made = call("leaderboard", submissions, "--format", "json")
    assert [row["strategy"] for row in json.loads(made.stdout)].count("norm") == 1
    assert f"norm/{norm.name}" in made.stderr and f"replaced by {newer.name}" in made.stderr
    assert "withdrawn on " in made.stderr and "a wrong | seed" in made.stderr
    assert "norm/elsewhere" in made.stderr and "rejected: " in made.stderr
    assert norm.is_dir() and theirs.is_dir()
    verified = call("verify", theirs)
    assert verified.exit_code == 0 and "withdrawn on " in verified.stdout and "a wrong | seed" in verified.stdout
    # A stranger replaces nothing.
    write_manifest(newer, about.model_copy(update={"about": SECOND}))
    assert call("verify", newer).exit_code == 1
    rows = rows_of(submissions)
    assert [row["strategy"] for row in rows].count("norm") == 1 and f"{FIRST.paper}" in {row["paper"] for row in rows}


@pytest.mark.parametrize("kind", ["link", "folder", "pipe", "large", "no JSON"])
def test_what_is_no_withdrawal_is_named_and_not_opened(few: Path, tmp_path: Path, kind: str) -> None:
    folder = Path(shutil.copytree(few, tmp_path / few.parent.name / few.name))
    path, secret = folder / "withdrawn.json", tmp_path / "secret"
    secret.write_text('{"date": "2026-01-01", "reason": "a secret"}')
    if kind == "link":
        path.symlink_to(secret)
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.write_text("{" * 20_000 if kind == "large" else "{")
    verified = call("verify", folder)
    assert "withdrawn.json cannot be read: " in verified.stdout and "secret" not in verified.stdout
    assert ": :" not in verified.stdout and "withdrawn on" not in verified.stdout


def test_a_version_of_a_suite_that_is_not_current_is_marked(place: Path, tmp_path: Path) -> None:
    submissions = copied(place, tmp_path)
    folder = folder_of(submissions, "theirs")
    path = folder / "records" / "records.parquet"
    texts = {name: text.replace('"tiny"', '"quick"') for name, text in forge.table.sidecars(path).items()}
    forge.table.write(path, forge.table.read(path), texts)
    forge.said(folder)
    shutil.move(folder, folder.with_name(folder.name.replace("tiny", "quick")))
    suites = {row["strategy"]: row["suite"] for row in rows_of(submissions)}
    assert "retired" in suites["theirs"] and "retired" not in suites["norm"]


@pytest.fixture(scope="module")
def hostile(few_out: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of one small submission by an author of hostile texts; do not write to it."""
    submissions = tmp_path_factory.mktemp("hostile") / "submissions"
    submit(few_out, submissions, about=FIRST)
    return submissions


@pytest.mark.parametrize("form", ["table", "md", "latex", "html", "csv"])
def test_hostile_texts_stay_texts(place: Path, hostile: Path, tmp_path: Path, form: str) -> None:
    file = tmp_path / "board"
    # Markdown is tested beside rows of the maintainers and of another submission.
    folder = place / "submissions" if form == "md" else hostile
    made = call("leaderboard", folder, "--format", form, "--wide", "-o", file)
    assert made.exit_code == 0, made.output
    text = file.read_text("utf-8")
    assert "Ada" in text
    if form == "html":
        assert "<img src=x" not in text
    if form == "md":
        assert "<img" not in text.replace("\\<img", "") and "](https://bad" not in text.replace("\\](", "")
        assert f"[paper]({FIRST.paper})" in text
        table = [line for line in text.splitlines() if line.startswith("|") and "Ada" in line]
        assert table and len({line.replace("\\|", "").count("|") for line in table}) == 1
    if form == "latex":
        assert "\\alert{" not in text
    if form == "csv":
        cells = [cell for row in csv.reader(io.StringIO(text)) for cell in row]
        assert any(HOSTILE[:20] in cell for cell in cells) and not any(cell.startswith("=") for cell in cells)


def test_options_of_a_single_board_are_refused(place: Path) -> None:
    for words in (["--check"], ["--update"], ["--view", "pairs"]):
        made = call("leaderboard", place / "submissions", *words)
        assert made.exit_code == 2 and made.stderr.count("\n") == 1


def test_forged_submissions_have_no_rows(place: Path, tmp_path: Path) -> None:
    submissions = copied(place, tmp_path)
    theirs = folder_of(submissions, "theirs")
    forged = changed(theirs, tmp_path / "forged", put(0.999, "metrics", "accuracy", "value"), "theirs")
    shutil.rmtree(theirs)
    shutil.move(forged, theirs)
    assert "theirs" not in {row["strategy"] for row in rows_of(submissions)}
