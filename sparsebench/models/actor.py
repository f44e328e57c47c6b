"""One strategy's way through one forward pass: what it sees, what it decides, what really happened."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sparsebench import seeds
from sparsebench.errors import DivergedError, StrategyError, UnsupportedError
from sparsebench.measure.cost import CostModel, Scoring, Step, projections_for
from sparsebench.measure.counts import budget_traits, rate_of, spending
from sparsebench.strategy import tokens
from sparsebench.strategy.base import LossInputs, ModelOutputs, Site, Strategy
from sparsebench.strategy.budget import Budget
from sparsebench.strategy.plan_checks import (
    check_form,
    check_numbers,
    check_own_macs,
    in_range,
    keep_of,
    merges,
    only_removes,
)
from sparsebench.strategy.plans import Keep, Mask, Merge, Mix, Plan, Rest, Shift
from sparsebench.strategy.sorting import sort
from sparsebench.strategy.tokens import Grouped, Padded, Resting, values_at
from sparsebench.strategy.view import Outputs, TokenView

Given = Mapping[str, Callable[[], Any]]
LEARNED = "strategy"
"""The name under which what a strategy learns is part of the network's module."""


@dataclass(frozen=True, eq=False)
class Decision:
    """One choice of a strategy.

    Attributes:
        block: where it was made.
        before, after: (B, N) and (B, M) of the tokens there, see `TokenView.index`; where tokens rest, of those that
            take part in the block.
        plan: what it was; the positions of a `Keep` in the order in which the tokens go on, rising unless `ordered`.
        sizes: (B, N) of the tokens there before.
    """

    block: int
    before: Tensor
    after: Tensor
    plan: Plan
    sizes: Tensor


