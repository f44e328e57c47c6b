"""Commands on a backbone: a network whose weights have no head."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from commands import call
from PIL import Image
from safetensors.torch import save_file
from timm.data import create_transform, resolve_data_config
from timm.models import load_checkpoint
from timm.models.vision_transformer import checkpoint_filter_fn

import sparsebench

MODEL = "timm:test_vit"
CLASSES = ("ant", "bee", "cow")
PICTURES = 4
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with weights with and without a head, and pictures of three classes. Tests do not change it."""
    folder = tmp_path_factory.mktemp("place")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = timm.create_model("test_vit", num_classes=3)
    state = model.state_dict()
    rng = torch.Generator().manual_seed(0)
    for name, value in state.items():
        state[name] = value + 0.1 * torch.randn(value.shape, generator=rng)
    save_file(state, folder / "whole.safetensors")
    save_file(
        {name: value for name, value in state.items() if not name.startswith("head.")}, folder / "backbone.safetensors"
    )
    pixels = np.random.default_rng(0)
    for name in CLASSES:
        (folder / "pictures" / name).mkdir(parents=True)
        for number in range(PICTURES):
            picture = Image.fromarray(pixels.integers(0, 255, (9, 12, 3), dtype=np.uint8)).resize((210, 170))
            picture.save(folder / "pictures" / name / f"{number}.png")
    return folder


def weights(place: Path, name: str = "backbone") -> list[str]:
    return ["--weights", str(place / f"{name}.safetensors")]


def pictures(place: Path) -> list[str]:
    return ["--images", f"folder:{place / 'pictures'}"]


def features_of(place: Path, file: Path, *more: object, name: str = "backbone") -> dict[str, np.ndarray]:
    done = call("features", MODEL, *weights(place, name), *pictures(place), "--device", "cpu", "-o", file, *more)
    assert done.exit_code == 0, done.output
    with np.load(file) as arrays:
        return dict(arrays)


def backbone(place: Path, **sizes: int) -> Any:
    """Return the network as timm builds it at a size, with resampled position embeddings."""
    model = timm.create_model("test_vit", num_classes=0, **sizes)
    load_checkpoint(model, str(place / "backbone.safetensors"), filter_fn=checkpoint_filter_fn)
    return model.eval()


@torch.no_grad()
def by_timm(place: Path, **sizes: int) -> np.ndarray:
    """Return the pooled features as timm computes them, in the order of the sorted paths."""
    model = backbone(place, **sizes)
    size = (3, *model.patch_embed.img_size)
    transform = create_transform(**resolve_data_config({"input_size": size}, model=model))
    files = sorted((place / "pictures").rglob("*.png"))
    return model(torch.stack([transform(Image.open(file)) for file in files])).numpy()


def test_features_are_those_of_timm(place: Path, tmp_path: Path) -> None:
    arrays = features_of(place, tmp_path / "a.npz", "--batch", 5)
    np.testing.assert_allclose(arrays["features"], by_timm(place), atol=1e-5)
    assert arrays["features"].dtype == np.float32
    assert arrays["paths"].tolist() == [f"{name}/{number}.png" for name in CLASSES for number in range(PICTURES)]
    assert arrays["classes"].tolist() == list(CLASSES)
    assert arrays["labels"].tolist() == np.repeat([0, 1, 2], PICTURES).tolist()
    about = json.loads(str(arrays["about"]))
    assert (
        about["strategy"] == "dense" and about["macs_ratio"] == 1 and about["weights"]["name"] == "backbone.safetensors"
    )
    with_head = features_of(place, tmp_path / "b.npz", name="whole")
    np.testing.assert_allclose(with_head["features"], arrays["features"], atol=1e-6)


def test_features_at_another_size_are_those_of_timm(place: Path, tmp_path: Path) -> None:
    arrays = features_of(place, tmp_path / "a.npz", "--image-size", 96)
    np.testing.assert_allclose(arrays["features"], by_timm(place, img_size=96), atol=1e-5)
    assert json.loads(str(arrays["about"]))["pictures"]["canvas"] == 96


