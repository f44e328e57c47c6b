"""Discarding one token after the other, and seeing how far a trained network's answer moves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparsebench.models.actor import Actor, Given, Pass
from sparsebench.models.base import Network
from sparsebench.strategy.base import Site
from sparsebench.strategy.plan_checks import only_removes
from sparsebench.strategy.plans import Keep, Plan
from sparsebench.strategy.tokens import Padded, sizes_after
from sparsebench.training.evaluate import BATCH, halving, patches_in
from sparsebench.training.steps import Samples

TOGETHER = 256
"""Disturbed images in one forward pass, or fewer where the device has no memory for them."""


class Influences(NamedTuple):
    """How far the answer for n samples of N tokens moves.

    Attributes:
        z: (n, N), see `influences`.
        predicted: (n,) class numbers, with all tokens that the strategy lets through.
    """

    z: np.ndarray
    predicted: np.ndarray


def influences(network: Network, actor: Actor | None, samples: Samples, n: int) -> Influences | None:
    """Return z = |p - p^(-k)| of the first n samples, or None where that cannot be told.

    p is the probability of the class that the network predicts, with all tokens that the strategy lets through, and
    p^(-k) that of the same class with token k discarded after the position embedding (arXiv 2509.04009, where only
    images that are classified rightly count: `predicted` says which). The strategy does not choose anew without it:
    the same patches leave at the same blocks. A token that it removes before the first block has z = 0. It can be told
    of strategies that keep or remove tokens, as many of each image, and do not fuse, merge or mix any.
    """
    return halving(TOGETHER, lambda together: _all(network, actor, samples, n, together))


@torch.no_grad()
def _all(network: Network, actor: Actor | None, samples: Samples, n: int, together: int) -> Influences | None:
    """Return what `influences` does, with at most `together` images in one forward pass."""
    network.module.eval()
    influences, predicted = [], []
    for rows in samples.items[:n].split(min(BATCH, together)):
        outputs, acting = samples.forward(network, actor, rows, visit=0, training=False)
        decisions = [] if acting is None else acting.decisions
        if not all(only_removes(decision.plan) and not isinstance(decision.plan, Padded) for decision in decisions):
            return None
        site = "input" if acting is None else acting.site
        stays = [(decision.block, decision.after.sort(dim=1).values) for decision in decisions]  # as a Replay has them
        influences.append(_influences(network, samples, rows, outputs, site, stays, together))
        predicted.append(outputs.argmax(dim=1))
    return Influences(torch.cat(influences).cpu().numpy(), torch.cat(predicted).cpu().numpy())


_Stays = list[tuple[int, Tensor]]
"""Each block in which tokens left, with the (B, M) patches that stayed, in rising order."""


def _influences(
    network: Network, samples: Samples, rows: Tensor, outputs: Tensor, site: Site, stays: _Stays, together: int
) -> Tensor:
    """Return (B, N) z of the samples `rows`, given the outputs of the undisturbed network and what stayed in it."""
    p, predicted = outputs.softmax(dim=1).max(dim=1)
    B, N = len(rows), network.cost.tokens
    z = p.new_zeros(B, N)
    every = torch.arange(N, device=rows.device).expand(B, N)
    places: list[tuple[Site, int, Tensor]] = [(site, block, after) for block, after in stays]
    if site != "input" or not stays:
        places.insert(0, ("input", 0, every))
    # Images that lose token k at the same place have as many tokens everywhere, and so go together.
    left = sum((patches_in(stay, N).long() for _, _, stay in places), start=torch.zeros_like(every))
    for seen in range(1, len(places) + 1):
        for pairs in (left == seen).nonzero().split(together):
            image, token = pairs.unbind(dim=1)
            script = [
                (where, block, _without(stay[image], token) if place < seen else stay[image])
                for place, (where, block, stay) in enumerate(places)
            ]
            disturbed = network(samples.take(rows[image]), Replay(N, script)).softmax(dim=1)
            z[image, token] = (p[image] - disturbed.gather(1, predicted[image, None])[:, 0]).abs()
    return z


def _without(stay: Tensor, token: Tensor) -> Tensor:
    """Return (R, M - 1), the (R, M) patches without the one token of each row."""
    return stay[stay != token[:, None]].reshape(len(stay), -1)


class Replay(Pass):
    """A pass in which given patches leave at given places: what was chosen before, or what a measurement takes away.

    Args:
        N: patches at the input.
        script: (site, block, (B, M) patches that stay, in rising order) for each place, in the network's order.
    """

    requires = frozenset()
    weighs_sizes = ragged = masked = learns = reads_out = False
    whole = True
    own_macs = 0.0

    def __init__(self, N: int, script: Sequence[tuple[Site, int, Tensor]]):
        self.script, self.asked = list(script), set()
        stay = self.script[0][2]
        self.index = torch.arange(N, device=stay.device).repeat(len(stay), 1)
        self.sizes, self.decisions, self.steps = torch.ones_like(self.index, dtype=torch.float32), [], []

    def acts_at(self, site: Site, block: int) -> bool:
        """See `Pass.acts_at`: here the same number may stay."""
        return bool(self.script) and self.script[0][:2] == (site, block)

    def decide(self, block: int, given: Given) -> Plan:
        """See `Pass.decide`: the plan is the next of the script."""
        _, _, stay = self.script.pop(0)
        plan = Keep(torch.searchsorted(self.index, stay))
        self.index, self.sizes = stay, sizes_after(plan, self.sizes)
        return plan
