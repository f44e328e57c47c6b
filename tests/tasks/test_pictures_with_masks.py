"""The task patches on a folder of pictures with masks: which masks are read as which numbers, and which are refused."""

import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from coded import ARCH, write_random_weights
from commands import call
from PIL import Image

import sparsebench
from sparsebench.errors import UserError
from sparsebench.measure.patches import patch_labels
from sparsebench.plan import plan as planner
from sparsebench.plan.request import Execution, Files, Request
from sparsebench.plugin.registry import Registry
from sparsebench.records import store
from sparsebench.records.record import Record, numbers_of
from sparsebench.runner import run as runs
from sparsebench.tasks.base import Data

pytestmark = pytest.mark.usefixtures("timed_once")

COLOURS = np.array([[90, 90, 90], [220, 40, 40], [40, 220, 40], [40, 40, 220]])
CANVAS, SIDE = 64, 4


def png(numbers: np.ndarray, bits: int) -> bytes:
    """Return a grey PNG with this number of bits for each pixel."""
    height, width = numbers.shape
    rows = bytearray()
    for row in numbers:
        digits = "".join(f"{number:0{bits}b}" for number in row)
        digits += "0" * (-len(digits) % 8)
        rows += bytes([0]) + int(digits, 2).to_bytes(len(digits) // 8, "big")
    parts = [(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, 0, 0, 0, 0)), (b"IDAT", zlib.compress(bytes(rows)))]
    chunks = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in [*parts, (b"IEND", b"")]
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def palette(numbers: np.ndarray) -> Image.Image:
    picture = Image.fromarray(numbers.astype(np.uint8), mode="P")
    picture.putpalette([255, 0, 0, 9, 9, 9, 0, 255, 0, 1, 2, 3])
    return picture


