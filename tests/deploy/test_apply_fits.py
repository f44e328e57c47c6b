"""A strategy that looks at images first, on a network of one's own: it wants them, or what it learned before."""

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file
from vits import vit

import sparsebench
from sparsebench.errors import UserError

WORDS = "fisher_mask:macs=0.6"
LABELS = torch.tensor([0, 4, 2, 2, 1])


def pixels(n=5, seed=1):
    return torch.randn(n, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def test_it_learns_from_images_and_comes_back_from_a_file(tmp_path):
    model, x = vit().train(), pixels(3, seed=2)
    before = copy.deepcopy(model.state_dict())
    sparse = sparsebench.apply(model, WORDS, images=pixels(), labels=LABELS)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training and all(weight.requires_grad for weight in model.parameters())
    outputs = sparse.eval()(x)
    assert not torch.allclose(outputs, model(x), atol=1e-3)
    kept = sparse.kept()
    assert (kept == kept[0]).all() and 0 < int(kept[0].sum()) < 16
    information = sparse.state_dict()["strategy.0.information"]
    assert information.shape == (16,) and bool((information > 0).all())
    assert not dict(sparse.named_parameters())["strategy.0.information"].requires_grad
    save_file(sparse.state_dict(), tmp_path / "learned.safetensors")
    again = sparsebench.apply(copy.deepcopy(model), sparse.spec, learned=tmp_path / "learned.safetensors")
    assert torch.equal(again(x), outputs)
    assert set(load_file(tmp_path / "learned.safetensors")) == {*before, "strategy.0.information"}


@pytest.mark.parametrize(
    ("words", "given", "says"),
    [
        (
            WORDS,
            {},
            "looks at training images before it acts; got neither.*: learned or images and labels",
        ),
        (WORDS, {"images": pixels()}, "got images; allowed: learned or images and labels"),
        (WORDS, {"images": pixels(), "labels": LABELS, "learned": "x"}, "got images and labels and learned"),
        (
            WORDS,
            {"images": pixels()[:, :, :16], "labels": LABELS},
            r"images to learn from; got \(5, 3, 16, 32\)",
        ),
        (WORDS, {"images": pixels(0), "labels": LABELS[:0]}, r"n of 1 or more"),
        (WORDS, {"images": [1], "labels": LABELS}, "images to learn from; got list"),
        (WORDS, {"images": 5, "labels": LABELS}, "images to learn from; got int"),
        (WORDS, {"images": pixels().double(), "labels": LABELS}, "float64.*allowed: .* float32, n of 1 or more, norm"),
        (WORDS, {"images": pixels() / 0, "labels": LABELS}, "-inf..inf; allowed: .* finite"),
        (WORDS, {"images": pixels(), "labels": LABELS[:2]}, r"got \(2,\) int64, 0..4; allowed: \(5,\) int64"),
        (WORDS, {"images": pixels(), "labels": LABELS + 1}, r"got \(5,\) int64, 1..5; allowed: .*0..4, the network's"),
        (WORDS, {"learned": "nowhere.safetensors"}, "cannot be read"),
        ("tome:macs=0.6", {"images": pixels()}, "'tome' learns from no images; got images; allowed: neither"),
        ("attn_topk:macs=0.6", {"labels": LABELS}, "learns from no images; got labels"),
    ],
)
def test_what_is_wrong_is_said_and_the_network_can_be_used_then(words, given, says):
    model = vit()
    with pytest.raises(UserError, match=f"(?s){says}"):
        sparsebench.apply(model, words, **given)
    with sparsebench.apply(model, "attn_topk:macs=0.6") as sparse:
        assert sparse.macs_ratio < 1


def test_images_are_normalised_as_the_models_are():
    """In the middle of what the network computes they are the same as when the sparse network is called."""
    seen, model = [], vit()

    class Looks(sparsebench.Strategy):
        name = "looks"

        def module(self, place):
            return torch.nn.ParameterDict({"nothing": torch.zeros(1)})

        def fit(self, images, network):
            network(images, lambda view: seen.append(view.tokens.detach()))
            return {0: {"nothing": torch.zeros(1)}}

        def scores(self, view):
            seen.append(view.tokens)
            return view.tokens[:, :, 0]

    sparse = sparsebench.apply(model, Looks, keep_rate=0.5, images=pixels(), mean=(0.4, 0.5, 0.6), std=0.2)
    with torch.no_grad():
        sparse(pixels())
    torch.testing.assert_close(*seen, atol=1e-5, rtol=1e-5)
