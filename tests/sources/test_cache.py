import logging
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from sparsebench.errors import UserError
from sparsebench.records import files
from sparsebench.sources import cache

SHAPE = (5, 4, 4, 3)
PIXELS = np.random.default_rng(0).integers(0, 256, SHAPE, dtype=np.uint8)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Return an empty folder that is the cache."""
    folder = tmp_path / "pictures"
    monkeypatch.setenv("SPARSEBENCH_CACHE", str(folder))
    cache._warn.cache_clear()
    return folder


class Rows:
    """Makes the pixels, and counts how often."""

    def __init__(self):
        self.made = 0

    def __call__(self):
        self.made += 1
        return iter(PIXELS)


@pytest.fixture
def rows():
    return Rows()


def test_what_was_made_once_is_read_the_next_time(place, rows):
    for _ in range(3):
        found = cache.keep_pixels("a", SHAPE, rows)
        np.testing.assert_array_equal(found, PIXELS)
        assert found.dtype == np.uint8
    assert rows.made == 1
    (file,) = place.iterdir()
    np.testing.assert_array_equal(np.load(file), PIXELS)


def test_writing_to_the_array_does_not_change_the_file(place, rows):
    cache.keep_pixels("a", SHAPE, rows)[:] = 7
    np.testing.assert_array_equal(cache.keep_pixels("a", SHAPE, rows), PIXELS)
    assert rows.made == 1


def test_another_name_shape_or_version_is_another_file(place, rows, monkeypatch):
    cache.keep_pixels("a", SHAPE, rows)
    cache.keep_pixels("b", SHAPE, rows)
    assert rows.made == 2
    monkeypatch.setattr(cache, "VERSION", cache.VERSION + 1)
    cache.keep_pixels("a", SHAPE, rows)
    assert rows.made == 3
    monkeypatch.setattr("PIL.__version__", "1.2.3")
    cache.keep_pixels("a", SHAPE, rows)
    assert rows.made == 4


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.write_bytes(file.read_bytes()[:-1]),
        lambda file: file.write_bytes(file.read_bytes() + b"x"),
        lambda file: file.write_bytes(b""),
        lambda file: file.write_bytes(b"x" * len(file.read_bytes())),
        lambda file: np.save(file, PIXELS.reshape(5, 4, 3, 4)),
    ],
    ids=["cut off", "too long", "empty", "no array", "another shape"],
)
def test_a_damaged_file_is_made_again(place, rows, damage):
    cache.keep_pixels("a", SHAPE, rows)
    (file,) = place.iterdir()
    damage(file)
    np.testing.assert_array_equal(cache.keep_pixels("a", SHAPE, rows), PIXELS)
    np.testing.assert_array_equal(np.load(file), PIXELS)
    assert rows.made == 2 and list(place.iterdir()) == [file]


def test_what_fails_while_it_is_made_leaves_nothing(place):
    def rows():
        yield PIXELS[0]
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError):
        cache.keep_pixels("a", SHAPE, rows)
    assert list(place.iterdir()) == []


def test_without_a_place_to_write_it_goes_on_with_one_warning(tmp_path, monkeypatch, rows, caplog):
    cache._warn.cache_clear()
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("SPARSEBENCH_CACHE", str(tmp_path / "file" / "below"))
    with caplog.at_level(logging.WARNING):
        cache.check()
        for _ in range(2):
            np.testing.assert_array_equal(cache.keep_pixels("a", SHAPE, rows), PIXELS)
    assert rows.made == 2
    (record,) = caplog.records
    assert "not kept" in record.getMessage() and "SPARSEBENCH_CACHE" in record.getMessage()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no disk that is always full")
def test_a_full_disk_goes_on_with_a_warning_and_leaves_no_torn_file(place, rows, caplog, monkeypatch):
    replaced = []
    monkeypatch.setattr("secrets.token_hex", lambda n: "0")
    monkeypatch.setattr(os, "replace", lambda *pair: replaced.append(pair))
    place.mkdir()
    real, full = cache.Path.open, cache.Path("/dev/full")
    monkeypatch.setattr(cache.Path, "open", lambda path, mode: real(full, "wb") if mode == "xb" else real(path, mode))
    np.testing.assert_array_equal(cache.keep_pixels("a", SHAPE, rows), PIXELS)
    assert not replaced and list(place.iterdir()) == []
    assert "No space left" in caplog.text


def test_many_processes_may_write_one_file_at_once(place):
    code = """