class Actor:
    """A strategy with its token counts for one network.

    Attributes:
        keep: how many tokens are to go on after each block in which it acts.
        scaled: the blocks of these in which one token alone is fused, see `counts.Spending`.
        shares: for each of these blocks the share of the first tokens that was asked for.
        planned: the steps that the budget comes to.
        bounds: whether counts are upper bounds of an adaptive strategy, which acts even where they are all tokens.
        more: the blocks in which it acts in training, see `Strategy.training_blocks`.
        learned: the modules that it learns, by block; they are the network's to train, see `Strategy.module`.
        weighs_sizes: see `Strategy.weighs_sizes`.
        checked: the shapes of plans that were read and are legal.
        reads_all: whether on a CPU, where to read is not to wait, the numbers of every plan are read.

    Args:
        strategy: the strategy.
        budget: what it may spend.
        cost: the network's closed form, which turns the budget into counts.
        grid: (rows, columns) of the network's patches, or None.
        stream: the seed of its random numbers.
    """

    def __init__(self, strategy: Strategy, budget: Budget, cost: CostModel, grid: tuple[int, int] | None, stream: int):
        self.strategy, self.grid, self.stream = strategy, grid, stream
        self.budget, self.cost, self.depth, self.tokens = budget, cost, cost.depth, cost.tokens
        self.prefix = cost.place(0, self.tokens, self.tokens).prefix
        self.requires, self.traits = strategy.reads(), strategy.traits()
        self.weighs_sizes = strategy.weighs_sizes
        if (strategy.trained or strategy.adaptive or strategy.ramps) and cost.alike:
            raise UnsupportedError(
                f"'{strategy.name}' is learned, keeps another number of tokens of each sample, or changes the number "
                "while training: this model is trained by steps in closed form, which can do none of these"
            )
        if cost.alike and (strategy.rests or strategy.fits()):
            why = "lets tokens rest for a block and return: this model has one, and nothing after it"
            if not strategy.rests:
                why = "looks at training images before the test: this model shows no gradients of what it is given"
            raise UnsupportedError(f"'{strategy.name}' {why}")
        if "relevance" in self.requires and strategy.kind != "oracle":
            raise StrategyError(f"'{strategy.name}' asks for the relevance mask and is no oracle")
        self.spend(budget)
        self.bounds = strategy.adaptive and (budget.counts is not None or min(self.keep.values()) < self.tokens)
        traits = budget_traits(budget, cost, self.traits)._replace(scaled=self.scaled)
        self.planned = cost.steps(traits, tuple(self.keep), tuple(self.keep.values()))
        self.more = strategy.training_blocks(self.depth)
        if not set(self.more) <= set(range(self.depth)):
            raise StrategyError(f"'{strategy.name}' is to train in blocks {self.more}, of {self.depth} from 0")
        blocks = sorted({*self.keep, *self.more})
        self.learned = {block: module for block in blocks if (module := self._module(block)) is not None}
        self.checked: set[tuple[Any, ...]] = set()
        self.reads_all = True

    def spend(self, budget: Budget) -> None:
        """Take the counts of that budget; what is asked for and planned stays as it was."""
        self._asked = budget, rate_of(budget, self.cost, self.traits), self.cost, self.traits
        self.keep, self.shares, self.scaled = spending(*self._asked)

    def counts(self, done: float) -> tuple[dict[int, int], frozenset[int]]:
        """Return `keep` and `scaled` as they are in training when the share `done` of it is done."""
        if not self.strategy.ramps or (way := self.strategy.ramp(done)) == 1:
            return self.keep, self.scaled
        if not 0 <= way <= 1:
            raise StrategyError(f"'{self.strategy.name}': ramp must lie in [0, 1], got {way}")
        keep, _, scaled = spending(*self._asked, way)
        return keep, scaled

    @property
    def acts(self) -> bool:
        """Whether anything is to happen: tokens leave, or an adaptive strategy was given counts as upper bounds."""
        return min(self.keep.values()) < self.tokens or bool(self.scaled) or self.bounds

    def share_of(self, steps: Sequence[Step]) -> Any:
        """Return the MACs of these steps as a fraction of the dense ones."""
        return self.cost.macs(steps) / self.cost.macs(self.cost.dense())

    def spent(self, counts: Sequence[Any]) -> Any:
        """Return the fraction of the dense MACs when so many tokens go on at the places where it acts; any numbers."""
        return self.share_of(self.cost.steps(self.traits, tuple(self.keep), counts))

    def _module(self, block: int) -> torch.nn.Module | None:
        came = [self.tokens, *(count for at, count in self.keep.items() if at < block)][-1]
        place = self.cost.place(block, came, self.keep.get(block, came))
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seeds.seed_of("learned", self.strategy.name, self.stream, block))
            module = self.strategy.module(place)
        return module.requires_grad_(False) if module is not None and self.strategy.fits() else module

    def begin(self, items: Tensor, visit: int, relevance: Tensor | None, *, training: bool, done: float = 1.0) -> Pass:
        """Start a forward pass over the (B,) items, seen for the `visit`-th time; relevance is (B, N) or None.

        The pass has the relevance only where the strategy reads it. `done` is the share of the training that is done.
        """
        return Pass(self, items, visit, relevance if "relevance" in self.requires else None, training, done)


