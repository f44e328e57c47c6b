"""Between training and test: `Strategy.fit` on a copy of the network, and token counts for adaptive strategies."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from sparsebench.errors import StrategyError, UnsupportedError, UserError, one_line
from sparsebench.models.actor import Actor
from sparsebench.models.base import Network
from sparsebench.strategy.base import Strategy, line_of, place_of
from sparsebench.strategy.budget import AMOUNTS, Budget
from sparsebench.strategy.plans import Mask, Plan, Shift
from sparsebench.strategy.view import Images, TokenView
from sparsebench.tasks.base import Recipe
from sparsebench.training.evaluation import StandIn, first_batch, halving
from sparsebench.training.steps import Samples, losses

Look = Callable[[TokenView], Plan | None]
IMAGES = 256
"""Number of training images on which the MACs of an adaptive strategy are calibrated."""
NEAR = 0.005
"""Tolerance of the calibration, relative to the requested MACs."""
TRIES = 10
"""Largest number of bisection steps of the calibration."""
Fitted = tuple[dict[str, Tensor], int]
"""The learned tensors by `block.name`, as in a state_dict, and the number of images that the network was shown."""


class _Looking(StandIn):
    """Keeps all tokens, and calls `look` with each view."""

    rests = ramps = reads_out = has_loss = adaptive = budgeted = False

    def __init__(self, strategy: Strategy, look: Look):
        super().__init__(strategy)
        self.look = look

    def plan(self, view: TokenView, _keep: int) -> Plan | None:
        """Return the Shift or Mask of `look`, or None."""
        plan = self.look(view)
        if plan is not None and not isinstance(plan, Shift | Mask):
            raise StrategyError(f"in fit, look returned {type(plan).__name__}; it returns Shift, Mask or None")
        return plan


class _Frozen:
    """See `FrozenNetwork`.

    Attributes:
        count: number of images that the network was given.
    """

    def __init__(self, network: Network, actor: Actor, recipe: Recipe, relevance: Tensor | None):
        self._network, self._recipe, self.count = network, recipe, 0
        self._relevance = relevance if "relevance" in actor.requires and actor.strategy.kind == "oracle" else None
        self._actor = copy.copy(actor)
        self._actor.more = tuple(actor.keep)
        self._actor.checked = set()
        self._actor.traits = actor.traits._replace(own_macs=lambda place: 0.0)

    def __call__(self, images: Images, look: Look | None = None, /) -> Tensor:
        self.count += len(images)
        if look is None:
            return self._network(images.inputs)
        actor = copy.copy(self._actor)
        stand_in: Any = _Looking(self._actor.strategy, look)
        actor.strategy = stand_in
        relevance = None if self._relevance is None else self._relevance[images.items]
        acting = actor.begin(images.items, 0, relevance, training=True)
        return self._network(images.inputs, acting)

    def losses(self, logits: Tensor, labels: Tensor, /) -> Tensor:
        return losses(self._recipe, logits, labels)


def fit(
    network: Network, actor: Actor, images: Images, recipe: Recipe, seed: int, relevance: Tensor | None = None
) -> Fitted:
    """Call `fit` of the actor's strategy on a copy of the network; load what it learned into `actor.learned`.

    Args:
        network: the network, with trained weights.
        actor: the strategy on it, with at least one site.
        images: the images for `fit`.
        recipe: the recipe with which the network was trained.
        seed: seeds torch's default generator during `fit`.
        relevance: (n, N) of all training images, for an oracle.

    Raises:
        UserError: `fit` raised an error, or returned other tensors than those of its modules.
        UnsupportedError: the strategy cannot act on this network.
    """
    strategy, copied = actor.strategy, copy.deepcopy(network)
    copied.module.eval().requires_grad_(False)
    frozen = _Frozen(copied, actor, recipe, relevance)
    device = next(copied.module.parameters()).device
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.enable_grad():
            torch.manual_seed(seed)
            returned = strategy.fit(images, frozen)
    except (UnsupportedError, MemoryError, torch.OutOfMemoryError):
        raise
    except (Exception, SystemExit) as error:
        where = place_of(error, _unwrap(strategy)) or line_of(_unwrap(strategy), "fit")
        raise UserError(
            f"'{strategy.name}': fit raised {one_line(error)}{where}", next_step="mend it: sparsebench check tries it"
        ) from error
    return _take(returned, actor), frozen.count


def _take(returned: Any, actor: Actor) -> dict[str, Tensor]:
    """Load the tensors that `fit` returned into the actor's modules; return them by `block.name`.

    Raises:
        UserError: the tensors do not match those of the modules.
    """
    expected = modules_of(actor).state_dict()
    try:
        weights = {f"{block}.{name}": value for block, values in returned.items() for name, value in values.items()}
        modules_of(actor).load_state_dict(weights)
        if nan := [name for name, value in expected.items() if bool(value.isnan().any())]:
            raise ValueError(f"NaN in {nan[0]}")
    except (AttributeError, ValueError, RuntimeError) as error:
        raise UserError(
            f"'{actor.strategy.name}': fit returned something else than its module has"
            f"{line_of(_unwrap(actor.strategy), 'fit')}",
            got=one_line(error),
            allowed=f"{{block: {{name: tensor}}}}, numbers for {', '.join(expected)}",
        ) from error
    return {name: value.detach().clone() for name, value in expected.items()}


def modules_of(actor: Actor) -> nn.ModuleDict:
    """Return the strategy's learned modules by block."""
    return nn.ModuleDict({str(block): module for block, module in actor.learned.items()})


