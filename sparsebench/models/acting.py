"""One strategy's way through one forward pass: what it sees, what it decides, what really happened."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sparsebench import seeds, tokens
from sparsebench.budget import Budget, solve, stages
from sparsebench.errors import DivergedError, StrategyError, UnsupportedError
from sparsebench.measure.cost import CostModel, Scoring, Step, projected_for
from sparsebench.strategy import Keep, Merge, Mix, Plan, Site, Strategy, TokenView

Given = Mapping[str, Callable[[], Tensor | None]]


class Actor:
    """A strategy with its token counts for one network.

    Args:
        strategy: the strategy.
        budget: what it may spend.
        cost: the network's closed form, which turns the budget into counts.
        grid: (rows, columns) of the network's patches, or None.
        stream: the seed of its random numbers.
    """

    def __init__(self, strategy: Strategy, budget: Budget, cost: CostModel, grid: tuple[int, int] | None, stream: int):
        self.strategy, self.grid, self.stream = strategy, grid, stream
        self.depth, self.tokens = cost.depth, cost.tokens
        self.requires = strategy.reads()
        if "relevance" in self.requires and strategy.kind != "oracle":
            raise StrategyError(f"'{strategy.name}' asks for the relevance mask and is no oracle")
        habits = strategy.habits()
        blocks, counts = stages(budget, habits, cost.depth), solve(budget, cost, habits)
        self.keep = dict(zip(blocks, counts, strict=True))
        self.planned = cost.steps(strategy.site, blocks, counts, self.requires)

    def begin(self, items: Tensor, visit: int, relevance: Tensor | None, *, tokens: int, training: bool) -> Pass:
        """Start a forward pass over the (B,) items, seen for the `visit`-th time; relevance is (B, N) or None.

        The pass has the relevance only where the strategy reads it.
        """
        return Pass(self, items, visit, relevance if "relevance" in self.requires else None, tokens, training)


@dataclass(frozen=True, eq=False)
class Decision:
    """One choice of a strategy.

    Attributes:
        block: where it was made.
        before, after: (B, N) and (B, M) of the tokens there, see `TokenView.index`.
        plan: what it was; the positions of a `Keep` in rising order.
    """

    block: int
    before: Tensor
    after: Tensor
    plan: Plan


@dataclass(eq=False)
class Pass:
    """The state of one forward pass. Networks call `acts` and `decide`; the rest is its record.

    Attributes:
        index, sizes: (B, N) of the tokens that are there now, see `TokenView`.
        decisions: what the strategy chose so far, in order.
        steps: the token counts so far, block by block.
    """

    actor: Actor
    items: Tensor
    visit: int
    relevance: Tensor | None
    count: int
    training: bool
    index: Tensor = field(init=False)
    sizes: Tensor = field(init=False)
    decisions: list[Decision] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        B, device = len(self.items), self.items.device
        self.index = torch.arange(self.count, device=device).expand(B, self.count)
        self.sizes = torch.ones(B, self.count, device=device)

    @property
    def scores(self) -> Tensor | None:
        """(B, N) of the strategy's first decision, or None."""
        return self.decisions[0].plan.scores if self.decisions else None

    @property
    def site(self) -> Site:
        """Where the strategy acts."""
        return self.actor.strategy.site

    @property
    def requires(self) -> frozenset[str]:
        """The fields of the view that the strategy reads."""
        return self.actor.requires

    def acts(self, block: int) -> bool:
        """Say whether fewer tokens are to leave this block than are there now."""
        return self.actor.keep.get(block, self.index.shape[1]) < self.index.shape[1]

    @property
    def weighs_sizes(self) -> bool:
        """Whether attention is to weigh tokens by their sizes: where the strategy asks for it, and some are merged."""
        return self.actor.strategy.proportional and any(isinstance(d.plan, Merge) for d in self.decisions)

    def acts_at(self, site: Site, block: int) -> bool:
        """Say whether fewer tokens are to leave this site of this block than come to it."""
        return site == self.site and self.acts(block)

    def went(self, tokens_in: int, *, early: bool = False, scoring: Scoring = "", projected: str = "") -> None:
        """Record one block; call it once a block, when its choice is made."""
        self.steps.append(Step(tokens_in, self.index.shape[1], early, scoring, projected))

    def decide(self, block: int, given: Given) -> Plan | None:
        """Ask the strategy, check its plan, and remember what became of the tokens.

        Args:
            block: where it acts.
            given: how to compute each field of the view; only declared ones are handed on.

        Raises:
            StrategyError: the plan breaks the contract.
            UnsupportedError: this network cannot give a field that the strategy needs here.
        """
        if not self.acts(block):
            return None
        keep = self.actor.keep[block]
        plan = self.actor.strategy.plan(self._view(block, given), keep)
        if plan is None:
            return None
        name = self.actor.strategy.name
        check_plan(plan, name, keep, self.index)
        if self.site == "attention" and "tokens" not in self.requires and not _only_removes(plan):
            raise StrategyError(
                f"'{name}' fuses, merges or mixes tokens and does not read them: add tokens to `needs`, as what is "
                "only removed leaves before the attention and costs less"
            )
        if isinstance(plan, Keep):
            plan = Keep(plan.index.sort(dim=1).values, plan.fuse, plan.scores)
        before = self.index
        self.index, self.sizes = tokens.index_after(plan, before), tokens.sizes_after(plan, self.sizes)
        self.decisions.append(Decision(block, before, self.index, plan))
        return plan

    def _view(self, block: int, given: Given) -> TokenView:
        fields = dict(given)
        if "relevance" in self.requires:
            if self.relevance is None:
                raise UnsupportedError("the data of this cell has no relevance mask")
            mask = self.relevance
            fields["relevance"] = lambda: _current(mask, self.index)
        if missing := sorted(self.requires - set(fields)):
            raise UnsupportedError(
                f"'{self.actor.strategy.name}' needs {', '.join(missing)}, which this model cannot give at the "
                f"{self.site} site (it gives {', '.join(sorted(fields))})"
            )
        count = self.index.shape[1]

        def random(
            draw: int,
        ) -> Tensor:  # most strategies want none, and a draw of few numbers takes as long as of many
            keys = seeds.mix(seeds.mix(self.items, self.actor.stream), self.visit)
            return seeds.uniform(seeds.mix(seeds.mix(keys, block + 1), draw + 1), count)

        return TokenView(
            {need: fields[need] for need in self.requires},
            index=self.index,
            sizes=self.sizes,
            block=block,
            depth=self.actor.depth,
            training=self.training,
            grid=self.actor.grid,
            random=random,
        )


