"""The task patches, from a request to records: the same predictions as with timm and scikit-learn alone."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from coded import ARCH, write_random_weights
from PIL import Image
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

import sparsebench
from sparsebench.errors import UserError
from sparsebench.plan import plan as planner
from sparsebench.plan.request import Execution, Files, Request
from sparsebench.plugin.registry import Registry
from sparsebench.publish.agreement import compare
from sparsebench.publish.submission import differences
from sparsebench.records import store
from sparsebench.records.record import Record, numbers_of
from sparsebench.runner import run as runs
from sparsebench.tasks.base import Data, Split

pytestmark = pytest.mark.usefixtures("timed_once")

CANVAS, SIDE, PATCH = 96, 6, 16
TASK = f"patches:canvas={CANVAS},foreground=64,test=12"
N_TRAIN = 30
PLACES = range(SIDE**2)
HALF = "attn_topk:macs=0.5,blocks=1"
STRATEGIES = {
    "dense": ("dense", 1.0),
    "oracle:macs=0.6": ("oracle", 0.6),
    "attn_topk:macs=1": ("attn_topk", 1.0),
    HALF: ("attn_topk", 0.5),
    f"{HALF},disposal=fuse": ("attn_topk(disposal=fuse)", 0.5),
    "attn_topk:macs=0.8,blocks=1,returns=3": ("attn_topk(returns=3)", 0.8),
    "tome:macs=0.6": ("tome", 0.6),
}
"""Strategies as they are requested, with the names and the budgets of their records."""
FAR = """
from dataclasses import replace

import sparsebench
from sparsebench.tasks.patches import Patches


class Far(Patches):
    \"\"\"Patches of pictures that are far down in a long list.\"\"\"

    name = "far"

    def draw(self, n_train, repetition, locations):
        data = super().draw(n_train, repetition, locations)
        return replace(data, test=replace(data.test, foregrounds=data.test.foregrounds + 70_000))


@sparsebench.hookimpl
def sparsebench_tasks():
    return [Far]
"""


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_weights(tmp_path_factory.mktemp("weights") / "backbone.safetensors", ARCH, 5)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of noisy pictures with three classes, each with a colour of its own."""
    root, rng = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for split in ("train", "test"):
        for label in range(3):
            folder = root / split / f"class-{label}"
            folder.mkdir(parents=True)
            for i in range(5):
                pixels = rng.integers(0, 160, (64, 64, 3))
                pixels[..., label] += 95
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{i}.png")
    return root


def request(*plugins: str, **options: Any) -> Request:
    usual: dict[str, Any] = {"suite": "patches", "tasks": (TASK,), "model": f"timm:{ARCH}", "n_train": (N_TRAIN,)}
    return Request(plugins=plugins, **(usual | {"seeds": 1, "alone": True} | options))


@pytest.fixture(scope="module")
def files(pictures: Path, weights: Path) -> Files:
    return Files(images=(f"folder:{pictures}",), weights=(weights,))


def executed(out: Path, asked: Request, files: Files) -> dict[tuple[str, float], Record]:
    """Return the records of a run by label and share of the MACs."""
    runs.run_missing(asked, files, Execution("cpu", jobs=0), Registry(), out)
    return {(record.label, record.cell.budget.macs or 1.0): record for record in store.read(out).values()}


@pytest.fixture(scope="module")
def records(files: Files, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Record]:
    """Return the records of the strategies."""
    stored = executed(tmp_path_factory.mktemp("out"), request(*STRATEGIES), files)
    return {spec: stored[key] for spec, key in STRATEGIES.items()}


@pytest.fixture(scope="module")
def data(records: dict[str, Record], pictures: Path) -> Data:
    cell = records["dense"].cell
    return Registry().resolve(cell).task.draw(N_TRAIN, 0, {str(cell.task.params["images"]): pictures})


