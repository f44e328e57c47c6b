"""PatchDropout saves MACs in training and does not change the test."""

import torch
from sparsebench_plugins.patch_dropout import PatchDropout
from sparsebench_plugins.random import Random
from tiny import B, N, act, images, vit


def trained(network, visit=0, rate=0.5):
    """Return the pass of one training step."""
    return act(PatchDropout(), network, images(), rate=rate, training=True, visit=visit)[0]


def test_the_test_sees_all_tokens_and_pays_for_them():
    network = vit()
    acting, out = act(PatchDropout(), network, images())
    torch.testing.assert_close(out, network(images()), atol=1e-6, rtol=1e-6)
    assert acting.index.shape == (B, N) and not acting.decisions
    assert network.cost.macs(acting.steps) == network.cost.macs(network.cost.dense())


def test_training_sees_the_share_that_is_not_dropped_another_each_time():
    network = vit()
    for rate, keep in ((0.5, 8), (0.3, 4), (0.01, 1)):
        assert trained(network, rate=rate).index.shape == (B, keep)
    first, again, next_time = (trained(network, visit).index for visit in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, next_time)
    assert len({tuple(row) for row in first.tolist()}) == B


def test_it_draws_as_random_does_which_acts_in_training_only():
    network = vit()
    assert torch.equal(trained(network).index, act(Random(), network, images())[0].index)