@pytest.mark.parametrize("plugin", ["random:macs=0.5", "ats:macs=0.6", "attn_topk:macs=0.6,schedule=auto"])
def test_features_do_not_depend_on_the_batch(plugin: str, place: Path, tmp_path: Path) -> None:
    first, second = (
        features_of(place, tmp_path / f"{size}.npz", "--plugin", plugin, "--batch", size) for size in (5, 12)
    )
    np.testing.assert_allclose(first["features"], second["features"], atol=1e-5)
    abouts = [json.loads(str(arrays["about"])) for arrays in (first, second)]
    assert abouts[0] == abouts[1] and abouts[0]["macs_ratio"] < 1


@pytest.mark.parametrize("more", [(), ("--skip-bad",)])
def test_a_schedule_is_not_chosen_on_unreadable_pictures(more: tuple[str, ...], place: Path, tmp_path: Path) -> None:
    (tmp_path / "torn" / "dog").mkdir(parents=True)
    for name in ("a.png", "b.jpg"):
        (tmp_path / "torn" / "dog" / name).write_bytes(b"\x89 no picture")
    given = ["--images", tmp_path / "torn", "--plugin", "tome:macs=0.7,schedule=auto", "--device", "cpu"]
    refused = call("features", MODEL, *weights(place), *given, *more, "-o", tmp_path / "a.npz")
    assert refused.exit_code in (1, 2) and "Traceback" not in refused.output
    assert "can be read" in refused.output if more else "2 of 2 pictures cannot be read" in refused.output
    assert not (tmp_path / "a.npz").exists()


def test_pictures_in_no_class_folder_have_no_label(place: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mixed"
    (folder / "ant").mkdir(parents=True)
    picture = (place / "pictures" / "ant" / "0.png").read_bytes()
    (folder / "loose.png").write_bytes(picture)
    (folder / "ant" / "0.png").write_bytes(picture)
    (folder / "ant" / "1.png").write_bytes(b"no picture")
    words = ["features", MODEL, *weights(place), "--images", folder, "--device", "cpu"]
    refused = call(*words, "-o", tmp_path / "a.npz")
    assert refused.exit_code == 1 and "1.png" in refused.output and not (tmp_path / "a.npz").exists()
    done = call(*words, "-o", tmp_path / "a.npz", "--skip-bad")
    assert done.exit_code == 0 and "left out: ant/1.png" in done.output, done.output
    with np.load(tmp_path / "a.npz") as arrays:
        assert set(arrays) == {"features", "paths", "about", "labels", "classes"}
        assert arrays["paths"].tolist() == ["ant/0.png", "loose.png"] and arrays["labels"].tolist() == [0, -1]
        np.testing.assert_allclose(arrays["features"][0], arrays["features"][1], atol=1e-5)
    (folder / "ant" / "1.png").unlink()
    (folder / "ant" / "0.png").unlink()
    assert call(*words, "-o", tmp_path / "b.npz").exit_code == 0
    with np.load(tmp_path / "b.npz") as arrays:
        assert set(arrays) == {"features", "paths", "about"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--images", "folder:nowhere"], "not a folder"),
        (["--images", "splits"], "holds splits, not classes"),
        (["-o", "a.csv"], "ends with .npz"),
        (["--plugin", "tome"], "the budget of 'tome' is missing"),
        (["--plugin", "oracle:macs=0.5"], "is an oracle"),
        (["--plugin", "dynamic_vit:macs=0.5"], "must be trained"),
        (["--image-size", "100"], "100 x 100 pixels.*patches of .16, 16."),
        (["--image-size", "0"], "--image-size"),
        (["--batch", "0"], "--batch"),
        (["--weights", "nowhere.safetensors"], "cannot be read"),
    ],
)  # fmt: skip
def test_wrong_input_of_features_is_one_line(
    words: list[str], message: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "splits" / "train" / "ant").mkdir(parents=True)
    (tmp_path / "splits" / "train" / "ant" / "0.png").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    given = {"--images": str(place / "pictures"), "--weights": str(place / "backbone.safetensors")}
    given |= {"-o": str(tmp_path / "a.npz"), "--device": "cpu", **dict(zip(words[::2], words[1::2], strict=True))}
    done = call("features", MODEL, *(word for pair in given.items() for word in pair))
    assert done.exit_code == 2, done.output
    assert "Error: " in done.output.splitlines()[-1] and re.search(message, done.output.splitlines()[-1])
    assert not (tmp_path / "a.npz").exists()


