"""Folders of records in which something is no record: damage of sealed files, odd lines and files, hostile texts."""

import base64
import hashlib
import json
import logging
import shutil
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result
from flats import filled, rows_in
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sparsebench.cli import main
from sparsebench.errors import UserError
from sparsebench.records import manifests, reports, store, table
from sparsebench.records.record import OLDEST, SCHEMA, Outcomes, Record, VersionError, bytes_of, canonical, digest

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "store"
Make = Callable[..., Record]
Raw = dict[str, Any]
COMMANDS = [["leaderboard", "OUT"], ["export", "OUT", "-o", "NEW"], ["merge", "OUT", "-o", "NEW"],
            ["run", "--out", "OUT", "--suite", "smoke"]]  # fmt: skip


def call(tmp_path: Path, *arguments: str) -> Result:
    places = {"OUT": str(tmp_path / "out"), "NEW": str(tmp_path / "new")}
    return CliRunner().invoke(main, [places.get(word, word) for word in arguments])


def changed(file: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    pq.write_table(change(pq.read_table(file)), file)


def flipped(file: Path) -> None:
    content, column = bytearray(file.read_bytes()), pq.ParquetFile(file).metadata.row_group(0).column(0)
    content[column.data_page_offset + column.total_compressed_size // 2] ^= 0xFF
    file.write_bytes(content)


def of_version(file: Path, **more: int) -> None:
    about = json.loads(pq.read_schema(file).metadata[table.ABOUT]) | more
    changed(file, lambda rows: rows.replace_schema_metadata({table.ABOUT: json.dumps(about)}))


def retyped(rows: pa.Table) -> pa.Table:
    return rows.set_column(rows.column_names.index("n_train"), "n_train", rows["n_train"].cast(pa.string()))


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut": (lambda file: file.write_bytes(file.read_bytes()[:-100]), "damaged"),
    "empty": (lambda file: file.write_bytes(b""), "damaged"),
    "a changed byte": (flipped, "damaged"),
    "no record's table": (lambda file: pq.write_table(pa.table({"a": [1]}), file), "damaged"),
    "a column less": (lambda file: changed(file, lambda rows: rows.drop_columns(["cell"])), "column 'cell'"),
    "a column of another type": (lambda file: changed(file, retyped), "column 'n_train'"),
    "a metric of another type": (
        lambda file: changed(file, lambda rows: rows.append_column("own", pa.array(["x"] * len(rows)))),
        "column 'own'",
    ),
    "another format": (lambda file: of_version(file, format=99), "upgrade sparsebench"),
    "a newer schema": (lambda file: of_version(file, schema_version=99), "upgrade sparsebench"),
    "an older format": (lambda file: of_version(file, format=0), "read it with the sparsebench that wrote it"),
}


@pytest.mark.parametrize(
    ("name", "arguments"),
    [*((name, COMMANDS[0]) for name in DAMAGE), *(("cut", arguments) for arguments in COMMANDS[1:])],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_a_damaged_file_is_one_line_and_nothing_is_written(tmp_path: Path, name: str, arguments: list[str]) -> None:
    shutil.copytree(GOLDEN / "records", tmp_path / "out" / "records")
    store.seal(tmp_path / "out")
    file, (damage, said) = store.sealed_files(tmp_path / "out")[0], DAMAGE[name]
    damage(file)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    result = call(tmp_path, *arguments)
    assert result.exit_code == 2 and result.stderr.count("\n") == 1, result.output
    assert said in result.stderr and str(file) in result.stderr
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_a_bit_that_changes_among_the_columns_changes_no_value(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "records", tmp_path / "out" / "records")
    store.seal(tmp_path / "out")
    file = store.sealed_files(tmp_path / "out")[0]
    content, whole = file.read_bytes(), table.read(file)
    columns = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    rng, refused = np.random.default_rng(0), 0
    for place in rng.integers(4, columns, 100):
        torn = bytearray(content)
        torn[place] ^= 1 << rng.integers(8)
        file.write_bytes(torn)
        try:
            assert table.read(file).equals(whole)
        except UserError:
            refused += 1
    assert refused > 50


@pytest.fixture
def out(tmp_path: Path, make_record: Make) -> Path:
    """Return a folder with a record, to whose segment `lines` are added."""
    return filled(tmp_path / "out", make_record())


def like_first(out: Path, *changes: Callable[[Raw], object]) -> list[bytes]:
    """Return lines like the first one, each changed, with the hashes that their cells have then."""
    lines = []
    for number, change in enumerate(changes, 1):
        raw = json.loads(store.segments(out)[0].read_bytes())
        raw["cell"]["repetition"], raw["cell_id"] = number, ""
        change(raw)
        lines.append(canonical(raw | {"cell_id": raw["cell_id"] or digest(raw["cell"])}).encode())
    return lines


def add(out: Path, *lines: bytes) -> Path:
    path = out / "records" / "zz.jsonl"
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def packed(**more: Any) -> Callable[[Raw], object]:
    few = bytes_of(np.arange(4))
    made = Outcomes(n=4, predicted=few, label=few, group=few, rank=few, foreground=b"")
    return lambda raw: raw.update(outcomes=made.model_dump(mode="json") | more)


ZEROS = base64.b64encode(zlib.compress(bytes(10**6), 9)).decode()
LINES: dict[str, bytes | Callable[[Raw], object]] = {
    "no JSON": b"{",
    "base64": packed(predicted="%%%"),
    "no labels": packed(label=""),
    "a letter too few": packed(label="abc"),
    "zlib": packed(group=base64.b64encode(b"x" * 20).decode()),
    "another n": packed(n=5),
    "negative n": packed(n=-1),
    "much": packed(n=500_000, predicted=ZEROS, label=ZEROS),
    "2^63": lambda raw: raw["cell"].update(n_train=2**63),
    "a list of outcomes": packed(predicted=[1]),
    "a number of outcomes": packed(rank=1),
    "a number whose square is none": lambda raw: raw["metrics"]["accuracy"].update(value=1e308),
    "another hash": lambda raw: raw.update(cell_id="0" * 16),
    "a field more": lambda raw: raw.update(extra=1),
    **{f"version {version!r}": (lambda raw, version=version: raw.update(schema_version=version))
       for version in ("new\n", 3.5)},
}  # fmt: skip


@pytest.mark.parametrize("name", LINES)
def test_an_odd_line_is_left_out(out: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    line = LINES[name]
    first, last = like_first(out, *[lambda raw: None] * 2)
    add(out, first, line if isinstance(line, bytes) else like_first(out, line)[0], last)
    with caplog.at_level(logging.WARNING):
        assert len(store.read(out)) == 3
    (message,) = caplog.messages
    assert "zz.jsonl line 2 is left out" in message and "\n" not in message


@pytest.mark.parametrize("spelling", ["1e400", "-1e999", "NaN", '"\\ud800"'])
@pytest.mark.parametrize("where", ['"value":0.5', '"canvas":20', '"label":"mine"'])
def test_what_no_writer_spells_is_left_out(out: Path, spelling: str, where: str) -> None:
    line = like_first(out, lambda raw: None)[0].decode().replace(where, f"{where.partition(':')[0]}:{spelling}")
    old, cell = json.loads(line)["cell_id"], line[len('{"cell":') : line.index(',"cell_id"')]
    add(out, line.replace(old, hashlib.sha256(cell.encode()).hexdigest()[:16]).encode())
    assert len(store.read(out)) == 1


def test_torn_and_many_odd_lines_are_left_out(out: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, last = like_first(out, *[lambda raw: None] * 2)
    for cut in (1, len(last) // 2, len(last)):
        caplog.clear()
        path = add(out, first)
        path.write_bytes(path.read_bytes() + last[:cut])
        assert len(store.read(out)) == 2
        (message,) = caplog.messages
        assert "zz.jsonl: line 2 is torn" in message
    add(out, first, *[b"1"] * 1000, b"x" * 5_000_000, last)
    caplog.clear()
    assert len(store.read(out)) == 3
    (message,) = caplog.messages
    assert "line 2 is left out" in message and "1000 more lines" in message


@pytest.mark.parametrize(("version", "said"), [(SCHEMA + 1, "upgrade sparsebench"), (OLDEST - 1, "that wrote it")])
@pytest.mark.parametrize("read", [store.read, store.summaries])
def test_a_record_of_another_version_is_refused(out: Path, read: Any, version: int, said: str) -> None:
    path = add(out, *like_first(out, lambda raw: None, lambda raw: raw.update(schema_version=version)))
    before = path.read_bytes()
    with pytest.raises(UserError, match=said) as caught:
        read(out)
    assert f"{path} line 2: " in str(caught.value) and path.read_bytes() == before


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda inner: st.lists(inner))


@settings(deadline=None, max_examples=40)
@given(data=st.data())
@example(data=b"")
@example(data=b"[" * 100_000)
@example(data=b'{"schema_version": ' + b"9" * 5000 + b"}")
@example(data=b'{"schema_version": 1, "cell": {"init": ' * 400 + b"1" + b"}}" * 400)
@example(data="{}".encode("utf-16"))
def test_a_changed_line_is_read_or_refused_in_one_line(make_record: Make, data: Any) -> None:
    """One of the values of a record is another, or some of its bytes."""
    line = data
    if not isinstance(line, bytes):
        raw = make_record().model_dump(mode="json")
        parts = [raw, raw["cell"], raw["cell"]["task"], raw["origin"], *raw["metrics"].values()]
        part = data.draw(st.sampled_from(parts))
        part[data.draw(st.sampled_from(sorted(part)))] = data.draw(JSON)
        line = json.dumps(raw).encode()
        start = data.draw(st.integers(0, len(line)))
        line = line[:start] + data.draw(st.binary(max_size=10)) + line[data.draw(st.integers(start, start + 10)) :]
    try:
        assert isinstance(store.parse(line), Record)
    except ValueError as error:
        assert len(str(error).splitlines()) == 1
    except VersionError:
        pass


READERS: dict[str, Callable[[Path], Any]] = {
    "environments": lambda out: manifests.environments(out, ["bad"]), "checks": reports.read,
    "strategies": manifests.strategies, "suites": manifests.suites, "metrics": manifests.metrics,
    "files": manifests.file_names,
}  # fmt: skip


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"name": "x", "schema_version": 1}', b"\xff", b"[" * 10**5])
@pytest.mark.parametrize("folder", READERS)
def test_an_odd_file_is_left_out(out: Path, folder: str, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    (out / folder).mkdir()
    (out / folder / "bad.json").write_bytes(content)
    found = READERS[folder](out)
    if folder == "environments" and found:  # which may say anything
        assert found == {"bad": {"name": "x", "schema_version": "1"}}
    else:
        (message,) = caplog.messages
        assert not found and "bad.json is left out" in message and "\n" not in message


def test_a_metric_cannot_take_the_place_of_what_a_record_is_about(out: Path, tmp_path: Path) -> None:
    one = {"value": 0.5, "unit": "fraction", "n": 1, "low": None, "high": None, "method": ""}
    more = dict.fromkeys(("strategy", "setting", "checks", "segment"), one)
    add(out, *like_first(out, lambda raw: raw["metrics"].update(more)))
    assert all(call(tmp_path, *arguments).exit_code == 0 for arguments in COMMANDS[:2])
    assert {row["strategy"] for row in rows_in(out)} == {"mine"}


HOSTILE = ["=cmd|' /C calc'!A0", "@x(1)", "\r=1", "a\nb", "\x1b[2J", "\u202ex", "<img src=x>"]


def test_texts_of_records_do_nothing_in_tables(out: Path, tmp_path: Path) -> None:
    def change(raw: Raw, text: str) -> None:
        raw.update(label=text, device=text, notes={"inactive": f"{text}: {text}"})
        raw["cell"]["task"]["name"] = raw["cell"]["strategy"]["name"] = raw["cell"]["task"]["params"]["watch"] = text
        raw["metrics"][f"accuracy: {text}"] = raw["metrics"]["accuracy"]

    def fail(raw: Raw, text: str) -> None:
        raw.update(status="failed", failure={"reason": text}, label=text)

    add(out, *like_first(out, *(partial(how, text=text) for text in HOSTILE for how in (change, fail))))
    boards = {form: call(tmp_path, "leaderboard", "OUT", "--format", form) for form in ("table", "md", "csv", "latex")}
    boards["task"] = call(tmp_path, "leaderboard", "OUT", "--by", "task", "--format", "csv")
    exports = {form: call(tmp_path, "export", "OUT", "--format", form) for form in ("csv", "jsonl")}
    for result in (*boards.values(), *exports.values()):
        assert result.exit_code == 0 and all(c.isprintable() or c == "\n" for c in result.stdout), result.output
    for result in (boards["csv"], boards["task"], exports["csv"]):
        cells = [one for line in result.stdout.splitlines() for one in line.split(",")]
        assert not [one for one in cells if one.lstrip('" ')[:1] in ("=", "@")]
    assert "<img" not in boards["md"].stdout.replace("\\<img", "")
