import os
from types import SimpleNamespace

import numpy as np
import pytest

from sparsebench import files
from sparsebench.errors import UserError
from sparsebench.tasks.sources import cache
from sparsebench.tasks.sources.cache import BadPicturesError, Pixels, decode, telling

SHAPE = (5, 3, 4, 4)
PIXELS = np.random.default_rng(0).integers(0, 256, SHAPE, dtype=np.uint8)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Return an empty cache folder."""
    folder = tmp_path / "pictures"
    monkeypatch.setenv("SPARSEBENCH_CACHE", str(folder))
    return folder


class Rows:
    """Makes the pixels, and records the rows."""

    def __init__(self):
        self.made = []

    def __call__(self, i):
        self.made.append(i)
        return PIXELS[i]


@pytest.fixture
def rows():
    return Rows()


def kept(place):
    """Return the files of the cache, without its lock."""
    return [path for path in place.iterdir() if path.name != cache.LOCK]


def test_decoded_pixels_are_read_again_and_changes_to_them_are_not_kept(place, rows, monkeypatch):
    for _ in range(3):
        result = Pixels("a", SHAPE, rows).array()
        np.testing.assert_array_equal(result, PIXELS)
        assert result.dtype == np.uint8
        result[:] = 7
    assert sorted(rows.made) == list(range(5))
    (file,) = kept(place)
    np.testing.assert_array_equal(np.load(file), PIXELS)
    Pixels("b", SHAPE, rows).array()
    for name, version in ((f"{cache.__name__}.VERSION", cache.VERSION + 1), ("PIL.__version__", "1.2.3")):
        monkeypatch.setattr(name, version)
        Pixels("a", SHAPE, rows).array()
    assert len(rows.made) == 20


@pytest.mark.parametrize("damage", [
    lambda file: file.write_bytes(file.read_bytes()[:-1]),
    lambda file: file.write_bytes(b""),
    lambda file: file.write_bytes(file.read_bytes().replace(b"{", b"(")),
    lambda file: np.save(file, PIXELS.reshape(5, 4, 3, 4)),
], ids=["cut off", "empty", "torn header", "another shape"])  # fmt: skip
def test_a_damaged_file_is_made_again(place, rows, damage):
    Pixels("a", SHAPE, rows).array()
    (file,) = kept(place)
    damage(file)
    np.testing.assert_array_equal(Pixels("a", SHAPE, rows).array(), PIXELS)
    np.testing.assert_array_equal(np.load(file), PIXELS)
    assert len(rows.made) == 10 and kept(place) == [file]


@pytest.mark.parametrize("error", [RuntimeError("no more"), KeyboardInterrupt(), UserError("it changed")])
def test_an_error_while_decoding_leaves_no_file(place, error):
    def row(i):
        if i == 3:
            raise error
        return PIXELS[i]

    with pytest.raises(type(error)):
        Pixels("a", SHAPE, row).array()
    assert kept(place) == []


def torn(*bad):
    """Return a function that makes the pixels, with some bad rows."""

    def row(i):
        if i in bad:
            raise BadPicturesError({f"{bad}/{i}.png": "torn"})
        return PIXELS[i]

    return row


def test_bad_pictures_of_several_sets_are_one_error(place, rows):
    """Bad pictures of several sets are one error and sets without any are kept."""
    sets = [Pixels("a", SHAPE, torn(1, 3)), Pixels("b", SHAPE, rows), Pixels("c", SHAPE, torn(4))]
    with pytest.raises(BadPicturesError, match=r"^3 of 15 pictures cannot be read: .*--skip-bad$") as raised:
        decode(sets)
    assert raised.value.reasons == dict.fromkeys(["(1, 3)/1.png", "(1, 3)/3.png", "(4,)/4.png"], "torn")
    assert all(name in str(raised.value) for name in raised.value.reasons)
    assert [pixels.read() is not None for pixels in sets] == [False, True, False] and len(kept(place)) == 1


def test_a_cache_folder_that_cannot_be_written_is_a_user_error(tmp_path, monkeypatch, rows):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("SPARSEBENCH_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(UserError, match=r"cannot write to .*below: .*; set SPARSEBENCH_CACHE to a .*folder"):
        Pixels("a", SHAPE, rows).array()
    cache.keep_about("b", 1)
    assert rows.made == [] and cache.read_about("b") is None


def test_a_disk_without_room_is_a_user_error_before_a_picture_is_decoded(place, rows, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=2 * PIXELS.nbytes - 1))
    says = r"need 0\.00 GB in .*pictures, and 0\.00 GB are free; free disk space, or set SPARSEBENCH_CACHE"
    with pytest.raises(UserError, match=says):
        decode([Pixels("a", SHAPE, rows), Pixels("b", SHAPE, rows)])
    assert rows.made == [] and kept(place) == []
    decode([Pixels("a", SHAPE, rows)])


def test_a_disk_that_fills_up_is_a_user_error_and_leaves_no_torn_file(place, rows, monkeypatch):
    def no_room(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_room)
    with pytest.raises(UserError, match=r"cannot write .*: No space left on device"):
        Pixels("a", SHAPE, rows).array()
    assert kept(place) == []


def test_files_of_a_killed_process_are_removed_by_the_next(place, rows):
    place.mkdir()
    (place / f".a{cache.SUFFIX}.1-0123.part").write_bytes(b"half")
    Pixels("b", SHAPE, rows).array()
    assert [path.name.partition("-")[0] for path in kept(place)] == ["b"]


def test_waiting_for_another_command_is_reported(place, rows):
    from filelock import FileLock

    place.mkdir()
    lock, messages = FileLock(place / cache.LOCK), []
    lock.acquire()

    def tell(what, done, total):
        messages.append(what)
        lock.release()

    with telling(tell):
        decode([Pixels("a", SHAPE, rows)])
    assert messages[0].startswith("waiting for another command") and "to decode" in messages[1]


def test_clearing_the_cache_removes_only_its_files(place, rows):
    Pixels("a", SHAPE, rows).array()
    cache.keep_about("b", {"1.png": "torn"})
    assert cache.read_about("b") == {"1.png": "torn"} and cache.read_about("c") is None
    (place / f".c{cache.SUFFIX}.1.0.part").write_bytes(b"half")
    (place / "mine.npy").write_bytes(b"mine")
    (place / "notes").mkdir()
    files, size = cache.size()
    assert files == 3 and size == PIXELS.nbytes + 128 + 4 + len('{"1.png": "torn"}')
    assert cache.clear() == (files, size) and cache.size() == (0, 0)
    assert sorted(path.name for path in kept(place)) == ["mine.npy", "notes"]


def test_the_cache_folder_depends_on_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("SPARSEBENCH_CACHE", str(tmp_path / "a"))
    assert files.cache_folder() == tmp_path / "a"
    monkeypatch.delenv("SPARSEBENCH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert files.cache_folder() == tmp_path / "b" / "sparsebench"
    monkeypatch.setenv("HOME", str(tmp_path))
    for unset in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert files.cache_folder() == tmp_path / ".cache" / "sparsebench"


def test_decoding_works_on_file_systems_without_locks(place, rows, monkeypatch):
    def flock(file, how):
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    np.testing.assert_array_equal(Pixels("a", SHAPE, rows).array(), PIXELS)
    assert len(kept(place)) == 1
