import shutil

import numpy as np
import pytest
from PIL import Image

from sparsebench.errors import UserError
from sparsebench.plan.locate import locate_backgrounds, locate_images
from sparsebench.tasks.sources.composites import Photos, backgrounds, foregrounds
from sparsebench.tasks.sources.files import read_rgb, square

COLOUR = (204, 51, 102)  # one that web palettes have


def save(path, size=(20, 12), colour=COLOUR, mode="RGB", **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).convert(mode).save(path, **options)
    return path


@pytest.fixture
def folder(tmp_path):
    """Return a folder of two classes, six pictures to train on and four to test on each, a colour each."""
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


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("colour.png", "RGB"),
        ("colour.jpg", "RGB"),
        ("COLOUR.JPEG", "RGB"),
        ("colour.webp", "RGB"),
        ("colour.bmp", "RGB"),
        ("grey.png", "L"),
        ("grey.jpg", "L"),
        ("palette.png", "P"),
        ("palette.gif", "P"),
        ("ink.jpg", "CMYK"),
        ("ink.tif", "CMYK"),
        ("clear.png", "RGBA"),
    ],
)
def test_every_kind_of_picture_becomes_rgb(tmp_path, name, mode):
    found = square(read_rgb(save(tmp_path / name, mode=mode)), 8)
    assert found.shape == (8, 8, 3) and found.dtype == np.uint8
    assert np.abs(found.astype(int) - ((102, 102, 102) if mode == "L" else COLOUR)).max() <= 8


def test_a_grey_picture_of_16_bits_keeps_its_shades(tmp_path):
    shades = np.repeat(np.linspace(0, 65535, 8).astype(np.uint16)[None], 8, axis=0)
    Image.fromarray(shades).save(tmp_path / "deep.png")
    found = square(read_rgb(tmp_path / "deep.png"), 8)
    assert np.abs(found[0, :, 0].astype(int) - np.linspace(0, 255, 8)).max() <= 2


@pytest.mark.parametrize("wide", [True, False])
def test_the_middle_square_is_taken(tmp_path, wide):
    pixels = np.zeros((10, 30, 3), dtype=np.uint8)
    pixels[:, 10:20] = COLOUR
    Image.fromarray(pixels if wide else pixels.transpose(1, 0, 2)).save(tmp_path / "bands.png")
    assert (square(read_rgb(tmp_path / "bands.png"), 10) == COLOUR).all()


@pytest.mark.parametrize("content", [b"", b"no picture", None], ids=["empty", "text", "cut off"])
@pytest.mark.parametrize("suffix", [".jpg", ".png", ".gif"])
def test_a_corrupt_picture_is_a_user_error_that_names_the_file(folder, content, suffix):
    bad = folder / "train" / "dog" / f"bad{suffix}"
    if content is None:
        noise = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
        Image.fromarray(noise).save(bad)
        content = bad.read_bytes()[:200]
    bad.write_bytes(content)
    name, locations = located(folder)
    with pytest.raises(UserError, match=f"bad{suffix} cannot be read as a picture"):
        foregrounds(name, 8, locations)


def test_a_program_in_postscript_is_no_picture_whatever_it_is_called(folder, monkeypatch):
    from PIL import EpsImagePlugin

    def run(*_, **__):
        raise AssertionError("Ghostscript was asked for")

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", run)
    bad = folder / "train" / "dog" / "eps.png"
    bad.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n")
    name, locations = located(folder)
    with pytest.raises(UserError, match=r"eps.png cannot be read as a picture \(of no known format\)"):
        foregrounds(name, 8, locations)


def test_a_picture_of_too_many_pixels_is_an_error_before_it_is_decoded(tmp_path, monkeypatch):
    path = tmp_path / "large.png"
    Image.new("1", (9000, 8000)).save(path)
    monkeypatch.setattr(Image.Image, "load", lambda picture: pytest.fail("it is decoded"))
    with pytest.raises(UserError, match="9000 x 8000 pixels, more than"):
        square(read_rgb(path), 8)


@pytest.mark.parametrize("missing", ["train", "test"])
def test_a_missing_split_is_a_user_error_that_shows_the_layout(folder, missing):
    shutil.rmtree(folder / missing)
    with pytest.raises(UserError, match=rf"{missing} is not a folder; allowed: .*train/<class>/\* and test/<class>"):
        locate_images(f"folder:{folder}", None, False)


def test_splits_of_different_classes_are_a_user_error(folder):
    (folder / "test" / "dog").rename(folder / "test" / "wolf")
    with pytest.raises(UserError, match=r"different classes; got \['dog', 'wolf'\]"):
        located(folder)


def test_one_class_and_an_empty_class_are_user_errors(folder):
    for path in (folder / "test" / "dog").iterdir():
        path.unlink()
    with pytest.raises(UserError, match="dog holds no pictures"):
        located(folder)
    shutil.rmtree(folder / "train" / "dog")
    shutil.rmtree(folder / "test" / "dog")
    with pytest.raises(UserError, match="too few classes"):
        located(folder)


def test_the_name_of_a_folder_is_the_same_wherever_it_lies_and_changes_with_a_new_file(folder, tmp_path):
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


def test_sources_that_are_not_on_this_machine_are_user_errors_with_the_option_to_give(tmp_path):
    with pytest.raises(UserError, match="not on this machine; give --images"):
        foregrounds("folder-0123456789ab", 8, {})
    with pytest.raises(UserError, match="are of a task of their own"):
        foregrounds("waterbirds-0123456789ab", 8, {"waterbirds-0123456789ab": tmp_path})
    with pytest.raises(UserError, match="give --backgrounds"):
        backgrounds("pictures-0123456789ab", 8, {})


def test_digits_are_split_two_thirds_to_one_in_ten_classes_of_their_own_colours():
    found = foregrounds("digits", 12, {})
    assert found.classes == tuple("0123456789")
    seen = set()
    for name in found.classes:
        train, test = found.train[name], found.test[name]
        assert len(train) == (len(train) + len(test)) * 2 // 3 > 100
        seen |= {picture.tobytes() for split in (train, test) for picture in split}
    assert len(seen) == 1797


def windows(photo, size):
    """Return the set of all crops of a photograph."""
    view = np.lib.stride_tricks.sliding_window_view(photo, (size, size, 3)).reshape(-1, size * size * 3)
    return {row.tobytes() for row in view}


@pytest.mark.parametrize("test", [False, True])
def test_a_crop_comes_from_the_kind_and_the_part_it_should(test):
    photos = Photos(8)
    kinds = np.array([0, 1] * 20)
    crops = photos.draw(np.random.default_rng(0), kinds, test=test)
    own = [windows(photos.photos[kind][test], 8) for kind in (0, 1)]
    other = [windows(photos.photos[kind][not test], 8) for kind in (0, 1)]
    for crop, kind in zip(crops.transpose(0, 2, 3, 1), kinds, strict=True):
        assert crop.tobytes() in own[kind] and crop.tobytes() not in other[kind] | own[1 - kind]
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


def test_a_background_folder_that_is_missing_empty_or_small_is_a_user_error(tmp_path, pictures):
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