class Pass:
    """The state of one forward pass. Networks call `acts` and `decide`; the rest is its record.

    Attributes:
        keep, scaled: as in `Actor`, in this pass.
        site: where the strategy acts; `requires` are the fields of the view that it reads.
        rests: whether tokens that it does not choose are there again after the block.
        count: how many tokens there were at first.
        index, sizes: (B, N) of the tokens that are there now, see `TokenView`.
        asked: what the network asked for of what it must heed, see `check_network`.
        ragged: whether images kept different numbers of tokens; what fills up their rows has size 0 and index -1.
        masked: whether some tokens count less than others.
        decisions: what the strategy chose so far, in order.
        steps: the token counts so far, block by block; of each image where they differ.
        memory: what the strategy wants to know again.
        student, teacher: what came out, where the strategy learns from it.
        previous: (B, N) see `TokenView.previous_attention`; None where no block was looked at.
        resting: how many tokens pass by the block that runs, see `Rest`.
    """

    def __init__(self, actor: Actor, items: Tensor, visit: int, relevance: Tensor | None, training: bool, done: float):
        self.actor, self.items, self.visit, self.relevance, self.training = actor, items, visit, relevance, training
        self.keep, self.scaled = actor.counts(done) if training else (actor.keep, actor.scaled)
        self.site: Site = actor.strategy.site
        self.requires, self.rests, self.count = actor.requires, actor.strategy.rests, actor.tokens
        self.index = torch.arange(self.count, device=items.device).expand(len(items), self.count)
        self.sizes = self._weights = torch.ones(len(items), self.count, device=items.device)
        self.ragged = self.masked = False
        self.decisions: list[Decision] = []  # torch's compiler cannot follow `list[Decision]()`
        self.steps: list[Step] = []
        self.memory: dict[str, Any] = {}
        self.requested: set[str] = set()
        self.student: ModelOutputs | None = None
        self.teacher: ModelOutputs | None = None
        self.previous: Tensor | None = None
        self.own_macs, self.resting = 0.0, 0

    @property
    def scores(self) -> Tensor | None:
        """(B, N) of the strategy's first decision, or None."""
        return self.decisions[0].plan.scores if self.decisions else None

    def acts(self, block: int) -> bool:
        """Say whether fewer tokens are to leave this block than are there now; how many an adaptive one decides.

        In training it may act in more blocks.
        """
        if self.training and block in self.actor.more:
            return self.actor.acts
        if self.actor.strategy.adaptive:
            return block in self.keep and self.actor.acts
        return block in self.scaled or self._count_at(block) < (self.count if self.rests else self.index.shape[1])

    def _count_at(self, block: int) -> int:
        """Return how many tokens are to go on after a block, or where tokens rest, to take part in it."""
        if self.rests:
            counts = [count for at, count in self.keep.items() if at <= block]
            return min(counts) if counts else self.count
        return self.keep.get(block, self.index.shape[1])

    @property
    def present(self) -> Any:
        """How many tokens are there: a number, or (B,) float64 where images differ."""
        return self.sizes.count_nonzero(1).double().cpu().numpy() if self.ragged else self.index.shape[1]

    @property
    def weighs_sizes(self) -> bool:
        """Whether attention is to weigh tokens by their sizes: where the strategy asks for it, and some are merged."""
        return self.actor.weighs_sizes and any(merges(d.plan) for d in self.decisions)

    @property
    def weights(self) -> Tensor:
        """(B, N) how much each token that is there counts as a key, see `Mask`."""
        self.requested.add("weights")
        return self._weights

    @property
    def whole(self) -> bool:
        """Whether every token that is there is one patch, and none fills up a row: so far they were only removed."""
        plans = [decision.plan for decision in self.decisions]
        return all(isinstance(plan, Rest) or (only_removes(plan) and not isinstance(plan, Padded)) for plan in plans)

    @property
    def even(self) -> bool:
        """Whether attention is the ordinary one, in which every token counts alike."""
        return not (self.ragged or self.masked or self.weighs_sizes)

    def bias(self) -> Tensor | None:
        """Return (B, N), what is added to what tokens are weighed by as keys: log sizes, -inf for padding, or None."""
        self.requested.add("bias")
        if self.weighs_sizes:
            return self.sizes.log()
        return torch.zeros_like(self.sizes).masked_fill(self.sizes == 0, -torch.inf) if self.ragged else None

    @property
    def learns(self) -> bool:
        """Whether the strategy acts in this pass and has a loss of its own, and it is training."""
        return self.training and self.actor.acts and self.actor.strategy.has_loss

    def loss(self) -> Tensor:
        """Return the strategy's own loss, when the network has run; see `Strategy.loss`.

        Raises:
            UnsupportedError: the network does not say what came out.
        """
        if self.student is None:
            must = "set acting.student = ModelOutputs(logits, tokens) if acting.learns"
            raise self._cannot("has a loss of its own", must)
        macs, shares = self.actor.share_of(self.actor.planned), self.actor.shares
        inputs = LossInputs(self.student, self.teacher, self.memory, self._weights, shares, macs, self.actor.spent)
        return self.actor.strategy.loss(inputs)

    def read_out(self, prefix: Tensor, tokens: Tensor) -> Tensor:
        """Return the (B, P, C) tokens that the head is to read, see `Strategy.read_out`."""
        self.requested.add("read_out")
        with exact(prefix.device):
            return self.actor.strategy.read_out(self.memory, full(prefix), full(tokens)).to(prefix.dtype)

    @property
    def reads_out(self) -> bool:
        """Whether the strategy acts in this pass and has a say in what the head reads."""
        return self.actor.acts and self.actor.strategy.reads_out

    def check_network(self) -> None:
        """Raise UnsupportedError if the network, which has run, did not heed what the strategy hangs on."""
        if len(self.steps) != self.actor.depth:
            raise self._cannot(f"acts in {self.actor.depth} blocks", "call acting.went(...) once in each")
        if self.reads_out and "read_out" not in self.requested:
            raise self._cannot("says what the head reads", "call acting.read_out(prefix, tokens) if acting.reads_out")
        if "decide" not in self.requested and any(map(self.acts, {*self.keep, *self.actor.more})):
            raise self._cannot(f"acts at the {self.site} site", "call acting.decide(...) there if acting.acts_at(...)")
        last = self.actor.depth - (self.site == "attention")  # what is chosen within it comes after its attention
        plans = [decision.plan for decision in self.decisions if decision.block < last]
        if any(isinstance(plan, Rest) and plan.index.shape[1] for plan in plans) and not any(
            s.rested for s in self.steps
        ):
            raise self._cannot("lets tokens rest", "run the block on the tokens plan.active alone")
        uneven = any(merges(plan) for plan in plans) and self.weighs_sizes
        if (uneven or any(isinstance(plan, Padded) for plan in plans)) and "bias" not in self.requested:
            raise self._cannot("has tokens count differently", "add acting.bias() to what attention weighs keys by")
        if self.masked and any(isinstance(plan, Mask) for plan in plans) and "weights" not in self.requested:
            raise self._cannot("has tokens count differently", "weigh keys by acting.weights if acting.masked")

    def _cannot(self, does: str, must: str) -> UnsupportedError:
        return UnsupportedError(f"'{self.actor.strategy.name}' {does}, which this model does not heed: it must {must}")

    def acts_at(self, site: Site, block: int) -> bool:
        """Say whether fewer tokens are to leave this site of this block than come to it."""
        return site == self.site and self.acts(block)

    def went(self, came: Any, *, early: bool = False, scoring: Scoring = "", projected: str = "") -> None:
        """Record one block, to whose attention so many tokens `came`; call it once a block, when its choice is made."""
        self.steps.append(Step(came, self.present, early, scoring, projected, self.own_macs, rested=self.resting))
        self.own_macs = 0.0

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
        self.requested.add("decide")
        came, strategy = self.present, self.actor.strategy
        keep = self._count_at(block)
        with exact(self.index.device):
            plan = strategy.plan(self._view(block, given), keep)
            if plan is not None:
                plan, keep = self._check(block, plan, keep)
                plan = self._follow(block, plan, keep)
        place = self.actor.cost.place(block, came, self.present if strategy.adaptive else keep)
        self.own_macs += check_own_macs(self.actor.traits.own_macs(place), strategy)
        return plan

    def _check(self, block: int, plan: Plan, keep: int) -> tuple[Plan, int]:
        """Raise StrategyError for an illegal plan; return one that can be carried out, and how many tokens go on.

        On a CPU the numbers of every plan are read. On a GPU, which is waited for then, those of the first plan of each
        shape are, and later ones are kept in range.
        """
        actor, strategy, index = self.actor, self.actor.strategy, self.index
        check_form(plan, strategy, index, keep, training=self.training, prefix=actor.prefix)
        more = isinstance(plan, Merge | Mix) or (isinstance(plan, Keep) and plan.fuse is not None)
        if self.site == "attention" and "tokens" not in self.requires and more:
            raise StrategyError(
                f"'{strategy.name}' fuses, merges or mixes tokens and does not read them: add tokens to `needs`, as "
                "what is only removed leaves before the attention and costs less"
            )
        shape = block, type(plan), self.training, tuple(index.shape), keep
        seen = torch.compiler.is_compiling() or (
            shape in actor.checked and not (actor.reads_all and index.device.type == "cpu")
        )
        if strategy.adaptive or not seen:
            check_numbers(plan, strategy, index, keep, actor.prefix)
            actor.checked.add(shape)
            return plan, keep_of(plan, strategy, index, keep)
        return plan if torch.compiler.is_compiling() else in_range(plan, index.shape[1], keep), keep

    def _follow(self, block: int, plan: Plan, keep: int) -> Plan:
        """Note what the plan makes of the tokens' names and sizes; return it as it is to be carried out."""
        if isinstance(plan, Rest):
            plan = Resting.of(plan, self.index.shape[1])
            self.decisions.append(Decision(block, self.index, self.index.gather(1, plan.active), plan, self.sizes))
            return plan
        if isinstance(plan, Merge):
            plan = Grouped.of(plan, keep)
        if isinstance(plan, Keep) and not plan.ordered:
            plan = Keep(sort(plan.index).values, plan.fuse, plan.scores)
        elif isinstance(plan, Mask) and plan.keep.dtype == torch.bool:
            padded = Padded.of(Mask(plan.keep & (self.sizes > 0), plan.scores))
            self.ragged = bool((padded.index < 0).any())
            plan = padded if self.ragged else Keep(padded.index, scores=plan.scores)
        before, sizes = self.index, self.sizes
        self.index, self.sizes = tokens.index_after(plan, before), tokens.sizes_after(plan, sizes)
        if isinstance(plan, Mask):
            self._weights, self.masked = self._weights * plan.keep, True
        elif self.masked and only_removes(plan):
            self._weights = tokens.sizes_after(plan, self._weights)
        elif not isinstance(plan, Shift):
            self._weights, self.masked = torch.ones_like(self.sizes), False
        self.decisions.append(Decision(block, before, self.index, plan, sizes))
        if isinstance(plan, Grouped) and plan.weight is None and plan.sizes is None:
            return replace(plan, weight=tokens.shares_of(plan, sizes, self.sizes))  # the sums are known now
        return plan

    def _view(self, block: int, given: Given) -> TokenView:
        fields, count, cost = dict(given), self.index.shape[1], self.actor.cost
        if "relevance" in self.requires:
            if self.relevance is None:
                raise UnsupportedError("the data of this cell has no relevance mask")
            mask = self.relevance
            fields["relevance"] = lambda: values_at(mask, self.index)
        if missing := sorted(self.requires - set(fields)):
            at = "; site = 'attention' gives what attention makes" if self.site == "input" and cost.depth > 1 else ""
            raise UnsupportedError(
                f"'{self.actor.strategy.name}' needs {', '.join(missing)}, which this model cannot give at the "
                f"{self.site} site (it gives {', '.join(sorted(fields))}){at}"
            )

        def shown(make: Callable[[], Any]) -> Callable[[], Any]:
            return lambda: full(make())

        def random(draw: int, width: int | None) -> Tensor:
            # Most strategies want none, and a draw of few numbers takes as long as of many.
            keys = seeds.mix(seeds.mix(self.items, self.actor.stream), self.visit)
            keys = seeds.mix(seeds.mix(keys, block + 1), draw + 1)
            return seeds.uniform(keys, count * (width or 1)).reshape(-1, count, *([] if width is None else [width]))

        return TokenView(
            {need: shown(fields[need]) for need in self.requires},
            index=self.index,
            sizes=self.sizes,
            weights=self._weights,
            place=cost.place(block, count, count),
            training=self.training,
            grid=self.actor.grid,
            random=random,
            learned=self.actor.learned.get(block),
            memory=self.memory,
        )


