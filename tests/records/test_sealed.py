"""Sealed files: what they hold is what was written, whoever is killed meanwhile, and damage is said in one line."""

import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from flats import filled, rows_in
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsebench.cli import main
from sparsebench.errors import UserError
from sparsebench.records import files, store, table
from sparsebench.records.cell import canonical
from sparsebench.records.record import Head, Metric, Outcomes, Record, TokenStep, pack

Make = Callable[..., Record]
ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden" / "store"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Return a folder of segments that published folders of all ages had."""
    shutil.copytree(GOLDEN / "records", tmp_path / "out" / "records")
    return tmp_path / "out"


@pytest.fixture
def file(out: Path) -> Path:
    store.seal(out)
    return store.sealed(out)[0]


def test_a_sealed_folder_is_what_was_written(out: Path) -> None:
    records, heads, rows = store.read(out), store.heads(out), rows_in(out)
    store.seal(out)
    assert not store.segments(out) and len(store.sealed(out)) == 5
    assert store.read(out) == records
    assert store.heads(out) == heads and rows_in(out) == rows


@settings(deadline=None, max_examples=60)
@given(
    notes=st.dictionaries(st.text(max_size=5), st.text(), max_size=3),
    metrics=st.dictionaries(
        st.sampled_from(["accuracy", "macs", "accuracy: 3 on china", "own"]),
        st.builds(
            Metric, value=st.none() | st.floats(-1e75, 1e75), unit=st.sampled_from(["fraction", "MACs"]),
            n=st.integers(0, 2**62), low=st.none() | st.floats(0, 1), high=st.none() | st.floats(0, 1),
            method=st.sampled_from(["", "Wilson 95 %"]),
        ),
    ),
    samples=st.dictionaries(st.text(max_size=3), st.lists(st.none() | st.floats(0, 1e9), max_size=3).map(tuple)),
    numbers=st.lists(st.integers(0, 65535), min_size=1, max_size=9),
    grouped=st.booleans(),
)  # fmt: skip
def test_any_record_comes_back_from_its_row(
    make_record: Make,
    notes: dict[str, str],
    metrics: dict[str, Metric],
    samples: dict[str, Any],
    numbers: list[int],
    grouped: bool,
) -> None:
    import numpy as np

    packed = pack(np.array(numbers))
    outcomes = Outcomes(
        n=len(numbers), predicted=packed, label=packed, group=packed if grouped else "", rank=packed, foreground=""
    )
    steps = (TokenStep(tokens_in=20, tokens_out=9.5, early=True, scoring="received", own=1 / 3),)
    records = [
        make_record(notes=notes, samples=samples, repetition=1).model_copy(update={"metrics": metrics}),
        make_record(outcomes=outcomes, trajectory=steps, repetition=2),
    ]
    rows = list(table.rows_of(table.table_of((record, 7) for record in records)))
    assert [table.record_of(row) for row in rows] == records


def test_a_segment_that_is_written_is_not_sealed_and_a_dead_writers_is(tmp_path: Path, make_record: Make) -> None:
    code = (
        "import sys, time; from pathlib import Path; from sparsebench.records import store, record; "
        "w = store.Writer(Path(sys.argv[1])); w.append(record.Record.model_validate_json(sys.stdin.read())); "
        "print('there', flush=True); time.sleep(600)"
    )
    record = make_record()
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          text=True) as writer:  # fmt: skip
        assert writer.stdin and writer.stdout
        writer.stdin.write(canonical(record.model_dump(mode="json")))
        writer.stdin.close()
        assert writer.stdout.readline() == "there\n"
        filled(tmp_path, make_record(repetition=1))
        store.seal(tmp_path)
        assert len(store.segments(tmp_path)) == len(store.sealed(tmp_path)) == 1
        writer.kill()
    store.seal(tmp_path)
    assert (store.segments(tmp_path), len(store.sealed(tmp_path)), len(store.read(tmp_path))) == ([], 2, 2)


def test_what_lies_beside_the_records_goes_with_them(tmp_path: Path, make_record: Make) -> None:
    filled(tmp_path, make_record())
    files.write_whole(tmp_path / "environments" / "a.json", b'{"python": "3"}')
    files.write_whole(tmp_path / "environments" / "bad.json", b"\xff")
    store.seal(tmp_path)
    assert [path.name for path in (tmp_path / "environments").iterdir()] == ["bad.json"]
    assert store.beside(tmp_path, "environments") == {"a.json": '{"python": "3"}'}
    files.write_whole(tmp_path / "environments" / "a.json", b'{"python": "4"}')
    assert store.beside(tmp_path, "environments") == {"a.json": '{"python": "4"}'}


def test_a_changed_cell_supersedes_a_sealed_one_and_a_failure_does_not(tmp_path: Path, make_record: Make) -> None:
    store.seal(filled(tmp_path, make_record(started=1, value=0.25), make_record(started=1, repetition=1)))
    newer, failed = make_record(started=2, value=0.75), make_record(started=2, repetition=1, status="failed")
    filled(tmp_path, newer, failed)
    for _ in range(2):
        records = store.read(tmp_path)
        assert records[newer.cell_id].metrics["accuracy"].value == 0.75 and records[failed.cell_id].status == "ok"
        store.seal(tmp_path)


