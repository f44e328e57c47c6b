"""What a strategy is: what it says of itself, and what its author writes.

This module imports no torch, so that listing strategies stays fast; a strategy file need not import it either.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from sparsebench.errors import StrategyError, UserError
from sparsebench.strategy import disposal as disposals
from sparsebench.strategy.disposal import DISPOSALS, Disposal
from sparsebench.strategy.plans import Place, Plan
from sparsebench.strategy.spec import parts_of
from sparsebench.strategy.view import FrozenNetwork, Images, TokenView

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

Kind = Literal["baseline", "deployable", "oracle"]
How = Literal["drop", "fuse", "merge", "mix", "drop+merge", "rest"]
Schedule = Literal["stages", "every", "late"]
Site = Literal["input", "attention", "block"]
Convention = Literal["power-floor", "compound-ceil"]
KINDS: tuple[Kind, ...] = ("baseline", "deployable", "oracle")
SITES: tuple[Site, ...] = ("input", "attention", "block")


class ModelOutputs(NamedTuple):
    """What came out, for a network or its teacher.

    Attributes:
        logits: (B, classes).
        tokens: (B, N, C) the patch tokens as the head would read them.
    """

    logits: Tensor
    tokens: Tensor


@dataclass(frozen=True, eq=False)
class LossInputs:
    """What a strategy may learn from after a forward pass in training; see `Strategy.loss`. Labels are not in it.

    Attributes:
        student: what came out.
        teacher: what the network it began as gives for the same images with nothing acting, without gradients; None
            unless the strategy asks for it (`distils`) and the network began with weights, the output layer's among
            them, that were trained for these classes.
        memory: what the strategy left in `TokenView.memory`.
        weights: (B, N) how much each of the student's tokens counts, see `Mask`.
        shares: for each block in which it acts, the share of the first tokens that was asked for after it: the keep
            rate to the power of the stage, or where there is none the share of the counts.
        macs: the fraction of the dense MACs that the budget comes to.
        spent: returns the fraction that one has spent when other numbers of tokens go on, one for each of `shares`, in
            order; with gradients where they are tensors.
    """

    student: ModelOutputs
    teacher: ModelOutputs | None
    memory: dict[str, Any]
    weights: Tensor
    shares: Mapping[int, float]
    macs: float
    spent: Callable[[Sequence[Any]], Any]


class Published(NamedTuple):
    """Words that give a published method.

    Attributes:
        words: as a user types them after --plugin.
        network: what it was published on.
        gmacs: what its authors say that an image costs there, in 10^9 MACs, or None where that is not known here.
    """

    words: str
    network: str
    gmacs: float | None = None

    def __str__(self) -> str:
        cost = "" if self.gmacs is None else f" {self.gmacs:.1f} G"
        return f"{self.words} · {self.network}{cost}"


class Traits(NamedTuple):
    """What of a strategy decides how a budget becomes token counts; see `Strategy`.

    Attributes:
        site: where it acts.
        needs: the fields of the view that it reads.
        schedule: its own.
        most: the largest share of the tokens that can leave at once.
        fuses: whether one token more goes on, in which those that left are fused.
        own_macs: the MACs of its own that a choice costs, those of its disposal among them.
        scaled: blocks in which one token alone is fused, so that as many go on as came.
        first: the share of the blocks that come before the first in which it acts, where tokens leave every block.
        rests: whether tokens that do not take part in a block are there again after it, see `Rest`. A count then holds
            in each block until the next one, as it does where tokens leave.
    """

    site: str
    needs: Collection[str] = ()
    schedule: Schedule = "stages"
    most: float = 1.0
    fuses: bool = False
    own_macs: Callable[[Place], float] = lambda place: 0.0
    scaled: frozenset[int] = frozenset()
    first: float = 0.0
    rests: bool = False


class Strategy(BaseModel):
    """Decides which tokens stay. Subclass it, name it, and write `scores` (or `plan`).

    Fields of the class are its parameters: typed, checked, and settable from the command line.

    Attributes:
        name: what users type.
        revision: raised by its author when what it chooses changes: with the name and the parameters it says which
            method a result is of.
        kind: "baseline", "deployable", or "oracle" for one that reads the relevance mask.
        site: where it acts: "input" (before the first block), "attention" (between attention and MLP of the
            scheduled blocks) or "block" (before the scheduled blocks).
        needs: the fields of the view that it reads; `tokens` among them if its plans fuse, merge or mix them.
        budgeted: False for one that spends the same whatever the budget, and so has one row.
        trains_only: True for one that acts in training only: the budget is the training's, the test is dense.
        trained: whether it must be trained: with the network it acts on, in the same steps.
        adaptive: whether each image keeps as many tokens as it needs: its plans are not held to the counts, and where
            they follow them, the counts are calibrated on training images until the mean cost is the budget's.
        distils: whether it begins with the trained dense network of the same task, model, training data and repetition,
            which its loss compares with.
        draws_random: whether what it does in a test depends on `view.random`, so that a trained network that is tested
            again with it is another test; None where it does not say: then it may.
        fit_images: how many training images it looks at before the test, of one that has a `fit`.
        fit_labels: whether it is told their labels.
        citation: where the method was published; `bibtex` the same as a BibTeX entry.
        expected_failures: conformance checks that it cannot pass, each with the reason; see `sparsebench check`.
        published: the words that give the published method, the best-known setting first.
        differs: how it differs from the published method, in one sentence without its end; "" where nothing is known.
        schedule: in which blocks it acts where the budget does not say, see `Budget`.
        first: the share of the blocks that come before the first in which it acts, where tokens leave every block.
        convention: how a keep rate becomes counts where the user does not say, see `Budget`.
        most: the largest share of the tokens that it can remove at once; 0.5 for those that merge pairs.
        fuses: whether one of the tokens that go on is made of those that do not.
        how: how one that makes its plans itself disposes of tokens; None where it does not say. Of others the
            disposal says it. One with "rest" returns `Rest` plans, and it alone.
        disposals: those that it takes; by default all with `scores`, and only its own default where it makes its
            plans itself.
        disposal: what becomes of the tokens that its scores do not keep, see `sparsebench.strategy.disposal.dispose`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: ClassVar[str]
    revision: ClassVar[int] = 1
    kind: ClassVar[Kind] = "deployable"
    site: ClassVar[Site] = "input"
    needs: ClassVar[frozenset[str]] = frozenset({"tokens"})
    budgeted: ClassVar[bool] = True
    trains_only: ClassVar[bool] = False
    trained: ClassVar[bool] = False
    adaptive: ClassVar[bool] = False
    distils: ClassVar[bool] = False
    draws_random: ClassVar[bool | None] = None
    fit_images: ClassVar[int] = 256
    fit_labels: ClassVar[bool] = False
    citation: ClassVar[str] = ""
    bibtex: ClassVar[str] = ""
    published: ClassVar[tuple[Published, ...]] = ()
    differs: ClassVar[str] = ""
    expected_failures: ClassVar[Mapping[str, str]] = {}
    schedule: ClassVar[Schedule] = "stages"
    first: ClassVar[float] = 0.0
    convention: ClassVar[Convention] = "power-floor"
    most: ClassVar[float] = 1.0
    fuses: ClassVar[bool] = False
    how: ClassVar[How | None] = None
    disposals: ClassVar[tuple[Disposal, ...]] = ()

    disposal: Disposal = "drop"

    def model_post_init(self, _context: Any) -> None:
        """Refuse a disposal that the strategy does not take."""
        if self.disposal not in (allowed := self.allowed_disposals()):
            raise UserError(
                f"strategy '{self.name}' does not take this disposal of tokens", got=f"disposal={self.disposal}",
                allowed=allowed, next_step="or leave disposal out",
            )  # fmt: skip

    @classmethod
    def allowed_disposals(cls) -> tuple[Disposal, ...]:
        """Return what `disposal` may be."""
        default = DISPOSALS if cls.plan is Strategy.plan else (cls.model_fields["disposal"].default,)
        return cls.disposals or default

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse to be changed, in words of its author's."""
        try:
            super().__setattr__(name, value)
        except ValidationError as error:
            raise StrategyError(
                f"'{self.name}' set self.{name}: it keeps nothing between calls; use view.memory in a pass"
            ) from error

    def requires(self) -> frozenset[str]:
        """Return the fields of the view it reads with these parameters; by default `needs`."""
        return self.needs

    def reads(self) -> frozenset[str]:
        """Return what it requires, and what its disposal needs."""
        return self.requires() | disposals.NEEDS[self.disposal]

    def _all_own_macs(self, place: Place) -> float:
        """Return the MACs of its own products and of its disposal's."""
        return self.own_macs(place) + disposals.own_macs(self.disposal, place)

    def traits(self) -> Traits:
        """Return what of it decides how a budget becomes token counts."""
        fuses = self.fuses or self.disposal == "fuse"
        macs, first = self._all_own_macs, self.first
        return Traits(self.site, self.reads(), self.schedule, self.most, fuses, macs, first=first, rests=self.rests)

    def own_macs(self, place: Place) -> float:
        """Return the MACs an image of the products that it makes itself at that place; 0 by default.

        What counts is what counts in a network: products of tokens with weights, with each other (similarities, and
        distances, a multiplication a channel) and of matrices with vectors (power iterations), as often as they are
        really made, the N M C of carrying out a `Mix` among them. Element-wise work, norms, softmax, sorting, and the
        gathers and sums that carry out other plans do not. Attention that it asks for in `needs` is counted already,
        and so is what its `disposal` multiplies.
        """
        return 0.0

    def module(self, place: Place) -> Module | None:
        """Return the module that it learns at that place, or None; it is trained with the network's weights.

        It is made once a cell for each block it acts in, from seeded random numbers, and is there as `view.learned`.
        That of a strategy with a `fit` is not trained: it holds what `fit` returns.
        """
        return None

    def fit(self, images: Images, network: FrozenNetwork) -> Mapping[int, Mapping[str, Tensor]]:
        """Return what it learns from some training images: for each block with a `module`, the tensors of that by name.

        It is called once, with `fit_images` of the training images and the trained network, before anything is tested;
        never with test images. The tensors have the shapes that `module` gave them. Not called unless it is overridden.
        """
        raise NotImplementedError

    @classmethod
    def fits(cls) -> bool:
        """Return whether it looks at training images before the test."""
        return cls.fit is not Strategy.fit

    def training_blocks(self, depth: int) -> tuple[int, ...]:
        """Return blocks in which it acts in training whatever the budget's are, from 0 to `depth` - 1; none by default.

        In those that are not the budget's its plan is asked to let all tokens go on that are there.
        """
        return ()

    def loss(self, inputs: LossInputs) -> Tensor:
        """Return a scalar that is added to the mean loss of a training step; not called unless it is overridden."""
        raise NotImplementedError

    def ramp(self, done: float) -> float:
        """Return the share of the way from all tokens to the budget's when the share `done` of the training is done.

        Not called unless it is overridden. In the test it is the budget.
        """
        return 1.0

    def inactive(self, teacher: bool) -> tuple[str, ...]:
        """Return which published terms of its loss are not in it with these parameters, with a teacher or without."""
        return ()

    def network_rate(self, done: float) -> float:
        """Return the factor of the step size of the network's own weights when the share `done` of training is done.

        1 by default. At 0 they stay as they are. What it learns itself has the recipe's step size.
        """
        return 1.0

    def read_out(self, memory: dict[str, Any], prefix: Tensor, tokens: Tensor) -> Tensor:
        """Return the (B, P, C) class and register tokens that the head is to read.

        It is given those after the last block, and the (B, N, C) patch tokens that are there then. Not called unless it
        is overridden; then a network whose head reads no class token is unsupported.
        """
        raise NotImplementedError

    @property
    def has_loss(self) -> bool:
        """Whether it has a loss of its own."""
        return type(self).loss is not Strategy.loss

    @property
    def ramps(self) -> bool:
        """Whether it begins its training with more tokens than the budget's."""
        return type(self).ramp is not Strategy.ramp

    @property
    def weighs_sizes(self) -> bool:
        """Whether attention after it weighs a token by its size, softmax(qk^T / sqrt(d) + log s).

        ToMe's proportional attention (Bolya et al. 2023). It is what `proportional` says, a parameter or class variable
        of a strategy that merges; without one, no.
        """
        return bool(getattr(self, "proportional", False))

    @property
    def rests(self) -> bool:
        """Whether its tokens rest and return, see `Rest`."""
        return self.how == "rest"

    @property
    def reads_out(self) -> bool:
        """Whether it has a say in what the head reads."""
        return type(self).read_out is not Strategy.read_out

    def scores(self, view: TokenView) -> Tensor:
        """Return (B, N) scores; the tokens with the largest stay."""
        raise StrategyError(f"strategy '{self.name}' has neither `scores` nor `plan`")

    def plan(self, view: TokenView, keep: int) -> Plan | None:
        """Return what happens to the view's N tokens so that `keep` go on; None leaves them all as they are."""
        shape = tuple(vars(view)["index"].shape)  # not by attribute: `check` watches what the strategy reads
        scores = disposals.check_scores(self.scores(view), shape, f"'{self.name}'")
        return disposals.dispose(self.disposal, scores, keep, view)


DISPOSED = {"drop": "drop", "fuse": "fuse", "merge": "merge", "squeeze": "mix"}
"""How tokens are disposed of, by the disposals."""


def how_of(cls: type[Strategy]) -> str:
    """Return how a strategy disposes of tokens: "trained" where it learns it, "truth" for oracles, "-" for dense."""
    if cls.kind == "oracle" or not cls.budgeted:
        return "truth" if cls.kind == "oracle" else "-"
    if cls.trained:
        return "trained"
    return (cls.how or "") if cls.plan is not Strategy.plan else DISPOSED[cls.model_fields["disposal"].default]


def how_of_label(how: str, label: str) -> str:
    """Return how a strategy with parameters disposes of tokens: as its `disposal`, if it has one there."""
    given = parts_of(label)[1].get("disposal")
    return how if given not in DISPOSED or how in ("trained", "truth") else DISPOSED[given]
