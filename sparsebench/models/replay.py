"""A pass whose choices are given beforehand."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparsebench import tokens
from sparsebench.models.actor import Given, Pass
from sparsebench.plans import Keep, Plan
from sparsebench.strategy import Site


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
        self.index, self.sizes = stay, tokens.sizes_after(plan, self.sizes)
        return plan