def save(path: Path, numbers: np.ndarray, form: str) -> None:
    """Save a mask in one of the forms of PNG files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if form == "palette":
        palette(numbers).save(path)
    elif form == "16 bits":
        Image.fromarray(numbers.astype(np.uint16)).save(path)
    elif form == "4 bits":
        path.write_bytes(png(numbers, 4))
    elif form == "2 bits":
        path.write_bytes(png(numbers, 2))
    else:
        Image.fromarray(numbers.astype(np.uint8)).save(path)


FORMS = ("8 bits", "palette", "16 bits", "4 bits", "2 bits")


def write(root: Path, n: int = 40) -> Path:
    """Write pictures of any size with an object of one of three colours, and their masks in all forms."""
    rng = np.random.default_rng(0)
    for i in range(n):
        height, width = (int(side) for side in rng.integers(41, 90, 2))
        numbers = np.zeros((height, width), int)
        top, left = rng.integers(0, 20, 2)
        numbers[top : top + 30, left : left + 35] = 1 + i % 3
        pixels = COLOURS[numbers] + rng.integers(-30, 30, (height, width, 3))
        (root / "images").mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.astype(np.uint8)).save(root / "images" / f"{i:02}.{'jpg' if i % 2 else 'png'}")
        if i % 8 == 7:  # a mask of twice the resolution
            numbers = numbers.repeat(2, axis=0).repeat(2, axis=1)
        save(root / "masks" / f"{i:02}.{'PNG' if i == 4 else 'png'}", numbers, FORMS[i % len(FORMS)])
    return root


def put_into_splits(root: Path, split_of: Callable[[int], str]) -> None:
    """Move the pictures and masks of a folder into subfolders, by their places."""
    for kind in ("images", "masks"):
        for place, path in enumerate(sorted((root / kind).iterdir())):
            split = root / kind / split_of(place)
            split.mkdir(exist_ok=True)
            path.rename(split / path.name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("masked"))


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_weights(tmp_path_factory.mktemp("weights") / "backbone.safetensors", ARCH, 5)


def planned(folder: Path, weights: Path, params: str = "", skip_bad: bool = False, **options: Any) -> planner.Plan:
    task = f"patches:canvas={CANVAS}{params}"
    usual: dict[str, Any] = {"suite": "patches", "tasks": (task,), "model": f"timm:{ARCH}", "seeds": 1}
    asked = Request(plugins=("dense", "oracle:macs=0.6"), alone=True, **(usual | options))
    of_network = (weights,) if asked.model else ()
    files = Files(images=(f"folder:{folder}",), weights=of_network, skip_bad=skip_bad)
    return planner.plan(asked, files, Registry(), Path("nowhere"), "missing")


def executed(folder: Path, weights: Path, out: Path, params: str = "", n_train: tuple[int, ...] = ()) -> list[Record]:
    """Return the records of dense and the oracle."""
    asked = Request(
        plugins=("dense", "oracle:macs=0.6"),
        suite="patches",
        tasks=(f"patches:canvas={CANVAS}{params}",),
        model=f"timm:{ARCH}",
        n_train=n_train,
        seeds=1,
        alone=True,
    )
    files = Files(images=(f"folder:{folder}",), weights=(weights,))
    runs.run_missing(asked, files, Execution("cpu", jobs=0), Registry(), out)
    return list(store.read(out).values())


def drawn(folder: Path, weights: Path, params: str = "", skip_bad: bool = False) -> Data:
    plan = planned(folder, weights, params, skip_bad=skip_bad)
    cell = plan.jobs[-1].cell
    return Registry().resolve(cell).task.draw(cell.drawn, cell.repetition, plan.locations)


def test_masks_of_all_forms_have_their_numbers(folder: Path, weights: Path) -> None:
    """Each picture has one object, whose number is its colour."""
    data = drawn(folder, weights)
    assert data.patch_classes == ("background", "1", "2", "3")
    assert len(data.train.labels) == len(data.test.labels) == 20
    for split in (data.train, data.test):
        assert split.segments is not None and split.foregrounds is not None
        assert split.inputs.shape == (20, 3, CANVAS, CANVAS) and split.segments.shape == (20, CANVAS, CANVAS)
        for pixels, segments, number in zip(split.inputs, split.segments, split.foregrounds, strict=True):
            assert set(np.unique(segments)) == {0, 1 + number % 3}
            nearest = np.linalg.norm(pixels.transpose(1, 2, 0)[:, :, None] - COLOURS, axis=3).argmin(axis=2)
            assert (nearest == segments).mean() > 0.95
    assert set(data.train.foregrounds).isdisjoint(data.test.foregrounds)


def test_patches_of_pictures_are_predicted(folder: Path, weights: Path, tmp_path: Path) -> None:
    for record in executed(folder, weights, tmp_path):
        assert record.status == "ok" and record.outcomes is not None, record.failure
        assert record.outcomes.n == 20 * SIDE**2
        assert (record.metrics["iou"].value or 0) > 0.3
        assert set(numbers_of(record.outcomes.foreground, record.outcomes.n)) < set(range(40))


def test_pixels_to_ignore_are_not_judged(folder: Path, weights: Path, tmp_path: Path) -> None:
    """Number 2 is ignored: its patches are no test items, and patches of other classes stay."""
    data = drawn(folder, weights, ",ignore=2")
    segments = data.test.segments
    assert segments is not None and data.patch_classes == ("background", "1", "", "3")
    assert set(np.unique(segments)) == {0, 1, 3, 255}
    judged = patch_labels(segments, (SIDE, SIDE)) != 255
    (record,) = [record for record in executed(folder, weights, tmp_path, ",ignore=2") if record.label == "dense"]
    assert record.status == "ok" and record.outcomes is not None, record.failure
    assert record.outcomes.n == judged.sum() < judged.size
    assert set(numbers_of(record.outcomes.label, record.outcomes.n)) == {0, 1, 3}
    assert record.metrics["iou_pixels"].n == (segments != 255).sum()


def test_a_head_that_cannot_be_learned_leaves_those_of_more_pictures(weights: Path, tmp_path: Path) -> None:
    """Only one of the training pictures has an object, so that two pictures have patches of one class."""
    write(tmp_path / "pictures", 24)
    for path in sorted((tmp_path / "pictures" / "masks").iterdir())[:19]:
        save(path, np.zeros(np.asarray(Image.open(path)).shape, int), "8 bits")
    put_into_splits(tmp_path / "pictures", lambda place: "train" if place < 20 else "val")
    records = executed(tmp_path / "pictures", weights, tmp_path / "out", n_train=(2, 20))
    status = {(record.label, record.cell.n_train): record.status for record in records}
    assert status == {("dense", 2): "failed", ("oracle", 2): "failed", ("dense", 20): "ok", ("oracle", 20): "ok"}
    for record in records:
        assert record.failure is None or "one class" in record.failure.reason


def test_the_background_may_have_another_number_or_none(folder: Path, weights: Path) -> None:
    assert drawn(folder, weights, ",background=3").patch_classes == ("background", "0", "1", "2")
    without = drawn(folder, weights, ",background=-1")
    assert without.patch_classes == ("background", "0", "1", "2", "3")
    assert without.test.segments is not None and without.test.segments.min() == 1


def test_folders_of_training_and_test_pictures_are_used(tmp_path: Path, weights: Path) -> None:
    write(tmp_path, 12)
    put_into_splits(tmp_path, lambda place: "training" if place < 8 else "validation")
    data = drawn(tmp_path, weights)
    assert (len(data.train.labels), len(data.test.labels)) == (8, 4)
    assert data.test.foregrounds is not None and sorted(data.test.foregrounds) == [8, 9, 10, 11]


def test_pictures_of_a_third_folder_need_no_masks_and_are_named(
    tmp_path: Path, weights: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in public sets, whose test pictures come without masks."""
    write(tmp_path, 12)
    put_into_splits(tmp_path, lambda place: "train" if place < 6 else "val" if place < 9 else "test")
    shutil.rmtree(tmp_path / "masks" / "test")
    data = drawn(tmp_path, weights)
    assert (len(data.train.labels), len(data.test.labels)) == (6, 3)
    (message,) = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert "images/test/09.jpg" in message and "images/train" in message and "images/val" in message


