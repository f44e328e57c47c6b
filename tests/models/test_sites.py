"""The sites "maps" and "mlp", `start` and `maps`, against torch's counter of products and against a whole network."""

from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from tiny import act, images, made, vit
from torch.utils.flop_counter import FlopCounterMode

from sparsebench.errors import StrategyError, UnsupportedError
from sparsebench.models.actor import Actor
from sparsebench.strategy.base import Strategy
from sparsebench.strategy.budget import Budget
from sparsebench.strategy.plans import Keep, Merge, Mix


@pytest.mark.parametrize(
    "words",
    [
        "gtp:graph=spatial", "gtp:theta=0.7", "cropr", "cropr:returns=-1", "mctf", "mctf:ahead=false", "rep_shift",
        "value_norm:returns=-1", "patch_variance:returns=2", "dtem",
    ],
)  # fmt: skip
@pytest.mark.parametrize("changes", [{}, {"class_token": False, "global_pool": "avg"}], ids=str)
def test_macs_are_what_the_counter_counts(words, changes):
    network = vit(depth=5, **changes)
    for block in network.module.blocks:
        block.attn.fused_attn = False  # the counter does not count it on a CPU
    with FlopCounterMode(display=False) as counter:
        acting, _ = act(made(words), network, images(1), rate=0.6)
    assert acting.decisions
    # Before the attention only the remaining tokens are queries; convolutions count as products.
    assert network.cost.macs(acting.steps) == counter.get_total_flops() / 2


@pytest.mark.parametrize("site", ["maps", "mlp"])
@pytest.mark.parametrize("merges", [False, True])
@torch.no_grad()
def test_a_plan_that_keeps_all_tokens_changes_nothing(scripted, site, merges):
    network = vit()

    def decide(view, keep):
        every = torch.arange(16).expand(view.index.shape)
        return Merge(every) if merges else Keep(every)

    strategy = scripted(decide, site=site, needs=("tokens", "received_attention"))
    actor = Actor(strategy, Budget(counts=(16, 16), blocks=(0, 2)), network.cost, network.grid, stream=0)
    actor.keep = {0: 16, 2: 16}
    acting = actor.begin(torch.arange(4), 0, None, training=False)
    acting.scaled = frozenset(actor.keep)
    torch.testing.assert_close(network(images(), acting), network(images()), atol=2e-5, rtol=1e-5)
    assert len(acting.decisions) == 2


def test_at_maps_tokens_can_only_be_dropped_or_merged(scripted):
    mixing = scripted(lambda view, keep: Mix(torch.ones(len(view.index), keep, view.index.shape[1])), site="maps")
    with pytest.raises(StrategyError, match="dropped or merged"):
        act(mixing, vit(), images())


def test_a_block_whose_values_cannot_be_computed_later_is_refused():
    with pytest.raises(UnsupportedError, match="values cannot be computed"):
        network = vit()
        network.module.blocks[1].attn.qkv = torch.nn.Sequential(network.module.blocks[1].attn.qkv)
        act(made("mctf"), network, images(), blocks=(1,))


class Path(Strategy):
    """Drops the tokens with the fewest neighbours in a graph of the patches, which loses the tokens that left."""

    name: ClassVar[str] = "path"
    site: ClassVar[str] = "block"

    def start(self, view):
        seen.tokens, graph = view.tokens, torch.arange(view.index.shape[1])
        view.memory["graph"] = ((graph - graph[:, None]).abs() == 1).float().expand(len(view.index), -1, -1)

    def scores(self, view):
        part = view.pairs(view.memory["graph"])
        for b, patches in enumerate(view.index.tolist()):
            expected = [[float(abs(i - j) == 1) for j in patches] for i in patches]
            assert part[b].tolist() == expected
        number = view.rows(torch.arange(view.memory["graph"].shape[1]).expand(len(view.index), -1))
        assert torch.equal(number, view.index)
        return part.sum(dim=2) + 1e-3 * number * (1 + view.block)


seen = SimpleNamespace()


def test_a_graph_of_the_patches_follows_the_tokens():
    network = vit()
    acting, _ = act(Path(), network, images(), rate=0.7, schedule="every")
    first = network.module._pos_embed(network.module.patch_embed(network.normalise(images())))
    torch.testing.assert_close(seen.tokens, first[:, 1:])
    assert len(acting.decisions) == 4


def test_a_network_that_never_starts_a_strategy_is_unsupported(monkeypatch):
    network = vit()
    monkeypatch.setattr(type(network), "_tokens", type(network)._tokens)
    actor = Actor(Path(), Budget(keep_rate=0.7), network.cost, network.grid, stream=0)
    acting = actor.begin(torch.arange(4), 0, None, training=False)
    network(images(), acting)
    acting.check_network()
    acting.called.remove("start")
    with pytest.raises(UnsupportedError, match="before the first block"):
        acting.check_network()
