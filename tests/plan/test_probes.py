"""Probes on frozen networks, from a command or a request to records: the same as with timm and scikit-learn alone."""

import threading
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
from sparsebench.records import store
from sparsebench.records.record import Record, numbers_of
from sparsebench.records.table import row_of
from sparsebench.runner import run as runs
from sparsebench.tasks.folder import Folder, cut_out
from sparsebench.tasks.sources.files import read_rgb

CANVAS, CLASSES = 160, 3


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
    usual: dict[str, Any] = {"suite": "probe", "tasks": ("folder",), "model": f"timm:{ARCH}", "macs": (0.6,), "seeds": 1}
    return Request(plugins=plugins, **(usual | options))


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
    return executed(tmp_path_factory.mktemp("out"), request("attn_topk", n_train=(6, 18, 36)), files)


def features_of_timm(weights: Path, paths: list[Path]) -> np.ndarray:
    """Return what timm's network without a head gives for pictures, in half precision."""
    model = timm.create_model(ARCH, img_size=CANVAS, num_classes=0).eval()
    model.load_state_dict(load_file(weights))
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


