"""Models of the transformers library with a strategy."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from timm.models import generate_default_cfgs, register_model, vision_transformer
from transformers_kinds import KINDS, folder_of, model_of, transformers

import sparsebench
from sparsebench.deploy.apply import timm_model
from sparsebench.errors import UserError
from sparsebench.models.deep import DeepViT
from sparsebench.models.transformers_families import CLASSES

pytestmark = pytest.mark.integration

NEAR = 1e-5


def pixels_for(model: Any, n: int = 2, side: int | None = None) -> torch.Tensor:
    config = getattr(model.config, "vision_config", model.config)
    size = config.image_size if side is None else side
    height, width = (size, size) if isinstance(size, int) else size
    return torch.randn(n, 3, height, width, generator=torch.Generator().manual_seed(1))


def fields_of(output: Any) -> dict[str, torch.Tensor]:
    return {name: value for name, value in output.items() if isinstance(value, torch.Tensor)}


def near(made: Any, expected: Any) -> bool:
    made, expected = fields_of(made), fields_of(expected)
    return made.keys() == expected.keys() and all(
        value.shape == made[name].shape and bool((value - made[name]).abs().max() <= NEAR)
        for name, value in expected.items()
    )


def test_the_kinds_here_are_of_all_classes():
    assert {name for name, _ in KINDS.values()} == set(CLASSES)


@pytest.mark.parametrize("kind", KINDS)
def test_all_macs_give_the_output_of_the_model_in_its_own_form(kind, caplog):
    model = model_of(kind)
    x = pixels_for(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        expected = model(pixel_values=x)
        for spec in ("tome:macs=1", "evit:macs=1"):
            with sparsebench.apply(model, spec) as sparse:
                made = sparse(pixel_values=x)
            assert type(made) is type(expected)
            assert near(made, expected)
            assert sparse.macs_ratio == 1
    assert len([line for line in caplog.messages if "checked" in line]) == 2
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("kind", ["ViT", "DINOv2, registers", "DINOv3", "SigLIP", "CLIP, projected"])
def test_the_tokens_that_remain_are_the_last_hidden_state(kind):
    model = model_of(kind)
    x = pixels_for(model, 3)
    with torch.no_grad(), sparsebench.apply(model, "attn_topk:counts=9+4,blocks=1+2") as sparse:
        output = sparse(x)
        tokens = sparse.forward_features(x)
        dense = model(pixel_values=x)
    prefix = dense.last_hidden_state.shape[1] - 16
    assert output.last_hidden_state.shape == (3, prefix + 4, 32)
    assert torch.equal(output.last_hidden_state, tokens)
    others = [name for name in fields_of(output) if name != "last_hidden_state"]
    assert others and all(output[name].shape == dense[name].shape for name in others)
    assert all(not torch.allclose(output[name], dense[name]) for name in others)


@pytest.mark.parametrize("kind", ["DINOv2 with 6 classes, SwiGLU", "DINOv2, registers, 7 classes"])
@torch.no_grad()
def test_features_of_a_probe_are_the_mean_of_the_patches_without_the_class_token(kind, tmp_path):
    model = model_of(kind)
    x = pixels_for(model)
    backbone = model.dinov2 if hasattr(model, "dinov2") else model.dinov2_with_registers
    hidden = backbone(pixel_values=x).last_hidden_state
    network = DeepViT(timm_model(f"hf:{folder_of(model, tmp_path / 'model')}", None))
    network.drop_head("patches")
    features = network.module(x)
    assert features.shape == (2, 32)
    assert (features - hidden[:, -16:].mean(dim=1)).abs().max() <= NEAR
    with sparsebench.apply(network.module, "tome:macs=0.7") as sparse:
        tokens, sizes = sparse.forward_features(x), sparse._last.sizes[:, :, None]
        mean = (tokens[:, -sizes.shape[1] :] * sizes).sum(dim=1) / 16
        assert (sparse(x) - mean).abs().max() <= NEAR


@pytest.mark.parametrize(
    "kind", ["ViT", "I-JEPA", "DeiT with 3 classes", "DINOv2, registers", "SigLIP", "CLIP", "DINOv3"]
)
def test_another_image_size_is_that_of_the_model(kind, caplog):
    model = model_of(kind)
    x = pixels_for(model, side=48)
    resamples_itself = kind.startswith("DINO")
    with torch.no_grad():
        expected = model(pixel_values=x, **({} if resamples_itself else {"interpolate_pos_encoding": True}))
        sparse = sparsebench.apply(model, "tome", macs=1, image_size=48)
        made = sparse(x)
    assert near(made, expected)
    assert any("48 x 48" in line for line in caplog.messages)
    with pytest.raises(UserError, match="multiples of the patch size"):
        sparsebench.apply(model, "tome", macs=1, image_size=44)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["DINOv2", "SigLIP with 3 classes", "DINOv3"])
def test_a_folder_in_half_precision_is_used_in_float32(kind, dtype, tmp_path, caplog):
    folder = folder_of(model_of(kind).to(dtype), tmp_path / "model")
    network = timm_model(f"hf:{folder}", None)
    model = type(model_of(kind)).from_pretrained(folder, dtype=torch.float32).eval()
    x = pixels_for(model)
    with torch.no_grad():
        output = model(pixel_values=x)
        expected = output.logits if "logits" in output else output.pooler_output
        assert (network(x) - expected).abs().max() <= NEAR
    assert next(network.parameters()).dtype == torch.float32
    assert any("becomes float32" in line for line in caplog.messages)


def tuned(sparse: Any, x: torch.Tensor) -> None:
    """Change each weight, except those that are not trained."""
    with torch.no_grad():
        for weight in sparse.parameters():
            weight.add_(0.05 * torch.sin(torch.arange(weight.numel(), dtype=torch.float32)).reshape(weight.shape))


@pytest.mark.parametrize("kind", KINDS)
def test_trained_weights_are_saved_with_the_names_of_transformers(kind, tmp_path):
    model = model_of(kind)
    x = pixels_for(model)
    names = set(model.state_dict())
    sparse = sparsebench.apply(model, "tome", macs=1)
    tuned(sparse, x)
    with torch.no_grad():
        expected = sparse(x)
        sparse.save_pretrained(tmp_path / "tuned")
        again = type(model).from_pretrained(tmp_path / "tuned").eval()
        assert near(again(pixel_values=x), expected)
        assert sparse.remove() is model
        assert near(model(pixel_values=x), expected)
    assert set(again.state_dict()) == names


def test_a_model_with_a_head_trains_by_labels():
    model = model_of("ViT with 5 classes, no biases", id2label={n: str(n) for n in range(5)})
    x, labels = pixels_for(model, 4), torch.tensor([0, 3, 1, 4])
    with sparsebench.apply(model, "evit:keep_rate=0.5").train() as sparse:
        output = sparse(pixel_values=x, labels=labels)
        output.loss.backward()
        assert torch.allclose(output.loss, torch.nn.functional.cross_entropy(output.logits, labels))
        assert all(weight.grad is not None for weight in sparse.parameters())
    with sparsebench.apply(model_of("CLIP"), "tome", macs=0.9) as sparse, pytest.raises(UserError, match="no logits"):
        sparse(x, labels=labels)


def test_positions_of_another_size_are_not_saved_as_those_of_the_model(tmp_path):
    sparse = sparsebench.apply(model_of("ViT"), "tome", macs=1, image_size=48)
    with pytest.raises(UserError, match="resampled"):
        sparse.save_pretrained(tmp_path / "saved")


@pytest.mark.parametrize("name", ["CLIPModel", "SiglipModel"])
def test_a_model_of_images_and_texts_is_its_part_for_images(name, tmp_path):
    cls = getattr(transformers, name)
    text = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    text |= {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2}
    config = cls.config_class(vision_config=KINDS["CLIP"][1], text_config=text)
    model = cls(config).eval()
    x = pixels_for(model)
    with torch.no_grad(), sparsebench.apply(model, "tome", macs=1) as sparse:
        assert near(sparse(x), model.vision_model(pixel_values=x))
        tuned(sparse, x)
        expected = sparse(x)
        sparse.save_pretrained(tmp_path / "tuned")
    again = cls.from_pretrained(tmp_path / "tuned").eval()
    with torch.no_grad():
        assert near(again.vision_model(pixel_values=x), expected)


# Changes of a model that its network in timm does not have.


def in_config(**changes: object):
    """Return a function that changes a model's folder, and gives its name."""

    def change(model: Any, folder: Path) -> str:
        file = folder_of(model, folder) / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
        return f"hf:{folder}"

    return change


