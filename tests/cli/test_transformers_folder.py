"""Commands on a folder of the transformers library."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import call
from PIL import Image
from safetensors.torch import load_file, save_file
from samples import SAMPLES
from transformers_kinds import WIDE, folder_of, model_of, transformers

from sparsebench.publish.submission import submit
from sparsebench.records import store

pytestmark = pytest.mark.integration

CLASSES = ("ant", "bee", "cow", "dog", "eel")
PICTURES = 3
SIDE = 32
OPENAI = [
    torch.tensor(values).reshape(3, 1, 1)
    for values in ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711])
]

PROCESSOR = {
    "size": {"height": SIDE, "width": SIDE},
    "resample": 2,
    "do_resize": True,
    "image_mean": [0.4, 0.5, 0.6],
    "image_std": [0.2, 0.3, 0.25],
    "rescale_factor": 1 / 255,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with models of transformers and pictures. Tests do not change it."""
    place = tmp_path_factory.mktemp("place")
    folder = folder_of(model_of("ViT with 5 classes, no biases"), place / "vit")
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    folder_of(model_of("DINOv2"), place / "dino")
    rng = np.random.default_rng(0)
    for name in CLASSES:
        (place / "pictures" / name).mkdir(parents=True)
        for number in range(PICTURES):
            picture = rng.integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8)
            Image.fromarray(picture).save(place / "pictures" / name / f"{number}.png")
    return place


def pictures(place: Path) -> list[str]:
    return ["--images", f"folder:{place / 'pictures'}"]


def test_features_are_those_of_the_model_for_pictures_normalised_as_its_processor_does(place, tmp_path):
    done = call("features", f"hf:{place / 'vit'}", *pictures(place), "--device", "cpu", "-o", tmp_path / "f.npz")
    assert done.exit_code == 0, done.output
    with np.load(tmp_path / "f.npz") as content:
        paths, rows = content["paths"], content["features"]
        assert re.fullmatch(r"hf-\w{12}", json.loads(str(content["about"]))["weights"])  # as in the cells of a run
    model: Any = transformers.ViTForImageClassification.from_pretrained(place / "vit").eval()
    mean, std = (torch.tensor(values).reshape(3, 1, 1) for values in ([0.4, 0.5, 0.6], [0.2, 0.3, 0.25]))
    for path, features in zip(paths, rows, strict=True):
        pixels = torch.from_numpy(np.array(Image.open(place / "pictures" / path))).permute(2, 0, 1) / 255
        with torch.no_grad():
            tokens = model.vit(pixel_values=((pixels - mean) / std)[None]).last_hidden_state
        assert np.allclose(features, tokens[0, 0].numpy(), atol=1e-5)


def smooth_pictures(folder: Path) -> Path:
    """Write pictures of several shapes, in which a shift by a pixel changes little."""
    folder.mkdir()
    for number, size in enumerate([(60, 90), (90, 60), (70, 70)]):
        colours = np.random.default_rng(number).integers(0, 256, (3, 4, 3), dtype=np.uint8)
        Image.fromarray(colours).resize(size, Image.Resampling.BILINEAR).save(folder / f"{number}.png")
    return folder


SQUASHED, KEEPS_RATIO = {"height": 40, "width": 40}, {"shortest_edge": 44}
CROP = {"height": SIDE, "width": SIDE}
PROCESSORS = {
    "squashed, then cut": ("DeiTImageProcessor", {"size": SQUASHED, "crop_size": CROP, "image_mean": [0.1, 0.2, 0.3]}),
    "shorter side, then cut": ("BitImageProcessor", {"size": KEEPS_RATIO, "crop_size": CROP, "resample": 2}),
    "usual values of its class": ("ViTImageProcessor", {"size": CROP}),
}