class Replay(Pass):
    """A pass in which given patches leave at given places: what was chosen before, or what a measurement takes away.

    Args:
        N: patches at the input.
        script: (site, block, (B, M) patches that stay, in rising order) for each place, in the network's order.
    """

    requires = frozenset()
    weighs_sizes = False

    def __init__(self, N: int, script: Sequence[tuple[Site, int, Tensor]]):
        self.script = list(script)
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


@dataclass(frozen=True, eq=False)
class Look:
    """A split as a network is shown it to tell of itself: inputs (n, ..), labels (n,), relevance (n, N), and the pass.

    Attributes:
        relevance: None where nobody knows it.
        acting: a pass over the whole split of the strategy that acts on it, or None.
    """

    inputs: Tensor
    labels: Tensor
    relevance: Tensor | None
    acting: Pass | None


def kept_only(acting: Pass, cost: CostModel, tokens_in: int, given: Given, because: str) -> Tensor | None:
    """Return the (B, M) positions that stay before the one attention layer of a network, or None where all do.

    Raises:
        UnsupportedError: the strategy does more than remove tokens, with the network's reason against it.
    """
    acts = acting.acts(0)
    scoring = cost.scoring(acting.requires) if acts else ""
    projected = projected_for(acting.requires, scoring) if acts else ""
    plan = acting.decide(0, given)
    acting.went(tokens_in, early=plan is not None, scoring=scoring, projected=projected)
    if plan is None:
        return None
    if not isinstance(plan, Keep) or not _only_removes(plan):
        raise UnsupportedError(f"{because}: tokens can be kept or removed, not fused, merged or mixed")
    return plan.index