def in_module(action):
    """Return a function that changes a model."""

    def change(model: Any, _: Path) -> Any:
        action(model)
        return model

    return change


def every_layer(model: Any) -> Any:
    return next(part for name, part in model.named_modules() if name.split(".")[-1] in ("layers", "layer"))


def with_other_epsilon(model: Any) -> None:
    every_layer(model)[1].norm2.eps = 0.1


def without_layer_scale(model: Any) -> None:
    every_layer(model)[2].layer_scale1.forward = lambda tokens: tokens


def with_scaled_attention(model: Any) -> None:
    attention = next(part for part in model.modules() if hasattr(part, "scaling"))
    attention.scaling *= 1.01


def with_positions_twice(model: Any) -> None:
    embeddings = model.embeddings
    forward = embeddings.forward
    embeddings.forward = lambda *args, **more: forward(*args, **more) + embeddings.position_embeddings


def with_other_wavelengths(model: Any) -> None:
    model.rope_embeddings.inv_freq *= 1.1


def pooled_by_the_last_token(model: Any) -> None:
    forward = model.pooler.forward
    model.pooler.forward = lambda tokens: forward(tokens.flip(1))


def with_other_mean(model: Any) -> None:
    norm = model.dinov2.layernorm
    norm.register_forward_hook(lambda _module, _inputs, tokens: tokens.cumsum(1))