@pytest.mark.parametrize("is_with_texts", [False, True])
@pytest.mark.parametrize("kind", PROCESSORS)
def test_pictures_are_cut_as_the_image_processor_does_it(kind, is_with_texts, tmp_path):
    name, values = PROCESSORS[kind]
    model = model_of("ViT with 5 classes, no biases")
    folder = folder_of(model, tmp_path / "model")
    processor = getattr(transformers, name)(**values)
    changed = {key: value for key, value in processor.to_dict().items() if key in values}
    changed["image_processor_type"] = name
    file = "processor_config.json" if is_with_texts else "preprocessor_config.json"
    (folder / file).write_text(json.dumps({"image_processor": changed} if is_with_texts else changed))
    images = ["--images", f"folder:{smooth_pictures(tmp_path / 'pictures')}"]
    done = call("features", f"hf:{folder}", *images, "--device", "cpu", "-o", tmp_path / "f.npz")
    assert done.exit_code == 0, done.output
    with np.load(tmp_path / "f.npz") as content:
        paths, rows = content["paths"], content["features"]
    assert len(paths) == 3
    for path, features in zip(paths, rows, strict=True):
        pixels = processor(Image.open(tmp_path / "pictures" / path), return_tensors="np")["pixel_values"]
        with torch.no_grad():
            expected = model.vit(pixel_values=torch.from_numpy(np.asarray(pixels))).last_hidden_state[0, 0].numpy()
        assert np.linalg.norm(features - expected) < 0.02 * np.linalg.norm(expected)


def with_processor(model: Any, folder: Path, **changes: object) -> Path:
    """Write a model with an image processor whose values are changed; return its folder."""
    folder_of(model, folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR | changes))
    return folder


@pytest.mark.parametrize(
    "changes",
    [
        {"do_normalize": False},
        {"do_rescale": False},
        {"rescale_factor": 1 / 127},
        {"rescale_factor": 1 / 256},
        {"rescale_factor": "small"},
        {"do_resize": False},
        {"size": {"shortest_edge": SIDE}},
        {"resample": 1},
        {"resample": [2, 3]},
        {"image_mean": [0.5, 0.5]},
        {"image_std": [0, 0.2, 0.2]},
        {"image_mean": "grey"},
        {"size": "small"},
        {"size": {"height": -SIDE, "width": SIDE}},
        None,
    ],
)
def test_an_image_processor_that_does_something_else_is_refused(place, changes, tmp_path):
    folder = with_processor(model_of("ViT"), tmp_path / "model", **(changes or {}))
    if changes is None:
        (folder / "preprocessor_config.json").write_text("{")
    done = call("features", f"hf:{folder}", *pictures(place), "--device", "cpu", "-o", tmp_path / "f.npz")
    assert done.exit_code == 2, done.output
    assert len(done.output.splitlines()) == 1 and "image processor" in done.output


def test_the_file_of_an_image_processor_that_does_something_else_is_named(place, tmp_path):
    folder = with_processor(model_of("ViT"), tmp_path / "model", rescale_factor=1 / 200)
    values = (folder / "preprocessor_config.json").read_text()
    (folder / "preprocessor_config.json").unlink()
    (folder / "processor_config.json").write_text(f'{{"image_processor": {values}}}')
    done = call("features", f"hf:{folder}", *pictures(place), "--device", "cpu", "-o", tmp_path / "f.npz")
    assert done.exit_code == 2
    assert "correct processor_config.json" in done.output


NETWORKS = {
    "of another shape": ({}, {"size": {"height": SIDE, "width": 2 * SIDE}}),
    "of one channel": ({"num_channels": 1}, {"image_mean": [0.4], "image_std": [0.2]}),
}


@pytest.mark.parametrize(
    "changes",
    [{}, {"do_normalize": False}, {"do_rescale": False}, {"rescale_factor": 1 / 250}, {"do_resize": False}],
    ids=str,
)
@pytest.mark.parametrize("kind", NETWORKS)
def test_image_processors_are_compared_that_are_not_for_squares_in_colour(place, kind, changes, tmp_path):
    """Pictures are squares in colour, which such a network reads at another size or in grey."""
    of_model, of_processor = NETWORKS[kind]
    folder = with_processor(model_of("ViT", **of_model), tmp_path / "model", **of_processor, **changes)
    size = ["--image-size", SIDE]
    done = call("features", f"hf:{folder}", *pictures(place), *size, "--device", "cpu", "-o", tmp_path / "f.npz")
    assert done.exit_code == (2 if changes else 0), done.output
    assert ("image processor" in done.output) == bool(changes)


STRANGE = {
    "another filter": {"resample": 1},
    "no normalisation": {"do_normalize": False, "image_mean": None, "image_std": None},
    "another range": {"rescale_factor": 1 / 127},
}


