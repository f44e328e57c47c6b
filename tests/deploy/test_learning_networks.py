"""Strategies that learn on a user's network: from images before, or in a training loop with a teacher."""

import copy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from vits import vit

import sparsebench
from sparsebench.errors import UserError
from sparsebench.strategy.base import ModelOutputs

WORDS = "fisher_mask:macs=0.6"
LABELS = torch.tensor([0, 4, 2, 2, 1])
SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "fine_tune.py"
TWO = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


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
    ("words", "given", "message"),
    [
        (WORDS, {}, "needs about 256 training images; got neither.*: learned or images and labels"),
        (WORDS, {"images": pixels()}, "got images; allowed: learned or images and labels"),
        (WORDS, {"images": pixels(), "labels": LABELS, "learned": "x"}, "got learned and images and labels"),
        *((WORDS, {"images": images, "labels": LABELS}, f"training images; got {got}") for images, got in (
            (pixels()[:, :, :16], r"\(5, 3, 16, 32\).*; allowed: \(n, 3, 32, 32\)"), ([1], "list"), (5, "int"),
            (pixels(0), r"\(0, .*n >= 1"), (pixels().double(), ".*float64.*allowed: .*float32, normalised"),
            (pixels() / 0, ".*-inf..inf; allowed: .* finite"))),
        (WORDS, {"images": pixels(), "labels": LABELS[:2]}, r"got \(2,\) torch.int64.*, 0..4; allowed: \(5,\) torch"),
        (WORDS, {"images": pixels(), "labels": LABELS + 1}, "got .*, 1..5; allowed: .*0..4"),
        (WORDS, {"learned": "nowhere.safetensors"}, "cannot be read"),
        ("tome:macs=0.6", {"images": pixels()}, "'tome' needs no images; got images; allowed: neither"),
        ("attn_topk:macs=0.6", {"labels": LABELS}, "needs no images; got labels"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_and_the_network_can_be_used_then(words, given, message):
    model = vit()
    with pytest.raises(UserError, match=f"(?s){message}"):
        sparsebench.apply(model, words, **given)
    with sparsebench.apply(model, "attn_topk:macs=0.6") as sparse:
        assert sparse.macs_ratio < 1


def test_images_are_normalised_as_the_models_are():
    """Fitting and calling the sparse network give the same activations."""
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


def test_a_keep_rate_falls_with_the_share_of_the_training_that_is_done():
    sparse = sparsebench.apply(vit(), "evit:keep_rate=0.5").train()
    sparse(pixels())
    untold, went_on = int(sparse.kept().sum()), {}
    for done in (0.0, 0.2, 1.0):
        assert sparse.progress(done) == 1
        sparse(pixels())
        went_on[done] = int(sparse.kept().sum())
    assert went_on[0.0] == 5 * 16 > went_on[0.2] > went_on[1.0]
    assert untold == went_on[1.0], "of whom nobody says how far the training is, it is done"


def dynamic_vit(model):
    return sparsebench.apply(model, "dynamic_vit:keep_rate=0.5", learned="random", seed=3).train()


def test_a_strategy_says_how_fast_the_network_learns_beside_it():
    sparse = dynamic_vit(vit())
    assert sparse.progress(0.0) == 0 < sparse.progress(1.0) < 1
    for wrong in (-0.1, 1.5, float("nan")):
        with pytest.raises(UserError, match="share of the training"):
            sparse.progress(wrong)


@pytest.mark.parametrize(
    ("words", "frozen"),
    [
        ("dtem:per_block=2", True),
        ("diffrate_search:macs=0.6,frozen=true", True),
        ("diffrate_search:macs=0.6", False),
        ("cropr:per_block=2", False),
        ("cropr:per_block=2,returns=-1,projections=true", False),
        ("dynamic_vit:keep_rate=0.5", False),
    ],
)
def test_a_loop_moves_the_weights_of_the_strategy_and_leaves_a_frozen_network(words, frozen):
    sparse = sparsebench.apply(vit(), words, learned="random").train()
    before = copy.deepcopy(sparse.state_dict())
    learned = [weight for name, weight in sparse.named_parameters() if name.startswith("strategy.")]
    groups = [{"params": list(sparse.model.parameters())}, {"params": learned}]
    optimizer, cross_entropy = torch.optim.AdamW(groups, lr=1e-2), torch.nn.functional.cross_entropy
    for step in range(4):
        optimizer.param_groups[0]["lr"] = 1e-2 * sparse.progress(step / 4)
        loss = cross_entropy(sparse(pixels()), LABELS) + sparse.loss()
        for logits in sparse.auxiliary():
            loss = loss + cross_entropy(logits, LABELS)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    moved = {name for name, value in sparse.state_dict().items() if not torch.equal(value, before[name])}
    own = {name for name in moved if name.startswith("strategy.0.")}
    assert own == {name for name in before if name.startswith("strategy.0.")}
    assert (moved <= own | {name for name in before if name.startswith("strategy.")}) == frozen


def test_a_teacher_is_asked_in_each_call_and_is_no_part_of_the_network():
    model, x = vit(), pixels()
    teacher, sparse = copy.deepcopy(model).train(), dynamic_vit(model)
    names, tokens = sparse.state_dict().keys(), teacher.eval().forward_features(x)

    def loss(*by_hand):
        sparse._visit = 0  # for the same random tokens
        sparse(x)
        return sparse.loss(*by_hand)

    alone, expected = loss(), loss(ModelOutputs(teacher.forward_head(tokens), tokens[:, 1:]))
    sparse.teach(teacher.train())
    taught = loss()
    assert torch.equal(taught, expected) and taught != alone and not teacher.training
    taught.backward()
    assert all(weight.grad is None for weight in teacher.parameters()) and sparse.state_dict().keys() == names
    sparse.teach(None)
    assert torch.equal(loss(), alone)
    for wrong, message in (
        (model, "is the trained network itself"),
        (sparse, "network itself"),
        (torch.nn.ReLU(), "teach"),
        ("a name", "the teacher; got str"),
        (vit(num_classes=7), "got 7 classes of"),
    ):
        with pytest.raises(UserError, match=message):
            sparse.teach(wrong)
    with pytest.raises(UserError, match="got Tensor; allowed: ModelOutputs"):
        sparse.loss(torch.zeros(3, 5))


def test_gradient_checkpointing_is_refused_whenever_it_is_switched_on():
    model = vit()
    sparse = sparsebench.apply(model, "tome:per_block=2").train()
    sparse(pixels())
    model.set_grad_checkpointing(True)
    with pytest.raises(UserError, match="gradient checkpointing"):
        sparse(pixels())
    sparse.eval()(pixels())  # checkpointing has no effect in evaluation
    model.set_grad_checkpointing(False)
    sparse.train()(pixels()).sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launch", "strategy"),
    [(TWO, []), (TWO, ["--strategy", "dynamic_vit:keep_rate=0.7", "--learned", "random"]), ([], [])],
)
def test_the_script_of_the_docs_trains_on_two_processes_or_one(tmp_path, launch, strategy):
    rng = np.random.default_rng(0)
    for number in range(24):
        folder = tmp_path / "pictures" / ("cat", "dog")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (40, 36, 3), dtype=np.uint8)).save(folder / f"{number}.png")
    words = [*launch, str(SCRIPT), "pictures", "--arch", "test_vit", "--batch", "4", "--epochs", "2", *strategy]
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert "epoch 1: loss " in done.stdout
    saved = torch.load(tmp_path / "sparse.pt", weights_only=True)
    assert saved["state_dict"].keys() >= saved["ema"].keys()


@pytest.mark.parametrize("wrap", [lambda sparse: sparse, torch.nn.Sequential], ids=["alone", "inside another module"])
def test_data_parallel_copies_are_refused(wrap):
    sparse = sparsebench.apply(vit().train(), "dynamic_vit:keep_rate=0.5", learned="random")
    with pytest.raises(UserError, match="DataParallel is not supported") as caught:
        for module in wrap(sparse).modules():  # as torch.nn.DataParallel does on two GPUs
            module._replicate_for_data_parallel()
    assert "\n" not in str(caught.value)
    sparse(pixels())
    assert sparse.loss().isfinite() and copy.deepcopy(sparse)(pixels()).isfinite().all()
