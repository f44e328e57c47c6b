import numpy as np
import pytest
import torch
from click.testing import CliRunner

from sparsebench.cli import main
from sparsebench.models.vits import Vit
from sparsebench.plan.locate import locate_images
from sparsebench.records import store
from sparsebench.runner import prepare
from sparsebench.runner.results import influences
from sparsebench.tasks.groups import Waterbirds
from sparsebench.training.steps import Samples

MODEL = ["--model", "vit:dim=16,depth=2,heads=2,patch=4"]


@pytest.fixture
def run(waterbirds, tmp_path):
    """Return a function that runs the task, and gives how it ended and the records by strategy."""

    def call(*arguments):
        out = tmp_path / "out"
        line = ["run", "--task", "waterbirds:canvas=8,epochs=1", *MODEL, "--seeds", "1", "--out", out, *arguments]
        done = CliRunner().invoke(main, [str(part) for part in line])
        return done, {record.label: record for record in store.read(out).values()}

    return call


@pytest.mark.slow
def test_a_run_measures_groups_and_no_selection_and_oracles_are_unsupported(run, waterbirds):
    done, records = run("--images", f"folder:{waterbirds.root}", "--n-train", 28, "--plugin", "attn_topk", "--jobs", 2)
    assert done.exit_code == 0, done.stderr
    for name in ("oracle", "anti_oracle"):
        assert records[name].status == "unsupported"
        assert records[name].failure.reason == "the data of this cell has no relevance mask"
    for name in ("dense", "random", "attn_topk"):
        metrics = records[name].metrics
        assert records[name].status == "ok"
        for metric in ("precision", "recall", "auroc"):
            assert metrics[f"selection_{metric}"].value is None
        assert metrics["accuracy: waterbird on land"].n == 3 and metrics["accuracy"].n == 12
        assert metrics["worst_group_accuracy"].value is not None
    assert records["random"].metrics["macs_ratio"].value < 1 == records["dense"].metrics["macs_ratio"].value


def test_the_place_is_in_no_record(run, waterbirds, tmp_path):
    done, records = run("--images", "waterbirds", "--data-root", tmp_path, "--n-train", 28, "--jobs", 0)
    assert done.exit_code == 0, done.stderr
    for record in records.values():
        assert record.cell.task.params["images"] == locate_images(f"folder:{waterbirds.root}")[0]
        assert str(tmp_path) not in record.model_dump_json()


def test_patience_without_a_validation_split_fails_with_its_reason(run, waterbirds):
    lines = waterbirds.table.read_text().splitlines()
    held = [i for i, row in enumerate(waterbirds.rows) if row[0] == 1]
    waterbirds.table.write_text("\n".join(line for i, line in enumerate(lines, -1) if i not in held))
    images = ["--images", f"folder:{waterbirds.root}", "--n-train", 28, "--jobs", 0]
    done, records = run(*images, "--task", "waterbirds:canvas=8,epochs=1,patience=2")
    found = [record for record in records.values() if record.cell.task.params["patience"]]
    assert done.exit_code == 1 and len(found) > 2
    for record in found:
        assert "patience needs a validation split, and these images have none" in record.failure.reason


@pytest.mark.parametrize("option", ["--images", "--pretrain-images"])
def test_a_set_with_a_task_of_its_own_is_for_no_other(waterbirds, tmp_path, option):
    line = ["run", "--suite", "real", option, f"folder:{waterbirds.root}", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(main, line)
    assert done.exit_code == 2 and "waterbirds is for the task 'waterbirds' alone" in done.stderr


def drawn(waterbirds):
    name, place = locate_images(f"folder:{waterbirds.root}")
    return Waterbirds(images=name, canvas=8).draw(28, 0, {name: place})


def on_device(inputs, device, drawn_before=None):
    return (drawn_before or prepare.Drawn()).on_device(inputs, device)


@pytest.mark.parametrize(("room", "kind"), [(28 * 192 - 1, "cpu"), (28 * 192, "meta")])
def test_images_for_which_a_device_has_no_room_stay_on_the_host(waterbirds, monkeypatch, room, kind):
    monkeypatch.setattr(prepare, "room", lambda device: room)
    assert on_device(drawn(waterbirds).train.inputs, "meta").device.type == kind


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_images_of_the_host_give_what_images_on_the_device_give(waterbirds, monkeypatch):
    data = drawn(waterbirds)
    network = Vit(dim=16, depth=2, heads=2).build(data, 0)
    network.module.to("cuda")
    outputs, moved = [], []
    labels = torch.from_numpy(data.train.labels).to("cuda:0")
    for room in (10**9, 0):
        monkeypatch.setattr(prepare, "room", lambda device, room=room: room)
        samples = Samples(on_device(data.train.inputs, "cuda:0"), labels, None)
        for rows in (samples.items, samples.items[3:9]):
            outputs.append(samples.forward(network, None, rows, visit=0, training=False)[0])
        outputs.append(torch.cat([network(inputs) for _, inputs in samples.batches(5)]))
        moved.append(influences(network, None, samples, 5).z)
    assert samples.inputs.device.type == "cpu"
    assert all(torch.equal(one, other) for one, other in zip(outputs[:3], outputs[3:], strict=True))
    np.testing.assert_array_equal(*moved)
