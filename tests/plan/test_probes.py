"""Probes on frozen networks, from a command or a request to records: the same as with timm and scikit-learn alone."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from coded import ARCH, write_random_weights
from PIL import Image
from safetensors.torch import load_file, save_file
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.preprocessing import StandardScaler

from sparsebench.errors import UserError
from sparsebench.models.deep import DeepViT
from sparsebench.plan import plan as planner
from sparsebench.plan.request import Execution, Files, Request
from sparsebench.plugin.registry import Registry
from sparsebench.publish.submission import differences
from sparsebench.records import store
from sparsebench.records.record import Record, numbers_of
from sparsebench.records.table import row_of
from sparsebench.runner import run as runs
from sparsebench.tasks.folder import Folder, cut_out
from sparsebench.tasks.sources.files import read_rgb
from sparsebench.training import probes
from sparsebench.training.probes import rows_of_probe

CANVAS, CLASSES = 48, 3
TASK = f"folder:canvas={CANVAS}"


def write_pictures(root: Path, n: int, seed: int) -> None:
    """Write n noisy pictures of each class, whose colours say the class in most of them."""
    rng = np.random.default_rng(seed)
    for label in range(CLASSES):
        folder = root / f"class-{label}"
        folder.mkdir(parents=True)
        for i in range(n):
            pixels = rng.integers(0, 256, (60, 50, 3))
            pixels[..., label] = np.minimum(255, pixels[..., label] + rng.integers(0, 40))
            Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{i}.png")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pictures")
    write_pictures(root / "train", 12, 0)
    write_pictures(root / "test", 9, 1)
    return root


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file of weights without a head."""
    path = write_random_weights(tmp_path_factory.mktemp("weights") / "backbone.safetensors", ARCH, 5)
    state = {name: value for name, value in load_file(path).items() if not name.startswith("head.")}
    save_file(state, path)
    return path


def request(*plugins: str, **options: Any) -> Request:
    usual: dict[str, Any] = {"suite": "probe", "tasks": (TASK,), "model": f"timm:{ARCH}", "macs": (0.6,), "seeds": 1}
    return Request(plugins=plugins, **(usual | options))


ASKED = request("dense", "attn_topk", "random_inside", n_train=(6, 36), alone=True)


def executed(
    out: Path, request: Request, files: Files, execution: Execution | None = None
) -> dict[tuple[str, int, int], Record]:
    """Return the records of a run by strategy, number of training images and repetition."""
    runs.run_missing(request, files, execution or Execution("cpu", jobs=0), Registry(), out)
    records = store.read(out).values()
    return {(record.label, record.cell.n_train, record.cell.repetition): record for record in records}


@pytest.fixture(scope="module")
def files(pictures: Path, weights: Path) -> Files:
    return Files((f"folder:{pictures}",), weights=(weights,))


@pytest.fixture(scope="module")
def records(files: Files, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int, int], Record]:
    return executed(tmp_path_factory.mktemp("out"), ASKED, files)


def features_of_timm(weights: Path, paths: list[Path]) -> np.ndarray:
    """Return what timm's network without a head gives for pictures, in half precision."""
    cfg = {"file": str(weights)}
    model = timm.create_model(ARCH, img_size=CANVAS, num_classes=0, pretrained=True, pretrained_cfg_overlay=cfg).eval()
    pixels = np.stack([cut_out(read_rgb(path), CANVAS, 0.95) for path in paths])
    mean, std = (torch.tensor(model.pretrained_cfg[key])[:, None, None] for key in ("mean", "std"))
    with torch.no_grad():
        outputs = model((torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255 - mean) / std)
    return outputs.half().double().numpy()


