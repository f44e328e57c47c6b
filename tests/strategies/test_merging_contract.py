"""What holds for every strategy that merges, and for what stands beside them."""

import pickle

import pytest
import torch
from merging import act
from sparsebench_plugins.atc import ATC
from sparsebench_plugins.diffrate import DiffRate
from sparsebench_plugins.downsample import Downsample
from sparsebench_plugins.dpc_knn import DPCKNN
from sparsebench_plugins.k_medoids import KMedoids
from sparsebench_plugins.mctf import MCTF
from sparsebench_plugins.pitome import PiToMe
from sparsebench_plugins.tofu import ToFu
from sparsebench_plugins.tome import ToMe
from tiny import images, vit
from token_sets import OneLayer, Sets

from sparsebench.errors import UnsupportedError

MERGING = [ToMe, ToFu, PiToMe, MCTF, ATC, DPCKNN, DiffRate]
every = pytest.mark.parametrize("make", [*MERGING, KMedoids, Downsample], ids=lambda cls: cls.name)
merging = pytest.mark.parametrize("make", MERGING, ids=lambda cls: cls.name)


@every
@torch.no_grad()
def test_with_all_the_macs_it_is_the_dense_model_bit_for_bit(make):
    network = vit()
    assert torch.equal(act(make(), network, images(), macs=1.0)[1], network(images()))


@every
@pytest.mark.parametrize("budget", [{"macs": 0.8}, {"macs": 0.5}, {"keep_rate": 0.5, "schedule": "stages"}], ids=str)
@torch.no_grad()
def test_as_many_tokens_stay_as_the_budget_says_and_the_same_ones_again(make, budget):
    network = vit()
    acting, out = act(make(), network, images(), **budget)
    assert acting.steps == acting.actor.planned
    assert acting.decisions and out.isfinite().all()
    again, same = act(make(), network, images(), **budget)
    assert torch.equal(out, same) and torch.equal(acting.index, again.index)


@every
@torch.no_grad()
def test_a_sample_alone_and_in_a_batch_are_treated_alike(make):
    network = vit()
    together, out = act(make(), network, images())
    for i in range(4):
        alone, one = act(make(), network, images()[i : i + 1], torch.tensor([i]))
        for here, there in zip(alone.decisions, together.decisions, strict=True):
            assert torch.equal(here.after[0], there.after[i])
        torch.testing.assert_close(one[0], out[i], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("make", [ToMe, PiToMe, MCTF, ATC, DPCKNN], ids=lambda cls: cls.name)
@torch.no_grad()
def test_sizes_add_up_to_all_patches_where_nothing_is_dropped(make):
    acting, _ = act(make(), vit(), images())
    assert acting.sizes.sum(dim=1).tolist() == [16.0] * 4 and acting.sizes.max() > 1


@pytest.mark.parametrize("make", [ToMe, ToFu, PiToMe, MCTF, ATC, DiffRate], ids=lambda cls: cls.name)
@torch.no_grad()
def test_attention_weighs_sizes_where_it_is_asked_to(make):
    network, out = vit(), []
    for proportional in (True, False):
        strategy = pickle.loads(pickle.dumps(make(proportional=proportional)))
        acting, logits = act(strategy, network, images(), blocks=(2, 3), keep_rate=0.6)
        assert strategy.weighs_sizes == acting.weighs_sizes == proportional and acting.sizes.max() > 1
        out.append(logits)
    assert float((out[0] - out[1]).abs().max()) > 1e-3
    assert make().proportional == (make not in (PiToMe, ToFu))


def test_what_has_no_say_in_it_does_not_weigh_sizes():
    assert not KMedoids().weighs_sizes and not DPCKNN().weighs_sizes
    with pytest.raises(ValueError, match="proportional"):
        KMedoids(proportional=True)


@every
def test_gradients_flow_through_what_goes_on(make):
    network = vit()
    _, out = act(make(), network, images())
    out.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.module.parameters())
    assert float(network.module.patch_embed.proj.weight.grad.abs().sum()) > 0


@merging
def test_on_a_network_of_token_sets_merging_is_unsupported_with_the_reason(make):
    data = Sets(tokens=20, relevant=0.4, confusion=0.1).draw(3, 0, {})
    network = OneLayer(m=8).build(data, 0)
    with pytest.raises(UnsupportedError, match="no sizes: tokens can be kept or removed, not fused, merged"):
        act(make(**({"merge_from": 0} if make is ToFu else {})), network, torch.from_numpy(data.train.inputs))


@pytest.mark.parametrize("strategy", [KMedoids(), KMedoids(weights="equal"), ToFu()], ids=str)
def test_what_only_removes_acts_on_a_network_of_token_sets(strategy):
    data = Sets(tokens=20, relevant=0.4, confusion=0.1).draw(3, 0, {})
    network = OneLayer(m=8).build(data, 0)
    acting, out = act(strategy, network, torch.from_numpy(data.train.inputs), keep_rate=0.5)
    assert acting.index.shape == (3, 10) and out.shape == (3,)


def test_a_grid_is_needed_to_downsample():
    data = Sets(tokens=20, relevant=0.4, confusion=0.1).draw(3, 0, {})
    with pytest.raises(UnsupportedError, match="have no places"):
        act(Downsample(), OneLayer(m=8).build(data, 0), torch.from_numpy(data.train.inputs))
