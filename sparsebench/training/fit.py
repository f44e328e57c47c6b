"""What a strategy learns from training images before the test: `Strategy.fit`, called once, watched and checked."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparsebench.errors import StrategyError, UnsupportedError, UserError, one_line
from sparsebench.models.actor import LEARNED, Actor
from sparsebench.models.base import Network
from sparsebench.strategy.base import Strategy
from sparsebench.strategy.contract import line_of, place_of
from sparsebench.strategy.plans import Mask, Plan, Shift
from sparsebench.strategy.view import Images, TokenView
from sparsebench.tasks.base import Recipe
from sparsebench.training.steps import losses

Look = Callable[[TokenView], Plan | None]
WANTED = "return {block: {name: tensor}}, with the blocks that have a module and the names and shapes of its tensors"


class Fitted(NamedTuple):
    """What came out.

    Attributes:
        learned: the tensors by `block.name`, as they are in a state_dict.
        shown: how many images went through the network, each as often as it did.
    """

    learned: dict[str, Tensor]
    shown: int


class StandIn:
    """Stands in a strategy's place in the harness, and is what the strategy is but for its plans."""

    def __init__(self, strategy: Strategy):
        self.strategy = strategy

    def __getattr__(self, name: str) -> Any:
        return getattr(self.strategy, name)


class _Looking(StandIn):
    """Lets all tokens go on, and has somebody look at each view."""

    rests = ramps = reads_out = has_loss = adaptive = False

    def __init__(self, strategy: Strategy, look: Look):
        super().__init__(strategy)
        self.look = look

    def plan(self, view: TokenView, _keep: int) -> Plan | None:
        """Return what is added to the tokens or weighs them, or None."""
        plan = self.look(view)
        if plan is not None and not isinstance(plan, Shift | Mask):
            raise StrategyError(f"in fit, look returned {type(plan).__name__}; it returns Shift, Mask or None")
        return plan


class _Frozen:
    """See `FrozenNetwork`.

    Attributes:
        shown: how many images it was given.
    """

    def __init__(self, network: Network, actor: Actor, recipe: Recipe, relevance: Tensor | None):
        self._network, self._recipe, self.shown = network, recipe, 0
        self._relevance = relevance if "relevance" in actor.requires and actor.strategy.kind == "oracle" else None
        self._actor = copy.copy(actor)
        self._actor.more, self._actor.checked = tuple(actor.keep), set()
        self._actor.traits = actor.traits._replace(own_macs=lambda place: 0.0)

    def __call__(self, images: Images, look: Look | None = None, /) -> Tensor:
        self.shown += len(images)
        if look is None:
            return self._network(images.inputs)
        actor = copy.copy(self._actor)
        stand_in: Any = _Looking(self._actor.strategy, look)
        actor.strategy = stand_in
        relevance = None if self._relevance is None else self._relevance[images.items]
        acting = actor.begin(images.items, 0, relevance, tokens=actor.tokens, training=True)
        logits = self._network(images.inputs, acting)
        acting.settle()
        return logits

    def losses(self, logits: Tensor, labels: Tensor, /) -> Tensor:
        return losses(self._recipe, logits, labels)


def fit(
    network: Network, actor: Actor, images: Images, recipe: Recipe, seed: int, relevance: Tensor | None = None
) -> Fitted:
    """Let the actor's strategy fit; return what it learned, which is in `actor.learned` then.

    The network is afterwards as before, whatever happens.

    Args:
        network: with trained weights.
        actor: the strategy on it; it acts somewhere.
        images: what it looks at.
        recipe: how the network was trained.
        seed: of torch's own random numbers, meanwhile.
        relevance: (n, N) of all training images, for an oracle.

    Raises:
        UserError: what `fit` did wrong: it raised, changed the network, or returned something else than its module has.
        UnsupportedError: it cannot act on this network.
    """
    strategy, frozen = actor.strategy, _Frozen(network, actor, recipe, relevance)
    before = {name: value.clone() for name, value in weights_of(network).items()}
    try:
        with _own_random_numbers(network, seed), as_in_a_test(network.module), _without_gradients(network.module):
            returned = strategy.fit(images, frozen)
    except (UnsupportedError, MemoryError, torch.OutOfMemoryError):
        raise
    except (Exception, SystemExit) as error:
        where = place_of(error, _itself(strategy)) or _line(strategy)
        raise UserError(
            f"'{strategy.name}': fit raised {one_line(error)}{where}", next_step="mend it: sparsebench check tries it"
        ) from error
    finally:
        changed = _put_back(network, before)
    if changed:
        raise UserError(
            f"'{strategy.name}': fit changed the network's weights{_line(strategy)}",
            got=f"another {changed[0]}" + (f" and {len(changed) - 1} more" if len(changed) > 1 else ""),
            allowed="weights as they were", next_step="work on copies, and return what is learned",
        )  # fmt: skip
    learned = _tensors_of(returned, actor)
    load_learned(actor, learned)
    return Fitted(learned, frozen.shown)


