import re
import shutil
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image

from sparsebench.cli import main
from sparsebench.errors import UserError
from sparsebench.models.vits import Vit
from sparsebench.records import store
from sparsebench.runner import prepare
from sparsebench.runner.environment import RunEnvironment
from sparsebench.tasks.groups import CelebA, Waterbirds, shares
from sparsebench.tasks.sources import files, known
from sparsebench.tasks.sources.composites import locate_images
from sparsebench.training.evaluation import influences

pytestmark = pytest.mark.usefixtures("no_picture", "timed_once")


def located(made):
    name, place = locate_images(f"folder:{made.root}")
    return name, {name: place}


def shown(split):
    """Return the picture that each image shows, identified by its colour."""
    return [round(float(red) / 3) for red in split.inputs[:, 0].mean(axis=(1, 2))]


def draw(made, n=28, repetition=0, cls=Waterbirds, **params):
    name, locations = located(made)
    return cls(images=name, canvas=8, **params).draw(n, repetition, locations)


def check_splits(made, data, label, attribute):
    """Assert that the splits have all their pictures, with these (n,) labels and attributes."""
    for number, split in enumerate((data.train, data.validation, data.test)):
        rows = [i for i, row in enumerate(made.rows) if row[0] == number]
        assert shown(split) == rows
        assert split.inputs.shape == (len(rows), 3, 8, 8) and split.inputs.dtype == np.uint8
        assert split.labels.tolist() == [label[i] for i in rows]
        assert split.groups.tolist() == [2 * label[i] + attribute[i] for i in rows]


def test_waterbirds_is_read_split_by_split(waterbirds):
    data = draw(waterbirds, patience=2)
    check_splits(waterbirds, data, *zip(*(row[1:] for row in waterbirds.rows), strict=True))
    assert draw(waterbirds).validation is None
    assert data.classes == ("landbird", "waterbird")
    assert data.group_names == ("landbird on land", "landbird on water", "waterbird on land", "waterbird on water")
    for number, split in enumerate((data.train, data.validation, data.test)):
        assert np.bincount(split.groups).tolist() == list(waterbirds.counts[number])


def test_celeba_is_read_as_published_and_as_kaggle_has_it(celeba):
    data = draw(celeba, cls=CelebA, validation=0.1)
    check_splits(celeba, data, *zip(*(row[1:] for row in celeba.rows), strict=True))
    assert data.classes == ("not Blond_Hair", "Blond_Hair")
    assert data.group_names[1] == "not Blond_Hair, Male" and data.group_names[2] == "Blond_Hair, not Male"


def test_celeba_has_other_attributes(celeba):
    data = draw(celeba, cls=CelebA, target="Young", confounder="Blond_Hair", patience=1)
    check_splits(celeba, data, celeba.young, [row[1] for row in celeba.rows])
    with pytest.raises(UserError, match=r"unknown column .*list_attr_celeba.*'Blond_Hare'.*did you mean 'Blond_Hair'"):
        draw(celeba, cls=CelebA, target="Blond_Hare")
    with pytest.raises(UserError, match="one attribute"):
        CelebA(images="celeba-0", target="Male").check()


def test_drawn_pictures_are_decoded_once(waterbirds, monkeypatch):
    paths, real = [], files.read_rgb
    monkeypatch.setattr(files, "read_rgb", lambda *arguments: paths.append(arguments[0]) or real(*arguments))
    parts = [draw(waterbirds, 14, repetition=k, test=4) for k in (0, 1, 0)]
    assert len(paths) == 2 * (14 + 4)
    np.testing.assert_array_equal(parts[0].train.inputs, parts[2].train.inputs)
    np.testing.assert_array_equal(parts[0].test.inputs, parts[2].test.inputs)
    assert not np.array_equal(parts[0].train.inputs, parts[1].train.inputs)


def test_a_table_that_changes_under_a_run_is_refused(waterbirds):
    name, locations = located(waterbirds)
    edit(waterbirds, "/sea/3.jpg", "/sea/4.jpg")
    known.labelled_pictures.cache_clear()  # as in another process
    with pytest.raises(UserError, match="changed while the run was under way"):
        Waterbirds(images=name, canvas=8).draw(28, 0, locations)


