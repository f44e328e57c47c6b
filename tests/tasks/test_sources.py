import shutil
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from sparsebench.errors import UserError
from sparsebench.tasks.sources import composites, files
from sparsebench.tasks.sources.composites import Photos, backgrounds, foregrounds, locate_backgrounds, locate_images
from sparsebench.tasks.sources.files import read_rgb, square

COLOUR = (204, 51, 102)  # in web palettes


@pytest.fixture(autouse=True)
def own_place(tmp_path, monkeypatch):
    """Use a new cache folder, and forget pictures of other tests."""
    monkeypatch.setenv("SPARSEBENCH_CACHE", str(tmp_path / "cache"))
    forget()


def forget():
    """Forget what this process has read, like a new process."""
    composites._foregrounds.cache_clear()
    composites._backgrounds.cache_clear()
    files._contents.clear()


def save(path, size=(20, 12), colour=COLOUR, mode="RGB", **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).convert(mode).save(path, **options)
    return path


@pytest.fixture
def folder(tmp_path):
    """Return a folder of two classes, each with six training and four test pictures of its own colours."""
    root = tmp_path / "pictures"
    for k, name in enumerate(("cat", "dog")):
        for i in range(6):
            save(root / "train" / name / f"{i}.png", colour=(100 * k, 10 * i, 0))
        for i in range(4):
            save(root / "test" / name / f"{i}.png", colour=(100 * k, 10 * i, 200))
    return root


def located(root):
    name, place = locate_images(f"folder:{root}", None, False)
    return name, {name: place}


MODES = {"colour": "RGB", "grey": "L", "palette": "P", "ink": "CMYK", "clear": "RGBA"}


@pytest.mark.parametrize("name", [
    "colour.png", "colour.jpg", "colour.JPEG", "colour.webp", "colour.bmp", "grey.png", "grey.jpg", "palette.png",
    "palette.gif", "ink.jpg", "ink.tif", "clear.png",
])  # fmt: skip
def test_every_kind_of_picture_becomes_rgb(tmp_path, name):
    mode = MODES[name.partition(".")[0]]
    result = square(read_rgb(save(tmp_path / name, mode=mode)), 8)
    assert result.shape == (8, 8, 3) and result.dtype == np.uint8
    assert np.abs(result.astype(int) - ((102, 102, 102) if mode == "L" else COLOUR)).max() <= 8


@pytest.mark.parametrize("name", ["deep.png", "deep.tif", "deep.pgm"])
def test_a_grey_picture_of_16_bits_keeps_its_shades(tmp_path, name):
    shades = np.repeat(np.linspace(0, 65535, 8).astype(np.uint16)[None], 8, axis=0)
    Image.fromarray(shades).save(tmp_path / name)
    result = square(read_rgb(tmp_path / name), 8)
    assert np.abs(result[0, :, 0].astype(int) - np.linspace(0, 255, 8)).max() <= 2


@pytest.mark.parametrize("wide", [True, False])
def test_the_middle_square_is_taken(tmp_path, wide):
    pixels = np.zeros((10, 30, 3), dtype=np.uint8)
    pixels[:, 10:20] = COLOUR
    Image.fromarray(pixels if wide else pixels.transpose(1, 0, 2)).save(tmp_path / "bands.png")
    assert (square(read_rgb(tmp_path / "bands.png"), 10) == COLOUR).all()


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n"
RANGE = "it has signed, 32-bit or float shades"


def tiff(mode):
    file = BytesIO()
    Image.new(mode, (9, 9), 1).save(file, "TIFF")
    return file.getvalue()


TORN = {
    "empty.jpg": (b"", "it is empty"), "text.gif": (b"no picture", "of no known format"), "cut-off.png": (None, ""),
    "a-program.png": (POSTSCRIPT, "of no known format"), "float.tif": (tiff("F"), RANGE),
    "long.tif": (tiff("I"), RANGE),
}  # fmt: skip


@pytest.mark.parametrize("name", TORN)
def test_a_file_that_is_no_picture_is_a_user_error_and_no_program_is_run(folder, name, monkeypatch):
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *_, **__: pytest.fail("Ghostscript was asked for"))
    bad, (content, reason) = folder / "train" / "dog" / name, TORN[name]
    if content is None:
        noise = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
        Image.fromarray(noise).save(bad)
        content = bad.read_bytes()[:200]
    bad.write_bytes(content)
    pictures, locations = located(folder)
    with pytest.raises(UserError, match=rf"1 of 21 pictures cannot be read: .*{name} \({reason}"):
        foregrounds(pictures, 8, locations)


