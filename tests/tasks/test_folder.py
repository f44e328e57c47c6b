import numpy as np
import pytest
from PIL import Image
from timm.data import ImageNetInfo, create_transform

from sparsebench.errors import UserError
from sparsebench.tasks.folder import Folder, cut_out, locate
from sparsebench.tasks.sources.files import read_rgb
from sparsebench.tasks.sources.labels import imagenet_classes as classes
from sparsebench.tasks.sources.labels import imagenet_number


@pytest.fixture
def folder(tmp_path):
    """Return a function that writes noise pictures of some classes, and returns their folder."""

    def write(classes=("b", "a"), each=3, below="val", size=(40, 30)):
        rng = np.random.default_rng(0)
        for name in classes:
            (tmp_path / below / name).mkdir(parents=True, exist_ok=True)
            for i in range(each):
                pixels = rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / below / name / f"{i}.png")
        return tmp_path

    return write


def task_on(root, **params):
    name, place = locate(f"folder:{root}")
    return Folder(images=name, **({"canvas": 16} | params)), {name: place}


@pytest.mark.parametrize("size", [(40, 30), (30, 40), (31, 57), (224, 224), (500, 333), (17, 300)])
@pytest.mark.parametrize(
    ("canvas", "crop", "mode", "filter"),
    [
        (24, 0.9, "center", "bicubic"),
        (224, 0.875, "center", "bilinear"),
        (31, 1.0, "center", "bicubic"),
        (32, 0.95, "squash", "bicubic"),
        (31, 1.0, "squash", "bilinear"),
    ],
)
def test_pictures_are_cut_as_timm_cuts_them(tmp_path, size, canvas, crop, mode, filter):
    pixels = np.random.default_rng(1).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    picture = Image.fromarray(pixels)
    picture.save(tmp_path / "x.png")
    timms = create_transform(
        canvas, is_training=False, interpolation=filter, crop_pct=crop, crop_mode=mode, normalize=False
    )
    expected = timms(picture)
    resize = "short" if mode == "center" else mode
    result = cut_out(read_rgb(tmp_path / "x.png"), canvas, crop, resize, filter)
    assert (result.transpose(2, 0, 1) == expected.numpy()).all()


@pytest.mark.parametrize("turned", [False, True])
def test_only_the_middle_of_a_very_long_picture_is_resized(turned):
    rng = np.random.default_rng(0)
    long = np.full((2, 2**24, 3), 200, np.uint8)
    long[:, 2**23 - 8 : 2**23 + 8] = rng.integers(0, 255, (2, 16, 3))
    middle = long[:, 2**23 - 40 : 2**23 + 40]
    result, expected = (cut_out(Image.fromarray(x.swapaxes(0, 1) if turned else x), 32, 0.9) for x in (long, middle))
    assert np.abs(result.astype(int) - expected).max() <= 1


@pytest.mark.parametrize("below", ["val", "test", "."])
def test_each_layout_gives_the_classes_in_the_order_of_their_names(folder, below):
    root = folder(below=below)
    task, locations = task_on(root)
    data = task.draw(0, 0, locations)
    assert data.classes == task.known_classes(locations) == ("a", "b")
    assert data.test.labels.tolist() == [0] * 3 + [1] * 3
    paths = [root / below / name / f"{i}.png" for name in "ab" for i in range(3)]
    expected = np.stack([cut_out(read_rgb(path), 16, 0.9) for path in paths])
    assert (data.test.inputs.transpose(0, 2, 3, 1) == expected).all()
    assert data.train.inputs.shape == (0, 3, 16, 16) and len(data.train.labels) == 0
    assert data.test.relevance_on((4, 4)) is None


def test_val_is_taken_before_test(folder):
    """Val is taken before test and the training pictures do not name the folder."""
    first = locate(f"folder:{folder()}")
    folder(below="train", each=1)
    folder(below="test", each=1)
    assert locate(f"folder:{folder()}") == first and first[1].name == "val"


def test_a_sample_of_pictures_differs_between_repetitions(folder):
    task, locations = task_on(folder(each=20), test=10)
    root = locations[task.images]
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.png"))
    every = np.stack([cut_out(read_rgb(root / name), 16, 0.9).transpose(2, 0, 1) for name in names])
    drawn = [task.draw(0, repetition, locations).test for repetition in (0, 1, 0)]
    rows = [[int((every == x).all(axis=(1, 2, 3)).argmax()) for x in split.inputs] for split in drawn]
    assert rows[0] == rows[2] != rows[1] and all(row == sorted(set(row)) and len(row) == 10 for row in rows)
    assert [label for row in rows for label in np.array(row) // 20] == [x for split in drawn for x in split.labels]
    with pytest.raises(UserError, match="got 41; allowed: at most 40"):
        task.model_copy(update={"test": 41}).draw(0, 0, locations)


def test_folders_are_known_by_wordnet_ids_and_by_class_names():
    info = ImageNetInfo()
    assert list(classes()) == info.label_names()
    assert list(map(imagenet_number, classes())) == list(range(1000))
    result = [imagenet_number(text.split(",")[0]) for text in info.label_descriptions()]
    assert all(number in (None, k) for k, number in enumerate(result)) and result.count(None) == 13
    names = {"tench": 0, "great_white_shark": 2, "White Shark": 2, "n01443537": 1}
    two = dict.fromkeys(("crane", "maillot", "airplane"))  # two cranes: a bird and a machine
    assert {name: imagenet_number(name) for name in names | two} == names | two


def test_wrong_folders_are_refused(tmp_path):
    for spec, says in [
        ("digits", "allowed: folder:DIR"),
        ("folder:", "allowed: folder:DIR"),
        (f"folder:{tmp_path / 'nowhere'}", "nowhere is not a folder"),
    ]:
        with pytest.raises(UserError, match=says):
            locate(spec)
    with pytest.raises(UserError, match="give --images folder:DIR"):
        Folder().check()
    with pytest.raises(UserError, match="not on this machine; give --images"):
        Folder(images="folder-0123456789ab").draw(0, 0, {})


def test_an_unknown_crop_mode_is_refused_unless_the_user_gives_another():
    border = {"canvas": 32, "crop": 0.9, "resize": "border", "filter": "bicubic"}
    with pytest.raises(UserError, match=r"cannot cut pictures.*border.*; give canvas"):
        Folder(images="folder-0").with_cut(border)
    assert Folder(images="folder-0", resize="short").with_cut(border).canvas == 32


def test_a_test_may_answer_with_the_classes_of_the_folders_alone(folder):
    root = folder((classes()[7], classes()[3]))
    for among in ("head", "folders"):
        task, locations = task_on(root, labels="imagenet", among=among)
        data = task.draw(0, 0, locations)
        assert (data.among is None) == (among == "head") and len(data.classes) == 1000
    assert data.among.tolist() == [imagenet_number(name) for name in sorted({classes()[7], classes()[3]})]
