"""Features of a sparse network: the remaining tokens, what the head reads, and the patches for which tokens stand."""

from functools import partial

import eva_vits
import pytest
import torch
import vits
from vits import close, vit

import sparsebench
from sparsebench.errors import UserError
from sparsebench.models.deep import DeepViT
from sparsebench.plugin.registry import Registry
from sparsebench.strategy.base import Strategy
from sparsebench.strategy.plans import Keep, Mask, Merge

MODELS = vits.ARCHITECTURES | eva_vits.KINDS
KINDS = ("plain", "4 registers", "distilled", "average pool without class token", "DINOv3", "EVA-02", "PE", "SigLIP")
EACH_WAY = ("random", "attn_topk", "tome", "evit", "dpc_knn", "ats", "idle_vit")
"""One of each way to act: at the input, in attention, merging, fusing, before a block, ragged, resting."""
TRAINING_FREE = [
    registered.cls
    for registered in Registry(shipped_only=True).strategies()
    if registered.cls.kind != "oracle"
    and registered.cls.budgeted
    and not registered.cls.trained
    and not registered.cls.fits()
]


def pixels(n=3, side=32):
    return torch.randn(n, 3, side, side, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "plain") for name in EACH_WAY), *(("attn_topk", kind) for kind in KINDS[1:])]
)
@torch.no_grad()
def test_all_macs_give_the_features_of_the_model_to_the_bit(name, kind):
    model, x = MODELS[kind](), pixels()
    tokens = model.forward_features(x)
    pooled = model.forward_head(tokens, pre_logits=True)
    outputs = model(x)
    sparse = sparsebench.apply(model, name, macs=1.0)
    assert torch.equal(sparse.forward_features(x), tokens)
    assert torch.equal(sparse.forward_head(tokens, pre_logits=True), pooled)
    assert torch.equal(sparse.forward_head(tokens), outputs)
    assert torch.equal(sparse.membership(x), torch.eye(16).expand(3, 16, 16))


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_without_a_head_the_outputs_are_the_pooled_features(kind):
    model, x = MODELS[kind](num_classes=0), pixels()
    before = model(x)
    assert torch.equal(sparsebench.apply(model, "attn_topk", macs=1.0)(x), before)
    sparse = sparsebench.apply(MODELS[kind](num_classes=0), "tome", macs=0.6)
    outputs = sparse(x)
    assert outputs.shape == before.shape and not torch.allclose(outputs, before, atol=1e-3)
    assert torch.equal(sparse.forward_head(sparse.forward_features(x), pre_logits=True), outputs)


@pytest.mark.filterwarnings("ignore:'perturbation")  # it has more MACs than the dense network
@pytest.mark.parametrize(
    ("name", "kind"), [*((cls.name, "plain") for cls in TRAINING_FREE), *(("tome", kind) for kind in KINDS[1:])]
)
@torch.no_grad()
def test_features_are_what_the_head_reads(name, kind):
    model, x = MODELS[kind](), pixels()
    sparse = sparsebench.apply(model, name, macs=0.6)
    read = []
    handle = model.norm.register_forward_hook(lambda _module, _inputs, tokens: read.append(tokens))
    outputs = sparse(x)  # the last call of the norm; some strategies call the network themselves
    handle.remove()
    tokens = sparse.forward_features(x)
    assert torch.equal(tokens, read[-1])
    assert torch.equal(sparse.forward_head(tokens), outputs)


class Scripted(Strategy):
    """Keeps, fuses or merges known tokens."""

    name = "scripted"
    site = "attention"
    needs = frozenset({"tokens"})
    way: str = "keep"

    def plan(self, view, keep):
        B, N = view.index.shape
        rng = torch.Generator().manual_seed(view.block)
        order = torch.rand(B, N, generator=rng).argsort(dim=1)
        if self.way == "keep":
            return Keep(order[:, :keep])
        if self.way == "fuse":
            return Keep(order[:, : keep - 1], fuse=torch.rand(B, N, generator=rng))
        target = torch.arange(N).expand(B, N) % keep
        return Merge(target.gather(1, order))


@pytest.mark.parametrize("way", ["keep", "fuse", "merge"])
@torch.no_grad()
def test_tokens_and_membership_follow_the_plans_in_this_order(way):
    """The features are those of a reference that multiplies with a matrix for each plan; so are the weights."""
    model, x = vit(num_classes=0, global_pool="", reg_tokens=2), pixels()  # such a model returns its tokens
    sparse = sparsebench.apply(model, Scripted(way=way), keep_rate=0.5, blocks=(1, 3))
    tokens = sparse.forward_features(x)
    decisions = sparse._last.decisions
    plans = {decision.block: decision.plan for decision in decisions}
    network = DeepViT(vit(num_classes=0, global_pool="", reg_tokens=2))
    close(tokens, vits.reference(network, network.restore(x), "attention", plans))

    expected = torch.eye(16, dtype=torch.float64).expand(3, 16, 16)
    for decision in decisions:
        expected = vits.matrix(decision.plan, decision.sizes, 0).double() @ expected
        expected = expected / expected.sum(dim=2, keepdim=True)
    close(sparse.membership().double(), expected)
    if way == "keep":
        patches = sparse.membership().argmax(dim=2)
        assert (patches.diff(dim=1) > 0).all(), "kept patches have the order of the grid"
        assert torch.equal(sparse.membership().sum(dim=1) > 0, sparse.kept())
    if way == "fuse":
        numbers = (sparse.membership() > 0).sum(dim=2)
        assert (numbers.clamp(max=2).diff(dim=1) >= 0).all() and (numbers[:, -1] > 1).all(), "fused tokens are last"