def renamed(model: Any) -> None:
    class Other(type(model)):
        def forward(self, pixel_values: torch.Tensor, **more: Any) -> Any:
            return super().forward(pixel_values=pixel_values.flip(3), **more)

    model.__class__ = Other


MUTATIONS = {
    "activation": ("ViT", in_config(hidden_act="relu")),
    "activation of DINOv3": ("DINOv3", in_config(hidden_act="quick_gelu")),
    "activation of a gated MLP": ("DINOv3, gated", in_config(hidden_act="gelu")),
    "norm epsilon": ("DINOv2", in_module(with_other_epsilon)),
    "layer scale": ("DINOv2, registers", in_module(without_layer_scale)),
    "attention scale": ("DeiT with 3 classes", in_module(with_scaled_attention)),
    "position embeddings": ("DeiT", in_module(with_positions_twice)),
    "rotary positions": ("DINOv3", in_module(with_other_wavelengths)),
    "pooling": ("ViT", in_module(pooled_by_the_last_token)),
    "tokens": ("DINOv2 with 6 classes, SwiGLU", in_module(with_other_mean)),
    "a subclass": ("ViT with 5 classes, no biases", in_module(renamed)),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_what_timms_network_does_not_have_is_refused_by_the_numbers(mutation, tmp_path):
    kind, change = MUTATIONS[mutation]
    sparsebench.apply(model_of(kind), "tome", macs=1).remove()
    changed = change(model_of(kind), tmp_path / "model")
    with pytest.raises(UserError, match=r"other outputs .* a difference of \d") as caught:
        timm_model(changed, None) if isinstance(changed, str) else sparsebench.apply(changed, "tome", macs=1)
    assert "\n" not in str(caught.value)


def test_biases_that_timms_network_lacks_are_refused_by_the_numbers():
    with pytest.raises(UserError, match=r"other outputs .* a difference of \d"):
        sparsebench.apply(model_of("DINOv3", key_bias=True), "tome", macs=1)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (
            "ViT with 5 classes, no biases",
            {"architectures": ["DeiTForImageClassification"]},
            "lacks weights of DeiT|cannot load",
        ),
        ("ViT", {"architectures": ["MyModel"]}, "MyModel .* is not supported.*ViTModel"),
        ("ViT", {"architectures": ["ViTForMaskedImageModeling"]}, "is not supported"),
        ("ViT", {"architectures": ["ViTForImageClassification"]}, "lacks weights of ViTForImageClassification"),
        ("ViT", {"model_type": "nothing"}, "cannot read"),
        ("ViT", {"architectures": None}, "does not name the class"),
        ("ViT", {"architectures": 7}, "does not name the class|cannot read"),
        ("ViT", {"image_size": [32, 32, 32]}, "image size"),
        ("ViT", {"hidden_size": 48, "num_attention_heads": 3}, "of other shapes than config.json.*cls_token"),
        ("ViT", {"patch_size": 4}, "of other shapes than config.json.*position_embeddings"),
        # transformers leaves out weights that a configuration has no place for.
        ("ViT", {"num_hidden_layers": 2}, r"weights that ViTModel does not have.*\.2\."),
        ("ViT", {"qkv_bias": False}, "weights that ViTModel does not have.*bias"),
        ("SigLIP", {"vision_use_head": False}, "weights that SiglipVisionModel does not have.*head"),
        (
            "DINOv2, registers",
            {"architectures": ["Dinov2Model"], "model_type": "dinov2"},
            "weights that Dinov2Model does not have.*register_tokens",
        ),
        ("DINOv2", {"num_hidden_layers": 4}, "lacks weights"),
        ("ViT", {"hidden_act": "nothing"}, "cannot"),
    ],
)
def test_a_folder_with_another_configuration_is_refused_in_one_line(kind, changes, message, tmp_path):
    name = in_config(**changes)(model_of(kind), tmp_path / "model")
    with pytest.raises(UserError, match=message) as caught:
        timm_model(name, None)
    assert "\n" not in str(caught.value)