def test_a_picture_of_too_many_pixels_is_an_error_before_it_is_decoded(tmp_path, monkeypatch):
    path = tmp_path / "large.png"
    Image.new("1", (9000, 8000)).save(path)
    monkeypatch.setattr(Image.Image, "load", lambda picture: pytest.fail("it is decoded"))
    with pytest.raises(UserError, match="9000 x 8000 pixels, more than"):
        square(read_rgb(path), 8)


WRONG = {
    "train is not a folder; allowed: .*train/<class>/.* and test/<class>": lambda root: shutil.rmtree(root / "train"),
    "test is not a folder": lambda root: shutil.rmtree(root / "test"),
    r"different classes; got \['dog', 'wolf'\]": lambda root: (root / "test/dog").rename(root / "test/wolf"),
    "dog holds no pictures": lambda root: [path.unlink() for path in (root / "test/dog").iterdir()],
    "train: too few classes": lambda root: [shutil.rmtree(root / split / "dog") for split in ("train", "test")],
}


@pytest.mark.parametrize("says", WRONG)
def test_a_folder_without_the_layout_is_a_user_error(folder, says):
    WRONG[says](folder)
    with pytest.raises(UserError, match=says):
        located(folder)


def test_the_name_of_a_folder_depends_on_its_files_and_not_on_its_path(folder, tmp_path):
    name, _ = located(folder)
    copy = shutil.copytree(folder, tmp_path / "elsewhere" / "copy")
    assert located(copy)[0] == name and name.startswith("folder-") and str(tmp_path) not in name
    (copy / "notes.txt").write_text("no picture")
    assert located(copy)[0] == name
    save(copy / "train" / "cat" / "new.png")
    changed, _ = located(copy)
    assert changed != name
    (copy / "train" / "cat" / "new.png").rename(copy / "train" / "cat" / "renamed.png")
    assert len({name, changed, located(copy)[0]}) == 3


@pytest.mark.parametrize("spec", ["mnist", "folder:", "folder", ""])
def test_an_unknown_source_is_a_user_error_with_the_known_ones(spec):
    with pytest.raises(UserError, match="allowed: digits, cifar10, cifar100, svhn, folder:DIR"):
        locate_images(spec, None, False)


def test_missing_sources_are_user_errors_with_an_option():
    """Sources that are not on this machine are user errors with the option to give."""
    with pytest.raises(UserError, match="not on this machine; give --images"):
        foregrounds("folder-0123456789ab", 8, {})
    with pytest.raises(UserError, match="give --backgrounds"):
        backgrounds("pictures-0123456789ab", 8, {})


def test_digits_are_split_two_thirds_to_one():
    """Digits are split two thirds to one in ten classes of their own colours."""
    result = foregrounds("digits", 12, {})
    assert result.classes == tuple("0123456789")
    pictures = set()
    for name in result.classes:
        train, test = result.train[name], result.test[name]
        assert len(train) == (len(train) + len(test)) * 2 // 3 > 100
        pictures |= {picture.tobytes() for split in (train, test) for picture in split}
    assert len(pictures) == 1797


def windows(photo, size):
    """Return the set of all crops of a photograph."""
    view = np.lib.stride_tricks.sliding_window_view(photo, (size, size, 3)).reshape(-1, size * size * 3)
    return {row.tobytes() for row in view}


@pytest.mark.parametrize("test", [False, True])
def test_a_crop_comes_from_the_requested_kind_and_part(test):
    photos = Photos(8)
    kinds = np.array([0, 1] * 20)
    crops = photos.draw(np.random.default_rng(0), kinds, test=test)
    pools = [windows(photos.photos[kind][test], 8) for kind in (0, 1)]
    other = [windows(photos.photos[kind][not test], 8) for kind in (0, 1)]
    for crop, kind in zip(crops.transpose(0, 2, 3, 1), kinds, strict=True):
        assert crop.tobytes() in pools[kind] and crop.tobytes() not in other[kind] | pools[1 - kind]
    assert len({crop.tobytes() for crop in crops}) > 30


@pytest.fixture
def pictures(tmp_path):
    root = tmp_path / "scenes"
    for i in range(12):
        save(root / f"{i:02}.png", colour=(20 * i + 10, 0, 0))
    return root


