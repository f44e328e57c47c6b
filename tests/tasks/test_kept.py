import shutil

import numpy as np
import pytest
from PIL import Image

from sparsebench.errors import UserError
from sparsebench.plan.locate import locate_backgrounds, locate_images
from sparsebench.tasks.sources import composites, files
from sparsebench.tasks.sources.composites import backgrounds, foregrounds


@pytest.fixture(autouse=True)
def own_place(tmp_path, monkeypatch):
    """Keep pictures in a new folder; forget those of other tests."""
    monkeypatch.setenv("SPARSEBENCH_CACHE", str(tmp_path / "cache"))
    forget()


def forget():
    """Forget what this process knows, as another does not know it."""
    composites._foregrounds.cache_clear()
    composites._backgrounds.cache_clear()
    files._known.clear()


@pytest.fixture
def decoded(monkeypatch):
    """Return the list of files that were decoded."""
    seen, real = [], files.read_rgb
    monkeypatch.setattr(files, "read_rgb", lambda path, *given: seen.append(path) or real(path, *given))
    return seen


@pytest.fixture
def folder(tmp_path):
    """Return a folder of two classes, one's name the beginning of the other's, and pictures of no class."""
    root = tmp_path / "pictures"
    shade = 0
    for split, n in (("train", 3), ("test", 2)):
        for name in ("cat", "cat-2"):
            (root / split / name).mkdir(parents=True)
            for i in range(n):
                shade += 1
                Image.new("RGB", (9, 9), (shade, 0, 0)).save(root / split / name / f"{i}.png")
    Image.new("RGB", (9, 9)).save(root / "logo.png")
    Image.new("RGB", (9, 9)).save(root / "train" / "stray.png")
    return root


def located(root):
    name, place = locate_images(f"folder:{root}")
    return name, {name: place}


def test_pictures_are_decoded_once_and_each_stays_in_its_class(folder, decoded):
    name, locations = located(folder)
    for _ in range(2):
        forget()
        found = foregrounds(name, 4, locations)
        assert found.classes == ("cat", "cat-2")
        shades = [
            [int(p[0, 0, 0]) for p in split[label]] for split in (found.train, found.test) for label in found.classes
        ]
        assert shades == [[1, 2, 3], [4, 5, 6], [7, 8], [9, 10]]
    assert len(decoded) == 10
    assert foregrounds(name, 5, locations).train["cat"].shape == (3, 3, 5, 5) and len(decoded) == 20


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("change", ["another picture", "another class", "one more"])
def test_pictures_that_change_during_a_run_are_a_user_error_or_were_kept(folder, tmp_path, change, kept):
    name, locations = located(folder)
    if kept:
        foregrounds(name, 4, locations)
    else:
        shutil.rmtree(tmp_path / "cache")
    forget()
    if change == "another picture":
        Image.new("RGB", (9, 9), (99, 0, 0)).save(folder / "train" / "cat" / "1.png")
    elif change == "another class":
        (folder / "train" / "cat" / "1.png").rename(folder / "train" / "cat-2" / "9.png")
    else:
        Image.new("RGB", (9, 9)).save(folder / "test" / "cat" / "new.png")
    if kept:  # they are those that the run began with
        assert foregrounds(name, 4, locations).train["cat"][:, 0, 0, 0].tolist() == [1, 2, 3]
        return
    with pytest.raises(UserError, match="changed while the run was under way; run it again"):
        foregrounds(name, 4, locations)


def save(path, *arrays):
    np.savez(path, *arrays)
    return path


PIXELS = np.random.default_rng(0).integers(0, 256, (10, 6, 8, 3), dtype=np.uint8)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64])
def test_the_first_array_of_an_npz_file_is_a_source_of_backgrounds(tmp_path, dtype):
    path = save(tmp_path / "plants.npz", PIXELS if dtype is np.uint8 else (PIXELS / 255).astype(dtype), np.zeros(3))
    name, place = locate_backgrounds(str(path))
    assert name.startswith("array-") and place == path
    source = backgrounds(name, 6, {name: place})
    assert source.kinds == ("pictures", "clean")
    for pool, rows in zip(source.pools, ([0, 1, 2, 3, 5, 6, 7, 8], [4, 9]), strict=True):
        np.testing.assert_array_equal(pool, PIXELS[rows][:, :, 1:7].transpose(0, 3, 1, 2))


@pytest.mark.parametrize(
    ("array", "says"),
    [
        (PIXELS[0], r"holds no pictures; got uint8 of shape \(6, 8, 3\); allowed: \(n, height, width, 3\)"),
        (PIXELS[..., :2], "holds no pictures"),
        (PIXELS[:0], "holds no pictures"),
        (PIXELS.astype(np.int64), "got int64"),
        (PIXELS.astype(np.uint16), "got uint16"),
        (PIXELS.astype(np.float32), r"float32 of shape .*, 0 to 255; allowed: .* \[0, 1\]"),
        (PIXELS / 255 - 0.1, ", -0.1 to 0.9"),
        (np.where(PIXELS > 250, np.nan, 0.5), ", nan to nan"),
        (np.array([{"a": 1}], dtype=object), "cannot be read as an .npz file"),
    ],
)
def test_an_array_that_holds_no_pictures_is_a_user_error(tmp_path, array, says):
    with pytest.raises(UserError, match=says):
        locate_backgrounds(str(save(tmp_path / "bad.npz", array)))


@pytest.mark.parametrize("damage", [b"", b"no archive", None])
def test_a_file_that_is_no_archive_is_a_user_error(tmp_path, damage):
    path = save(tmp_path / "bad.npz", PIXELS)
    path.write_bytes(path.read_bytes()[:900] if damage is None else damage)
    with pytest.raises(UserError, match=r"bad\.npz cannot be read as an \.npz file"):
        locate_backgrounds(str(path))


def test_an_archive_of_nothing_few_pictures_and_a_changed_one_are_user_errors(tmp_path):
    with pytest.raises(UserError, match="holds no pictures"):
        locate_backgrounds(str(save(tmp_path / "none.npz")))
    path = save(tmp_path / "few.npz", PIXELS[:4])
    name, place = locate_backgrounds(str(path))
    with pytest.raises(UserError, match="too few pictures; got 4"):
        backgrounds(name, 6, {name: place})
    path = save(tmp_path / "all.npz", PIXELS)
    name, place = locate_backgrounds(str(path))
    save(path, PIXELS[::-1])
    with pytest.raises(UserError, match="changed while the run was under way"):
        backgrounds(name, 6, {name: place})