@pytest.mark.parametrize("kind", STRANGE)
def test_a_strange_image_processor_is_refused_only_where_pictures_are_cut(place, kind, tmp_path):
    folder = with_processor(model_of("ViT with 5 classes, no biases"), tmp_path / "model", **STRANGE[kind])
    setting = ["--suite", "folder", "--model", f"hf:{folder}", *pictures(place), "--jobs", 0, "--device", "cpu"]
    setting += ["--out", tmp_path / "out"]
    for command in (["run", "--plugin", "tome"], ["compare", "tome:macs=0.6", "evit:macs=0.6", "--task", "folder"]):
        done = call(*command, *setting)
        assert done.exit_code == 2, done.output
        assert "image processor" in done.output and "correct preprocessor_config.json" in done.output

    speed = ["--mode", "eager", "--rounds", 2, "--batch", 1, "--device", "cpu", "--out", tmp_path / "speed"]
    done = call("speed", f"hf:{folder}", "tome:macs=0.6", *speed)
    assert done.exit_code == 0, done.output


def test_lines_about_a_folder_are_noted_once_in_a_process(place, tmp_path, caplog):
    """The folder has no image processor, and weights in half precision."""
    folder = folder_of(model_of("ViT with 5 classes, no biases").half(), tmp_path / "model")
    setting = ["--suite", "folder", "--model", f"hf:{folder}", *pictures(place), "--jobs", 0, "--device", "cpu"]
    done = call("run", *setting, "--plugin", "tome", "--macs", "0.8,0.6", "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert sum("has no image processor" in line for line in caplog.messages) == 1
    assert sum("float16 becomes float32" in line for line in caplog.messages) == 1


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch 2.9 warns about its own reading
@pytest.mark.parametrize("size", [[], ["--image-size", 48]])
def test_a_network_is_exported(place, tmp_path, size):
    file = tmp_path / "sparse.pt2"
    done = call("export", f"hf:{place / 'dino'}", "--plugin", "attn_topk:macs=0.6", *size, "-o", file)
    assert done.exit_code == 0, done.output
    side = size[-1] if size else SIDE
    exported = torch.export.load(file).module()
    assert exported(torch.zeros(1, 3, side, side)).shape == (1, 32)


def test_a_run_tests_the_network_and_names_it_by_its_content(place, tmp_path):
    options = [*pictures(place), "--plugin", "tome", "--macs", 0.8, "--jobs", 0, "--device", "cpu"]
    first = call("run", "--suite", "folder", "--model", f"hf:{place / 'vit'}", *options, "--out", tmp_path / "out")
    assert first.exit_code == 0, first.output
    records = [record for record in store.read(tmp_path / "out").values() if record.status == "ok"]
    dense = next(record for record in records if record.cell.strategy.name == "dense")
    assert len(records) == 4
    assert dense.cell.model.name == "hf" and str(place) not in dense.model_dump_json()

    model = transformers.ViTForImageClassification.from_pretrained(place / "vit").eval()
    mean, std = (torch.tensor(values).reshape(3, 1, 1) for values in ([0.4, 0.5, 0.6], [0.2, 0.3, 0.25]))
    right = 0
    for number, name in enumerate(CLASSES):
        for file in (place / "pictures" / name).iterdir():
            pixels = torch.from_numpy(np.array(Image.open(file))).permute(2, 0, 1) / 255
            with torch.no_grad():
                right += int(model(pixel_values=((pixels - mean) / std)[None]).logits.argmax()) == number
    assert dense.metrics["accuracy"].value == pytest.approx(right / (PICTURES * len(CLASSES)))


def test_a_run_compares_a_model_once_and_a_changed_one_again(place, tmp_path):
    """Outputs of the model itself are computed for its comparison alone; all cells run timm's network."""
    called = []

    def count(module, inputs, outputs):
        if type(module).__name__ == "ViTForImageClassification":
            called.append(module)

    handle = torch.nn.modules.module.register_module_forward_hook(count)
    try:
        for number in (1, 2):
            folder = Path(shutil.copytree(place / "vit", tmp_path / f"vit {number}"))
            weights = load_file(folder / "model.safetensors")
            weights["classifier.bias"] += number
            save_file(weights, folder / "model.safetensors", {"format": "pt"})
            options = [*pictures(place), "--plugin", "tome", "--macs", "0.8,0.6", "--jobs", 0, "--device", "cpu"]
            out = tmp_path / f"out {number}"
            done = call("run", "--suite", "folder", "--model", f"hf:{folder}", *options, "--out", out)
            assert done.exit_code == 0, done.output
            assert sum(record.status == "ok" for record in store.read(out).values()) > 4
            assert len(called) == number
    finally:
        handle.remove()


@pytest.mark.parametrize(("model", "size"), [("vit", []), ("vit", ["--image-size", 48]), ("dino", [])])
def test_tokens_and_schedules_are_examined(place, tmp_path, model, size):
    """Networks with and without a head, and at another size, in all commands that look at strategies."""
    setting = ["--suite", "folder", "--task", "folder", "--model", f"hf:{place / model}", *pictures(place), *size]
    setting += ["--jobs", 0, "--device", "cpu", "--out", tmp_path / "out"]
    patches = ((size[-1] if size else SIDE) // 8) ** 2

    done = call("compare", "attn_topk:macs=0.6", "tome:macs=0.6", *setting, "--json", "--picture", tmp_path / "c.png")
    assert done.exit_code == 0, done.output
    content = json.loads(done.stdout)
    assert content["task"]["params"]["canvas"] == (size[-1] if size else SIDE)
    done = call("show-tokens", "--plugin", "attn_topk:macs=0.6", *setting)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "out" / "tokens.png").stat().st_size > 0
    done = call("schedules", "attn_topk", *setting, "--macs", 0.5, "--json")
    assert done.exit_code == 0, done.output
    (schedules,) = json.loads(done.stdout)
    counts = [candidate["counts"] for candidate in schedules["candidates"]]
    assert len(counts) > 1 and all(1 <= count < patches for several in counts for count in several)


def submitted(place: Path, root: Path, *options: object) -> Path:
    """Return a submission of a strategy's cells on models of transformers."""
    setting = ["--suite", "folder", "--jobs", 0, "--device", "cpu", *pictures(place), "--macs", 0.8]
    done = call("run", *setting, "--plugin", SAMPLES / "good.py", *options, "--out", root / "out")
    assert done.exit_code == 0, done.output
    submit(root / "out", root / "to")
    return root / "to"


def test_a_replay_names_the_folder_that_it_needs(place, tmp_path):
    folder = submitted(place, tmp_path, "--model", f"hf:{place / 'vit'}")
    for given in ([], ["--weights", place / "dino"]):
        done = call("verify", folder, "--replay", 2, "--yes", "--device", "cpu", *pictures(place), *given)
        assert done.exit_code == 2
        assert re.search(r"was run with hf-\w{12}.*--weights", done.output), done.output


@pytest.mark.slow
@pytest.mark.parametrize("has_texts", [False, True])
def test_cells_on_a_folder_are_replayed(place, tmp_path, has_texts):
    model, more = place / "vit", []
    if has_texts:
        model, width = clip(tmp_path / "model", "CLIPModel")
        features = np.random.default_rng(1).normal(size=(5, width)).astype(np.float32)
        np.savez(tmp_path / "texts.npz", features=features, classes=np.array(CLASSES))
        more = ["--text-features", tmp_path / "texts.npz"]
    folder = submitted(place, tmp_path, "--model", f"hf:{model}", *more)
    given = [*pictures(place), "--weights", model, *more]
    done = call("verify", folder, "--replay", 2, "--yes", "--device", "cpu", *given)
    assert done.exit_code == 0 and ": replayed: " in done.stdout, done.output


def test_a_backbone_is_not_tested_on_classes(place, tmp_path):
    done = call(
        "run", "--suite", "folder", "--model", f"hf:{place / 'dino'}", *pictures(place), "--plugin", "tome", "--out",
        tmp_path / "out",
    )  # fmt: skip
    assert done.exit_code == 2
    assert "no head" in done.output


@pytest.mark.parametrize("more", [["--pretrained"], ["--weights", "own.pth"]])
def test_a_folder_has_its_own_weights(place, tmp_path, more):
    if more[0] == "--weights":
        torch.save(model_of("ViT").state_dict(), tmp_path / "own.pth")
        more = ["--weights", tmp_path / "own.pth"]
    done = call(
        "run", "--suite", "folder", "--model", f"hf:{place / 'vit'}", *pictures(place), *more, "--plugin", "tome",
        "--out", tmp_path / "out",
    )  # fmt: skip
    assert done.exit_code == 2
    assert "in its folder" in done.output


TEXT = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 50}