def replace(root: Path, change: Callable[[Path], object]) -> None:
    change(root / "masks" / "03.png")


def colours(path: Path) -> None:
    Image.fromarray(np.zeros((50, 50, 3), np.uint8)).save(path)


def tall(path: Path) -> None:
    save(path, np.zeros((90, 30), int), "8 bits")


def damaged(path: Path) -> None:
    """Change a bit of the pixels of a mask, which the checksum of PNG files detects."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)


def picture_of(mask: Path) -> Path:
    (path,) = (mask.parent.parent / "images").glob(f"{mask.stem}.*")
    return path


def empty_picture(mask: Path) -> None:
    picture_of(mask).write_bytes(b"")


def strange_picture(mask: Path) -> None:
    picture_of(mask).write_bytes(b"no picture of any kind")


def rotated_picture(mask: Path) -> None:
    path = picture_of(mask)
    with Image.open(path) as picture:
        exif = picture.getexif()
        exif[0x0112] = 3
        picture.copy().save(path, exif=exif)


def second_picture(mask: Path) -> None:
    with Image.open(picture_of(mask)) as picture:
        picture.save(mask.parent.parent / "images" / f"{mask.stem}.webp")


def one_picture(mask: Path) -> None:
    for path in [*mask.parent.iterdir(), *(mask.parent.parent / "images").iterdir()]:
        if path.stem != mask.stem:
            path.unlink()


def beyond(path: Path) -> None:
    with Image.open(path) as picture:
        numbers = np.asarray(picture).astype(int)
    save(path, np.where(numbers > 0, 700, 0), "16 bits")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (Path.unlink, "1 of 40 pictures have no mask: images/03.jpg"),
        (colours, r"1 of 40 masks cannot be used: masks/03.png \(it has colours"),
        (tall, r"masks/03.png \(it has 30 x 90 pixels, another shape than its picture"),
        (lambda path: path.write_bytes(path.read_bytes()[:55]), r"masks/03.png \("),
        (lambda path: path.write_bytes(b"GIF89a"), r"masks/03.png \(it is not a PNG file"),
        (lambda path: path.write_bytes(b""), r"masks/03.png \(it is empty"),
        (lambda path: path.write_bytes(path.read_bytes()[:24] + b"\3" + path.read_bytes()[25:]), r"masks/03.png \("),
        (damaged, r"1 of 40 masks cannot be used: masks/03.png \("),
        (empty_picture, r"masks/03.png \(its picture is empty"),
        (strange_picture, r"masks/03.png \(its picture is of no known format"),
        (rotated_picture, r"masks/03.png \(its picture has a rotation in EXIF"),
        (second_picture, "2 of 41 pictures share a mask with another picture: images/03.jpg, images/03.webp"),
        (one_picture, "holds one picture; allowed: at least two"),
        (beyond, r"1 of 40 masks have class numbers out of range; got masks/03.png \(700\); allowed: 0 to 253"),
    ],
)
def test_a_wrong_mask_is_refused_in_one_line(
    folder: Path, weights: Path, tmp_path: Path, change: Callable[[Path], object], words: str
) -> None:
    root = tmp_path / "copy"
    shutil.copytree(folder, root)
    replace(root, change)
    with pytest.raises(UserError, match=words) as caught:
        planned(root, weights)
    assert "\n" not in str(caught.value) and "<" not in str(caught.value)


@pytest.mark.parametrize("kind", ["images", "masks"])
def test_files_that_cannot_be_read_are_left_out_on_request(
    folder: Path, weights: Path, tmp_path: Path, kind: str
) -> None:
    root = tmp_path / "copy"
    shutil.copytree(folder, root)
    (path,) = (root / kind).glob("04.*")
    path.write_bytes(b"")
    assert len(drawn(root, weights, skip_bad=True).test.labels) == 19


def test_files_that_belong_to_no_picture_are_named(
    folder: Path, weights: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Training and test pictures have folders, so a picture beside these folders is left out as well."""
    root = tmp_path / "copy"
    shutil.copytree(folder, root)
    (root / "images" / "07.jpg").unlink()
    for kind in ("images", "masks"):
        for path in sorted((root / kind).iterdir()):
            if path.stem not in ("07", "11"):
                split = root / kind / ("train" if path.stem < "20" else "val")
                split.mkdir(exist_ok=True)
                path.rename(split / path.name)
    data = drawn(root, weights)
    assert (len(data.train.labels), len(data.test.labels)) == (18, 20)
    (message,) = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert "masks/07.png" in message and "images/11.jpg" in message


