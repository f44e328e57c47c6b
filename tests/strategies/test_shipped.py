import importlib
import subprocess
import sys
from functools import partial

import pytest
import torch
from sparsebench_plugins.anti_oracle import AntiOracle
from sparsebench_plugins.attn_topk import AttnTopK
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


def test_importing_them_and_counting_macs_imports_neither_torch_nor_timm():
    modules = ", ".join(f"sparsebench_plugins.{name}" for name in SHIPPED)
    counted = "cost = Vit().cost(Composite(), 10); cost.macs(cost.dense())"
    code = (
        f"import sys, sparsebench, {modules}; from sparsebench.models.vits import Vit; "
        f"from sparsebench.tasks.images import Composite; {counted}; "
        "sys.exit(list({'torch', 'timm'} & set(sys.modules)) or 0)"
    )
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


def test_oracles_on_token_sets_keep_and_remove_the_majority_pattern():
    data = Sets(tokens=20, relevant=0.4, confusion=0.1).draw(10, 0, {})
    network = OneLayer(m=8).build(data, 0)
    relevance = torch.from_numpy(data.train.relevance)
    for strategy, number in ((Oracle(), 8), (AntiOracle(), 0)):
        acting, _ = act(strategy, network, torch.from_numpy(data.train.inputs), relevance)
        assert relevance.gather(1, acting.index).sum(1).tolist() == [number] * 10


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


def test_class_attention_without_a_class_token_is_unsupported():
    with pytest.raises(UnsupportedError, match="'attn_topk' needs class_attention"):
        act(AttnTopK(attention="class"), vit(class_token=False, global_pool="avg"), images(), blocks=(1,))