def clip(folder: Path, name: str) -> tuple[Path, int]:
    """Write a model of images and texts; return its folder and the number of its features."""
    cls = getattr(transformers, name)
    config = cls.config_class(vision_config=WIDE, text_config=TEXT | {"bos_token_id": 1, "eos_token_id": 2})
    torch.manual_seed(0)
    model = cls(config).eval()
    with torch.no_grad():
        for weight in model.vision_model.parameters():
            weight.copy_(0.2 * torch.randn(weight.shape) + 0.5 * (weight.ndim == 1))
    return folder_of(model, folder), config.projection_dim if name == "CLIPModel" else 32


@pytest.mark.parametrize("name", ["CLIPModel", "SiglipModel"])
def test_texts_are_classes_without_training(place, tmp_path, name):
    folder, width = clip(tmp_path / "model", name)
    model = getattr(transformers, name).from_pretrained(folder).eval()
    texts = np.random.default_rng(1).normal(size=(6, width)).astype(np.float32)
    names = ["eel", "fly", "dog", "ant", "cow", "bee"]  # another order than the folders, and one more
    np.savez(tmp_path / "texts.npz", features=texts, classes=np.array(names))

    options = [
        "--text-features",
        tmp_path / "texts.npz",
        "--plugin",
        "tome",
        "--macs",
        1,
        "--jobs",
        0,
        "--device",
        "cpu",
    ]
    done = call(
        "run", "--suite", "folder", "--model", f"hf:{folder}", *pictures(place), *options, "--out", tmp_path / "out"
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    records = store.read(tmp_path / "out").values()
    dense = next(record for record in records if record.cell.strategy.name == "dense")

    mean, std = (0.5, 0.5) if name == "SiglipModel" else OPENAI
    right = 0
    for folder_name in CLASSES:
        for file in sorted((place / "pictures" / folder_name).iterdir()):
            pixels = torch.from_numpy(np.array(Image.open(file))).permute(2, 0, 1) / 255
            with torch.no_grad():
                features = model.vision_model(pixel_values=((pixels - mean) / std)[None]).pooler_output
                features = model.visual_projection(features) if name == "CLIPModel" else features
            cosines = torch.nn.functional.cosine_similarity(features, torch.from_numpy(texts))
            right += names[int(cosines.argmax())] == folder_name
    assert dense.metrics["accuracy"].value == pytest.approx(right / (PICTURES * len(CLASSES)))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"features": np.ones((5, 3), np.float32), "classes": np.array(CLASSES)}, "not encoded by this model"),
        ({"features": np.ones((4, 20), np.float32), "classes": np.array(CLASSES)}, "for 5 classes"),
        ({"features": np.ones((5, 20), np.float32)}, "cannot be read"),
        ({"features": np.ones((5, 20), np.complex64), "classes": np.array(CLASSES)}, "cannot be read"),
        ({"features": np.full((5, 20), 1e300), "classes": np.array(CLASSES)}, "one finite row"),
        ({"features": np.ones((5, 20), np.float32), "classes": np.array(CLASSES), "scale": np.nan}, "a positive scale"),
        ({"features": np.ones((5, 20), np.float32), "classes": np.array(CLASSES)}, "no scale"),
        ({"features": np.ones((5, 20), np.float32), "classes": np.array(["x", *CLASSES[1:]])}, "match no class"),
    ],
)
def test_texts_that_do_not_fit_are_refused(place, tmp_path, arrays, message):
    folder = folder_of(model_of("CLIP, projected"), tmp_path / "model")
    np.savez(tmp_path / "texts.npz", **arrays)
    done = call(
        "run", "--suite", "folder", "--model", f"hf:{folder}", *pictures(place), "--text-features",
        tmp_path / "texts.npz", "--plugin", "tome", "--out", tmp_path / "out",
    )  # fmt: skip
    assert done.exit_code == 2
    assert message in done.output


@pytest.mark.parametrize("bytes_that_stay", [None, 0, 20, 400])
def test_a_damaged_file_of_texts_is_refused_in_one_line(place, tmp_path, bytes_that_stay):
    folder = folder_of(model_of("CLIP, projected"), tmp_path / "model")
    np.savez(tmp_path / "texts.npz", features=np.ones((5, 20), np.float32), classes=np.array(CLASSES))
    content = (tmp_path / "texts.npz").read_bytes()
    (tmp_path / "texts.npz").unlink()
    if bytes_that_stay is not None:
        (tmp_path / "texts.npz").write_bytes(content[:bytes_that_stay])
    done = call(
        "run", "--suite", "folder", "--model", f"hf:{folder}", *pictures(place), "--text-features",
        tmp_path / "texts.npz", "--plugin", "tome", "--out", tmp_path / "out",
    )  # fmt: skip
    assert done.exit_code == 2
    assert len(done.output.splitlines()) == 1
    assert ("there is no file" if bytes_that_stay is None else "cannot be read") in done.output
