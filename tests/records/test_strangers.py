"""Folders of strangers: what is no plain file, or no record, is left out, and nothing hangs or is read elsewhere."""

import base64
import hashlib
import json
import logging
import os
import shutil
import signal
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flats import rows_in

from sparsebench.board import gather
from sparsebench.board.budget_table import text as render
from sparsebench.engine import underway
from sparsebench.errors import UserError
from sparsebench.publish.submit import submit
from sparsebench.records import export, manifests, store
from sparsebench.records.cell import canonical, digest
from sparsebench.records.record import Outcomes, Record, pack
from sparsebench.records.store import merge

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "store"
FOLDERS = ("records", "environments", "strategies", "suites", "checks", "metrics", "underway")
Make = Callable[..., Record]


@pytest.fixture(autouse=True)
def ends() -> Iterator[None]:
    """End a test that waits for a pipe: an alarm is an error there."""

    def end(*_: object) -> None:
        pytest.fail("it waits")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def folder(tmp_path: Path, make_record: Make) -> Path:
    """Return a folder with a record and an empty folder of each kind."""
    for name in FOLDERS:
        (tmp_path / "run" / name).mkdir(parents=True)
    writer = store.Writer(tmp_path / "run")
    writer.append(make_record())
    writer.close()
    return tmp_path / "run"


def add(folder: Path, *changes: Callable[[dict[str, Any]], object], line: Callable[[str], str] = str) -> None:
    """Add records like the first, each changed, with the hashes that their cells have then."""
    (first,) = store.segments(folder)
    lines = []
    for number, change in enumerate(changes, 1):
        raw = json.loads(first.read_bytes())
        raw["cell"]["repetition"] = number
        change(raw)
        raw["cell_id"] = digest(raw["cell"])
        lines.append(line(canonical(raw)) + "\n")
    (folder / "records" / "zz.jsonl").write_text("".join(lines), encoding="utf-8")


def read_all(folder: Path, out: Path) -> int:
    """Read a folder in all ways, and return how many records it has."""
    out.mkdir()
    board = gather.gather(folder)
    for form in ("table", "md", "csv", "json", "latex"):
        render(board.rows, board.budgets, form, board.notes)
    for form in export.FORMATS:
        with (out / form).open("wb") as file:
            export.write(folder, form, file)
    underway.underway(folder)
    return merge([folder], out / "merged")


ZEROS = base64.b64encode(zlib.compress(bytes(10**6), 9)).decode()


def packed(n: int = 4) -> dict[str, Any]:
    few = pack(np.arange(n))
    return Outcomes(
        n=n, predicted=few, label=few, group=few, rank=few, foreground=""
    ).model_dump()  # fmt: skip


CORRUPT: dict[str, Callable[[dict[str, Any]], object]] = {
    "base64": lambda raw: raw.update(outcomes=packed() | {"predicted": "%%%"}),
    "no labels": lambda raw: raw.update(outcomes=packed() | {"label": ""}),
    "a letter too few": lambda raw: raw.update(outcomes=packed() | {"label": "abc"}),
    "zlib": lambda raw: raw.update(outcomes=packed() | {"group": base64.b64encode(b"x" * 20).decode()}),
    "n": lambda raw: raw.update(outcomes=packed() | {"n": 5}),
    "negative n": lambda raw: raw.update(outcomes=packed() | {"n": -1}),
    "much": lambda raw: raw.update(
        outcomes=packed() | dict.fromkeys(("predicted", "label"), ZEROS)
        | {"n": 500_000}
    ),
    "2^63": lambda raw: raw["cell"].update(n_train=2**63),
    "2^63 in a parameter": lambda raw: raw["cell"]["task"]["params"].update(tokens=2**63),
    "2^63 in a metric": lambda raw: raw["metrics"]["accuracy"].update(n=-(2**63)),
    "a number whose square is none": lambda raw: raw["metrics"]["accuracy"].update(value=1e308),
    "another kind": lambda raw: raw.update(kind="<b>"),
    "a machine elsewhere": lambda raw: raw.update(environment="../../secret"),
    "many metrics": lambda raw: raw.update(metrics=dict.fromkeys(map(str, range(20_000)), raw["metrics"]["accuracy"])),
}  # fmt: skip


@pytest.mark.parametrize("name", CORRUPT)
def test_what_cannot_be_read_is_an_unreadable_line_said_once(
    folder: Path, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "secret.json").write_text('{"processor": "secret"}')
    add(folder, CORRUPT[name], lambda raw: None)
    with caplog.at_level(logging.WARNING):
        assert len(store.read(folder)) == 2
    assert caplog.text.count("zz.jsonl line 1 is left out") == 1
    assert read_all(folder, tmp_path / "out") == 2