def test_rows_of_pictures_that_cannot_be_read_are_left_out(waterbirds):
    rows = [[i for i, row in enumerate(waterbirds.rows) if row[0] == split] for split in (0, 2)]
    bad = [*rows[0][:2], rows[1][0]]
    for row in bad:
        (waterbirds.root / waterbirds.names[row]).write_bytes(b"no picture")
    name, place = locate_images(f"folder:{waterbirds.root}", skip_bad=True)
    data = Waterbirds(images=name, canvas=8).draw(0, 0, {name: place})
    assert [shown(data.train), shown(data.test)] == [[i for i in split if i not in bad] for split in rows]


def test_a_part_keeps_the_shares_of_the_groups_and_is_drawn_by_repetition(waterbirds):
    parts = [draw(waterbirds, 14, repetition=k, test=4, patience=2) for k in (0, 0, 1)]
    for data in parts:
        assert np.bincount(data.train.groups).tolist() == [6, 2, 2, 4]
        assert np.bincount(data.test.groups).tolist() == [1, 1, 1, 1]
        assert len(data.validation.labels) == 8
        for split in (data.train, data.test):
            assert split.groups.tolist() == [2 * waterbirds.rows[i][1] + waterbirds.rows[i][2] for i in shown(split)]
    first, again, other = (shown(data.train) for data in parts)
    assert first == again != other and len(set(first)) == 14
    more = shown(draw(waterbirds, 21).train)
    assert set(first) < set(more)


@pytest.mark.parametrize(
    ("n", "expected"),
    [(4, [1, 1, 1, 1]), (5, [2, 1, 1, 1]), (9, [6, 1, 1, 1]), (20, [14, 1, 1, 4]), (100, [72, 4, 2, 22])],
)
def test_shares_are_rounded_and_no_group_is_left_out(n, expected):
    counts = np.array([72, 4, 2, 22])
    assert shares(counts, n).tolist() == expected and sum(expected) == n
    for n in range(4, 101):
        out = shares(counts, n)
        assert out.sum() == n and (out >= 1).all() and (out <= counts).all()


@pytest.mark.parametrize("n", [3, 29, 1000])
def test_too_many_or_few_samples_are_a_user_error(waterbirds, n):
    """Too many or too few samples are a user error with the allowed number."""
    with pytest.raises(UserError, match=f"training split; got {n}; allowed: 4, .* to 28, "):
        draw(waterbirds, n)


def test_the_name_depends_on_the_content_and_not_on_the_folder(waterbirds, tmp_path):
    name, _ = located(waterbirds)
    copy = shutil.copytree(waterbirds.root, tmp_path / "elsewhere")
    assert locate_images(f"folder:{copy}")[0] == name and name.startswith("waterbirds-")
    assert locate_images("waterbirds", tmp_path)[0] == name
    table = copy / "metadata.csv"
    table.write_text(table.read_text().replace("/sea/0.jpg", "/sea/1.jpg"))
    changed = locate_images(f"folder:{copy}")[0]
    Image.new("RGB", (9, 9)).save(copy / waterbirds.names[3])
    assert len({name, changed, locate_images(f"folder:{copy}")[0]}) == 3


def test_a_task_without_its_images_is_refused_at_once(waterbirds, tmp_path):
    with pytest.raises(UserError, match="give --images waterbirds"):
        Waterbirds().check()
    with pytest.raises(UserError, match="got 'folder-0123'; give --images celeba"):
        CelebA(images="folder-0123").check()
    with pytest.raises(UserError, match="not on this machine; give --images"):
        Waterbirds(images="waterbirds-0123").draw(8, 0, {})
    with pytest.raises(UserError, match=r"celeba is not in .*; get it from https.* give --images folder:DIR"):
        locate_images("celeba", tmp_path)


def edit(made, old, new, count=-1):
    made.table.write_text(made.table.read_text().replace(old, new, count))


def in_line(number, column, value):
    """Return a function that replaces a value in a column and line of a table."""

    def change(text):
        lines = text.splitlines()
        fields = lines[number - 1].split(",")
        fields[column] = value
        lines[number - 1] = ",".join(fields)
        return "\n".join(lines)

    return change