def test_probe_and_neighbours_are_those_of_timm_and_scikit_learn(
    records: dict[tuple[str, int, int], Record], pictures: Path, weights: Path
) -> None:
    """With all training pictures nothing is drawn, so every prediction can be made with these libraries alone."""
    paths = {split: sorted((pictures / split).rglob("*.png")) for split in ("train", "test")}
    labels = {split: np.array([int(path.parent.name[-1]) for path in paths[split]]) for split in paths}
    X = {split: features_of_timm(weights, paths[split]) for split in paths}
    scaler = StandardScaler().fit(X["train"])
    grid = {"C": [1e-4, 1e-3, 1e-2, 1e-1, 1.0]}
    record = records["dense", 36, 0]
    assert record.status == "ok" and record.outcomes is not None
    assert numbers_of(record.outcomes.label, 27).tolist() == labels["test"].tolist()

    unit = {split: X[split] / np.linalg.norm(X[split], axis=1, keepdims=True) for split in X}
    votes = np.zeros((27, CLASSES))
    for row, similarities in zip(votes, unit["test"] @ unit["train"].T, strict=True):
        for place in np.argsort(-similarities)[: 36 // 5]:
            row[labels["train"][place]] += np.exp(similarities[place] / 0.07)
    assert numbers_of(record.outcomes.neighbour, 27).tolist() == votes.argmax(axis=1).tolist()

    search = GridSearchCV(LogisticRegression(max_iter=5000), grid, scoring="neg_log_loss")
    predicted = search.fit(scaler.transform(X["train"]), labels["train"]).predict(scaler.transform(X["test"]))
    assert record.notes["probe"] == f"C={search.best_params_['C']:g}"
    assert numbers_of(record.outcomes.predicted, 27).tolist() == predicted.tolist()
    assert record.metrics["accuracy"].value == (predicted == labels["test"]).mean()
    assert len(set(predicted.tolist())) > 1


def test_each_image_passes_once_whatever_the_number_of_sizes(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dense and a strategy with a stated schedule; a strategy is checked for leaks on the test images, twice."""
    passed: Counter[bool] = Counter()
    call = DeepViT.__call__

    def counted(self: DeepViT, images: torch.Tensor, acting: Any = None) -> torch.Tensor:
        passed[acting is not None] += len(images)
        return call(self, images, acting)

    monkeypatch.setattr(DeepViT, "__call__", counted)
    asked = request("dense", "attn_topk:macs=0.6,0.4,blocks=1", n_train=(6, 36), alone=True)
    records = executed(tmp_path, asked, files)
    assert {record.status for record in records.values()} == {"ok"}
    assert len(store.read(tmp_path)) == 6
    assert passed == {False: 36 + 27, True: 2 * (36 + 27) + 2 * 27}


def comparable(records: dict[tuple[str, int, int], Record]) -> dict[tuple[str, int, int], Any]:
    """Return what a cell measures, without times."""
    timed = {"images_per_s"}
    return {
        key: (record.outcomes, {name: x for name, x in record.metrics.items() if name not in timed}, record.schedule)
        for key, record in records.items()
    }


def test_a_cell_has_the_same_result_whoever_computes_its_features(
    records: dict[tuple[str, int, int], Record], files: Files, tmp_path: Path
) -> None:
    """Cells of a shard find the features of another one, or compute them; files are removed unless they are kept."""
    last = executed(tmp_path, ASKED, files, Execution("cpu", jobs=0, shard="0/3"))
    assert not (tmp_path / "features").exists()
    last = executed(tmp_path, ASKED, files, Execution("cpu", jobs=0, shard="1/3", keep_features=True))
    assert list((tmp_path / "features").glob("*.safetensors"))
    last = executed(tmp_path, ASKED, files, Execution("cpu", jobs=2, shard="2/3"))
    assert last.keys() == records.keys()
    assert comparable(last) == comparable(records)


def test_strategies_that_need_labels_training_or_a_head_have_no_probe(files: Files, tmp_path: Path) -> None:
    plugins = ("fisher_mask", "dynamic_vit", "zero_tprune", "perturbation")
    known = {registered.cls.name for registered in Registry().strategies()}
    asked = request(*(name for name in plugins if name in known), n_train=(6,), alone=True)
    records = executed(tmp_path, asked, files)
    status = {record.cell.strategy.name: record.status for record in records.values()}
    assert status.pop("zero_tprune") == "ok"
    assert set(status.values()) == {"unsupported"}
    assert {"fisher_mask", "dynamic_vit"} <= set(status)


def test_features_that_are_not_numbers_are_no_leak(weights: Path, pictures: Path, tmp_path: Path) -> None:
    """All weights are finite; the patches overflow in the first block, the same way with any labels."""
    state = load_file(weights)
    state["patch_embed.proj.bias"] += 1e38
    save_file(state, tmp_path / "large.safetensors")
    files = Files((f"folder:{pictures}",), weights=(tmp_path / "large.safetensors",))
    strategies = ("random_inside:macs=0.6,blocks=1", "attn_topk")  # a stated schedule, and a chosen one
    records = executed(tmp_path / "out", request(*strategies, n_train=(6, 18), alone=True), files)
    for record in records.values():
        assert record.status == "failed" and record.failure is not None
        assert record.failure.kind == "DivergedError" and "not finite" in record.failure.reason
        assert "diverged" not in record.failure.reason  # nothing was trained


def test_neighbours_do_not_depend_on_how_many_are_compared_together(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    train, test = rng.normal(size=(60, 5)), rng.normal(size=(41, 5))
    labels = rng.integers(0, 4, 60)
    together = probes.neighbours(train, labels, test, 4)
    monkeypatch.setattr(probes, "TOGETHER", 7 * 60)
    assert probes.neighbours(train, labels, test, 4).tolist() == together.tolist()
    assert len(set(together.tolist())) > 1


def test_times_are_of_batches_of_one_size_if_memory_is_short(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory is short once, in the pass over the training images."""
    sizes: list[int] = []
    call = DeepViT.__call__

    def short_once(self: DeepViT, images: torch.Tensor, acting: Any = None) -> torch.Tensor:
        sizes.append(len(images))
        if len(sizes) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return call(self, images, acting)

    monkeypatch.setattr(DeepViT, "__call__", short_once)
    asked = request("dense", n_train=(36,), alone=True)
    (record,) = executed(tmp_path, asked, files, Execution("cpu", jobs=0, batch=8)).values()
    assert record.status == "ok", record.failure
    assert sizes == [8, *[4] * 9, *[4] * 6, 3]
    assert record.metrics["timed_batch"].value == 4
    assert len(record.samples["seconds_per_batch"]) == 8 + 5


def test_test_pictures_that_are_learned_too_are_reported(
    weights: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for split, seed in (("train", 5), ("test", 6)):
        write_pictures(tmp_path / split, 4, seed)
    files = Files((f"folder:{tmp_path}",), weights=(weights,))
    asked = request("dense", n_train=(6,))
    planner.plan(asked, files, Registry(), tmp_path / "out", "missing")
    assert "training pictures" not in caplog.text
    copy = tmp_path / "test" / "class-1" / "copy.png"
    copy.write_bytes((tmp_path / "train" / "class-1" / "2.png").read_bytes())
    planner.plan(asked, files, Registry(), tmp_path / "out", "missing")
    assert "1 of 13 test pictures" in caplog.text and "copy.png" in caplog.text


FAILS = """
from typing import ClassVar
import sparsebench

class Fails(sparsebench.Strategy):
    name: ClassVar[str] = "fails"

    def scores(self, view):
        raise ZeroDivisionError("no score")

@sparsebench.hookimpl
def sparsebench_strategies():
    return [Fails]
"""


def test_cells_that_share_features_fail_alike(files: Files, tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(FAILS)
    asked = request(str(tmp_path / "fails.py"), n_train=(6, 18, 36), alone=True)
    records = list(executed(tmp_path / "out", asked, files).values())
    assert [record.status for record in records] == ["failed"] * 3
    assert len({record.failure for record in records}) == 1
    failure = records[0].failure
    assert failure is not None and "no score" in failure.reason and "fails.py" in failure.reason


def test_random_tokens_are_drawn_once_for_an_image_and_a_repetition(
    records: dict[tuple[str, int, int], Record], files: Files, tmp_path: Path
) -> None:
    """All sizes have the same test features, so equal kept tokens; another repetition draws other tokens."""
    asked = request("random_inside", n_train=(36,), seeds=2, alone=True)
    again = executed(tmp_path, asked, files)
    first, second = (again["random_inside", 36, repetition] for repetition in (0, 1))
    assert comparable({("", 0, 0): first}) == comparable({("", 0, 0): records["random_inside", 36, 0]})
    assert first.outcomes != second.outcomes or first.metrics["p_label"] != second.metrics["p_label"]


def test_permuted_test_labels_give_chance(weights: Path, tmp_path: Path) -> None:
    """The test pictures are those of the training, in class folders that are drawn: nothing knows their classes."""
    write_pictures(tmp_path / "pictures" / "train", 40, 3)
    rng = np.random.default_rng(4)
    for path in sorted((tmp_path / "pictures" / "train").rglob("*.png")):
        drawn = tmp_path / "pictures" / "test" / f"class-{rng.integers(CLASSES)}"
        drawn.mkdir(parents=True, exist_ok=True)
        (drawn / f"{path.parent.name}-{path.name}").write_bytes(path.read_bytes())
    files = Files((f"folder:{tmp_path / 'pictures'}",), weights=(weights,))
    records = executed(tmp_path / "out", request("dense", "attn_topk", n_train=(120,), alone=True), files)
    for record in records.values():
        assert record.status == "ok", record.failure
        for metric in ("accuracy", "neighbour_accuracy"):
            accuracy = record.metrics[metric].value
            assert accuracy is not None and abs(accuracy - 1 / CLASSES) < 4 * np.sqrt(2 / 9 / 120)


def test_a_folder_without_training_pictures_is_divided_anew_in_each_repetition(pictures: Path, weights: Path) -> None:
    asked = Files((f"folder:{pictures / 'train'}",), weights=(weights,))
    plan = planner.plan(request("dense", seeds=2, n_train=(6, 18)), asked, Registry(), Path("nowhere"), "missing")
    tests = []
    for repetition in (0, 1):
        cell = next(job.cell for job in plan.jobs if job.cell.repetition == repetition)
        task = Registry().resolve(cell).task
        assert isinstance(task, Folder) and task.split == 0.5 and not task.train
        data = task.draw(cell.drawn, repetition, plan.locations)
        assert np.bincount(data.train.labels).tolist() == [6, 6, 6]
        assert np.bincount(data.test.labels).tolist() == [6, 6, 6]
        images = {array.tobytes() for array in np.concatenate([data.train.inputs, data.test.inputs])}
        assert len(images) == 36, "no picture is in both"
        tests.append({array.tobytes() for array in data.test.inputs})
    assert tests[0] != tests[1]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"n_train": (4,)}, r"n-train.*got 4.*6 \(2 of each class\) to 36"),
        ({"n_train": (50,)}, "n-train.*got 50"),
        ({"tasks": ("folder:labels=imagenet",)}, "learns the class folders"),
        ({"tasks": ("folder:train=folder-0123",)}, "training pictures.*got train=.*leave train out"),
        ({"suite": "imagenet", "tasks": ("folder:split=0.3",)}, "for probes only.*got split=0.3"),
        ({"suite": "imagenet", "tasks": ("folder:train=folder-0123",)}, "for probes only.*got train="),
        ({"tasks": ("theory",)}, "no training images"),
        ({"where": "train"}, "allowed.*test"),
    ],
)
def test_what_no_probe_can_be_is_refused(options: dict[str, Any], says: str, files: Files) -> None:
    with pytest.raises(UserError, match=says):
        planner.plan(request("dense", **options), files, Registry(), Path("nowhere"), "missing")