def blank(root: Path, number: int, splits: tuple[str, ...]) -> None:
    """Give all masks of the subfolders one number."""
    for split in splits:
        for path in (root / "masks" / split).iterdir():
            with Image.open(path) as picture:
                shape = np.asarray(picture).shape
            save(path, np.full(shape, number), "8 bits")


@pytest.mark.parametrize(
    ("number", "splits", "words"),
    [
        (255, ("train", "val"), "all patches of the test images are to ignore"),
        (255, ("val",), "all patches of the test images are to ignore"),
        (255, ("train",), "all patches of the training images are to ignore"),
        (0, ("train",), "one class"),
        (0, ("val",), ""),
    ],
)
def test_masks_of_one_number_give_a_board(
    weights: Path, tmp_path: Path, number: int, splits: tuple[str, ...], words: str
) -> None:
    """Without an object in the test there is accuracy and no intersection over union; else a reason why it failed."""
    root, out = tmp_path / "pictures", tmp_path / "out"
    write(root, 12)
    put_into_splits(root, lambda place: "train" if place < 8 else "val")
    blank(root, number, splits)
    for record in executed(root, weights, out):
        assert record.failure is None or words in record.failure.reason
        assert record.status == ("failed" if words else "ok")
    board = sparsebench.leaderboard(out)
    assert len(board) == (0 if words else 2)
    if not words:
        assert board["accuracy"].notna().all() and ("iou" not in board or board["iou"].isna().all())
        text = call("leaderboard", out).output
        assert "pictures with masks of a folder" in text and f"{4 * SIDE**2} test patches" in text
        assert "oracle" in text.partition("Predicted patches")[2]


def test_a_number_beyond_the_range_may_be_ignored(folder: Path, weights: Path, tmp_path: Path) -> None:
    root = tmp_path / "copy"
    shutil.copytree(folder, root)
    replace(root, beyond)
    assert drawn(root, weights, ",ignore=700").patch_classes == ("background", "1", "2", "3")
    with pytest.raises(UserError, match="out of range"):
        planned(root, weights, ",ignore=700,largest=2")


def test_the_background_may_be_larger_than_the_largest_number(folder: Path, weights: Path) -> None:
    data = drawn(folder, weights, ",background=3,largest=2")
    assert data.patch_classes == ("background", "0", "1", "2")
    with pytest.raises(UserError, match="out of range"):
        planned(folder, weights, ",background=3,largest=1")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": None}, "give a network with its weights"),
        ({"tasks": ("composite:test=4",), "suite": "probe"}, "can only be used by task 'patches'"),
    ],
)
def test_what_does_not_fit_pictures_with_masks_is_refused(
    folder: Path, weights: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        planned(folder, weights, **options)


def test_a_folder_without_masks_is_refused(folder: Path, weights: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "images", tmp_path / "images")
    with pytest.raises(UserError, match="masks is not a folder"):
        planned(tmp_path, weights)