@torch.no_grad()
def test_merged_features_are_put_back_on_the_grid():
    """Each patch gets the token of its group, and a token has equal weights for the patches of its group."""
    x = pixels()
    sparse = sparsebench.apply(vit(class_token=False, global_pool="avg"), "tome:per_block=3")
    tokens = sparse.forward_features(x).double()
    membership = sparse.membership()
    decisions = sparse._last.decisions
    values = torch.randn(3, 16, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    means = membership.double() @ values
    grid = (membership > 0).to(tokens).transpose(1, 2) @ tokens
    for image in range(3):
        groups = [[patch] for patch in range(16)]
        for decision in decisions:
            merged = [[] for _ in range(decision.after.shape[1])]
            for token, group in enumerate(decision.plan.target[image].tolist()):
                merged[group] += groups[token]
            groups = merged
        assert sorted(patch for group in groups for patch in group) == list(range(16)) and len(groups) == 4
        for place, group in enumerate(groups):
            mean = sum(values[image, patch] for patch in group) / len(group)
            close(means[image, place], mean)
            for patch in group:
                close(grid[image, patch], tokens[image, place])


@pytest.mark.filterwarnings("ignore:'perturbation")
@pytest.mark.parametrize("cls", TRAINING_FREE, ids=lambda cls: cls.name)
@torch.no_grad()
def test_rows_sum_to_1_and_a_patch_is_in_one_token_at_most(cls):
    model, x = vit(reg_tokens=2), pixels()
    sparse = sparsebench.apply(model, cls, macs=0.6)
    tokens = sparse.forward_features(x)
    try:
        stay = sparse.kept()
    except UserError:
        with pytest.raises(UserError, match="mixture of many patches") as caught:
            sparse.membership()
        assert "\n" not in str(caught.value)
        return
    membership = sparse.membership()
    assert membership.shape == (3, tokens.shape[1] - 3, 16)
    sums = membership.sum(dim=2)
    padding = (membership == 0).all(dim=2)
    close(sums, 1.0 - padding.float())
    assert cls.adaptive or not padding.any()
    assert padding.sum(dim=1).max() < membership.shape[1] and (padding.float().diff(dim=1) >= 0).all()
    assert ((membership > 0).sum(dim=1) <= 1).all()
    weighted = any(getattr(decision.plan, "weight", None) is not None for decision in sparse._last.decisions)
    if not weighted:  # otherwise a patch may join a group with weight 0
        assert (membership.sum(dim=1) > 0)[stay].all(), "a patch that is kept is in a token"
    assert torch.equal(membership, sparse.membership(x))


@pytest.mark.parametrize("words", ["gtp:per_block=2", "gtp:per_block=3,graph=spatial"])
@torch.no_grad()
def test_what_is_added_to_a_kept_patch_has_no_weight(words):
    sparse = sparsebench.apply(vit(), words)
    membership = sparse.membership(pixels())
    index = sparse._last.index
    assert torch.equal(membership, torch.eye(16)[index])
    assert torch.equal(membership.sum(dim=1) > 0, sparse.kept())


@pytest.mark.parametrize("words", ["attn_topk:returns=-1", "value_norm:returns=2", "attn_topk:returns=-2"])
@torch.no_grad()
def test_tokens_that_came_back_stand_for_their_patches(words):
    sparse = sparsebench.apply(vit(reg_tokens=2), words, counts=(11, 6), blocks=(0, 1))
    tokens = sparse.forward_features(pixels())
    membership = sparse.membership()
    assert any(decision.after.shape[1] < 16 for decision in sparse._last.decisions)
    assert tokens.shape[1] == 3 + membership.shape[1]
    assert torch.equal(membership, torch.eye(16).expand(3, 16, 16))
    assert sparse.kept().all()


@torch.no_grad()
def test_with_the_counts_of_each_image_shorter_rows_end_with_padding():
    class Brighter(Strategy):
        name = "brighter"
        site = "block"
        adaptive = True

        def plan(self, view, keep):
            return Mask(view.index >= torch.tensor([[3], [9], [14]]))

    sparse = sparsebench.apply(vit(), Brighter, counts=(15, 15), blocks=(1, 3))
    membership = sparse.membership(pixels())
    assert membership.sum(dim=(1, 2)).tolist() == [13, 7, 2]
    for image, first in enumerate((3, 9, 14)):
        expected = torch.zeros(13, 16)
        for place, patch in enumerate(range(first, 16)):
            expected[place, patch] = 1
        assert torch.equal(membership[image], expected)


def test_the_loss_of_a_training_by_features_is_that_of_a_call():
    losses = []
    for in_two_steps in (False, True):
        sparse = sparsebench.apply(vit(), "dynamic_vit:keep_rate=0.5", learned="random").train()
        sparse.teach(vit())
        outputs = sparse.forward_head(sparse.forward_features(pixels())) if in_two_steps else sparse(pixels())
        losses.append(outputs.square().sum() + sparse.loss())
    assert torch.equal(*losses)
    losses[1].backward()


@torch.no_grad()
def test_what_features_refuse_is_one_line():
    sparse = sparsebench.apply(vit(), "tome:per_block=2")
    tokens = torch.randn(3, 9, 32)
    for call, message in [
        (sparse.membership, r"was not called yet; give the pixels: membership\(x\)"),
        (partial(sparse.forward_head, tokens), "call forward_features first"),
        (partial(sparse.forward_features, pixels(side=24)), "pixels; got"),
        (partial(sparse.forward_features, "x.png"), "pixels; got str"),
    ]:
        with pytest.raises(UserError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)
    features = sparse.forward_features(pixels())
    with pytest.raises(UserError, match="tokens of the last call"):
        sparse.forward_head(features[:2])
    sparse.remove()
    with pytest.raises(UserError, match="was removed"):
        sparse.forward_features(pixels())