@pytest.mark.parametrize(
    "words",
    [["--suite", "folder"], ["--suite", "imagenet"], ["--task", "composite"], ["--task", "spurious"]],
    ids=lambda words: words[-1],
)
def test_a_run_that_needs_classes_is_refused_and_names_probes(words: list[str], place: Path, tmp_path: Path) -> None:
    images = pictures(place) if "--suite" in words else []
    model = ["--model", MODEL, *weights(place)]
    done = call("run", "attn_topk", *words, *images, *model, "--device", "cpu", "--out", tmp_path / "out")
    assert done.exit_code == 2 and len(done.output.splitlines()) == 1, done.output
    assert "backbone.safetensors has no head" in done.output and "--suite probe" in done.output
    assert not (tmp_path / "out").exists()


def test_timms_weights_without_a_head_are_refused_alike(place: Path, tmp_path: Path) -> None:
    model = ["--model", "timm:vit_small_patch14_dinov2", "--pretrained"]
    done = call(
        "run", "tome", "--suite", "folder", *pictures(place), *model, "--device", "cpu", "--out", tmp_path / "out"
    )
    assert done.exit_code == 2 and len(done.output.splitlines()) == 1, done.output
    assert "no head" in done.output and "--suite probe" in done.output


@pytest.mark.parametrize("suite", [["--suite", "folder"], ["--suite", "probe", "--task", "folder"]])
def test_compare_compares_features(place: Path, tmp_path: Path, suite: list[str]) -> None:
    words = ["compare", "attn_topk:macs=0.5", "tome:macs=0.5", *suite, *pictures(place), "--model", MODEL]
    done = call(*words, *weights(place), "--device", "cpu", "--jobs", 0, "--out", tmp_path / "out", "--json")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    names = {"a": "attn_topk:macs=0.5", "b": "tome:macs=0.5", "dense": "dense"}
    features = {
        side: features_of(place, tmp_path / f"{side}.npz", "--plugin", plugin)["features"].astype(np.float64)
        for side, plugin in names.items()
    }
    for pair, interval in result["cosines"].items():
        one, other = (features[side] for side in pair.split("_"))
        cosines = (one * other).sum(1) / np.linalg.norm(one, axis=1) / np.linalg.norm(other, axis=1)
        assert interval["cosine"] == pytest.approx(cosines.mean(), abs=1e-5)
        assert interval["cosine_low"] < interval["cosine"] < interval["cosine_high"]
    assert set(result["cosines"]) == {"a_dense", "b_dense", "a_b"} and result["samples"] == 3 * PICTURES
    assert not (tmp_path / "out" / "records").exists(), "nothing is recorded of a network that has no classes"


def test_compare_says_that_it_compares_features_only_without_a_head(place: Path, tmp_path: Path) -> None:
    words = ["compare", "attn_topk:macs=0.5", "tome:macs=0.5", "--suite", "folder", *pictures(place), "--model", MODEL]
    words += ["--device", "cpu", "--jobs", "0"]
    text = call(*words, *weights(place), "--out", tmp_path / "out").stdout
    assert "no head" in text and "cosine" in text
    with_head = call(*words, *weights(place, "whole"), "--out", tmp_path / "whole", "--json")
    assert with_head.exit_code == 0 and "cosines" not in json.loads(with_head.stdout)