def exact(device: torch.device) -> AbstractContextManager[Any]:
    """Return the context in which products are made in the precision of what is multiplied, whatever autocast says."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()


def full(x: Any) -> Any:
    """Return it in float32 where it is a tensor in half precision."""
    return x.float() if isinstance(x, Tensor) and x.dtype in (torch.bfloat16, torch.float16) else x


@dataclass(frozen=True, eq=False)
class SplitPass:
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
    projected = projections_for(acting.requires, scoring) if acts else ""
    plan = acting.decide(0, given)
    acting.went(tokens_in, early=plan is not None, scoring=scoring, projected=projected)
    if plan is None:
        return None
    if not isinstance(plan, Keep) or not only_removes(plan):
        raise UnsupportedError(f"{because}: tokens can be kept or removed, not fused, merged or mixed")
    return plan.index


def in_chunks(answer: Callable[[Tensor, Tensor], Tensor], rows: int) -> Outputs:
    """Return what the view has as `outputs`, from what answers so many rows at a time."""

    @torch.no_grad()
    def outputs(tokens: Tensor, sample: Tensor) -> Tensor:
        pairs = zip(tokens.split(rows), sample.split(rows), strict=True)
        logits = torch.cat([answer(*pair) for pair in pairs])
        return logits if logits.ndim == 2 else logits[:, None]

    return outputs


def finite(seen: Tensor) -> Tensor:
    """Return what a strategy is to see; DivergedError where it is not finite, which is not the strategy's doing."""
    if not bool(seen.isfinite().all()):
        raise DivergedError("training diverged: what the network shows a strategy is not finite")
    return seen
