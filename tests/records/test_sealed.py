"""Sealed files: what they hold is what was written, whoever is killed meanwhile."""

import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flats import filled, rows_in

from sparsebench.errors import UserError
from sparsebench.records import files, store
from sparsebench.records.cell import canonical
from sparsebench.records.record import Record

Make = Callable[..., Record]
GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "store"


def test_a_sealed_folder_is_what_was_written(tmp_path: Path) -> None:
    """Segments of published folders of all ages."""
    shutil.copytree(GOLDEN / "records", tmp_path / "records")
    records, heads, rows = store.read(tmp_path), store.heads(tmp_path), rows_in(tmp_path)
    store.seal(tmp_path)
    assert not store.segments(tmp_path) and len(store.sealed(tmp_path)) == 5
    assert store.read(tmp_path) == records
    assert store.heads(tmp_path) == heads and rows_in(tmp_path) == rows


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


def test_what_cannot_be_sealed_stays(tmp_path: Path, make_record: Make, full_disk: Any) -> None:
    filled(tmp_path, make_record())
    with full_disk(100), pytest.raises(UserError, match="cannot write"):
        store.seal(tmp_path)
    assert len(store.read(tmp_path)) == len(store.segments(tmp_path)) == len(list(tmp_path.rglob("*.*"))) == 1