@pytest.mark.parametrize("spelling", ["1e400", "-1e999", "NaN", '"\\ud800"', "9" * 400])
@pytest.mark.parametrize("where", ['"value":0.5', '"tokens":20', '"label":"mine"'])
def test_what_no_writer_spells_is_an_unreadable_line(folder: Path, tmp_path: Path, spelling: str, where: str) -> None:
    key = where.partition(":")[0]
    (first,) = store.segments(folder)
    line = first.read_text().replace(where, f"{key}:{spelling}").replace('"repetition":0', '"repetition":7')
    cell = line[len('{"cell":') : line.index(',"cell_id"')]
    old = json.loads(first.read_bytes())["cell_id"]
    new = hashlib.sha256(cell.encode()).hexdigest()[:16]
    (folder / "records" / "zz.jsonl").write_text(line.replace(old, new))
    assert read_all(folder, tmp_path / "out") == 1


def test_lines_that_are_many_are_counted_and_a_line_that_is_endless_ends_a_segment(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "records" / "zz.jsonl").write_bytes(b"1\n" * 1000 + b"x" * 5_000_000 + b"\n")
    assert len(store.read(folder)) == 1
    assert len(caplog.records) < 10 and "995 more lines are left out" in caplog.text and "too long" in caplog.text


def test_a_metric_cannot_take_the_place_of_what_a_record_is_about(folder: Path, tmp_path: Path) -> None:
    one = {"value": 0.5, "unit": "fraction", "n": 1, "low": None, "high": None, "method": ""}
    add(folder, lambda raw: raw["metrics"].update(dict.fromkeys(("strategy", "setting", "checks", "segment"), one)))
    assert read_all(folder, tmp_path / "out") == 2
    assert {row["strategy"] for row in rows_in(folder)} == {"mine"}


@pytest.mark.parametrize("text", ["=cmd|' /C calc'!A0", "@x(1)", "\r=1", "a\nb", "\x1b[2J", "\u202ex", "<img src=x>"])
def test_texts_of_records_do_nothing_in_tables(folder: Path, tmp_path: Path, text: str) -> None:
    def change(raw: dict[str, Any]) -> None:
        raw.update(label=text, device=text, notes={"inactive": f"{text}: {text}"})
        raw["cell"]["task"]["name"] = raw["cell"]["strategy"]["name"] = text
        raw["metrics"][f"accuracy: {text}"] = raw["metrics"]["accuracy"]

    def fail(raw: dict[str, Any]) -> None:
        raw.update(status="failed", failure={"reason": text}, label=text)

    add(folder, change, fail)
    read_all(folder, tmp_path / "out")
    written = (tmp_path / "out" / "csv").read_bytes().decode()
    board = gather.gather(folder)
    tables = {form: render(board.rows, board.budgets, form, board.notes) for form in ("table", "md", "csv", "latex")}
    for made in (written, *tables.values(), (tmp_path / "out" / "jsonl").read_text()):
        assert all(c.isprintable() or c == "\n" for c in made)
    for made in (written, tables["csv"]):
        assert not [one for line in made.splitlines() for one in line.split(",") if one.lstrip('" ')[:1] in ("=", "@")]
    assert "<img" not in tables["md"].replace("\\<img", "")


@pytest.mark.parametrize("kind", ["pipe", "folder", "junk", "zero"])
def test_only_pictures_of_the_folder_itself_are_embedded(tmp_path: Path, kind: str) -> None:
    shutil.copytree(GOLDEN / "records", tmp_path / "run" / "records")
    path = tmp_path / "run" / "tokens.png"
    if kind == "zero":
        path.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.write_bytes(b"%!PS-Adobe private")
    assert "tokens" not in gather.gather(tmp_path / "run").pictures


@pytest.mark.parametrize("odd", ["../../x", "a/b", "..", "\x1b[31m"])
def test_a_submission_is_written_where_it_is_asked_for(folder: Path, tmp_path: Path, odd: str) -> None:
    def change(raw: dict[str, Any]) -> None:
        raw["cell"]["strategy"]["name"] = raw["label"] = odd
        raw["origin"]["revision"] = "b" * 64

    add(folder, change)
    (first, _) = store.segments(folder)
    first.unlink()
    (record,) = store.read(folder).values()
    about = {"name": odd, "revision": "b" * 64, "kind": "deployable", "site": "input", "trained": False,
             "adaptive": False, "citation": "", "bibtex": "", "how": ""}  # fmt: skip
    store.keep(folder / "strategies", about)
    store.keep(folder / "suites", {"name": "x", "version": 1, "settings": [manifests.setting_of(record.cell)]})
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match="name of a folder"):
        submit(folder, tmp_path / "to" / "deep")
    assert sorted(tmp_path.rglob("*")) == before


def test_parameters_that_tell_settings_apart_are_plain_too(folder: Path) -> None:
    add(folder, lambda raw: raw["cell"]["task"]["params"].update(watch="\x1b[2J=\r"), lambda raw: None)
    rows = gather.gather(folder).by_task
    assert len({row["task"] for row in rows}) == 2 and all(row["task"].isprintable() for row in rows)
