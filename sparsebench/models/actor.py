"""A strategy in a forward pass: it reads a view and returns plans; the pass checks them and records token counts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sparsebench import seeds
from sparsebench.errors import DivergedError, StrategyError, UnsupportedError
from sparsebench.measure.cost import CostModel, Scoring, Step, block_of_return, projections_for
from sparsebench.measure.schedule import TokenSchedule
from sparsebench.strategy import tokens
from sparsebench.strategy.base import LossInputs, ModelOutputs, Site, Strategy
from sparsebench.strategy.budget import Budget
from sparsebench.strategy.plan_checks import (
    check_form,
    check_nothing,
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

Fields = Mapping[str, Callable[[], Any]]
"""A function for each field of the view that computes it."""
LEARNED = "strategy"
"""The name of the strategy's modules in the module of the network."""


@dataclass(frozen=True, eq=False)
class Decision:
    """One decision of a strategy.

    Attributes:
        block: the block in which the strategy decided.
        before, after: (B, N) and (B, M) indices of the tokens before and after, see `TokenView.index`; for a `Rest`,
            `after` has the tokens that take part in the block.
        plan: the plan; the positions of a `Keep` have the order of the kept tokens, increasing unless `ordered`.
        sizes: (B, N) sizes of the tokens before.
    """

    block: int
    before: Tensor
    after: Tensor
    plan: Plan
    sizes: Tensor


class Actor:
    """A strategy with its token counts for one network.

    Attributes:
        schedule: the schedule of the token counts.
        keep: the requested token count after each block in which the strategy acts.
        shares, scaled: for these blocks, see `schedule.BlockCounts`.
        planned: the steps for the requested token counts; calibration (`spend`) does not change them.
        bounds: whether counts are upper bounds of an adaptive strategy, which then acts even if all tokens may stay.
        more: additional blocks in which it acts in training, see `Strategy.training_blocks`.
        learned: the strategy's modules by block, see `Strategy.module`. They are trained with the network.
        weighs_sizes: see `Strategy.weighs_sizes`.
        returns: the block before which tokens that left come back, or None.
        checked: the shapes of plans whose numbers were checked.
        reads_all: whether the numbers of every plan are checked on a CPU, where reading them does not wait.

    Args:
        strategy, budget: the strategy and its budget.
        cost: the network's cost model, which turns the budget into token counts.
        grid: (rows, columns) of the network's patches, or None.
        stream: the seed of the strategy's random numbers.
    """

    def __init__(self, strategy: Strategy, budget: Budget, cost: CostModel, grid: tuple[int, int] | None, stream: int):
        self.strategy, self.grid, self.stream = strategy, grid, stream
        self.budget = budget
        self.cost = cost
        self.depth = cost.depth
        self.tokens = cost.tokens
        self.prefix = cost.place(0, self.tokens, self.tokens).prefix
        self.requires, self.traits = strategy.reads(), strategy.traits()
        self.weighs_sizes = strategy.weighs_sizes
        _check_strategy(strategy, cost)
        self.returns = None if strategy.returns is None else block_of_return(strategy.returns, cost.depth)
        self.spend(budget)
        self.bounds = strategy.adaptive and (budget.counts is not None or min(self.keep.values()) < self.tokens)
        self.planned = self.schedule.steps
        self.more = strategy.training_blocks(self.depth)
        if not set(self.more) <= set(range(self.depth)):
            raise StrategyError(f"'{strategy.name}': training_blocks must be 0 to {self.depth - 1}, got {self.more}")
        self.learned: dict[int, torch.nn.Module] = {}
        for block in sorted({*self.keep, *self.more}):
            module = self._module(block)
            if module is not None:
                self.learned[block] = module
        self.checked: set[tuple[Any, ...]] = set()
        self.reads_all = True

    def spend(self, budget: Budget) -> None:
        """Use the token counts of this budget. The requested budget and the planned steps do not change."""
        self.schedule = TokenSchedule(budget, self.traits, self.cost)
        self.keep, self.shares, self.scaled = self.schedule.at(1.0)

    def counts(self, done: float) -> tuple[dict[int, int], frozenset[int]]:
        """Return `keep` and `scaled` when the share `done` of the training is done, see `Strategy.ramp`."""
        if not self.strategy.ramps or (ramp := self.strategy.ramp(done)) == 1:
            return self.keep, self.scaled
        if not 0 <= ramp <= 1:
            raise StrategyError(f"'{self.strategy.name}': ramp must lie in [0, 1], got {ramp}")
        counts = self.schedule.at(ramp)
        return counts.keep, counts.scaled

    @property
    def acts(self) -> bool:
        """Whether the strategy acts at all: the counts remove or scale tokens, or they are upper bounds."""
        return min(self.keep.values()) < self.tokens or bool(self.scaled) or self.bounds

    def share_of(self, steps: Sequence[Step]) -> Any:
        """Return the MACs of these steps as a fraction of the dense MACs."""
        return self.cost.macs(steps) / self.cost.macs(self.cost.dense())

    def spent(self, counts: Sequence[Any]) -> Any:
        """Return the fraction of the dense MACs for token counts after the blocks of `keep`: numbers or tensors."""
        return self.share_of(self.cost.steps(self.traits, tuple(self.keep), counts))

    def _module(self, block: int) -> torch.nn.Module | None:
        before = [self.tokens, *(count for number, count in self.keep.items() if number < block)][-1]
        place = self.cost.place(block, before, self.keep.get(block, before))
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seeds.seed_of("learned", self.strategy.name, self.stream, block))
            module = self.strategy.module(place)
        return module.requires_grad_(False) if module is not None and self.strategy.fits() else module

    def begin(self, items: Tensor, visit: int, relevance: Tensor | None, *, training: bool, done: float = 1.0) -> Pass:
        """Start a forward pass over the (B,) items, seen for the `visit`-th time; both seed the random numbers.

        `relevance` is (B, N) or None; only oracles get it. `done` is the share of the training that is done.
        """
        return Pass(self, items, visit, relevance if "relevance" in self.requires else None, training, done)


