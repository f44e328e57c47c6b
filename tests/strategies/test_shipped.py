import importlib
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch
from sparsebench_plugins.anti_oracle import AntiOracle
from sparsebench_plugins.attn_topk import AttnTopK
from sparsebench_plugins.dense import Dense
from sparsebench_plugins.noise import Noise
from sparsebench_plugins.oracle import Oracle
from sparsebench_plugins.random import Random
from timm.models.deit import VisionTransformerDistilled
from tiny import ENTRIES, ROOT, SHIPPED, B, N, act, images, vit
from token_sets import OneLayer, Sets

from sparsebench.errors import UnsupportedError
from sparsebench.strategy.base import KINDS
from sparsebench.strategy.contract import complaint
from sparsebench.tasks.images import Composite


@pytest.mark.parametrize("name", SHIPPED)
def test_each_comes_in_by_an_entry_point_of_its_own_name(name):
    assert ENTRIES[name] == f"sparsebench_plugins.{name}"
    assert importlib.import_module(ENTRIES[name]).sparsebench_strategies() == [SHIPPED[name]]
    assert SHIPPED[name].name == name and complaint(SHIPPED[name]) is None
    assert SHIPPED[name].__doc__ and SHIPPED[name].model_validate_json(SHIPPED[name]().model_dump_json())


def test_each_file_of_a_strategy_has_an_entry_point():
    assert {path.stem for path in (ROOT / "plugins/sparsebench_plugins").glob("*.py")} - {"__init__"} == set(ENTRIES)


def test_kinds_are_as_published():
    assert {name: cls.kind for name, cls in SHIPPED.items() if cls.kind != "deployable"} == {
        "dense": "baseline", "random": "baseline", "random_inside": "baseline", "radial": "baseline",
        "downsample": "baseline", "patch_dropout": "baseline", "perturbation": "baseline", "oracle": "oracle",
        "anti_oracle": "oracle",
    }  # fmt: skip
    assert {cls.kind for cls in SHIPPED.values()} == set(KINDS)
    assert [name for name, cls in SHIPPED.items() if not cls.budgeted] == ["dense"]
    assert [name for name, cls in SHIPPED.items() if cls.trains_only] == ["patch_dropout"]