def modules_of(actor: Actor) -> nn.ModuleDict:
    """Return the modules of what the strategy learns, by block."""
    return nn.ModuleDict({str(block): module for block, module in actor.learned.items()})


def load_learned(actor: Actor, learned: Mapping[str, Tensor]) -> None:
    """Put what was learned, by `block.name`, into the actor's modules."""
    modules_of(actor).load_state_dict(dict(learned))


def weights_of(network: Network) -> dict[str, Tensor]:
    """Return the network's own weights, without what a strategy learned."""
    state = network.module.state_dict()
    return {name: value for name, value in state.items() if not name.startswith(f"{LEARNED}.")}


def state_digest(state: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of tensors with their names, in whatever order they come."""
    digest = hashlib.sha256()
    for name, value in sorted(state.items()):
        content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(name.encode() + content.numpy().tobytes())
    return digest.hexdigest()


def _itself(strategy: Any) -> Strategy:
    """Return the strategy that others may stand in for."""
    while isinstance(strategy, StandIn):
        strategy = strategy.strategy
    return strategy


def _line(strategy: Strategy) -> str:
    return line_of(_itself(strategy), "fit")


@contextmanager
def as_in_a_test(model: nn.Module) -> Iterator[None]:
    """Have all parts of the model as in a test, and then as they were."""
    training = [part for part in model.modules() if part.training]
    model.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


@contextmanager
def _without_gradients(model: nn.Module) -> Iterator[None]:
    """Give the model's weights no gradients, and everything else some."""
    learning = [weight for weight in model.parameters() if weight.requires_grad]
    model.requires_grad_(False)
    try:
        with torch.enable_grad():
            yield
    finally:
        for weight in learning:
            weight.requires_grad = True


@contextmanager
def _own_random_numbers(network: Network, seed: int) -> Iterator[None]:
    """Seed torch's random numbers for what is done meanwhile, and have them as before then."""
    device = next(network.module.parameters()).device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


@torch.no_grad()
def _put_back(network: Network, before: Mapping[str, Tensor]) -> list[str]:
    """Give the network its weights again; return the names of those that were others."""
    now = weights_of(network)
    changed = [name for name, value in before.items() if name not in now or not _same(now[name], value)]
    for name in changed:
        if name in now:
            now[name].copy_(before[name])
    return changed


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(torch.equal(a, b) or torch.equal(a.nan_to_num(), b.nan_to_num()))


def _tensors_of(returned: object, actor: Actor) -> dict[str, Tensor]:
    """Return the tensors that `fit` returned, by `block.name`.

    Raises:
        UserError: they are not what the modules hold.
    """
    strategy, wanted = actor.strategy, modules_of(actor).state_dict()

    def wrong(what: str, got: str, allowed: str, next_step: str = WANTED) -> UserError:
        what = f"'{strategy.name}': fit {what}{_line(strategy)}"
        return UserError(what, got=got, allowed=allowed, next_step=next_step)

    names = ", ".join(wanted)
    if not isinstance(returned, Mapping) or not all(isinstance(one, Mapping) for one in returned.values()):
        raise wrong("returned no mapping of mappings", type(returned).__name__, f"tensors for {names}")
    given = {f"{block}.{name}": value for block, one in returned.items() for name, value in one.items()}
    if given.keys() != wanted.keys():
        raise wrong("returned other tensors than its module has", ", ".join(given) or "none", names)
    for name, like in wanted.items():
        value = given[name]
        if not isinstance(value, Tensor) or value.is_floating_point() != like.is_floating_point():
            got = str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
            raise wrong(f"returned {name} as another type", got, f"a tensor of {like.dtype}")
        if value.shape != like.shape:
            raise wrong(f"returned {name} in another shape", str(tuple(value.shape)), str(tuple(like.shape)))
        if bool(value.isnan().any()):
            count = f"{int(value.isnan().sum())} of {value.numel()}"
            raise wrong(f"returned NaN in {name}", count, "numbers", "look at what it divides by")
    return {name: given[name].detach().to(like) for name, like in wanted.items()}