class TokenState:
    """The tokens in one forward pass: which are present, what they weigh, and what happened to them so far.

    Attributes:
        requires: the fields of the view that are read; none unless a strategy acts.
        index, sizes: (B, N) of the current tokens, see `TokenView`.
        called: names of the methods that the network called: `decide`, `bias`, `weights`, `read_out`, `start`, `maps`,
            `come_back`; `check_network` finds a network that ignores a plan.
        ragged: whether token counts differ between images; padding then has size 0 and index -1.
        masked: whether a real-valued `Mask` weights the tokens.
        soft: whether attention multiplies e^(query . key) by sizes with gradients, see `Shift`.
        decisions: the decisions so far, in order.
        steps: the token counts so far, by block; arrays with a number for each image if images differ.
        previous: (B, N) see `TokenView.previous_attention`; None if no block has computed it.
        resting: number of tokens that skip the current block, see `Rest`.
        own_macs: the strategy's own MACs since the last recorded block.

    Args:
        index: (B, N) the patch of each token.
    """

    requires: frozenset[str] = frozenset()

    def __init__(self, index: Tensor):
        self.index = index
        self.sizes = self._weights = torch.ones(index.shape, device=index.device)
        self.ragged = self.masked = self.soft = False
        self.decisions: list[Decision] = []  # torch's compiler cannot follow `list[Decision]()`
        self.steps: list[Step] = []
        self.called: set[str] = set()
        self.previous: Tensor | None = None
        self.own_macs, self.resting = 0.0, 0

    @property
    def weighs_sizes(self) -> bool:
        """Whether attention must weight tokens by their sizes."""
        return False

    @property
    def starts(self) -> bool:
        """Whether a strategy builds something from the tokens before the first block, see `start`."""
        return False

    @property
    def changes_maps(self) -> bool:
        """Whether a strategy changes the attention matrices of the blocks in which it acts, see `maps`."""
        return False

    @property
    def keeps_left(self) -> bool:
        """Whether the network must keep the tokens that leave, see `leave`, because they come back later."""
        return False

    def comes_back(self, block: int) -> bool:
        """Return whether tokens that left come back before this block, see `come_back`."""
        return False

    @property
    def learns(self) -> bool:
        """Whether this is training, a strategy acts, and it has its own loss."""
        return False

    @property
    def reads_out(self) -> bool:
        """Whether a strategy acts in this pass and changes the input of the head."""
        return False

    @property
    def present(self) -> Any:
        """The current number of tokens: an integer, or a (B,) float64 array if images differ."""
        return self.sizes.count_nonzero(1).double().cpu().numpy() if self.ragged else self.index.shape[1]

    def weights(self) -> Tensor:
        """Return the (B, N) weights of the current tokens as keys, see `Mask`. The call is noted, as are others."""
        self.called.add("weights")
        return self._weights

    @property
    def whole(self) -> bool:
        """Whether each current token is one patch, without padding: tokens were only removed so far."""
        plans = [decision.plan for decision in self.decisions]
        return all(isinstance(plan, Rest) or (only_removes(plan) and not isinstance(plan, Padded)) for plan in plans)

    @property
    def even(self) -> bool:
        """Whether attention is ordinary: all tokens have the same weight as keys."""
        return not (self.ragged or self.masked or self.soft or self.weighs_sizes)

    def bias(self) -> Tensor | None:
        """Return (B, N) to add to the attention logits of the keys, or None: log sizes, or -inf for padding."""
        self.called.add("bias")
        if self.weighs_sizes:
            return self.sizes.log()
        return torch.zeros_like(self.sizes).masked_fill(self.sizes == 0, -torch.inf) if self.ragged else None

    def record_block(
        self,
        tokens_in: Any,
        tokens_out: Any = None,
        *,
        early: bool = False,
        scoring: Scoring = "",
        projected: str = "",
        fused: bool = False,
    ) -> None:
        """Record one block, see `Step`. Call it once, after the decision.

        `tokens_in` entered its attention, and `tokens_out` its MLP: by default those that are present now.
        """
        out = self.present if tokens_out is None else tokens_out
        step = Step(tokens_in, out, early, scoring, projected, self.own_macs, rested=self.resting, fused=fused)
        self.steps.append(step)
        self.own_macs = 0.0

    def begin_rest(self, active: Tensor) -> None:
        """Let only the tokens at the (B, M) positions `active` take part, until `end_rest`."""
        self._before_rest = self.index, self.sizes, self.previous
        self.index = self.index.gather(1, active)
        self.sizes = self.sizes.gather(1, active)
        self.resting = self._before_rest[0].shape[1] - active.shape[1]

    def end_rest(self, active: Tensor) -> None:
        """Let all tokens take part again; those that rested keep the attention that an earlier block computed."""
        self.index, self.sizes, before = self._before_rest
        self.resting = 0
        computed = self.previous
        if before is not None and computed is not None and computed is not before:
            self.previous = before.scatter(1, active, computed)