def in_weights(change):
    """Return a function that changes the weights of a model's folder."""

    def write(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        save_file({name: change(value) for name, value in weights.items()}, folder / "model.safetensors")

    return write


def in_parts(folder: Path, last_type: torch.dtype) -> None:
    """Write the weights of a model's folder into two files. Those of the second are converted to a type."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    middle = len(weights) // 2
    places = {name: f"part-{1 + (number >= middle)}.safetensors" for number, name in enumerate(sorted(weights))}
    for file, kind in (("part-1.safetensors", torch.float32), ("part-2.safetensors", last_type)):
        part = {name: weights[name].to(kind) for name in places if places[name] == file}
        save_file(part, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def with_code(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    code = {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}
    (folder / "config.json").write_text(json.dumps(config | code))
    (folder / "own.py").write_text("raise SystemExit('code of the folder runs')")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (in_weights(lambda value: (100 * value).to(torch.int8)), "weights of type I8.*not quantized"),
        (in_weights(lambda value: value.to(torch.float8_e4m3fn)), "weights of type F8.*not quantized"),
        (lambda folder: in_parts(folder, torch.uint8), "weights of type U8.*not quantized"),
        (lambda folder: (folder / "model.safetensors").unlink(), "cannot load"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"no weights"), "cannot load"),
        (lambda folder: (folder / "config.json").write_bytes(b"\xff{"), "no JSON object with 'model_type'"),
        (with_code, "custom code"),
    ],
)
def test_a_damaged_folder_is_refused_in_one_line(damage, message, tmp_path):
    folder = folder_of(model_of("ViT"), tmp_path / "model")
    damage(folder)
    with pytest.raises(UserError, match=message) as caught:
        timm_model(f"hf:{folder}", None)
    assert "\n" not in str(caught.value)


def in_a_file_of_another_name(folder: Path) -> None:
    """Rename the file of a model's weights. Its configuration names it."""
    (folder / "model.safetensors").rename(folder / "large.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"transformers_weights": "large.safetensors"}))


@pytest.mark.parametrize(
    "change",
    [lambda folder: None, lambda folder: in_parts(folder, torch.float32), in_a_file_of_another_name],
    ids=["one file", "parts", "another name"],
)
def test_quantized_weights_that_are_not_those_of_the_model_may_lie_beside_them(change, tmp_path):
    model = model_of("DINOv2")
    folder = folder_of(model, tmp_path / "model")
    change(folder)
    quantized = {name: value.to(torch.int8) for name, value in model.state_dict().items()}
    save_file(quantized, folder / "model_int8.safetensors")
    network = timm_model(f"hf:{folder}", None)
    x = pixels_for(model)
    with torch.no_grad():
        assert (network(x) - model(pixel_values=x).pooler_output).abs().max() <= NEAR


def test_weights_that_are_not_finite_are_not_another_network():
    model = model_of("DINOv2")
    with torch.no_grad():
        model.encoder.layer[1].mlp.fc1.bias[0] = float("nan")
    with pytest.raises(UserError, match=r"not finite.*check its weights"):
        sparsebench.apply(model, "tome", macs=1)


def test_a_pooler_that_is_not_in_the_folder_is_not_invented(tmp_path):
    model = transformers.ViTModel(model_of("ViT").config, add_pooling_layer=False).eval()
    network = timm_model(f"hf:{folder_of(model, tmp_path / 'model')}", None)
    x = pixels_for(model)
    with torch.no_grad():
        assert (network(x) - model(pixel_values=x).last_hidden_state[:, 0]).abs().max() <= NEAR


def test_what_is_no_folder_of_transformers_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name, message in ((tmp_path, "no config.json"), (tmp_path / "none", "no such folder")):
        with pytest.raises(UserError, match=message):
            timm_model(f"hf:{name}", None)
    with pytest.raises(UserError, match="--weights"):
        timm_model(f"hf:{folder_of(model_of('ViT'), tmp_path / 'model')}", Path("weights.pth"))
    with pytest.raises(UserError, match="half precision"):
        sparsebench.apply(model_of("ViT").half(), "tome", macs=1)


def test_a_name_of_the_hub_is_a_folder_that_was_downloaded(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match=r"hf download somebody/small --local-dir DIR; then give hf:DIR") as caught:
        timm_model("hf:somebody/small", None)
    assert "\n" not in str(caught.value)
    commit, store = "0" * 40, tmp_path / "models--somebody--small"
    folder_of(model_of("DINOv2"), store / "snapshots" / commit)
    (store / "refs").mkdir()
    (store / "refs" / "main").write_text(commit)
    network = timm_model("hf:somebody/small", None)
    with torch.no_grad():
        x = pixels_for(model_of("DINOv2"))
        assert (network(x) - model_of("DINOv2")(pixel_values=x).pooler_output).abs().max() <= NEAR


def test_without_transformers_a_folder_is_refused_with_what_to_install(tmp_path, monkeypatch):
    folder = folder_of(model_of("ViT"), tmp_path / "model")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match=r"sparsebench\[transformers\].*--weights FILE"):
        timm_model(f"hf:{folder}", None)


SAME = {"hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 2, "intermediate_size": 192}


@pytest.mark.parametrize(
    ("name", "labels", "dtype"), [("ViTModel", 0, torch.float32), ("ViTForImageClassification", 7, torch.float16)]
)
def test_a_file_with_the_names_of_transformers_is_read_for_timms_architecture(name, labels, dtype, tmp_path, caplog):
    cls = getattr(transformers, name)
    config = cls.config_class(**SAME, image_size=160, patch_size=16, layer_norm_eps=1e-6, num_labels=labels)
    model = cls(config).eval().to(dtype)
    file = folder_of(model, tmp_path / "model") / "model.safetensors"
    network = timm_model("timm:test_vit", file)
    assert any("not checked" in line for line in caplog.messages)
    x = pixels_for(model)
    with torch.no_grad():
        output = model.float()(pixel_values=x)
        expected = output.logits if labels else output.last_hidden_state[:, 0]
        assert (network(x) - expected).abs().max() <= NEAR
    with pytest.raises(UserError, match="another architecture"):
        timm_model("timm:test_vit2", file)


default_cfgs = generate_default_cfgs(
    {"vit_with_registers_of_these_tests": {"input_size": (3, 64, 64), "num_classes": 0}}
)


@register_model
def vit_with_registers_of_these_tests(pretrained: bool = False, **kwargs: Any) -> Any:
    """Return a small DINOv2 with registers, whose class token has no position."""
    shape = {"patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 2, "init_values": 1.0}
    parts = {"reg_tokens": 4, "no_embed_class": True}
    return vision_transformer._create_vision_transformer(
        "vit_with_registers_of_these_tests", pretrained=pretrained, **shape, **parts, **kwargs
    )


@pytest.mark.parametrize("side", [32, 48])
def test_positions_of_a_file_are_resampled_as_timm_does_it(side, tmp_path, caplog):
    """The file is for another size than that of the architecture, and its class token has a position."""
    model = model_of("DINOv2, registers")
    file = folder_of(model, tmp_path / "model") / "model.safetensors"
    network = timm_model("timm:vit_with_registers_of_these_tests", file, side=side)
    assert network.patch_embed.img_size == (side, side)
    again = timm_model("timm:vit_with_registers_of_these_tests", file)
    again.set_input_size((side, side))
    x = pixels_for(model, side=side)
    with torch.no_grad():
        assert (network(x) - again(x)).abs().max() <= NEAR
        # transformers resamples in the same way for these models
        assert (network(x) - model(pixel_values=x).pooler_output).abs().max() <= NEAR
    assert any("resampled" in line for line in caplog.messages) == (side != 32)


def test_models_of_timm_are_used_at_another_size_too(caplog):
    model = timm.create_model("test_vit", num_classes=3, img_size=64).eval()
    positions = model.pos_embed.clone()
    sparse = sparsebench.apply(model, "tome", macs=1, image_size=(96, 64))
    again = timm.create_model("test_vit", num_classes=3, img_size=64).eval()
    again.load_state_dict(model.state_dict())
    again.set_input_size((96, 64))
    x = torch.randn(2, 3, 96, 64)
    with torch.no_grad():
        assert torch.equal(sparse(x), again(x))
    assert any(re.search("64 x 64 to 96 x 64", line) for line in caplog.messages)
    assert torch.equal(model.pos_embed, positions)
    assert sparse.model.blocks[0].attn.qkv.weight is model.blocks[0].attn.qkv.weight
    with pytest.raises(UserError, match="multiples of the patch size"):
        sparsebench.apply(model, "tome", macs=1, image_size=70)


@pytest.mark.parametrize("size", ["96", 48.0, (48,), (48, 48, 48)])
def test_a_size_of_another_type_is_refused(size):
    for model in (model_of("ViT"), timm.create_model("test_vit", num_classes=3)):
        with pytest.raises(UserError, match="image size"):
            sparsebench.apply(model, "tome", macs=1, image_size=size)