def test_a_line_that_cannot_be_read_keeps_its_segment_and_a_torn_one_not(tmp_path: Path, make_record: Make) -> None:
    for name, end in {"torn": b'{"cell"', "odd": b"{}\n"}.items():
        (path,) = store.segments(filled(tmp_path / name, make_record()))
        path.write_bytes(path.read_bytes() + end)
        store.seal(tmp_path / name)
        assert bool(store.segments(tmp_path / name)) == (name == "odd") and len(store.read(tmp_path / name)) == 1


@pytest.mark.slow
def test_whoever_is_killed_while_sealing_nothing_is_lost_or_doubled(tmp_path: Path, make_record: Make) -> None:
    records = [make_record(repetition=number) for number in range(300)]
    rng, expected = random.Random(0), {record.cell_id for record in records}
    code = "import sys; from pathlib import Path; from sparsebench.records import store; import pyarrow.parquet; "
    code += "print(flush=True); store.seal(Path(sys.argv[1]))"
    for trial in range(20):
        out = tmp_path / str(trial)
        for part in range(3):
            filled(out, *records[part * 100 : part * 100 + 100])
        with subprocess.Popen([sys.executable, "-c", code, str(out)], stdout=subprocess.PIPE) as sealing:
            assert sealing.stdout
            sealing.stdout.readline()
            time.sleep(rng.random() * 0.15)
            sealing.send_signal(signal.SIGKILL)
        assert set(store.read(out)) == expected
        store.seal(out)
        assert not store.segments(out) and set(store.read(out)) == expected and len(rows_in(out)) == 300
        assert not list(out.rglob("*.jsonl"))


def changed(file: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    pq.write_table(change(pq.read_table(file)), file)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def flipped(file: Path) -> None:
    content, column = bytearray(file.read_bytes()), pq.ParquetFile(file).metadata.row_group(0).column(0)
    content[column.data_page_offset + column.total_compressed_size // 2] ^= 0xFF
    file.write_bytes(content)


def of_version(file: Path, **more: int) -> None:
    def change(rows: pa.Table) -> pa.Table:
        about = json.loads(rows.schema.metadata[table.ABOUT]) | more
        return rows.replace_schema_metadata({table.ABOUT: json.dumps(about)})

    changed(file, change)


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut": (cut, "damaged"),
    "empty": (lambda file: file.write_bytes(b"") and None, "damaged"),
    "a changed byte": (flipped, "damaged"),
    "no record's table": (lambda file: pq.write_table(pa.table({"a": [1]}), file), "damaged"),
    "a column less": (lambda file: changed(file, lambda rows: rows.drop_columns(["cell"])), "column 'cell'"),
    "a column of another type": (
        lambda file: changed(file, lambda rows: rows.set_column(
            rows.column_names.index("n_train"), "n_train", rows["n_train"].cast(pa.string()))),
        "column 'n_train'",
    ),
    "a metric of another type": (
        lambda file: changed(file, lambda rows: rows.append_column("own", pa.array(["x"] * len(rows)))),
        "column 'own'",
    ),
    "another format": (lambda file: of_version(file, format=99), "upgrade sparsebench"),
    "a newer schema": (lambda file: of_version(file, schema_version=99), "upgrade sparsebench"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
@pytest.mark.parametrize(
    "arguments",
    [["leaderboard", "OUT"], ["export", "OUT", "-o", "NEW"], ["merge", "OUT", "-o", "NEW"],
     ["run", "--out", "OUT", "--suite", "smoke"]],
    ids=lambda arguments: arguments[0],
)  # fmt: skip
def test_a_damaged_file_is_one_line_and_nothing_is_written(
    file: Path, tmp_path: Path, name: str, arguments: list[str]
) -> None:
    damage, said = DAMAGE[name]
    damage(file)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    places = {"OUT": str(tmp_path / "out"), "NEW": str(tmp_path / "new")}
    result = CliRunner().invoke(main, [places.get(word, word) for word in arguments])
    assert result.exit_code == 2 and result.stderr.count("\n") == 1, result.output
    assert said in result.stderr and str(file) in result.stderr
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_what_cannot_be_sealed_stays(tmp_path: Path, make_record: Make, caplog: pytest.LogCaptureFixture) -> None:
    filled(tmp_path, make_record())
    if os.geteuid() == 0:
        pytest.skip("root writes everywhere")
    (tmp_path / "records").chmod(0o500)
    with caplog.at_level(logging.WARNING), pytest.raises(UserError, match="cannot write"):
        store.seal(tmp_path)
    (tmp_path / "records").chmod(0o700)
    assert len(store.read(tmp_path)) == 1 and len(store.segments(tmp_path)) == 1


def test_heads_need_not_the_rest_of_a_file(file: Path) -> None:
    assert all(type(head) is Head for head in store.heads(file.parents[1]).values())