def finite(seen: Tensor) -> Tensor:
    """Return what a strategy is to see; DivergedError where it is not finite, which is not the strategy's doing."""
    if not bool(seen.isfinite().all()):
        raise DivergedError("training diverged: what the network shows a strategy is not finite")
    return seen


def _only_removes(plan: Plan) -> bool:
    return isinstance(plan, Keep) and plan.fuse is None


def _current(mask: Tensor, index: Tensor) -> Tensor:
    """Return the mask's values for the tokens that are there; 0 for one that stands for no single patch."""
    return mask.gather(1, index.clamp(min=0)) * (index >= 0)


def _tensors(plan: Plan, B: int, N: int, keep: int) -> Iterator[tuple[str, object, tuple[int, ...]]]:
    """Yield the name, the value and the right shape of what the plan holds."""
    if plan.scores is not None:
        yield "scores", plan.scores, (B, N)
    if isinstance(plan, Keep):
        yield "Keep.index", plan.index, (B, keep - (plan.fuse is not None))
        if plan.fuse is not None:
            yield "Keep.fuse", plan.fuse, (B, N)
    elif isinstance(plan, Merge):
        yield "Merge.target", plan.target, (B, N)
        for what in ("weight", "sizes"):
            if (value := getattr(plan, what)) is not None:
                yield f"Merge.{what}", value, (B, N)
    else:
        yield "Mix.weight", plan.weight, (B, keep, N)


def check_plan(plan: Plan, name: str, keep: int, index: Tensor) -> None:
    """Raise StrategyError unless the plan turns the (B, N) tokens into exactly `keep` of them, legally."""
    if not isinstance(plan, Keep | Merge | Mix):
        raise StrategyError(f"'{name}' returned {type(plan).__name__}, not a plan (Keep, Merge, Mix or None)")
    B, N = index.shape
    for what, value, expected in _tensors(plan, B, N, keep):
        if not isinstance(value, Tensor) or tuple(value.shape) != expected:
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise StrategyError(f"'{name}': {what} must have shape {expected}, got {got}")
        if value.device != index.device:
            raise StrategyError(f"'{name}': {what} is on {value.device}, the tokens are on {index.device}")
        if value.is_floating_point() and bool(value.isnan().any()):
            raise StrategyError(f"'{name}': {what} holds NaN")
    if isinstance(plan, Keep):
        _check_index(plan.index, name, N)
    elif isinstance(plan, Merge):
        _check_groups(plan.target, name, keep)


def _check_index(index: Tensor, name: str, N: int) -> None:
    if index.dtype != torch.int64:
        raise StrategyError(f"'{name}': Keep.index must be int64, got {index.dtype}")
    if index.numel() == 0:
        return
    low, high = (int(x) for x in index.aminmax())
    if low < 0 or high >= N:
        raise StrategyError(f"'{name}': Keep.index must lie in 0..{N - 1}, got {low}..{high}")
    ordered = index.sort(dim=1).values
    if bool((ordered[:, 1:] == ordered[:, :-1]).any()):
        raise StrategyError(f"'{name}': Keep.index names a token twice")


def _check_groups(target: Tensor, name: str, keep: int) -> None:
    if target.dtype != torch.int64:
        raise StrategyError(f"'{name}': Merge.target must be int64, got {target.dtype}")
    low, high = (int(x) for x in target.aminmax())
    if low < -1 or high >= keep:
        raise StrategyError(f"'{name}': Merge.target must lie in 0..{keep - 1}, or be -1, got {low}..{high}")
    members = torch.zeros(target.shape[0], keep + 1, device=target.device)
    if bool((members.scatter(1, target + 1, 1.0)[:, 1:] == 0).any()):
        raise StrategyError(f"'{name}': Merge.target leaves one of its {keep} groups empty")
