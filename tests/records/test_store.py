import errno
import json
import logging
import os
import resource
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sparsebench.errors import UserError
from sparsebench.records import files, store
from sparsebench.records.cell import canonical
from sparsebench.records.record import Failure, Metric, Outcomes, Record, TokenStep, pack

Make = Callable[..., Record]


def line_of(record: Record) -> bytes:
    return canonical(record.model_dump(mode="json")).encode()


def write(out: Path, *records: Record) -> Path:
    """Write the records to a segment of their own and return its path."""
    before = set((out / "records").glob("*"))
    writer = store.Writer(out)
    for record in records:
        writer.append(record)
    writer.close()
    (path,) = set((out / "records").glob("*")) - before
    return path


@pytest.fixture
def heard(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING)
    return caplog


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Let no file grow beyond `size`: the write that would do so is cut short, as on a full disk."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


def test_a_record_comes_back_as_it_was_written(tmp_path: Path, make_record: Make) -> None:
    numbers = np.arange(20) % 2
    record = make_record(
        trajectory=(TokenStep(tokens_in=20, tokens_out=9.5, early=True, scoring="received"),),
        samples={"seconds_per_batch": (0.1, 1 / 3, 1e-9)},
        outcomes=Outcomes(
            n=20, predicted=pack(numbers), label=pack(numbers), group=pack(numbers * 0), rank=pack(numbers),
            foreground=pack(numbers + 9),
        ),
        notes={"attention": "class", "text": 'line\nbreak, "quotes", \u2028 and ü'},
        environment="e", device="cpu", seconds=0.125,
    )  # fmt: skip
    write(tmp_path, record)
    assert store.read(tmp_path) == {record.cell_id: record}