class Pass(TokenState):
    """A strategy in one forward pass, and the interface for networks.

    Attributes, besides those of `TokenState`:
        keep, scaled: as in `Actor`, for this pass.
        site, requires: the strategy's site, and the fields of the view that it reads.
        rests: whether its plans are `Rest`.
        count: the number of tokens at the input.
        memory: see `TokenView.memory`.
        left: the tokens that left, if they come back: pairs of (B, R, C) tokens and (B, R) patches.
        student, teacher: the outputs of the network and of the teacher, for the strategy's loss.
    """

    def __init__(self, actor: Actor, items: Tensor, visit: int, relevance: Tensor | None, training: bool, done: float):
        super().__init__(torch.arange(actor.tokens, device=items.device).expand(len(items), actor.tokens))
        self.actor = actor
        self.items = items
        self.visit = visit
        self.relevance = relevance
        self.training = training
        self.keep, self.scaled = actor.counts(done) if training else (actor.keep, actor.scaled)
        self.site: Site = actor.strategy.at_site()
        self.requires = actor.requires
        self.rests = actor.strategy.rests
        self.count = actor.tokens
        self.memory: dict[str, Any] = {}
        self.left: list[tuple[Tensor, Tensor]] = []
        self.student: ModelOutputs | None = None
        self.teacher: ModelOutputs | None = None

    @property
    def scores(self) -> Tensor | None:
        """(B, N) scores of the strategy's first decision, or None."""
        return self.decisions[0].plan.scores if self.decisions else None

    def acts(self, block: int) -> bool:
        """Return whether the strategy acts in this block: whether the requested count is below the current one.

        An adaptive strategy decides the number itself, so it acts in all its blocks. In training there may be more.
        """
        if self.training and block in self.actor.more:
            return self.actor.acts
        if self.actor.strategy.adaptive:
            return block in self.keep and self.actor.acts
        return block in self.scaled or self._count_at(block) < (self.count if self.rests else self.index.shape[1])

    def _count_at(self, block: int) -> int:
        """Return the requested number of tokens after a block; if tokens rest, the number that take part in it."""
        if self.rests:
            counts = [count for number, count in self.keep.items() if number <= block]
            return min(counts) if counts else self.count
        return self.keep.get(block, self.index.shape[1])

    @property
    def weighs_sizes(self) -> bool:
        """Whether attention must weight tokens by their sizes: the strategy asks for it, and some were merged."""
        return self.actor.weighs_sizes and any(merges(d.plan) for d in self.decisions)

    @property
    def learns(self) -> bool:
        """Whether this is training, the strategy acts, and it has its own loss."""
        return self.training and self.actor.acts and self.actor.strategy.has_loss

    @property
    def starts(self) -> bool:
        """Whether the strategy builds something from the tokens before the first block."""
        return self.actor.acts and self.actor.strategy.starts

    def start(self, fields: Fields) -> None:
        """Let the strategy build what it reads later, from the `tokens` and `prefix` before the first block."""
        self.called.add("start")
        with exact(self.index.device):
            self.actor.strategy.start(self._view(0, fields, frozenset(fields)))

    @property
    def changes_maps(self) -> bool:
        """Whether the strategy changes the attention matrices of the blocks in which it acts."""
        return self.actor.strategy.changes_maps

    def maps(self, maps: Tensor) -> Tensor:
        """Return the (B, H, T, T) attention matrices that multiply the values, from those of the softmax."""
        self.called.add("maps")
        with exact(maps.device):
            changed = self.actor.strategy.maps(full(maps))
        if changed.shape != maps.shape:
            name = self.actor.strategy.name
            got = tuple(changed.shape)
            raise StrategyError(f"'{name}': maps must return shape {tuple(maps.shape)}, got {got}")
        return changed

    @property
    def keeps_left(self) -> bool:
        """Whether the network must keep the tokens that leave, because they come back later."""
        return self.actor.returns is not None and self.actor.acts

    def leave(self, patches: Tensor) -> None:
        """Keep the tokens that the last plan removes, of the (B, N, C) patch tokens before it."""
        decision = self.decisions[-1]
        if isinstance(decision.plan, Mask | Shift):
            return  # in training or in `fit` all tokens stay
        if not only_removes(decision.plan):
            kind = type(decision.plan).__name__
            raise StrategyError(
                f"'{self.actor.strategy.name}': with `returns`, plans must only drop tokens, got {kind}"
            )
        assert isinstance(decision.plan, Keep)
        gone = tokens.others(decision.plan.index, patches.shape[1])
        self.left.append((tokens.gather(patches, gone), decision.before.gather(1, gone)))

    def comes_back(self, block: int) -> bool:
        """Return whether tokens that left come back before this block."""
        return block == self.actor.returns and bool(self.left)

    def come_back(self, patches: Tensor) -> Tensor:
        """Return the (B, patches, C) tokens in the order of the image: the (B, N, C) tokens, and those that left."""
        self.called.add("come_back")
        parts, patch = zip((patches, self.index), *self.left, strict=True)
        order = sort(torch.cat(patch, dim=1)).indices
        self.left.clear()
        self.index = torch.arange(self.actor.tokens, device=order.device).expand_as(order)
        self.sizes = self._weights = torch.ones(order.shape, device=order.device)
        return tokens.gather(torch.cat(parts, dim=1), order)

    def kept_at(self) -> Tensor:
        """Return (B, patches), the current token that each input patch identifies, see `index`; -1 for none."""
        B, N = self.index.shape
        token = self.index.new_full((B, self.count + 1), -1)  # tokens without a patch are written into the last column
        numbers = torch.arange(N, device=token.device).expand(B, N)
        return token.scatter(1, self.index % (self.count + 1), numbers)[:, :-1]

    def membership(self) -> Tensor:
        """Return (B, patches), the current token that contains each input patch; -1 for a patch that was dropped.

        Raises:
            UnsupportedError: tokens are mixtures of many patches.
        """
        if self.whole:  # tokens that came back are in no plan
            return self.kept_at()
        token = torch.arange(self.count, device=self.index.device).expand(len(self.index), -1)
        for decision in self.decisions:
            plan = decision.plan
            if isinstance(plan, Mix) or (isinstance(plan, Mask) and plan.values is not None):
                raise UnsupportedError(
                    f"each token of '{self.actor.strategy.name}' is a mixture of many patches, and stands for none in "
                    "particular"
                )
            if isinstance(plan, Keep | Merge):
                token = tokens.membership_after(plan, token, decision.before.shape[1])
        return token

    def auxiliary(self) -> Sequence[Tensor]:
        """Return further logits of a forward pass in training, see `Strategy.auxiliary`; none without any."""
        if not (self.training and self.actor.acts and self.actor.strategy.has_auxiliary):
            return ()
        return self.actor.strategy.auxiliary(self.memory)

    def loss(self) -> Tensor:
        """Return the strategy's own loss after the forward pass; raise UnsupportedError without a `student`."""
        if self.student is None:
            must = "set acting.student = ModelOutputs(logits, tokens) if acting.learns"
            raise self._cannot("has its own loss", must)
        macs = self.actor.share_of(self.actor.planned)
        shares = self.actor.shares
        inputs = LossInputs(self.student, self.teacher, self.memory, self._weights, shares, macs, self.actor.spent)
        return self.actor.strategy.loss(inputs)

    def read_out(self, prefix: Tensor, tokens: Tensor) -> Tensor:
        """Return the (B, P, C) class and register tokens for the head, see `Strategy.read_out`."""
        self.called.add("read_out")
        with exact(prefix.device):
            return self.actor.strategy.read_out(self.memory, full(prefix), full(tokens)).to(prefix.dtype)

    @property
    def reads_out(self) -> bool:
        """Whether the strategy acts in this pass and changes the input of the head."""
        return self.actor.acts and self.actor.strategy.reads_out

    def check_network(self) -> None:
        """Raise UnsupportedError if the network, after its forward pass, ignored what the strategy depends on."""
        if len(self.steps) != self.actor.depth:
            raise self._cannot(f"acts in {self.actor.depth} blocks", "call acting.record_block(...) once in each")
        if self.reads_out and "read_out" not in self.called:
            raise self._cannot("changes the head's input", "call acting.read_out(prefix, tokens) if acting.reads_out")
        if "decide" not in self.called and any(map(self.acts, {*self.keep, *self.actor.more})):
            raise self._cannot(f"acts at the {self.site} site", "call acting.decide(...) there if acting.acts_at(...)")
        if self.starts and "start" not in self.called:
            raise self._cannot("reads the tokens before the first block", "call acting.start(fields) if acting.starts")
        if self.changes_maps and "decide" in self.called and "maps" not in self.called:
            raise self._cannot("changes attention matrices", "multiply values by acting.maps(A) if acting.changes_maps")
        removes = any(isinstance(decision.plan, Keep) for decision in self.decisions)
        if self.left or (self.keeps_left and removes and "come_back" not in self.called):
            raise self._cannot(
                f"has tokens that come back before block {self.actor.returns}",
                "call acting.leave(patches) after a plan, and acting.come_back(patches) if acting.comes_back(block)",
            )
        self._check_use_of_plans()

    def _check_use_of_plans(self) -> None:
        """Raise UnsupportedError if the network ignored a plan: tokens that rest, or that have other weights."""
        last = self.actor.depth - (self.site == "attention")  # there, the last block's plan affects no attention
        plans = [decision.plan for decision in self.decisions if decision.block < last]
        must_rest = any(isinstance(plan, Rest) and plan.index.shape[1] for plan in plans)
        if must_rest and not any(step.rested for step in self.steps):
            raise self._cannot("lets tokens rest", "run the block only on the tokens plan.active")
        uneven = any(merges(plan) for plan in plans) and self.weighs_sizes
        if (uneven or any(isinstance(plan, Padded) for plan in plans)) and "bias" not in self.called:
            raise self._cannot("weights tokens differently", "add acting.bias() to the attention logits of the keys")
        if self.masked and any(isinstance(plan, Mask) for plan in plans) and "weights" not in self.called:
            raise self._cannot("weights tokens differently", "weight keys by acting.weights() if acting.masked")

    def _cannot(self, does: str, must: str) -> UnsupportedError:
        return UnsupportedError(f"'{self.actor.strategy.name}' {does}, which this model ignores: it must {must}")

    def acts_at(self, site: Site, block: int) -> bool:
        """Return whether the strategy acts at this site in this block, see `acts`."""
        return site == self.site and self.acts(block)

    def decide(self, block: int, fields: Fields) -> Plan | None:
        """Return the strategy's plan after checking it, or None; update the tokens' indices and sizes.

        Args:
            block: the block in which the strategy acts.
            fields: how to compute each field of the view; the view has only the declared ones.

        Raises:
            StrategyError: the plan breaks the contract.
            DivergedError: so it does, and the network gave the strategy numbers that are not finite.
            UnsupportedError: this network cannot provide a field that the strategy needs here.
        """
        if not self.acts(block):
            return None
        self.called.add("decide")
        tokens_in, strategy = self.present, self.actor.strategy
        keep = self._count_at(block)
        with exact(self.index.device):
            plan = strategy.plan(self._view(block, fields), keep)
            if plan is None:
                check_nothing(strategy, self.index.shape[1], keep)
            else:
                plan, keep = self._check(block, plan, keep, fields)
                plan = self._follow(block, plan, keep)
        place = self.actor.cost.place(block, tokens_in, self.present if strategy.adaptive else keep)
        self.own_macs += check_own_macs(self.actor.traits.own_macs(place), strategy)
        return plan

    def _check(self, block: int, plan: Plan, keep: int, fields: Fields) -> tuple[Plan, int]:
        """Return the plan and the number of tokens after it; raise an error for an illegal plan, see `decide`.

        On a CPU the numbers of every plan are checked. On a GPU, where reading them waits, only those of the first plan
        of each shape are. Positions of later plans are limited to the allowed range.
        """
        actor, strategy, index = self.actor, self.actor.strategy, self.index
        check_form(plan, strategy, index, keep, training=self.training, prefix=actor.prefix)
        combines = isinstance(plan, Merge | Mix) or (isinstance(plan, Keep) and not only_removes(plan))
        if self.site == "attention" and "tokens" not in self.requires and combines:
            raise StrategyError(
                f"'{strategy.name}' fuses, merges or mixes tokens but does not read them: add tokens to `needs`. "
                "Without it, only removal is possible, which happens before the attention and costs fewer MACs"
            )
        if self.site == "maps" and not (isinstance(plan, Merge | Mask | Shift) or only_removes(plan)):
            kind = type(plan).__name__
            raise StrategyError(f"'{strategy.name}': at the maps site tokens are dropped or merged, got another {kind}")
        shape = block, type(plan), self.training, tuple(index.shape), keep
        skip = torch.compiler.is_compiling() or (
            shape in actor.checked and not (actor.reads_all and index.device.type == "cpu")
        )
        if strategy.adaptive or not skip:
            try:
                check_numbers(plan, strategy, index, keep, actor.prefix)
            except StrategyError:
                _check_fields(self.requires, fields)
                raise
            actor.checked.add(shape)
            return plan, keep_of(plan, strategy, index, keep)
        return plan if torch.compiler.is_compiling() else in_range(plan, index.shape[1], keep), keep

    def _follow(self, block: int, plan: Plan, keep: int) -> Plan:
        """Update the tokens' indices, sizes and weights; return the plan in the form that `tokens.apply` takes."""
        before, sizes = self.index, self.sizes
        removes_by_mask = isinstance(plan, Mask) and plan.keep.dtype == torch.bool
        plan = self._prepared(plan, keep)
        if isinstance(plan, Resting):
            # The tokens are all present after the block, so nothing is updated.
            self.decisions.append(Decision(block, before, before.gather(1, plan.active), plan, sizes))
            return plan
        if removes_by_mask:
            self.ragged = isinstance(plan, Padded)
        self.index = tokens.index_after(plan, before)
        self.sizes = tokens.sizes_after(plan, sizes)
        self._weigh(plan)
        self.decisions.append(Decision(block, before, self.index, plan, sizes))
        if isinstance(plan, Grouped) and plan.weight is None and plan.sizes is None:
            return replace(plan, weight=tokens.shares_of(plan, sizes, self.sizes))  # reuses the sums of the sizes
        return plan

    def _prepared(self, plan: Plan, keep: int) -> Plan:
        """Return a plan in the form that `tokens.apply` takes."""
        if isinstance(plan, Rest):
            return Resting.of(plan, self.index.shape[1])
        if isinstance(plan, Merge):
            return Grouped.of(plan, keep)
        if isinstance(plan, Keep) and not plan.ordered:
            return _in_order(plan)
        if isinstance(plan, Mask) and plan.keep.dtype == torch.bool:
            padded = Padded.of(Mask(plan.keep & (self.sizes > 0), plan.scores))
            is_ragged = bool((padded.index < 0).any())
            return padded if is_ragged else Keep(padded.index, scores=plan.scores)
        return plan

    def _weigh(self, plan: Plan) -> None:
        """Update the weights of the tokens as keys: a real-valued mask multiplies them, and merging resets them."""
        if isinstance(plan, Mask):
            self._weights = self._weights * plan.keep
            self.masked = True
        elif self.masked and only_removes(plan):
            self._weights = tokens.sizes_after(plan, self._weights)
        elif isinstance(plan, Shift):
            self.soft = self.soft or plan.sizes is not None
        else:
            self._weights = torch.ones_like(self.sizes)
            self.masked = False

    def _view(self, block: int, fields: Fields, needs: Collection[str] | None = None) -> TokenView:
        """Return the view of a block with the fields in `needs`, by default those that the strategy declares."""
        count = self.index.shape[1]
        fields = self._with_relevance(fields)
        if needs is None:
            needs = self.requires
            self._check_needs(fields)

        def in_float32(compute: Callable[[], Any]) -> Callable[[], Any]:
            return lambda: full(compute())

        def random(draw: int, width: int | None) -> Tensor:
            # Computed on demand: most strategies draw none, and few numbers take as long as many.
            keys = seeds.mix(seeds.mix(self.items, self.actor.stream), self.visit)
            keys = seeds.mix(seeds.mix(keys, block + 1), draw + 1)
            if width is None:
                return seeds.uniform(keys, count).reshape(-1, count)
            return seeds.uniform(keys, count * width).reshape(-1, count, width)

        return TokenView(
            {need: in_float32(fields[need]) for need in needs},
            index=self.index,
            sizes=self.sizes,
            weights=self._weights,
            place=self.actor.cost.place(block, count, count),
            training=self.training,
            grid=self.actor.grid,
            random=random,
            learned=self.actor.learned.get(block),
            memory=self.memory,
        )

    def _with_relevance(self, fields: Fields) -> Fields:
        """Return the fields of a network, with the relevance of tokens for a strategy that reads it.

        Raises:
            UnsupportedError: the data have no relevance mask.
        """
        if "relevance" not in self.requires:
            return fields
        if self.relevance is None:
            raise UnsupportedError("the data of this cell has no relevance mask")
        mask = self.relevance
        return {**fields, "relevance": lambda: values_at(mask, self.index)}

    def _check_needs(self, fields: Fields) -> None:
        """Raise UnsupportedError if the fields lack one that the strategy reads."""
        missing = sorted(self.requires - set(fields))
        if not missing:
            return
        hint = ""
        if self.site == "input" and self.actor.cost.depth > 1:
            hint = "; site = 'attention' gives attention fields"
        raise UnsupportedError(
            f"'{self.actor.strategy.name}' needs {', '.join(missing)}, which this model cannot give at the "
            f"{self.site} site (it gives {', '.join(sorted(fields))}){hint}"
        )


