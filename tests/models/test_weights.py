import hashlib
from functools import partial

import pytest
import timm
import torch
from eva_vits import KINDS
from safetensors.torch import save_file
from timm.layers import resample_abs_pos_embed
from vits import ARCHITECTURES, vit

from sparsebench.errors import UserError
from sparsebench.models.timm_models import create_vit, load_weights, match_weights
from sparsebench.plan.locate import locate_weights

architectures = pytest.mark.parametrize("make", ARCHITECTURES.values(), ids=ARCHITECTURES)
HEADS = ("head.", "head_dist.")


@pytest.fixture
def saved(tmp_path):
    """Return a function that writes weights by name, or of a model, to a file and returns its path."""

    def save(what, name="own.safetensors"):
        state = what if isinstance(what, dict) else what.state_dict()
        save_file({key: value.contiguous() for key, value in state.items()}, tmp_path / name)
        return tmp_path / name

    return save


def body(model):
    return {key: value for key, value in model.state_dict().items() if not key.startswith(HEADS)}


def other(make, **changes):
    """Return a model of this architecture with other weights."""
    model = make(**changes)
    with torch.no_grad():
        for value in model.parameters():
            value.add_(1)
    return model


@pytest.mark.parametrize("make", (ARCHITECTURES | KINDS).values(), ids=ARCHITECTURES | KINDS)
def test_weights_of_a_file_are_the_model_s(saved, make):
    model, again = make(), other(make)
    path = saved(model)
    assert load_weights(again, path, fresh_head=False)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())
    assert [*locate_weights([path])] == [f"weights-{hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"]


@architectures
def test_a_position_embedding_is_resampled_as_in_timm(saved, make):
    """A position embedding of another resolution is resampled as timm does it."""
    model, larger = make(img_size=32), other(make, img_size=48)
    load_weights(larger, saved(model), fresh_head=False)
    expected = resample_abs_pos_embed(model.pos_embed, (6, 6), (4, 4), num_prefix_tokens=model.num_prefix_tokens)
    assert torch.equal(larger.pos_embed, expected)
    assert all(torch.equal(v, larger.state_dict()[k]) for k, v in model.state_dict().items() if k != "pos_embed")


def test_a_file_is_read_as_timm_itself_reads_it(saved):
    name = "deit_tiny_distilled_patch16_224"
    path = saved(timm.create_model(name, num_classes=7))
    cfg = {"file": str(path), "num_classes": 7}
    by_timm = timm.create_model(name, img_size=96, num_classes=7, pretrained=True, pretrained_cfg_overlay=cfg)
    ours = create_vit(name, 96, 7)
    load_weights(ours, path, fresh_head=False)
    assert all(torch.equal(value, ours.state_dict()[key]) for key, value in by_timm.state_dict().items())


@pytest.mark.parametrize("make", [vit, ARCHITECTURES["distilled"]])
@pytest.mark.parametrize(
    ("whole", "message"), [(True, "a head of 7 classes, and the task, which trains nothing, has 5"), (False, "no head")]
)
def test_a_head_that_does_not_fit_is_fresh_only_in_training(saved, make, whole, message):
    """A head that does not fit is fresh where the cell trains and refused where it only tests."""
    model, again = make(num_classes=7), other(make)
    path, head = saved(model if whole else body(model)), again.head.weight.clone()
    with pytest.raises(UserError, match=message):
        load_weights(again, path, fresh_head=False)
    load_weights(again, path, fresh_head=True)
    assert torch.equal(again.head.weight, head)
    assert all(torch.equal(value, body(model)[key]) for key, value in body(again).items())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(vit, depth=5), "unexpected: blocks.4.attn.proj.bias, .* and 9 more"),
        (partial(vit, depth=3), "missing: blocks.3.norm1.weight"),
        (partial(vit, embed_dim=16), r"of another shape: cls_token \(1, 1, 16\) in place of \(1, 1, 32\)"),
        (partial(vit, patch_size=4), r"patch_embed.proj.weight \(32, 3, 4, 4\) in place of \(32, 3, 8, 8\)"),
        (partial(vit, reg_tokens=4), "unexpected: reg_token"),
        (ARCHITECTURES["distilled"], "unexpected: dist_token"),
        (ARCHITECTURES["average pool without class token"], "missing: cls_token"),
        (lambda: torch.nn.Linear(3, 4), "missing: cls_token, pos_embed, .*unexpected: bias, weight"),
    ],
    ids=["deeper", "shallower", "narrower", "other patches", "registers", "distilled", "no class token", "no ViT"],
)
def test_the_weights_of_another_architecture_are_refused_by_name(saved, make, message):
    with pytest.raises(UserError, match=message) as refusal:
        match_weights(vit(), saved(make()), fresh_head=True)
    assert "own.safetensors holds the weights of another architecture" in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("pos_embed", torch.tensor(torch.nan), "not finite, in pos_embed"),
        (
            "blocks.0.attn.qkv.weight",
            torch.tensor(1, dtype=torch.int8),
            r"numbers of type int8, in blocks\.0\.attn\.qkv",
        ),
        ("\x1b[31mx\u202e", torch.tensor(0.0), "unexpected: "),
    ],
)
def test_numbers_and_names_that_make_no_sense_are_refused_in_plain_text(saved, name, value, message):
    state = vit().state_dict()
    state[name] = value.expand(state[name].shape if name in state else 5)
    with pytest.raises(UserError, match=message) as refusal:
        load_weights(vit(), saved(state), fresh_head=True)
    assert str(refusal.value).isprintable()


def cut_to(path, size):
    path.write_bytes(path.read_bytes()[:size])


class Program:
    """An object whose code runs if its pickle is loaded without protection."""

    def __reduce__(self):
        return pytest.fail, ("a program in a file of weights was run",)


@pytest.mark.parametrize(
    ("name", "spoil", "message"),
    [
        *(("own.safetensors", partial(cut_to, size=size), "truncated") for size in (-100, 5, 0)),
        ("own.safetensors", lambda path: path.unlink(), "cannot be read: No such file"),
        *(("own.pth", partial(cut_to, size=size), "own.pth is not a checkpoint of torch.save: it is damaged.*; save")
          for size in (0, 20)),
        *(("own.pth", partial(torch.save, what), r"own\.pth is not a checkpoint")
          for what in ({"epoch": 3}, torch.zeros(2), {"a": torch.eye(2).to_sparse()})),
        ("own.pth", partial(torch.save, {"a": Program()}), "with only weights; got .*Fail; save only model.state_dict"),
    ],
)  # fmt: skip
def test_a_file_without_weights_is_refused_and_not_executed(saved, name, spoil, message):
    """A file that holds no weights is refused and no program in it is run."""
    path = saved(vit(), name)
    spoil(path)
    with pytest.raises(UserError, match=message) as refusal:
        match_weights(vit(), path, fresh_head=True)
    assert "\n" not in str(refusal.value) and "PyTorch 2.6" not in str(refusal.value)