def state_digest(state: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of named tensors; it does not depend on their order."""
    digest = hashlib.sha256()
    for name, value in sorted(state.items()):
        content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(name.encode() + content.numpy().tobytes())
    return digest.hexdigest()


def _unwrap(strategy: Any) -> Strategy:
    """Return the strategy behind any StandIns."""
    while isinstance(strategy, StandIn):
        strategy = strategy.strategy
    return strategy


class _Attempt(NamedTuple):
    """A budget that was tried: all as shares of the dense MACs, and the token counts by block."""

    error: float
    macs: float
    spent: float
    keep: dict[int, int]

    def spends_less(self, target: float) -> bool:
        """Return whether the strategy acts with this budget and spends less than the target."""
        return math.isfinite(self.error) and self.spent < target


def calibrate(network: Network, actor: Actor, samples: Samples) -> tuple[Budget, float, int] | None:
    """Give the actor the token counts with which an adaptive strategy spends the budget's MACs, as nearly as possible.

    An adaptive strategy treats a count as an upper bound, and the number of tokens that it keeps depends on the image.
    Therefore the counts are those of another budget in MACs. It is found by bisection on the first samples, without
    their labels. A strategy whose MACs do not follow the counts keeps its counts.

    Returns:
        The budget of the chosen counts, the share of the dense MACs that the strategy spends with them, mean over the
        images, and the number of images; None if the budget states counts, which remain upper bounds.
    """
    if actor.budget.counts is not None:
        return None
    cost = actor.cost
    dense = cost.macs(cost.dense())
    target = cost.macs(actor.planned) / dense
    rows = samples.items[:IMAGES]
    shape = actor.budget.model_dump(exclude=set(AMOUNTS))

    def try_budget(macs: float) -> _Attempt:
        actor.spend(Budget(macs=macs, **shape))
        spent = _mean_macs(network, actor, samples, rows) / dense
        # A strategy without sites is the dense network, which spends too much.
        error = abs(spent - target) if actor.acts else np.inf
        return _Attempt(error, macs, spent, actor.keep)

    best = min(_bisect(try_budget, target), key=lambda attempt: attempt.error)
    budget = Budget(macs=best.macs, **shape)
    actor.spend(budget)
    return budget, best.spent, len(rows)


def _bisect(try_budget: Callable[[float], _Attempt], target: float) -> list[_Attempt]:
    """Return attempts to spend a share of the dense MACs, by bisection of the share that sets the counts."""
    attempts = [try_budget(target)]
    low, high = 0.0, 1.0
    while len(attempts) < TRIES and attempts[-1].error > NEAR * target:
        if attempts[-1].spends_less(target):
            low = attempts[-1].macs
        else:
            high = attempts[-1].macs
        attempts.append(try_budget((low + high) / 2))
        # Other counts with the same MACs: the strategy does not follow the counts.
        if attempts[-1].spent == attempts[0].spent and attempts[-1].keep != attempts[0].keep:
            return attempts
    is_near = min(attempt.error for attempt in attempts) <= NEAR * target
    if high == 1.0 and attempts[-1].spends_less(target) and not is_near:
        attempts.append(try_budget(high))  # all tokens as upper bounds: the most that it can spend
    return attempts


@torch.no_grad()
def _mean_macs(network: Network, actor: Actor, samples: Samples, rows: torch.Tensor) -> float:
    """Return the mean MACs of the samples `rows`, counted as in the test."""
    network.module.eval()

    def work(batch: int) -> float:
        macs = []
        for part in rows.split(batch):
            _, acting = samples.forward(network, actor, part, visit=0, training=False)
            assert acting is not None
            macs.append(np.broadcast_to(actor.cost.macs(acting.steps), len(part)))
        return float(np.concatenate(macs).mean())

    return halving(first_batch(network, samples), work)