def _in_order(plan: Keep) -> Keep:
    """Return a plan with its kept tokens in their old order."""
    index, order = sort(plan.index)
    add = None if plan.add is None else tokens.gather(plan.add, order)
    sizes = None if plan.sizes is None else plan.sizes.gather(1, order)
    return Keep(index, plan.fuse, plan.scores, add=add, sizes=sizes)


def _check_strategy(strategy: Strategy, cost: CostModel) -> None:
    """Raise an error if the strategy reads what only an oracle may, or needs what the network cannot do."""
    needs_blocks = _needs_blocks(strategy) if cost.alike else ""
    if needs_blocks:
        raise UnsupportedError(f"'{strategy.name}' {needs_blocks}")
    if "relevance" in strategy.reads() and strategy.kind != "oracle":
        raise StrategyError(f"'{strategy.name}' needs the relevance mask but is not an oracle")


def _needs_blocks(strategy: Strategy) -> str:
    """Return what the strategy does that no model of one layer with closed-form gradients can do, or ""."""
    steps = "this model is trained by steps in closed form, which cannot do this"
    reasons = {
        f"is trained with the network: {steps}": strategy.trained,
        f"keeps another number of tokens of each sample: {steps}": strategy.adaptive,
        f"changes the number of tokens while training: {steps}": strategy.ramps,
        "lets tokens rest for a block and return: this model has one, and nothing after it": strategy.rests,
        "builds something from the tokens before the first block: this model has one": strategy.starts,
        "changes attention matrices: this model computes its attention in closed form": strategy.changes_maps,
        "has tokens that come back before a later block: this model has one block": strategy.returns is not None,
        "looks at training images before the test: this model shows no gradients of what it is given": strategy.fits(),
    }
    return next((why for why, applies in reasons.items() if applies), "")