def labels_of(split: Split) -> np.ndarray:
    """Return the (n, N) most frequent class of the pixels of each patch, the first of several."""
    assert split.segments is not None
    labels = np.zeros((len(split.segments), SIDE**2), int)
    for image, segments in enumerate(split.segments):
        for place in PLACES:
            top, left = PATCH * (place // SIDE), PATCH * (place % SIDE)
            labels[image, place] = np.bincount(segments[top : top + PATCH, left : left + PATCH].ravel()).argmax()
    return labels


def network_of(weights: Path) -> torch.nn.Module:
    return timm.create_model(
        ARCH, img_size=CANVAS, num_classes=5, pretrained=True, pretrained_cfg_overlay={"file": str(weights)}
    ).eval()


def pixels_of(model: Any, split: Split) -> torch.Tensor:
    mean, std = (torch.tensor(model.pretrained_cfg[key])[:, None, None] for key in ("mean", "std"))
    return (torch.from_numpy(split.inputs) / 255 - mean) / std


Features = Callable[[torch.Tensor], torch.Tensor]


def predictions(weights: Path, data: Data, of_test: Callable[[Any], Features] | None = None) -> np.ndarray:
    """Return the (n, N) predictions of a linear probe learned on dense tokens, see `scores_of`."""
    classes, scores = scores_of(weights, data, of_test)
    return classes[scores.argmax(axis=2)]


def scores_of(
    weights: Path, data: Data, of_test: Callable[[Any], Features] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the (k,) classes of a linear probe learned on dense tokens, and their (n, N, k) log-probabilities.

    `of_test` returns for a network the function that gives the (n, N, C) features of test images.
    """
    model: Any = network_of(weights)
    prefix = model.num_prefix_tokens
    with torch.no_grad():
        train = model.forward_features(pixels_of(model, data.train))[:, prefix:].double().flatten(0, 1).numpy()
        pixels = pixels_of(model, data.test)
        dense = model.forward_features(pixels)[:, prefix:] if of_test is None else of_test(model)(pixels)
    scaler = StandardScaler().fit(train)
    probe = LogisticRegression(C=50 / len(train), max_iter=1000).fit(
        scaler.transform(train), labels_of(data.train).ravel()
    )
    test = scaler.transform(dense.double().flatten(0, 1).numpy())
    return probe.classes_, probe.predict_log_proba(test).reshape(12, SIDE**2, -1)


def predicted(record: Record) -> np.ndarray:
    assert record.status == "ok" and record.outcomes is not None, record.failure
    return numbers_of(record.outcomes.predicted, record.outcomes.n).reshape(12, -1)


@pytest.mark.parametrize("spec", ["dense", "attn_topk:macs=1"])
def test_without_removal_each_patch_is_predicted_as_by_timm_and_scikit_learn(
    records: dict[str, Record], weights: Path, data: Data, spec: str
) -> None:
    record = records[spec]
    expected, labels = predictions(weights, data), labels_of(data.test)
    assert predicted(record).tolist() == expected.tolist()
    assert record.outcomes is not None
    assert numbers_of(record.outcomes.label, record.outcomes.n).tolist() == labels.ravel().tolist()
    assert np.unique(expected).tolist() == [0, 1, 2, 3]
    assert record.metrics["accuracy"].value == (expected == labels).mean()
    assert record.notes["probe"] == f"{N_TRAIN * SIDE**2} patches of {N_TRAIN} images"


def test_scores_of_patches_are_upsampled_for_pixels(records: dict[str, Record], weights: Path, data: Data) -> None:
    """Pixels are predicted from linear interpolation between the middles of patches, first down, then across."""
    middles = (np.arange(SIDE) + 0.5) * PATCH - 0.5
    classes, scores = scores_of(weights, data)
    segments = data.test.segments
    assert segments is not None
    predicted_pixels = np.zeros(segments.shape, int)
    for image, of_image in enumerate(scores.reshape(12, SIDE, SIDE, -1)):
        of_class = []
        for k in range(len(classes)):
            down = np.array([np.interp(range(CANVAS), middles, column) for column in of_image[:, :, k].T]).T
            of_class.append([np.interp(range(CANVAS), middles, row) for row in down])
        predicted_pixels[image] = classes[np.argmax(of_class, axis=0)]
    ious = []
    for k in np.unique(segments)[1:]:
        either = (predicted_pixels == k) | (segments == k)
        ious.append(((predicted_pixels == k) & (segments == k)).sum() / either.sum())
    assert records["dense"].metrics["iou_pixels"].value == pytest.approx(np.mean(ious), abs=1e-4)


def on_grid(spec: str) -> Callable[[Any], Features]:
    """Return the function that puts what a strategy leaves at all its patches, or at the patches nearest to them."""

    def of_network(model: Any) -> Features:
        sparse = sparsebench.apply(model, spec)

        def features(pixels: torch.Tensor) -> torch.Tensor:
            left = sparse.forward_features(pixels)[:, model.num_prefix_tokens :]
            member = sparse.membership() > 0
            filled = left.new_empty(len(left), SIDE**2, left.shape[2])
            for image, tokens in enumerate(left):
                has_token = member[image].any(dim=0)
                for place in PLACES:
                    distance = [
                        (i // SIDE - place // SIDE) ** 2 + (i % SIDE - place % SIDE) ** 2 for i in range(SIDE**2)
                    ]
                    near = min((i for i in range(SIDE**2) if has_token[i]), key=lambda i: (distance[i], i))
                    filled[image, place] = tokens[int(member[image, :, near].nonzero()[0, 0])]
            return filled

        return features

    return of_network


@pytest.mark.parametrize("spec", list(STRATEGIES)[3:])
def test_what_left_is_predicted_from_its_token_or_the_nearest_patch(
    records: dict[str, Record], weights: Path, data: Data, spec: str
) -> None:
    """Dropped, fused and merged patches, and patches that come back, with the tokens of a model in Python."""
    expected = predictions(weights, data, on_grid(spec))
    assert predicted(records[spec]).tolist() == expected.tolist()
    if "returns" not in spec:  # it changes little in a network of random weights
        assert expected.tolist() != predictions(weights, data).tolist()


def test_metrics_follow_from_predictions(records: dict[str, Record], data: Data) -> None:
    """IoU of plain sets, accuracies on parts of the patches; and the oracle keeps all patches of objects."""
    segments = data.test.segments
    assert segments is not None
    blocks = segments.reshape(12, SIDE, PATCH, SIDE, PATCH).swapaxes(2, 3).reshape(12 * SIDE**2, -1)
    boundary = np.array([len(set(block.tolist())) > 1 for block in blocks])
    for record in records.values():
        assert list(differences(record)) == []
        found, labels = predicted(record).ravel(), labels_of(data.test).ravel()
        ious = [
            ((found == k) & (labels == k)).sum() / ((found == k) | (labels == k)).sum() for k in sorted({*labels} - {0})
        ]
        value = {name: metric.value for name, metric in record.metrics.items()}
        assert value["iou"] == pytest.approx(np.mean(ious))
        assert value["accuracy_relevant"] == (found == labels)[labels > 0].mean()
        assert value["accuracy_irrelevant"] == (found == labels)[labels == 0].mean()
        assert value["accuracy_boundary"] == (found == labels)[boundary].mean()
        assert 0 <= (value["iou_pixels"] or 0) <= 1
    assert records["oracle:macs=0.6"].metrics["selection_recall"].value == 1


def test_a_head_of_its_own_is_learned_with_the_strategy(
    records: dict[str, Record], files: Files, tmp_path: Path
) -> None:
    task = f"{TASK},head=own"
    asked = request("dense", HALF, tasks=(task,))
    own = executed(tmp_path, asked, files)
    assert predicted(own["dense", 1.0]).tolist() == predicted(records["dense"]).tolist()
    assert predicted(own["attn_topk", 0.5]).tolist() != predicted(records[HALF]).tolist()


def test_merged_patches_can_be_filled_from_the_nearest_kept_patch(
    records: dict[str, Record], files: Files, tmp_path: Path
) -> None:
    asked = request("tome:macs=0.6", HALF, tasks=(f"{TASK},fill=nearest",))
    nearest = executed(tmp_path, asked, files)
    assert predicted(nearest["attn_topk", 0.5]).tolist() == predicted(records[HALF]).tolist()
    assert predicted(nearest["tome", 0.6]).tolist() != predicted(records["tome:macs=0.6"]).tolist()


def test_mixtures_of_patches_are_unsupported(files: Files, tmp_path: Path) -> None:
    (record,) = executed(tmp_path, request("sinkhorn:macs=0.6"), files).values()
    assert record.status == "unsupported"


@pytest.fixture(scope="module")
def far(files: Files, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Data]:
    """Return the folder of a run on pictures with large numbers, and the data."""
    root = tmp_path_factory.mktemp("far")
    (root / "far.py").write_text(FAR)
    registry = Registry()
    registry.load_file(root / "far.py")
    asked = request("dense", str(root / "far.py"), tasks=(TASK.replace("patches", "far"),))
    plan = runs.run_missing(asked, files, Execution("cpu", jobs=0), registry, root / "out")
    cell = plan.jobs[-1].cell
    return root / "out", registry.resolve(cell).task.draw(N_TRAIN, 0, plan.locations)


def test_any_number_of_pictures_can_be_told_apart(far: tuple[Path, Data]) -> None:
    out, data = far
    (record,) = store.read(out).values()
    assert record.outcomes is not None and data.test.foregrounds is not None, record.failure
    pictures = numbers_of(record.outcomes.foreground, record.outcomes.n)
    expected = data.test.foregrounds.repeat(SIDE**2)
    assert data.test.foregrounds.min() > 2**16
    assert (np.unique(pictures, return_inverse=True)[1] == np.unique(expected, return_inverse=True)[1]).all()
    (row,) = sparsebench.leaderboard(out).to_dict("records")
    assert row["iou_low"] < row["iou"] < row["iou_high"]


def test_without_the_numbers_of_pictures_there_is_no_interval(far: tuple[Path, Data], tmp_path: Path) -> None:
    (record,) = store.read(far[0]).values()
    assert record.outcomes is not None
    unknown = record.model_copy(update={"outcomes": record.outcomes.model_copy(update={"foreground": b""})})
    store.Writer(tmp_path).append(unknown)
    (row,) = sparsebench.leaderboard(tmp_path).to_dict("records")
    assert row["iou"] == pytest.approx(record.metrics["iou"].value)
    assert np.isnan(row["iou_low"]) and np.isnan(row["iou_high"])


def many_classes(root: Path, n: int) -> Files:
    """Write a folder with a picture for training and one for the test in each of n classes."""
    for split in ("train", "test"):
        for label in range(n):
            (root / split / f"{label:03}").mkdir(parents=True)
            pixels = np.full((4, 4, 3), label % 256, np.uint8)
            Image.fromarray(pixels).save(root / split / f"{label:03}" / "0.png")
    return Files(images=(f"folder:{root}",))


def test_more_classes_than_pixels_can_tell_apart_are_refused(weights: Path, tmp_path: Path) -> None:
    files = replace(many_classes(tmp_path, 255), weights=(weights,))
    asked = request("dense", tasks=(TASK,), n_train=(600,))
    with pytest.raises(UserError, match="got 255 classes; allowed: at most 254"):
        planner.plan(asked, files, Registry(), Path("nowhere"), "missing")
    one = request("dense", tasks=(f"{TASK},objects=one",), n_train=(600,))
    assert planner.plan(one, files, Registry(), Path("nowhere"), "missing").todo


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"suite": "quick"}, "--suite patches"),
        ({"suite": "quick", "n_train": ()}, "--suite patches"),
        ({"pooling": "patches"}, "--pooling"),
        ({"tasks": (f"{TASK},permuted=true",)}, "permuted"),
        ({"tasks": ("patches:test=9000",)}, "test="),
    ],
)
def test_what_does_not_fit_is_refused(weights: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        planner.plan(request("dense", **options), Files(weights=(weights,)), Registry(), Path("nowhere"), "missing")


@pytest.mark.parametrize("name", ["accuracy_relevant", "accuracy_irrelevant", "iou_pixels", "accuracy_boundary"])
def test_a_better_number_than_that_of_the_predictions_is_noticed(records: dict[str, Record], name: str) -> None:
    """Accuracies on objects and background follow from the outcomes, the others are compared with a replay."""
    record = records["dense"]
    usual = record.metrics[name]
    assert usual.value is not None
    better = usual.model_copy(update={"value": usual.value + 0.2})
    changed = record.model_copy(update={"metrics": record.metrics | {name: better}})
    elsewhere = {"environment": "0" * 16}
    if name in ("accuracy_relevant", "accuracy_irrelevant"):
        assert any(name in text for text in differences(changed))
        return
    assert list(differences(changed)) == []
    assert compare([(record, record)], ())[0] == []
    assert compare([(changed, record)], ())[0]
    assert any(name in text for text in compare([(changed.model_copy(update=elsewhere), record)], ())[0])
    assert compare([(record.model_copy(update=elsewhere), record)], ())[0] == []