def test_every_fifth_picture_is_for_tests_only_and_the_other_kind_is_black(pictures):
    name, root = locate_backgrounds(str(pictures))
    assert name.startswith("pictures-")
    source = backgrounds(name, 8, {name: root})
    assert source.kinds == ("pictures", "clean") and source.textured == (0,)
    rng, kinds = np.random.default_rng(0), np.array([0] * 200 + [1] * 10)
    for test, expected in ((False, {0, 1, 2, 3, 5, 6, 7, 8, 10, 11}), (True, {4, 9})):
        drawn = source.draw(rng, kinds, test=test)
        assert drawn.shape == (210, 3, 8, 8) and drawn.dtype == np.uint8
        assert {(red - 10) // 20 for red in drawn[:200, 0, 0, 0].tolist()} == expected
        assert not drawn[200:].any()


def test_a_bad_background_folder_is_a_user_error(tmp_path, pictures):
    """A background folder that is missing empty or small is a user error."""
    with pytest.raises(UserError, match="is not a folder; allowed: photos"):
        locate_backgrounds(str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no pictures"):
        locate_backgrounds(str(tmp_path / "empty"))
    for i in range(4, 12):
        (pictures / f"{i:02}.png").unlink()
    name, root = locate_backgrounds(str(pictures))
    with pytest.raises(UserError, match="too few pictures; got 4; allowed: 5 or more"):
        backgrounds(name, 8, {name: root})


@pytest.fixture
def decoded(monkeypatch):
    """Return the list of files that were decoded."""
    paths, real = [], files.read_rgb
    monkeypatch.setattr(files, "read_rgb", lambda path, *arguments: paths.append(path) or real(path, *arguments))
    return paths


@pytest.fixture
def numbered(tmp_path):
    """Return a folder of two classes, one name a prefix of the other, and pictures without a class."""
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


def test_pictures_are_decoded_once_and_each_stays_in_its_class(numbered, decoded):
    name, locations = located(numbered)
    for _ in range(2):
        forget()
        result = foregrounds(name, 4, locations)
        assert result.classes == ("cat", "cat-2")
        shades = [
            [int(p[0, 0, 0]) for p in split[label]] for split in (result.train, result.test) for label in result.classes
        ]
        assert shades == [[1, 2, 3], [4, 5, 6], [7, 8], [9, 10]]
    assert len(decoded) == 10
    assert foregrounds(name, 5, locations).train["cat"].shape == (3, 3, 5, 5) and len(decoded) == 20


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("change", ["another picture", "another class", "one more"])
def test_pictures_that_change_during_a_run_are_a_user_error_or_were_kept(numbered, tmp_path, change, kept):
    name, locations = located(numbered)
    if kept:
        foregrounds(name, 4, locations)
    else:
        shutil.rmtree(tmp_path / "cache")
    forget()
    if change == "another picture":
        Image.new("RGB", (9, 9), (99, 0, 0)).save(numbered / "train" / "cat" / "1.png")
    elif change == "another class":
        (numbered / "train" / "cat" / "1.png").rename(numbered / "train" / "cat-2" / "9.png")
    else:
        Image.new("RGB", (9, 9)).save(numbered / "test" / "cat" / "new.png")
    if kept:  # they are those of the beginning of the run
        assert foregrounds(name, 4, locations).train["cat"][:, 0, 0, 0].tolist() == [1, 2, 3]
        return
    with pytest.raises(UserError, match="changed while the run was under way; run it again"):
        foregrounds(name, 4, locations)


def archive(path, *arrays):
    np.savez(path, *arrays)
    return path


PIXELS = np.random.default_rng(0).integers(0, 256, (10, 6, 8, 3), dtype=np.uint8)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64])
def test_the_first_array_of_an_npz_file_is_a_source_of_backgrounds(tmp_path, dtype):
    path = archive(tmp_path / "plants.npz", PIXELS if dtype is np.uint8 else (PIXELS / 255).astype(dtype), np.zeros(3))
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
def test_an_array_without_pictures_is_a_user_error(tmp_path, array, says):
    with pytest.raises(UserError, match=says):
        locate_backgrounds(str(archive(tmp_path / "bad.npz", array)))


@pytest.mark.parametrize("damage", [b"", b"no archive", None])
def test_a_file_that_is_no_archive_is_a_user_error(tmp_path, damage):
    path = archive(tmp_path / "bad.npz", PIXELS)
    path.write_bytes(path.read_bytes()[:900] if damage is None else damage)
    with pytest.raises(UserError, match=r"bad\.npz cannot be read as an \.npz file"):
        locate_backgrounds(str(path))


def test_a_bad_archive_is_a_user_error(tmp_path):
    """An archive of nothing few pictures and a changed one are user errors."""
    with pytest.raises(UserError, match="holds no pictures"):
        locate_backgrounds(str(archive(tmp_path / "none.npz")))
    path = archive(tmp_path / "few.npz", PIXELS[:4])
    name, place = locate_backgrounds(str(path))
    with pytest.raises(UserError, match="too few pictures; got 4"):
        backgrounds(name, 6, {name: place})
    path = archive(tmp_path / "all.npz", PIXELS)
    name, place = locate_backgrounds(str(path))
    archive(path, PIXELS[::-1])
    with pytest.raises(UserError, match="changed while the run was under way"):
        backgrounds(name, 6, {name: place})