def test_a_model_without_its_weights_is_refused() -> None:
    asked = request("dense", tasks=())
    with pytest.raises(UserError, match="without weights"):
        planner.plan(asked, Files(), Registry(), Path("nowhere"), "missing")


def test_the_number_of_images_is_limited_by_the_pictures(files: Files) -> None:
    plan = planner.plan(request("dense"), files, Registry(), Path("nowhere"), "missing")
    assert {job.cell.n_train for job in plan.jobs} == {20, 36}
    assert {job.cell.drawn for job in plan.jobs} == {36}
    assert {job.label for job in plan.jobs} == {"dense", "random", "random_inside"}, "no oracle, as nothing is known"


def test_patches_are_pooled_if_asked(records: dict[tuple[str, int, int], Record], files: Files, tmp_path: Path) -> None:
    pooled = executed(tmp_path, request("dense", n_train=(36,), pooling="patches", alone=True), files)["dense", 36, 0]
    usual = records["dense", 36, 0]
    assert pooled.status == "ok" and pooled.cell_id != usual.cell_id
    assert pooled.metrics["p_label"] != usual.metrics["p_label"]
    assert row_of(pooled)["setting"] != row_of(usual)["setting"]


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int, int], Record]:
    """Return records of the suite's task with groups, on a network that comes with the package."""
    asked = Request(
        plugins=("dense", "oracle:macs=0.5"),
        suite="probe",
        tasks=("spurious:test=80",),
        n_train=(8, 40),
        seeds=1,
        alone=True,
    )
    return executed(tmp_path_factory.mktemp("shipped"), asked, Files())


