"""Writing and sealing, and what lies beside records: it is there, whoever is killed and whatever the disk does."""

import errno
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from flats import filled, rows_in
from measured import TINY
from running import run_without_board

from sparsebench import files
from sparsebench.errors import UserError
from sparsebench.plugin.registry import Registry
from sparsebench.records import manifests, store
from sparsebench.records.record import Record

pytestmark = pytest.mark.usefixtures("no_picture", "timed_once")

Make = Callable[..., Record]
GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "store"
WRITE = """
import os, sys
from pathlib import Path
from sparsebench.records import store
template, out, first, number = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
record, writer = store.parse(template.read_bytes()), store.Writer(out)
for k in range(first, first + number):
    cell = record.cell.model_copy(update={"repetition": k})
    writer.append(record.model_copy(update={"cell": cell, "cell_id": cell.id}))
    os.write(1, cell.id.encode() + b"\\n")
"""


@pytest.mark.integration
def test_what_writers_that_were_killed_acknowledged_is_there(tmp_path: Path, make_record: Make) -> None:
    writers, victims, number, endless = 4, 2, 100, 10**6
    (tmp_path / "one.json").write_text(make_record().model_dump_json())
    logs = [tmp_path / f"{k}.log" for k in range(writers)]
    processes = []
    for k, log in enumerate(logs):
        # A victim never ends by itself: a test that is slow to kill it must find it at work.
        words = [tmp_path / "one.json", tmp_path, k * endless, endless if k < victims else number]
        with log.open("wb") as file:
            processes.append(subprocess.Popen([sys.executable, "-c", WRITE, *map(str, words)], stdout=file))
    for victim in range(victims):
        while logs[victim].stat().st_size < 17 * 40 * (victim + 1) and processes[victim].poll() is None:
            time.sleep(0.005)
        processes[victim].send_signal(signal.SIGKILL)
    ends = [process.wait(300) for process in processes]
    assert ends == [-signal.SIGKILL] * victims + [0] * (writers - victims)
    acknowledged = {line for log in logs for line in log.read_text().split("\n")[:-1]}
    assert len(acknowledged) >= (writers - victims) * number + victims * 40
    there = set(store.read(tmp_path))
    assert acknowledged <= there and len(there - acknowledged) <= victims
    assert len(store.segments(tmp_path)) == writers


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """Let no file grow beyond a size: the write that would do so is cut short."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


def fails(file: int, *size: int) -> None:
    raise OSError(errno.ENOSPC, "No space left")


def fails_on_folders(file: int, real: Any = os.fsync) -> None:
    """As network file systems may."""
    if stat.S_ISDIR(os.fstat(file).st_mode):
        raise OSError(errno.EINVAL, "Invalid argument")
    real(file)


@pytest.mark.parametrize(
    ("more", "sync", "said"),
    [(500, fails_on_folders, "the disk is full"), (0, fails_on_folders, "File too large"), (10**6, fails, "No space")],
    ids=["a short write", "no write", "no sync"],
)
def test_a_record_for_which_the_disk_has_no_room_costs_no_other(
    tmp_path: Path, make_record: Make, monkeypatch: pytest.MonkeyPatch, more: int, sync: Any, said: str
) -> None:
    writer = store.Writer(tmp_path)
    monkeypatch.setattr(os, "fsync", fails_on_folders)
    writer.append(make_record())
    (path,) = store.segments(tmp_path)
    whole = path.read_bytes()
    with monkeypatch.context() as patched, full_disk(len(whole) + more), pytest.raises(UserError, match=said) as caught:
        patched.setattr(os, "fsync", sync)
        writer.append(make_record(repetition=1))
    assert str(tmp_path) in str(caught.value) and path.read_bytes().startswith(whole)
    writer.append(make_record(repetition=2))
    writer.close()
    there = set(store.read(tmp_path)) - ({make_record(repetition=1).cell_id} if sync is fails else set())
    assert there == {make_record(repetition=k).cell_id for k in (0, 2)}


@pytest.mark.parametrize(
    "act",
    [lambda below, record: store.Writer(below).append(record), lambda below, record: files.write_whole(below, b""),
     lambda below, record: store.check_writable(below), lambda below, record: store.check_writable(below.parents[1])],
    ids=["append", "write_whole", "check_writable", "records is a file"],
)  # fmt: skip
def test_a_folder_that_cannot_be_written(tmp_path: Path, make_record: Make, act: Callable[..., None]) -> None:
    (tmp_path / "records").write_bytes(b"")
    with pytest.raises(UserError, match=f"cannot write.*{tmp_path}"):
        act(tmp_path / "records" / "below", make_record())


def test_a_file_is_written_whole_or_stays_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file"
    files.write_whole(path, b"old")
    with full_disk(1000), pytest.raises(UserError, match="cannot write"):
        files.write_whole(path, b"new" * 1000)
    assert path.read_bytes() == b"old"
    files.write_whole(path, b"new")
    assert path.read_bytes() == b"new" and [p.name for p in path.parent.iterdir()] == ["file"]


def test_a_folder_that_is_not_there_holds_no_records_and_can_be_made(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b"
    assert store.read(out) == store.summaries(out) == {} and not out.exists()
    store.check_writable(out)
    assert out.is_dir() and [p for p in out.rglob("*") if p.is_file()] == []


def test_a_sealed_folder_is_what_was_written(tmp_path: Path) -> None:
    """Segments of published folders of all ages."""
    shutil.copytree(GOLDEN / "records", tmp_path / "records")
    records, summaries, rows = store.read(tmp_path), store.summaries(tmp_path), rows_in(tmp_path)
    store.seal(tmp_path)
    assert not store.segments(tmp_path) and len(store.sealed_files(tmp_path)) == 5
    assert store.read(tmp_path) == records
    assert store.summaries(tmp_path) == summaries and rows_in(tmp_path) == rows


@pytest.mark.integration
def test_a_segment_that_is_written_is_not_sealed_and_a_dead_writers_is(tmp_path: Path, make_record: Make) -> None:
    code = "import sys; from pathlib import Path; from sparsebench.records import store; w = store.Writer(Path('.')); "
    code += "w.append(store.parse(sys.argv[1].encode())); print('there', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, make_record().model_dump_json()]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=tmp_path, **pipes) as writer:
        assert writer.stdout and writer.stdout.readline() == b"there\n"
        filled(tmp_path, make_record(repetition=1))
        store.seal(tmp_path)
        assert len(store.segments(tmp_path)) == len(store.sealed_files(tmp_path)) == 1
        writer.kill()
    store.seal(tmp_path)
    assert (store.segments(tmp_path), len(store.sealed_files(tmp_path)), len(store.read(tmp_path))) == ([], 2, 2)


def test_an_open_store_is_as_it_was_until_it_is_refreshed(tmp_path: Path, make_record: Make) -> None:
    """Others seal files, merge new ones in their place, and remove them meanwhile."""
    filled(tmp_path, make_record())
    opened = store.Store(tmp_path)
    assert len(opened.summaries()) == 1 and not opened.sidecars("environments")
    files.write_whole(tmp_path / "environments" / "a.json", b'{"python": "3"}')
    filled(tmp_path, make_record(repetition=1))
    store.seal(tmp_path)
    assert len(opened.summaries()) == 1 and not opened.sidecars("environments")
    opened.refresh()
    assert opened.summaries() == store.summaries(tmp_path) and len(opened.newest()) == 2
    assert opened.sidecars("environments") == {"environments/a.json": '{"python": "3"}'}

    filled(tmp_path / "other", *(make_record(repetition=k) for k in range(2, 5)))
    store.merge([tmp_path / "other"], tmp_path / "merged")
    first, second = store.sealed_files(tmp_path)
    os.replace(tmp_path / "merged" / "records" / "merged.parquet", first)
    second.unlink()
    opened.refresh()
    assert opened.summaries() == store.summaries(tmp_path) == store.summaries(tmp_path / "other")
    assert opened.sidecars("environments") == store.sidecars(tmp_path, "environments") == {}


def test_what_lies_beside_the_records_goes_with_them(tmp_path: Path, make_record: Make) -> None:
    filled(tmp_path, make_record())
    files.write_whole(tmp_path / "environments" / "a.json", b'{"python": "3"}')
    files.write_whole(tmp_path / "environments" / "bad.json", b"\xff")
    store.seal(tmp_path)
    assert [path.name for path in (tmp_path / "environments").iterdir()] == ["bad.json"]
    assert store.sidecars(tmp_path, "environments") == {"environments/a.json": '{"python": "3"}'}
    files.write_whole(tmp_path / "environments" / "a.json", b'{"python": "4"}')
    assert store.sidecars(tmp_path, "environments") == {"environments/a.json": '{"python": "4"}'}


def test_a_line_that_cannot_be_read_keeps_its_segment_and_a_torn_one_not(tmp_path: Path, make_record: Make) -> None:
    for name, end in {"torn": b'{"cell"', "odd": b"{}\n"}.items():
        (path,) = store.segments(filled(tmp_path / name, make_record()))
        path.write_bytes(path.read_bytes() + end)
        store.seal(tmp_path / name)
        assert bool(store.segments(tmp_path / name)) == (name == "odd") and len(store.read(tmp_path / name)) == 1


def test_what_cannot_be_sealed_stays(tmp_path: Path, make_record: Make) -> None:
    filled(tmp_path, make_record())
    with full_disk(100), pytest.raises(UserError, match="cannot write"):
        store.seal(tmp_path)
    assert len(store.read(tmp_path)) == len(store.segments(tmp_path)) == len(list(tmp_path.rglob("*.*"))) == 1


SMALL: dict[str, Any] = {"suite": TINY, "n_train": (4,)}


def test_a_run_says_what_its_strategies_are(tmp_path: Path) -> None:
    """A run says what its strategies are and that it answers no whole suite."""
    out, less, merged = tmp_path / "out", tmp_path / "less", tmp_path / "merged"
    run_without_board("attn_topk", "column_norm", seeds=2, out=out, **SMALL)
    found = manifests.strategies(out)
    for name in ("attn_topk", "column_norm", "dense", "random", "oracle"):
        shipped = Registry().strategy(name)
        one = found[name, shipped.origin.revision]
        for each in ("kind", "site", "trained", "citation", "bibtex"):
            assert getattr(one, each) == getattr(shipped.cls, each)
        assert one.variant == (shipped.cls.differs if name == "column_norm" else "")
    (asked,) = manifests.suites(out)
    assert (asked.name, asked.version, len(asked.settings)) == (manifests.OWN, 1, 2)
    store.merge([out], merged)
    assert manifests.strategies(merged) == found and manifests.suites(merged) == [asked]
    run_without_board("noise", seeds=1, out=less, **SMALL)
    (other,) = manifests.suites(less)
    assert set(other.settings) < set(asked.settings)


def test_what_was_said_before_there_was_more_to_say_gives_way(tmp_path: Path) -> None:
    old = {"name": "mine", "sha256": "0", "kind": "deployable", "site": "input", "trained": False, "adaptive": False,
           "citation": "", "bibtex": ""}  # fmt: skip
    for said in ({}, {"how": "merge"}):
        store.Store(tmp_path).keep("strategies", old | said)
        assert manifests.strategies(tmp_path)["mine", "0"].how == said.get("how", "")
    for name, file in (("a", "w.pt"), ("a", "x/w.pt"), ("b", "x/w.pt"), ("c", "v.pt")):
        store.Store(tmp_path).keep("files", {"name": name, "file": file})
    assert manifests.file_names(tmp_path) == {"a": "x/w.pt (a)", "b": "x/w.pt (b)", "c": "v.pt"}