@settings(deadline=None)
@given(
    notes=st.dictionaries(st.text(max_size=5), st.text(), max_size=3),
    value=st.none() | st.floats(-1e75, 1e75),
    timings=st.lists(st.floats(0, 1e9), max_size=3),
    label=st.text(),
)
def test_any_record_is_one_line_that_gives_it_back(
    make_record: Make, notes: dict[str, str], value: float | None, timings: list[float], label: str
) -> None:
    record = make_record(notes=notes, samples={"s": tuple(timings)}).model_copy(
        update={"label": label, "metrics": {"accuracy": Metric(value=value, unit="fraction", n=1)}}
    )
    line = line_of(record)
    assert b"\n" not in line
    assert store.parse(line) == record


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each value inside a JSON value."""
    yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inside:
        yield from places(part, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = replaced(copy[path[0]], path[1:], new)
    return copy


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


def parses_or_is_refused_in_one_line(line: bytes) -> None:
    try:
        assert isinstance(store.parse(line), Record)
    except ValueError as error:
        assert len(str(error).splitlines()) == 1


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_a_changed_record_is_read_or_refused_in_one_line(make_record: Make, data: st.DataObject) -> None:
    raw = make_record(trajectory=(TokenStep(tokens_in=1, tokens_out=1, early=False, scoring=""),)).model_dump(
        mode="json"
    )
    path = data.draw(st.sampled_from(sorted(places(raw), key=str)))
    parses_or_is_refused_in_one_line(json.dumps(replaced(raw, path, data.draw(JSON))).encode())


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_a_record_with_changed_bytes_is_read_or_refused_in_one_line(make_record: Make, data: st.DataObject) -> None:
    line = line_of(make_record())
    start = data.draw(st.integers(0, len(line)))
    end = data.draw(st.integers(start, min(len(line), start + 10)))
    parses_or_is_refused_in_one_line(line[:start] + data.draw(st.binary(max_size=10)) + line[end:])


@given(line=st.binary())
@example(b"")
@example(b"[" * 100_000)
@example(b'{"schema_version": ' + b"9" * 5000 + b"}")
@example(b'{"schema_version": 1, "cell": {"init": ' * 400 + b"1" + b"}}" * 400)
@example("{}".encode("utf-16"))
def test_anything_else_is_refused_in_one_line(line: bytes) -> None:
    with pytest.raises(ValueError) as caught:
        store.parse(line)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("field", ["cell_id", "schema_version", "kind", "status"])
def test_a_line_break_in_a_field_does_not_break_the_warning(make_record: Make, field: str) -> None:
    parses_or_is_refused_in_one_line(json.dumps(make_record().model_dump(mode="json") | {field: "a\nb"}).encode())


def test_a_torn_last_line_is_left_out_with_a_warning(
    tmp_path: Path, make_record: Make, heard: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path, make_record(), make_record(repetition=1))
    whole = path.read_bytes()
    start = whole.index(b"\n") + 1
    for cut in (start + 1, start + (len(whole) - start) // 2, len(whole) - 1):
        heard.clear()
        path.write_bytes(whole[:cut])
        assert list(store.read(tmp_path)) == [make_record().cell_id]
        (message,) = heard.messages
        assert path.name in message and "torn" in message


@pytest.mark.parametrize("broken", [b"", b"{", b"\xff\xfe", b"null", b"[1, 2]", b'{"schema_version": 1}'])
def test_a_broken_line_is_named_and_the_others_survive(
    tmp_path: Path, make_record: Make, heard: pytest.LogCaptureFixture, broken: bytes
) -> None:
    path = write(tmp_path, make_record(), make_record(repetition=1), make_record(repetition=2))
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([lines[0], broken, lines[2]]) + b"\n")
    kept = {make_record(repetition=k).cell_id for k in (0, 2)}
    assert set(store.read(tmp_path)) == kept
    (message,) = heard.messages
    assert f"{path.name} line 2 " in message


def test_a_record_whose_cell_has_another_hash_is_left_out(
    tmp_path: Path, make_record: Make, heard: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path, make_record(), make_record(repetition=1))
    path.write_bytes(path.read_bytes().replace(b'"repetition":1', b'"repetition":7'))
    assert list(store.read(tmp_path)) == [make_record().cell_id]
    assert make_record(repetition=1).cell_id in heard.messages[0]


def test_every_writer_has_a_segment_of_its_own(tmp_path: Path, make_record: Make) -> None:
    first, second = store.Writer(tmp_path), store.Writer(tmp_path)
    for repetition in range(6):
        (first, second)[repetition % 2].append(make_record(repetition=repetition))
    first.close()
    second.close()
    segments = list((tmp_path / "records").glob("*.jsonl"))
    assert sorted(len(path.read_bytes().splitlines()) for path in segments) == [3, 3]
    assert len(store.read(tmp_path)) == 6


def test_stores_are_merged_by_copying_segments(tmp_path: Path, make_record: Make) -> None:
    for k, name in enumerate(("one", "two")):
        write(tmp_path / name, make_record(repetition=k))
    for path in (tmp_path / "two" / "records").iterdir():
        shutil.copy(path, tmp_path / "one" / "records")
    assert len(store.read(tmp_path / "one")) == 2


@pytest.mark.parametrize("swap", [False, True], ids=["in order", "the other way round"])
@pytest.mark.parametrize(
    ("older", "newer", "wins"),
    [
        pytest.param({}, {}, "newer", id="the newer success wins"),
        pytest.param({}, {"status": "failed"}, "older", id="a failure does not replace a success"),
        pytest.param({"status": "crashed"}, {}, "newer", id="a success replaces a failure"),
        pytest.param({"status": "failed"}, {"status": "oom"}, "newer", id="the newer failure wins"),
        pytest.param({}, {"revision": "b"}, "newer", id="a changed source replaces"),
        pytest.param({}, {"revision": "b", "status": "failed"}, "newer", id="a changed source that fails replaces"),
        pytest.param({"status": "failed"}, {"revision": "b", "status": "failed"}, "newer", id="changed failures"),
    ],
)
def test_one_record_of_each_cell_counts(
    tmp_path: Path, make_record: Make, older: dict[str, str], newer: dict[str, str], wins: str, swap: bool
) -> None:
    both = {"older": make_record(started=1, **older), "newer": make_record(started=2, **newer)}
    write(tmp_path, *(list(both.values())[:: -1 if swap else 1]))
    assert store.read(tmp_path) == {both[wins].cell_id: both[wins]}


def test_a_full_disk_costs_the_record_that_was_written_and_no_other(tmp_path: Path, make_record: Make) -> None:
    writer = store.Writer(tmp_path)
    writer.append(make_record())
    (path,) = (tmp_path / "records").iterdir()
    whole = path.read_bytes()
    with file_size_limit(len(whole) + len(whole) // 2), pytest.raises(UserError, match="cannot write records"):
        writer.append(make_record(repetition=1))
    assert path.read_bytes() == whole
    assert list(store.read(tmp_path)) == [make_record().cell_id]
    writer.append(make_record(repetition=2))
    writer.close()
    assert set(store.read(tmp_path)) == {make_record(repetition=k).cell_id for k in (0, 2)}


def test_a_line_that_could_not_be_taken_back_stays_the_last_of_its_segment(
    tmp_path: Path, make_record: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, real = store.Writer(tmp_path), os.write

    def refuse(*arguments: Any) -> None:
        raise OSError("no answer from the server")

    writer.append(make_record())
    with monkeypatch.context() as patched, pytest.raises(UserError, match="recorded before is safe"):
        patched.setattr(os, "write", lambda file, line: real(file, line[:-1]))
        patched.setattr(os, "ftruncate", refuse)
        writer.append(make_record(repetition=1))
    writer.append(make_record(repetition=2))
    writer.close()
    assert set(store.read(tmp_path)) == {make_record(repetition=k).cell_id for k in (0, 2)}


def test_a_record_that_did_not_reach_the_disk_is_taken_back(
    tmp_path: Path, make_record: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = store.Writer(tmp_path)
    writer.append(make_record())

    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched, pytest.raises(UserError, match="No space left"):
        patched.setattr(os, "fsync", full)  # where network file systems say it
        writer.append(make_record(repetition=1))
    assert list(store.read(tmp_path)) == [make_record().cell_id]


def test_a_folder_that_cannot_be_synced_is_no_mistake(
    tmp_path: Path, make_record: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync

    def only_files(file: int) -> None:
        if stat.S_ISDIR(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        real(file)

    monkeypatch.setattr(os, "fsync", only_files)
    write(tmp_path, make_record())
    assert list(store.read(tmp_path)) == [make_record().cell_id]


def test_a_short_write_is_taken_back(tmp_path: Path, make_record: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, real = store.Writer(tmp_path), os.write
    writer.append(make_record())
    with monkeypatch.context() as patched, pytest.raises(UserError, match="the disk is full"):
        patched.setattr(os, "write", lambda file, line: real(file, line[: len(line) // 2]))
        writer.append(make_record(repetition=1))
    writer.close()
    (path,) = (tmp_path / "records").iterdir()
    assert path.read_bytes() == line_of(make_record()) + b"\n"


def test_a_record_with_infinity_is_not_written(tmp_path: Path, make_record: Make) -> None:
    writer = store.Writer(tmp_path)
    writer.append(make_record())
    with pytest.raises(ValueError):
        writer.append(make_record(repetition=1, value=float("inf")))
    writer.close()
    assert list(store.read(tmp_path)) == [make_record().cell_id]


@pytest.mark.parametrize(
    "act",
    [
        pytest.param(lambda below, record: store.Writer(below).append(record), id="append"),
        pytest.param(lambda below, record: files.write_whole(below / "x", b""), id="write_whole"),
        pytest.param(lambda below, record: store.check_writable(below), id="check_writable"),
    ],
)
def test_a_folder_that_cannot_be_written_is_the_users_mistake(
    tmp_path: Path, make_record: Make, act: Callable[..., None]
) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UserError, match="cannot write") as caught:
        act(tmp_path / "file" / "below", make_record())
    assert str(tmp_path / "file") in str(caught.value)


def test_checking_a_folder_makes_it_and_leaves_nothing_in_it(tmp_path: Path) -> None:
    store.check_writable(tmp_path / "a" / "b")
    assert [p for p in (tmp_path / "a" / "b").rglob("*") if p.is_file()] == []


def test_a_records_folder_that_cannot_be_written_is_found_before_anything_is_computed(tmp_path: Path) -> None:
    (tmp_path / "records").write_text("")
    with pytest.raises(UserError, match="cannot write to"):
        store.check_writable(tmp_path)


def test_a_file_is_written_whole_or_stays_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file"
    files.write_whole(path, b"old")
    with file_size_limit(1000), pytest.raises(UserError, match="cannot write"):
        files.write_whole(path, b"new" * 1000)
    assert path.read_bytes() == b"old"
    files.write_whole(path, b"new")
    assert path.read_bytes() == b"new"
    assert [p.name for p in path.parent.iterdir()] == ["file"]


def test_a_folder_that_is_not_there_holds_no_records(tmp_path: Path) -> None:
    assert store.read(tmp_path / "nowhere") == {}


def test_failures_come_back_with_their_reason(tmp_path: Path, make_record: Make) -> None:
    record = make_record(status="failed")
    write(tmp_path, record)
    assert store.read(tmp_path)[record.cell_id].failure == Failure(reason="it broke")