def test_the_suite_learns_probes_on_networks_of_the_package(shipped: dict[tuple[str, int, int], Record]) -> None:
    """They know two classes well, with groups, known relevant tokens, and the MACs of a network without a head."""
    assert len(shipped) == 4
    for (strategy, n, _), record in shipped.items():
        assert record.status == "ok", record.failure
        assert record.cell.init is not None and record.cell.track == "probe"
        assert not record.cell.network
        value = {name: metric.value for name, metric in record.metrics.items()}
        groups = {name: count for name, count in value.items() if name.startswith("train_samples: ")}
        assert sum(count or 0 for count in groups.values()) == n and len(groups) == 4
        assert {"spurious_gap", "worst_group_accuracy", "p_label", "images_per_s"} <= value.keys()
        assert (value["accuracy"] or 0) > 0.6
        assert (value["selection_precision"] or 0) > (0.4 if strategy == "oracle" else 0.2)
        assert list(differences(record)) == []
        assert record.notes["timed"] == "perhaps beside other cells"


def test_images_of_a_probe_have_the_shares_of_the_classes() -> None:
    labels = np.repeat([0, 1, 2], [50, 30, 4])
    few, more = (rows_of_probe(labels, n, "task", 0) for n in (8, 42))
    assert np.bincount(labels[few]).tolist() == [4, 2, 2]
    assert np.bincount(labels[more]).tolist() == [25, 15, 2]
    assert set(few) <= set(more)
    assert rows_of_probe(labels, 84, "task", 1).tolist() == list(range(84))
    assert rows_of_probe(labels, 8, "task", 1).tolist() != few.tolist()