def test_importing_them_imports_neither_torch_nor_timm():
    modules = ", ".join(f"sparsebench_plugins.{name}" for name in SHIPPED)
    code = f"import sys, sparsebench, {modules}; sys.exit(list({{'torch', 'timm'}} & set(sys.modules)) or 0)"
    path = f"import sys; sys.path[:0] = {[str(ROOT), str(ROOT / 'plugins')]!r}; "
    done = subprocess.run([sys.executable, "-c", path + code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def masks(share):
    """Return (B, N) relevance: random tokens with that share each, the others with none."""
    order = torch.rand(B, N, generator=torch.Generator().manual_seed(2)).argsort(dim=1)
    return torch.zeros(B, N).scatter(1, order[:, :5], share)


@pytest.mark.parametrize("share", [1.0, 1 / 1024])
@pytest.mark.parametrize("rate", [3 / 16, 0.5])
def test_the_oracle_keeps_what_matters_first_and_the_anti_oracle_removes_it_first(share, rate):
    mask, network, M = masks(share), vit(), round(rate * 16)
    for strategy, relevant in ((Oracle(), min(5, M)), (AntiOracle(), max(0, M - 11))):
        acting, _ = act(strategy, network, images(), mask, rate)
        assert acting.index.shape == (B, M)
        assert (mask.gather(1, acting.index) > 0).sum(1).tolist() == [relevant] * B


def test_the_oracle_orders_partly_covered_patches_by_their_share():
    data = Composite(canvas=32, foreground=19, test=1).draw(40, 0, {})
    network = vit()
    relevance = torch.from_numpy(data.train.relevance_on(network.grid))
    assert len(relevance.unique()) > 5
    for strategy, sign in ((Oracle(), 1), (AntiOracle(), -1)):
        acting, _ = act(strategy, network, torch.from_numpy(data.train.inputs), relevance)
        kept = (sign * relevance).gather(1, acting.index).sum(1)
        best = (sign * relevance).sort(dim=1, descending=True).values[:, :8].sum(1)
        torch.testing.assert_close(kept, best)


@pytest.mark.parametrize("strategy", [Oracle(), AntiOracle(), Random()], ids=lambda s: s.name)
def test_equals_are_drawn_at_random_for_each_sample(strategy):
    items = torch.arange(300)
    acting, _ = act(strategy, vit(depth=1), images(1).expand(300, -1, -1, -1), torch.full((300, N), 0.5), items=items)
    assert len({tuple(row) for row in acting.index.tolist()}) > 250
    often = torch.bincount(acting.index.flatten(), minlength=N)
    assert int(often.min()) > 110 and int(often.max()) < 190


@pytest.mark.parametrize("strategy", [Oracle(), AntiOracle(), Random()], ids=lambda s: s.name)
def test_a_draw_is_the_same_alone_and_in_a_batch(strategy):
    relevance = torch.full((B, N), 0.5)
    together, _ = act(strategy, vit(), images(), relevance)
    for i in range(B):
        alone, _ = act(strategy, vit(), images()[i : i + 1], relevance[:1], items=torch.tensor([i]))
        assert torch.equal(alone.index[0], together.index[i])


def test_oracles_on_token_sets_keep_and_remove_the_majority_pattern():
    data = Sets(tokens=20, relevant=0.4, confusion=0.1).draw(10, 0, {})
    network = OneLayer(m=8).build(data, 0)
    relevance = torch.from_numpy(data.train.relevance)
    for strategy, number in ((Oracle(), 8), (AntiOracle(), 0)):
        acting, _ = act(strategy, network, torch.from_numpy(data.train.inputs), relevance)
        assert relevance.gather(1, acting.index).sum(1).tolist() == [number] * 10


def test_an_oracle_without_a_mask_is_unsupported():
    with pytest.raises(UnsupportedError, match="no relevance mask"):
        act(Oracle(), vit(), images())


@torch.no_grad()
def test_dense_leaves_everything_as_it_is():
    assert Dense().plan(None, 1) is None
    network = vit()
    acting, out = act(Dense(), network, images())
    torch.testing.assert_close(out, network(images()), atol=1e-6, rtol=1e-6)
    assert acting.index.tolist() == [list(range(N))] * B


def noisy(inputs, patches, std, rng):
    """Return images with Gaussian noise on the given (n, k) patches of 8 x 8 pixels."""
    out = inputs.clone()
    for i, chosen in enumerate(patches.tolist()):
        for patch in chosen:
            row, column = 8 * (patch // 4), 8 * (patch % 4)
            out[i, :, row : row + 8, column : column + 8] += std * torch.randn(3, 8, 8, generator=rng)
    return out


def smooth(n):
    """Return images with edges and slopes, without noise."""
    y, x = torch.meshgrid(torch.linspace(0, 1, 32), torch.linspace(0, 1, 32), indexing="ij")
    planes = [0.3 + 0.2 * x + 0.1 * y, 0.5 - 0.3 * y, 0.4 + 0.2 * (x > 0.4).float()]
    return torch.stack(planes).expand(n, 3, 32, 32)


@pytest.mark.parametrize("std", [0.02, 0.1])
def test_noise_drops_the_patches_to_which_noise_was_added(std):
    rng = torch.Generator().manual_seed(3)
    patches = torch.rand(B, N, generator=rng).argsort(dim=1)
    acting, _ = act(Noise(), vit(), noisy(smooth(B), patches[:, :6], std, rng), rate=10 / 16)
    assert torch.equal(acting.index, patches[:, 6:].sort(dim=1).values)


def test_noise_measures_the_standard_deviation():
    rng = torch.Generator().manual_seed(4)
    network = vit(img_size=128, patch_size=32)
    for std in (0.01, 0.05, 0.2):
        flat = torch.full((2, 3, 128, 128), 0.5)
        acting, _ = act(Noise(), network, flat + std * torch.randn(flat.shape, generator=rng))
        assert float(-acting.scores.mean()) == pytest.approx(std, rel=0.03)
        assert float(acting.scores.std()) < 0.1 * std


def test_noise_does_not_mistake_slopes_for_noise():
    acting, _ = act(Noise(), vit(), smooth(1))
    assert float(acting.scores.abs().max()) < 0.005


def test_noise_reads_bytes_and_shares_of_one_alike():
    whole = torch.randint(0, 256, (B, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(act(Noise(), vit(), whole)[0].scores, act(Noise(), vit(), whole / 255)[0].scores)


def test_noise_drops_tokens_of_unusual_length_where_there_are_no_pixels():
    data = Sets(tokens=10, d=6, relevant=0.4, confusion=0.1).draw(3, 0, {})
    network = OneLayer(m=8).build(data, 0)
    tokens = torch.from_numpy(data.train.inputs).clone()
    tokens[0, [2, 5]] *= 3
    tokens[1, [0, 9]] *= 0.2
    tokens[2, 1] *= 2
    tokens[2, 8] *= 0.5
    acting, _ = act(Noise(), network, tokens, rate=0.8)
    removed = [sorted(set(range(10)) - set(row)) for row in acting.index.tolist()]
    assert removed == [[2, 5], [0, 9], [1, 8]]


def test_noise_finds_most_noisy_tokens_of_sets():
    data = Sets(tokens=50, noisy_share=0.3, noisy_std=0.35).draw(100, 0, {})
    tokens = data.train.inputs
    nearest = np.linalg.norm(tokens[:, :, None] - np.eye(10)[:5], axis=3).min(axis=2)
    acting, _ = act(Noise(), OneLayer(m=8).build(data, 0), torch.from_numpy(tokens), rate=0.7)
    removed = np.ones((100, 50), dtype=bool)
    np.put_along_axis(removed, acting.index.numpy(), False, axis=1)
    assert (nearest > 0.3).sum() == pytest.approx(1500, abs=10)
    assert (nearest[removed] > 0.3).mean() > 0.9


def attention_by_hand(network, inputs, number):
    """Return the (B, H, T, T) attention of a block of the bare model."""
    seen = []
    block = network.module.blocks[number]
    handle = block.norm1.register_forward_hook(lambda _, args, out: seen.append(out))
    with torch.no_grad():
        network(inputs)
        handle.remove()
        q, k, _ = block.attn.qkv(seen[0]).unflatten(2, (3, 4, 8)).permute(2, 0, 3, 1, 4)
    return torch.softmax(torch.einsum("bhqc,bhkc->bhqk", q, k) / 8**0.5, dim=-1)


@pytest.mark.parametrize(
    ("make", "attention", "rows"),
    [
        (vit, "auto", [0]),
        (vit, "class", [0]),
        (vit, "received", list(range(17))),
        (partial(vit, reg_tokens=4), "auto", [0]),
        (partial(vit, VisionTransformerDistilled), "auto", [0, 1]),
        (partial(vit, class_token=False, global_pool="avg"), "auto", list(range(16))),
        (partial(vit, class_token=False, global_pool="avg"), "received", list(range(16))),
    ],
    ids=[
        "class token",
        "asked for class",
        "asked for received",
        "registers",
        "distilled",
        "no class token",
        "received",
    ],
)
def test_attn_topk_keeps_the_tokens_with_the_largest_attention_of_the_declared_rows(make, attention, rows):
    network = make()
    full = attention_by_hand(network, images(), 1)
    scores = full[:, :, rows, network.prefix :].mean(dim=(1, 2))
    acting, _ = act(AttnTopK(attention=attention), network, images(), blocks=(1,))
    torch.testing.assert_close(acting.scores, scores, atol=1e-5, rtol=1e-4)
    assert torch.equal(acting.index, scores.argsort(dim=1, descending=True)[:, :8].sort(dim=1).values)


def test_the_two_attentions_choose_differently():
    found = [act(AttnTopK(attention=a), vit(), images(), blocks=(1,))[0].index for a in ("class", "received")]
    assert not torch.equal(*found)


def test_class_attention_without_a_class_token_is_unsupported():
    with pytest.raises(UnsupportedError, match="'attn_topk' needs class_attention"):
        act(AttnTopK(attention="class"), vit(class_token=False, global_pool="avg"), images(), blocks=(1,))


def test_attn_topk_on_a_network_of_token_sets_keeps_what_receives_most():
    data = Sets(tokens=20, relevant=0.4, confusion=0.1).draw(6, 0, {})
    network, tokens = OneLayer(m=8).build(data, 0), torch.from_numpy(data.train.inputs)
    with torch.no_grad():
        queries, keys = tokens @ network.Q.T, tokens @ network.K.T
        received = torch.softmax(queries @ keys.mT, dim=2).mean(dim=1)
    acting, _ = act(AttnTopK(), network, tokens)
    assert torch.equal(acting.index, received.argsort(dim=1, descending=True)[:, :10].sort(dim=1).values)