@pytest.mark.parametrize("suite", [["--suite", "folder"], ["--suite", "probe", "--task", "folder"]])
def test_show_tokens_draws_features_and_says_so(place: Path, tmp_path: Path, suite: list[str]) -> None:
    words = ["show-tokens", "--plugin", "attn_topk:macs=0.5", *suite, *pictures(place), "--model", MODEL]
    words += [*weights(place), "--device", "cpu", "--jobs", "0", "--out", str(tmp_path / "out"), "--samples", "2"]
    dry = call(*words, "--dry-run")
    assert dry.exit_code == 0 and dry.stdout.startswith("0 of ") and not (tmp_path / "out").exists()
    done = call(*words)
    assert done.exit_code == 0, done.output
    assert "no head" in done.stderr and (tmp_path / "out" / "tokens.png").stat().st_size > 10_000
    assert not (tmp_path / "out" / "records").exists()


def test_networks_of_the_suite_of_probes_are_examined(tmp_path: Path) -> None:
    """Pictures are of the network on whose features probes are learned."""
    words = [
        "--suite",
        "probe",
        "--task",
        "composite:test=12",
        "--device",
        "cpu",
        "--jobs",
        0,
        "--out",
        tmp_path / "out",
    ]
    done = call("compare", "attn_topk:macs=0.5", "tome:macs=0.5", *words, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["samples"] == 12
    done = call("show-tokens", "--plugin", "attn_topk:macs=0.5", *words)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "out" / "tokens.png").stat().st_size > 10_000


def test_schedules_are_compared_by_features(place: Path, tmp_path: Path) -> None:
    words = ["schedules", "attn_topk", "--macs", "0.5", *pictures(place), "--model", MODEL, *weights(place)]
    done = call(*words, "--device", "cpu", "--jobs", 0, "--out", tmp_path / "out", "--json")
    assert done.exit_code == 0, done.output
    (schedules,) = json.loads(done.stdout)
    assert schedules["distance"] == "squared error" and len(schedules["candidates"]) > 1
    dense = features_of(place, tmp_path / "dense.npz")["features"].astype(np.float64)
    best = features_of(place, tmp_path / "best.npz", "--plugin", schedules["words"])["features"].astype(np.float64)
    squares = ((best - dense) / dense.std(axis=0)) ** 2
    assert schedules["candidates"][schedules["chosen"]]["distance"] == pytest.approx(squares.mean(), abs=2e-3)


def test_speed_needs_no_head_and_takes_an_image_size(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_compiler(_model: object, **_options: object) -> object:
        def fails(_pixels: object) -> None:
            raise RuntimeError("no C++ compiler")

        return fails

    monkeypatch.setattr(torch, "compile", no_compiler)
    words = ["speed", MODEL, "tome:per_block=2", "--mode", "eager", "--batch", 1, "--rounds", 2, "--device", "cpu"]
    done = call(*words, *weights(place), "--image-size", 96, "--out", tmp_path / "s")
    assert done.exit_code == 0, done.output
    assert "96 x 96 pixels" in done.output and "no head" in done.output
    rows = [json.loads(line) for line in (tmp_path / "s" / "speed.jsonl").read_text().splitlines()]
    assert {row["image"] for row in rows} == {96} and all(row["latency"] for row in rows if row["mode"] == "eager")
    dense, sparse = (row for row in rows if row["mode"] == "eager")
    assert (dense["tokens"], sparse["tokens"]) == (36, 24)
    refused = call(*words, *weights(place), "--image-size", 97, "--out", tmp_path / "t")
    assert refused.exit_code == 2 and "97 x 97" in refused.output and not (tmp_path / "t").exists()


@pytest.mark.filterwarnings("ignore")  # torch warns about itself in an export
@torch.no_grad()
def test_export_needs_no_head_and_takes_an_image_size(
    place: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words = ["export", MODEL, "--plugin", "attn_topk:keep_rate=0.5", "--image-size", 64, *weights(place)]
    done = call(*words, "-o", tmp_path / "sparse.pt2")
    assert done.exit_code == 0, done.output
    assert "64 x 64 pixels" in done.output and "features" in done.output
    assert "resampled from 160 x 160 to 64 x 64 pixels" in caplog.text
    x = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    exported = torch.export.load(tmp_path / "sparse.pt2").module()(x)
    expected = sparsebench.apply(backbone(place, img_size=64), "attn_topk:keep_rate=0.5")(x)
    torch.testing.assert_close(exported, expected, atol=1e-4, rtol=1e-4)