import sys, numpy as np
from sparsebench.sources import cache
pixels = np.random.default_rng(0).integers(0, 256, (5, 4, 4, 3), dtype=np.uint8)
for k in range(40):
    assert (cache.keep_pixels(f"a{k}", pixels.shape, lambda: iter(pixels)) == pixels).all()
"""
    started = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(4)]
    assert [process.wait() for process in started] == [0] * 4
    assert cache.size() == (40, 40 * (PIXELS.nbytes + 128))


def test_many_processes_make_one_file_once(place, tmp_path):
    code = """
import sys, time, numpy as np
from sparsebench.sources import cache
def rows():
    with open(sys.argv[1], "a") as file:
        file.write("x")
    for _ in range(5):
        time.sleep(0.3)
        yield np.full((4, 4, 3), 7, dtype=np.uint8)
assert (cache.keep_pixels("a", (5, 4, 4, 3), rows) == 7).all()
"""
    line = [sys.executable, "-c", code, str(tmp_path / "made")]
    started = [subprocess.Popen(line) for _ in range(4)]
    assert [process.wait() for process in started] == [0] * 4
    assert (tmp_path / "made").read_text() == "x" and len(list(place.iterdir())) == 1


def test_without_locks_it_goes_on(place, rows, monkeypatch):
    def flock(file, how):
        raise OSError("no locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    np.testing.assert_array_equal(cache.keep_pixels("a", SHAPE, rows), PIXELS)
    monkeypatch.setitem(sys.modules, "fcntl", None)  # as where there is no such module
    np.testing.assert_array_equal(cache.keep_pixels("b", SHAPE, rows), PIXELS)
    assert rows.made == 2 and cache.size()[0] == 2


def test_a_disk_without_room_for_many_pictures_is_a_user_error_before_one_is_decoded(place, rows, monkeypatch, caplog):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=PIXELS.nbytes - 1))
    np.testing.assert_array_equal(cache.keep_pixels("a", SHAPE, rows), PIXELS)
    assert rows.made == 1 and "No space left" in caplog.text
    monkeypatch.setattr(cache, "LARGE", PIXELS.nbytes - 1)
    with pytest.raises(UserError, match=r"pictures has no room for the decoded pictures, 0\.0 GB; .*SPARSEBENCH_CACHE"):
        cache.keep_pixels("a", SHAPE, rows)
    assert rows.made == 1 and list(place.iterdir()) == []


def test_it_is_emptied_of_its_own_files_only(place, rows):
    cache.keep_pixels("a", SHAPE, rows)
    cache.keep_pixels("b", SHAPE, rows)
    (place / f".c{cache.SUFFIX}.1.0.part").write_bytes(b"half")
    (place / "mine.npy").write_bytes(b"mine")
    (place / "notes").mkdir()
    files, size = cache.size()
    assert files == 3 and size == 2 * (PIXELS.nbytes + 128) + 4
    assert cache.clear() == (files, size) and cache.size() == (0, 0)
    assert sorted(path.name for path in place.iterdir()) == ["mine.npy", "notes"]


def test_its_place_is_asked_of_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("SPARSEBENCH_CACHE", str(tmp_path / "a"))
    assert files.cache_folder() == tmp_path / "a"
    monkeypatch.delenv("SPARSEBENCH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert files.cache_folder() == tmp_path / "b" / "sparsebench"
    monkeypatch.setenv("HOME", str(tmp_path))
    for unset in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert files.cache_folder() == tmp_path / ".cache" / "sparsebench"