WRONG = {
    "no split": (lambda text: text.replace(",split,", ",part,"), "unknown column of .*metadata.csv; got 'split'"),
    "no name": (lambda text: text.replace(",img_filename,", ",file,"), "got 'img_filename'"),
    "another picture": (in_line(4, 1, "nowhere.jpg"), "metadata.csv, line 4: .*is not there"),
    "twice": (
        lambda text: text.replace("002.Bird/Bird_0002.jpg,", "001.Bird/Bird_0001.jpg,"),
        "metadata.csv, line 4: .*is also in line 3",
    ),
    "a class": (in_line(7, 2, "7"), "metadata.csv, line 7: y; got '7'; allowed: 0, 1"),
    "a split": (in_line(7, 3, "7"), "metadata.csv, line 7: split; got '7'; allowed: 0, 1"),
    "a place": (in_line(7, 4, "7"), "metadata.csv, line 7: place; got '7'; allowed: 0, 1"),
    "no rows": (lambda text: "img_filename,y,split,place\n", "has no rows"),
    "empty": (lambda text: "", r"metadata\.csv"),
    "no text": (lambda text: "\0\xff\xfe", r"metadata\.csv"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_table_that_is_wrong_is_a_user_error(waterbirds, what):
    change, says = WRONG[what]
    waterbirds.table.write_text(change(waterbirds.table.read_text()), "latin-1")
    with pytest.raises(UserError, match=says):
        located(waterbirds)


def test_a_celeba_table_that_is_cut_off_is_a_user_error(celeba):
    lines = celeba.table.read_text().splitlines()
    celeba.table.write_text("\n".join(lines[:-3]))
    if celeba.table.suffix == ".txt":
        with pytest.raises(UserError, match=f"damaged; got {len(celeba.rows) - 3} rows"):
            located(celeba)
    partition = celeba.root / f"list_eval_partition{celeba.table.suffix}"
    celeba.table.write_text("\n".join(lines))
    partition.write_text("\n".join(partition.read_text().splitlines()[:-2]))
    with pytest.raises(UserError, match=rf"line {len(lines) - 1}: .* is not in {partition.name}"):
        located(celeba)
    partition.unlink()
    with pytest.raises(UserError, match=r"list_eval_partition\.txt cannot be read"):
        located(celeba)


@pytest.mark.parametrize(
    "spell",
    [lambda name: "./" + name.upper(), lambda name: name.replace("/", "\\"), lambda name: name.replace("/", "//")],
    ids=["upper case", "backslash", "twice"],
)
def test_a_table_may_spell_names_otherwise_than_the_disk(waterbirds, celeba, spell):
    for made, cls in ((waterbirds, Waterbirds), (celeba, CelebA)):
        before = draw(made, cls=cls)
        for name in made.names[::2]:
            edit(made, name, spell(name))
        after = draw(made, cls=cls)
        for a, b in ((before.train, after.train), (before.test, after.test)):
            np.testing.assert_array_equal(a.inputs, b.inputs)
            assert a.groups.tolist() == b.groups.tolist()


@pytest.mark.parametrize("forms", [("NFC", "NFD"), ("NFD", "NFC")])
def test_a_table_may_have_another_form_of_unicode(waterbirds, forms):
    on_disk, in_table = (unicodedata.normalize(form, "Küken.jpg") for form in forms)
    path = waterbirds.root / waterbirds.names[0]
    path.rename(path.with_name(on_disk))
    edit(waterbirds, waterbirds.names[0], f"{path.parent.name}/{in_table}")
    assert len(draw(waterbirds).train.labels) == 28


def test_ambiguous_names_of_pictures_are_refused(waterbirds):
    first = waterbirds.root / waterbirds.names[0]
    shutil.copy(first, first.with_suffix(".JPG"))
    assert len(draw(waterbirds).train.labels) == 28  # the table gives the exact name
    edit(waterbirds, waterbirds.names[0], waterbirds.names[0].replace("Bird_", "bird_"))
    with pytest.raises(UserError, match=r"line 2: .*may be .*Bird_0000\.(jpg|JPG) or .*exact name"):
        located(waterbirds)


def test_whole_numbers_may_be_written_as_spreadsheets_do(waterbirds, celeba):
    for made, cls in ((waterbirds, Waterbirds), (celeba, CelebA)):
        before = draw(made, cls=cls).train.groups.tolist()
        text = made.table.read_text()
        text = re.sub(r"(?<=,)(-?[012])(?=[,\r\n])", r"\1.0", text)
        made.table.write_text(re.sub(r"(?<=  )(-?1)(?=\s)", r"\1.0", text))
        assert ".0" in made.table.read_text()
        assert draw(made, cls=cls).train.groups.tolist() == before


@pytest.mark.parametrize(("split", "word"), [(0, "training"), (2, "test")])
def test_a_group_without_a_picture_is_an_error_before_anything_is_run(waterbirds, tmp_path, split, word):
    lines = waterbirds.table.read_text().splitlines()
    empty = [i for i, row in enumerate(waterbirds.rows) if row == (split, 1, 0)]
    waterbirds.table.write_text("\n".join(line for i, line in enumerate(lines, -1) if i not in empty))
    words = ["run", "--task", "waterbirds:canvas=8", "--model", "vit:dim=16,depth=2,heads=2", "--n-train", "8"]
    images = ["--images", f"folder:{waterbirds.root}", "--jobs", "0", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(main, [*words, *images])
    assert done.exit_code == 2 and not (tmp_path / "out").exists()
    assert f"its {word} split has no picture of 'waterbird on land'" in done.stderr
    assert "rerun" not in done.stderr and len(done.stderr.splitlines()) == 1


MODEL = ["--model", "vit:dim=16,depth=2,heads=2,patch=4"]


@pytest.fixture
def run(waterbirds, tmp_path):
    """Return a function that runs the task, and returns the result of the command and the records by strategy."""

    def call(*arguments):
        out = tmp_path / "out"
        line = ["run", "--task", "waterbirds:canvas=8,epochs=1", *MODEL, "--seeds", "1", "--out", out, *arguments]
        done = CliRunner().invoke(main, [str(part) for part in line])
        return done, {record.label: record for record in store.read(out).values()}

    return call


def test_oracles_alone_are_unsupported_and_the_place_is_in_no_record(run, waterbirds, tmp_path):
    done, records = run("--images", "waterbirds", "--data-root", tmp_path, "--n-train", 28, "--jobs", 0)
    assert done.exit_code == 0, done.stderr
    for record in records.values():
        assert record.cell.task.params["images"] == locate_images(f"folder:{waterbirds.root}")[0]
        assert (record.status == "unsupported") == (record.kind == "oracle")
        assert str(tmp_path) not in record.model_dump_json()
    assert records["dense"].metrics["accuracy: waterbird on land"].n == 3
    assert records["random"].metrics["selection_auroc"].value is None


def test_patience_without_a_validation_split_fails_with_its_reason(run, waterbirds):
    lines = waterbirds.table.read_text().splitlines()
    held = [i for i, row in enumerate(waterbirds.rows) if row[0] == 1]
    waterbirds.table.write_text("\n".join(line for i, line in enumerate(lines, -1) if i not in held))
    images = ["--images", f"folder:{waterbirds.root}", "--n-train", 28, "--jobs", 0]
    done, records = run(*images, "--task", "waterbirds:canvas=8,epochs=1,patience=2")
    result = [record for record in records.values() if record.cell.task.params["patience"]]
    assert done.exit_code == 1 and len(result) > 2
    for record in result:
        assert "patience needs a validation split, and these images have none" in record.failure.reason


@pytest.mark.parametrize("option", ["--images", "--pretrain-images"])
def test_a_set_with_its_own_task_is_refused_by_other_tasks(waterbirds, tmp_path, option):
    line = ["run", "--suite", "real", option, f"folder:{waterbirds.root}", "--jobs", "0"]
    done = CliRunner().invoke(main, [*line, "--out", str(tmp_path / "out")])
    assert done.exit_code == 2 and "only be used by task 'waterbirds'" in done.stderr


def on_device(split, device):
    return prepare.Context(RunEnvironment(out=Path(), device=device)).samples(split, None)


@pytest.mark.parametrize(("room", "kind"), [(28 * 192 - 1, "cpu"), (28 * 192, "meta")])
def test_images_for_which_a_device_has_no_room_stay_on_the_host(waterbirds, monkeypatch, room, kind):
    monkeypatch.setattr(prepare, "room", lambda device: room)
    assert on_device(draw(waterbirds).train, "meta").inputs.device.type == kind


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_images_on_the_host_give_the_same_results_as_on_the_device(waterbirds, monkeypatch):
    data = draw(waterbirds)
    network = Vit(dim=16, depth=2, heads=2).build(data, 0)
    network.module.to("cuda")
    outputs, moved = [], []
    for room in (10**9, 0):
        monkeypatch.setattr(prepare, "room", lambda device, room=room: room)
        samples = on_device(data.train, "cuda:0")
        for rows in (samples.items, samples.items[3:9]):
            outputs.append(samples.forward(network, None, rows, visit=0, training=False)[0])
        outputs.append(torch.cat([network(inputs) for _, inputs in samples.batches(5)]))
        moved.append(influences(network, None, samples, 5)[0])
    assert samples.inputs.device.type == "cpu"
    assert all(torch.equal(a, b) for a, b in zip(outputs[:3], outputs[3:], strict=True))
    np.testing.assert_array_equal(*moved)