def exact(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context without autocast, in which products have the precision of their factors."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()


def full(x: Any) -> Any:
    """Return a tensor in half precision as float32, and anything else unchanged."""
    return x.float() if isinstance(x, Tensor) and x.dtype in (torch.bfloat16, torch.float16) else x


@dataclass(frozen=True, eq=False)
class SplitPass:
    """A split of the data for `observe` and `trained_values` of a network.

    Attributes:
        inputs, labels: (n, ...) and (n,).
        relevance: (n, N), or None if unknown.
        acting: a pass of the strategy over the whole split, or None without a strategy.
    """

    inputs: Tensor
    labels: Tensor
    relevance: Tensor | None
    acting: Pass | None


def kept_only(acting: Pass, cost: CostModel, tokens_in: int, fields: Fields, because: str) -> Tensor | None:
    """Return the (B, M) positions of the tokens kept before a network's only attention layer, or None for all.

    `tokens_in` is the number of tokens before it, and `fields` are those of `Pass.decide`.

    Raises:
        UnsupportedError: the strategy fuses, merges or mixes tokens; `because` is the network's reason.
    """
    acts = acting.acts(0)
    scoring = cost.scoring(acting.requires) if acts else ""
    projected = projections_for(acting.requires, scoring) if acts else ""
    plan = acting.decide(0, fields)
    acting.record_block(tokens_in, early=plan is not None, scoring=scoring, projected=projected)
    if plan is None:
        return None
    if not isinstance(plan, Keep) or not only_removes(plan):
        raise UnsupportedError(f"{because}: tokens can be kept or removed, not fused, merged or mixed")
    return plan.index


def in_chunks(answer: Callable[[Tensor, Tensor], Tensor], rows: int) -> Outputs:
    """Return the function `outputs` of the view, which calls `answer` with at most `rows` rows at a time."""

    @torch.no_grad()
    def outputs(tokens: Tensor, sample: Tensor) -> Tensor:
        pairs = zip(tokens.split(rows), sample.split(rows), strict=True)
        logits = torch.cat([answer(*pair) for pair in pairs])
        return logits if logits.ndim == 2 else logits[:, None]

    return outputs


def _check_fields(names: Collection[str], fields: Fields) -> None:
    """Raise DivergedError if one of these fields is not finite: then a wrong plan is not the strategy's fault."""
    for name in sorted(set(names) & set(fields)):
        field = fields[name]()
        if isinstance(field, Tensor) and not bool(field.isfinite().all()):
            raise DivergedError(f"the network gives the strategy numbers that are not finite, in {name}")


def finite(field: Tensor) -> Tensor:
    """Return a field of the view; raise DivergedError if it is not finite, as that is not the strategy's fault."""
    if not bool(field.isfinite().all()):
        raise DivergedError("training diverged: the network gives the strategy numbers that are not finite")
    return field
