"""The base class of strategies, and the checks of their classes.

This module does not import torch, so that listing strategies stays fast; a strategy file need not import it either.
"""

from __future__ import annotations

import difflib
import inspect
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from sparsebench.errors import StrategyError, UserError, last_line
from sparsebench.strategy import plans as disposals
from sparsebench.strategy.budget import Budget, Convention, Schedule
from sparsebench.strategy.plans import DISPOSALS, Disposal, Place, Plan
from sparsebench.strategy.view import NEEDS, FrozenNetwork, Images, TokenView

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

Kind = Literal["baseline", "deployable", "oracle"]
How = Literal["drop", "fuse", "merge", "mix", "drop+merge", "rest"]
Site = Literal["input", "block", "maps", "attention", "mlp"]
KINDS: tuple[Kind, ...] = ("baseline", "deployable", "oracle")
SITES: tuple[Site, ...] = ("input", "block", "maps", "attention", "mlp")
REDUCTIONS = {"drop": "drop", "fuse": "fuse", "merge": "merge", "squeeze": "mix"}
"""The `how` of each disposal."""


class ModelOutputs(NamedTuple):
    """The outputs of a network or its teacher.

    Attributes:
        logits: (B, classes).
        tokens: (B, N, C) the patch tokens as input of the head.
    """

    logits: Tensor
    tokens: Tensor


@dataclass(frozen=True, eq=False)
class LossInputs:
    """Inputs of `Strategy.loss` after a forward pass in training. They have no labels.

    Attributes:
        student: the outputs of the network.
        teacher: the outputs of the initial dense network for the same images, without gradients. None unless the
            strategy has `distils` and the initial weights, including the output layer, were trained for these classes.
        memory: the dictionary `TokenView.memory`, as filled by the strategy.
        weights: (B, N) the product of the masks, for each token of the student, see `Mask`.
        shares: for each block in which the strategy acts, the requested share of the initial tokens after it: the keep
            rate to the power of the stage, or without a keep rate the share from the token counts.
        macs: the MACs of the budget, as a fraction of the dense MACs.
        spent: returns this fraction for other token counts, one for each of `shares`, in order; with gradients if the
            counts are tensors.
    """

    student: ModelOutputs
    teacher: ModelOutputs | None
    memory: dict[str, Any]
    weights: Tensor
    shares: Mapping[int, float]
    macs: float
    spent: Callable[[Sequence[Any]], Any]


class Published(NamedTuple):
    """A published setting of a method.

    Attributes:
        words: the setting, as a value for --plugin.
        network: the network in the publication.
        gmacs: the published cost of one image, in 10^9 MACs, or None if unknown.
    """

    words: str
    network: str
    gmacs: float | None = None

    def __str__(self) -> str:
        cost = "" if self.gmacs is None else f" {self.gmacs:.1f} G"
        return f"{self.words} · {self.network}{cost}"


class Traits(NamedTuple):
    """The properties of a strategy that turn a budget into token counts; the fields not listed are as in `Strategy`.

    Attributes:
        needs: the fields of the view that the strategy and its disposal read.
        own_macs: its own MACs at a block, including those of its disposal.
        scaled: blocks in which only one token is fused, so that the token count stays the same.
        rests: whether tokens that skip a block are present again after it, see `Rest`. A count then holds in each block
            until the next count, as it does if tokens are removed.
        reads_out: whether the strategy changes the input of the head, and so may read tokens of the last block.
        returns: the block before which the tokens that left come back, see `Strategy.returns`, or None.
        changes_maps: see `Strategy.changes_maps`.
    """

    site: Site
    needs: Collection[str] = ()
    schedule: Schedule = "stages"
    most: float = 1.0
    fuses: bool = False
    own_macs: Callable[[Place], float] = lambda place: 0.0
    scaled: frozenset[int] = frozenset()
    first: float = 0.0
    rests: bool = False
    reads_out: bool = False
    returns: int | None = None
    changes_maps: bool = False


class Strategy(BaseModel):
    """Decides which tokens stay. Subclass it, name it, and write `scores` (or `plan`).

    Fields of the class are its parameters: typed, checked, and settable from the command line.

    Attributes:
        name: the name on the command line.
        revision: increased by the author when the strategy selects other tokens. Name, revision and parameters identify
            the method of a result.
        kind: "baseline", "deployable", or "oracle" for a strategy that reads the relevance mask.
        site: where the strategy acts: "input" (before the first block), or in the scheduled blocks: "block" (before the
            block), "maps" (between the attention matrices and their product with the values), "attention" (between
            attention and MLP) or "mlp" (after the MLP, at the end of the block).
        needs: the fields of the view that the strategy reads; must include `tokens` if plans fuse, merge or mix tokens.
        budgeted: False if the MACs do not depend on the budget; the strategy then has one row.
        trains_only: True if the strategy acts in training only: the budget applies to the training, the test is dense.
        trained: whether the strategy must be trained, together with the network and in the same steps.
        adaptive: whether the number of kept tokens differs between images. Plans then need not keep exactly the
            requested counts. If they depend on the counts, these are calibrated on training images until the mean MACs
            meet the budget.
        distils: whether training starts from the trained dense network of the same task, model, training data and
            repetition, which is also the teacher in `loss`.
        draws_random: whether test results depend on `view.random`, so that a test of the same trained network can be
            repeated; None if unknown, which counts as True, except for strategies of sparsebench.
        fit_images: number of training images for `fit`.
        fit_labels: whether `fit` also gets the labels of these images.
        citation: where the method was published; `bibtex` the same as a BibTeX entry.
        expected_failures: conformance checks that the strategy cannot pass, each with the reason; see
            `sparsebench check`.
        published: the settings of the paper, as values for --plugin, the best-known setting first.
        differs: difference to the published method, in one sentence without a full stop; "" if no difference is known.
        variant: whether, because of what `differs` says, results must not be taken for those of the published method.
        schedule: the default schedule, if the budget does not set one, see `Budget`.
        first: the share of the blocks before the first removal, for schedules that remove tokens in every block.
        convention: the default rule for rounding token counts from a keep rate, see `Budget`.
        most: the largest share of the tokens that can be removed in one block; 0.5 for strategies that merge pairs.
        fuses: whether one of the remaining tokens is a combination of the removed tokens.
        how: for a strategy with `plan`: what happens to the tokens that are not kept; None if not declared. For a
            strategy with `scores`, `disposal` says this. "rest" if and only if the plans are `Rest`.
        disposals: the allowed values of `disposal`. Default: all for a strategy with `scores`, only the default value
            for a strategy with `plan`.
        disposal: what happens to the tokens that the scores do not keep, see `sparsebench.strategy.plans.dispose`.
        returns: before this block the tokens that left come back, unchanged, and all tokens are computed from there on;
            a negative number counts from the end, -1 is the last block. None: they do not come back. Only for tokens
            that are dropped.
        added: parameters that older records lack; they are part of a result only if they differ from their defaults.
            Those of the bases count too.
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
    variant: ClassVar[bool] = False
    expected_failures: ClassVar[Mapping[str, str]] = {}
    schedule: ClassVar[Schedule] = "stages"
    first: ClassVar[float] = 0.0
    convention: ClassVar[Convention] = "power-floor"
    most: ClassVar[float] = 1.0
    fuses: ClassVar[bool] = False
    how: ClassVar[How | None] = None
    disposals: ClassVar[tuple[Disposal, ...]] = ()
    added: ClassVar[frozenset[str]] = frozenset({"returns"})

    disposal: Disposal = "drop"
    returns: int | None = None

    def model_post_init(self, _context: Any) -> None:
        """Refuse a disposal that the strategy does not support."""
        if self.disposal not in (allowed := self.allowed_disposals()):
            raise UserError(
                f"strategy '{self.name}' does not take this disposal of tokens",
                got=f"disposal={self.disposal}",
                allowed=allowed,
                next_step="or leave disposal out",
            )
        if self.returns is not None and not self.only_drops:
            raise UserError(
                f"no token of strategy '{self.name}' can come back, because it does not only drop tokens",
                got=f"returns={self.returns}",
                next_step="use disposal=drop" if type(self).plan is Strategy.plan else "leave returns out",
            )

    @classmethod
    def allowed_disposals(cls) -> tuple[Disposal, ...]:
        """Return the allowed values of `disposal`."""
        default = DISPOSALS if cls.plan is Strategy.plan else (cls.model_fields["disposal"].default,)
        return cls.disposals or default

    def __setattr__(self, name: str, value: Any) -> None:
        """Raise StrategyError, because parameters are frozen; its text is for the author of the strategy."""
        try:
            super().__setattr__(name, value)
        except ValidationError as error:
            raise StrategyError(
                f"'{self.name}' set self.{name}: it keeps no state between calls; use view.memory in a pass"
            ) from error

    def requires(self) -> frozenset[str]:
        """Return the fields of the view that the strategy reads with these parameters; by default `needs`."""
        return self.needs

    def at_site(self) -> Site:
        """Return the site with these parameters; by default `site`."""
        return self.site

    def reads(self) -> frozenset[str]:
        """Return the fields that the strategy and its disposal read."""
        return self.requires() | disposals.NEEDS[self.disposal]

    def _all_own_macs(self, place: Place) -> float:
        """Return the MACs of the strategy's own products and of its disposal."""
        return self.own_macs(place) + disposals.own_macs(self.disposal, place)

    def traits(self) -> Traits:
        """Return the properties that turn a budget into token counts."""
        fuses = self.fuses or self.disposal == "fuse"
        return Traits(
            self.at_site(),
            self.reads(),
            self.schedule,
            self.most,
            fuses,
            self._all_own_macs,
            first=self.first,
            rests=self.rests,
            reads_out=self.reads_out,
            returns=self.returns,
            changes_maps=self.changes_maps,
        )

    def own_macs(self, place: Place) -> float:
        """Return the MACs per image of the strategy's own matrix products at this block; 0 by default.

        The rules are those for a network. Count products of tokens with weights and with each other (similarities, and
        distances with one multiplication per channel), and of matrices with vectors (power iterations), each time they
        are computed. Include the N M C MACs of applying a `Mix`. Do not count element-wise operations, norms, softmax,
        sorting, and the gathers and sums that apply other plans. Attention in `needs` and the products of `disposal`
        are already counted.
        """
        return 0.0

    def module(self, place: Place) -> Module | None:
        """Return the module with the strategy's weights at this block, or None.

        It is trained with the network's weights. Called once per cell for each block in which the strategy acts, with
        seeded random numbers. The view has the module as `learned`. For a strategy with `fit`, the module is not
        trained but filled with the result of `fit`.
        """
        return None

    def fit(self, images: Images, network: FrozenNetwork) -> Mapping[int, Mapping[str, Tensor]]:
        """Return tensors computed from training images: for each block with a `module`, its tensors by name.

        Called once, before the test, with `fit_images` training images and the trained network; never with test images.
        The tensors have the shapes of those of `module`. Not called unless overridden.
        """
        raise NotImplementedError

    @classmethod
    def fits(cls) -> bool:
        """Return whether the strategy has a `fit`."""
        return cls.fit is not Strategy.fit

    def start(self, view: TokenView) -> None:
        """Build what later plans of this forward pass read, such as a graph of the patches, and put it in view.memory.

        Called once in each forward pass, before the first block, with all tokens; not called unless overridden. The
        view has `tokens` and `prefix`, and the fields that are always available. `own_macs` must count the products in
        the first block in which the strategy acts, where `place.tokens` is `place.patches`.
        """
        raise NotImplementedError

    def maps(self, maps: Tensor) -> Tensor:
        """Return the (B, H, T, T) attention matrices that multiply the values, from those of the softmax.

        Called in each block in which the strategy acts inside the block; not called unless overridden. The fields of
        the view are computed from the result.
        """
        raise NotImplementedError

    def auxiliary(self, memory: dict[str, Any]) -> Sequence[Tensor]:
        """Return further (B, classes) logits of a forward pass in training; not called unless overridden.

        The loss of each, by the labels, is added to the loss of the network. A strategy never gets labels itself.
        """
        raise NotImplementedError

    def training_blocks(self, depth: int) -> tuple[int, ...]:
        """Return blocks, from 0 to `depth` - 1, in which it also acts in training, whatever the budget.

        None by default. In a block that is not in the budget, `plan` is called with `keep` = N.
        """
        return ()

    def loss(self, inputs: LossInputs) -> Tensor:
        """Return a scalar that is added to the mean loss of a training step; not called unless overridden."""
        raise NotImplementedError

    def ramp(self, done: float) -> float:
        """Return how far tokens are removed, from 0 (all stay) to 1 (the budget), at the share `done` of the training.

        Not called unless overridden. The test always uses the budget.
        """
        return 1.0

    def inactive(self, teacher: bool) -> tuple[str, ...]:
        """Return the terms of the published loss that are inactive with these parameters, with or without a teacher."""
        return ()

    def network_rate(self, done: float) -> float:
        """Return a factor for the learning rate of the network's own weights at the share `done` of the training.

        1 by default; 0 freezes these weights. The strategy's own weights have the learning rate of the recipe.
        """
        return 1.0

    def read_out(self, memory: dict[str, Any], prefix: Tensor, tokens: Tensor) -> Tensor:
        """Return the (B, P, C) class and register tokens for the head.

        The arguments are these tokens and the (B, N, C) patch tokens after the last block. Not called unless
        overridden; if it is, networks whose head reads no class token are unsupported.
        """
        raise NotImplementedError

    @property
    def has_loss(self) -> bool:
        """Whether the strategy has its own loss."""
        return type(self).loss is not Strategy.loss

    @property
    def starts(self) -> bool:
        """Whether the strategy overrides `start`."""
        return type(self).start is not Strategy.start

    @property
    def changes_maps(self) -> bool:
        """Whether the strategy overrides `maps`."""
        return type(self).maps is not Strategy.maps

    @property
    def has_auxiliary(self) -> bool:
        """Whether the strategy overrides `auxiliary`."""
        return type(self).auxiliary is not Strategy.auxiliary

    @property
    def only_drops(self) -> bool:
        """Whether the tokens that leave are dropped, and the others unchanged, so that they can come back."""
        if self.adaptive or self.rests or not self.budgeted or self.trains_only:
            return False
        return self.disposal == "drop" if type(self).plan is Strategy.plan else self.how == "drop"

    @property
    def ramps(self) -> bool:
        """Whether training starts with more tokens than the budget allows."""
        return type(self).ramp is not Strategy.ramp

    @property
    def weighs_sizes(self) -> bool:
        """Whether later attention weights tokens by their sizes, softmax(qk^T / sqrt(d) + log s).

        This is ToMe's proportional attention (Bolya et al. 2023). The value is that of `proportional`, a parameter or
        class variable of strategies that merge; False without it.
        """
        return bool(getattr(self, "proportional", False))

    @property
    def rests(self) -> bool:
        """Whether tokens rest and return, see `Rest`."""
        return self.how == "rest"

    @property
    def reads_out(self) -> bool:
        """Whether the strategy overrides `read_out`."""
        return type(self).read_out is not Strategy.read_out

    def scores(self, view: TokenView) -> Tensor:
        """Return (B, N) scores; the tokens with the largest scores stay."""
        raise StrategyError(f"strategy '{self.name}' has neither `scores` nor `plan`")

    def plan(self, view: TokenView, keep: int) -> Plan | None:
        """Return a plan that turns the N tokens of the view into `keep` tokens; None leaves all tokens unchanged."""
        shape = tuple(vars(view)["index"].shape)  # not view.index: `check` records it as read by the strategy
        scores = disposals.check_scores(self.scores(view), shape, f"'{self.name}'")
        return disposals.dispose(self.disposal, scores, keep, view)


def default_reduction(cls: type[Strategy]) -> str:
    """Return what a strategy does with tokens: "trained" if it learns this, "truth" for oracles, "-" for dense."""
    if cls.kind == "oracle":
        return "truth"
    if not cls.budgeted:
        return "-"
    if cls.trained:
        return "trained"
    return (cls.how or "") if cls.plan is not Strategy.plan else REDUCTIONS[cls.model_fields["disposal"].default]


def reduction_of(default: str, params: Mapping[str, Any]) -> str:
    """Return what a strategy does with tokens: what its parameter `disposal` says, if it is given.

    Args:
        default: the `default_reduction` of its class.
        params: the parameters that differ from their defaults.
    """
    disposal = str(params.get("disposal"))
    if disposal not in REDUCTIONS or default in ("trained", "truth"):
        return default
    return REDUCTIONS[disposal]


def complaint(candidate: object) -> str | None:
    """Return why the candidate is not a valid strategy class, or None."""
    if isinstance(candidate, Strategy):
        return f"{candidate!r} is an instance of a strategy; return the class, {type(candidate).__name__}"
    if not (isinstance(candidate, type) and issubclass(candidate, Strategy)):
        return f"{candidate!r} is not a subclass of sparsebench.Strategy"
    if problem := complaint_on_fields(candidate, Strategy):
        return problem
    name = getattr(candidate, "name", None)
    if not isinstance(name, str) or not name.isidentifier():
        return f"{candidate.__name__}.name must be a plain identifier, got {name!r}"
    problem = complaint_on_revision(candidate)
    if problem:
        return problem
    faults = itertools.chain(
        _faults_of_site(candidate),
        _faults_of_fit(candidate),
        _faults_of_needs(candidate),
        _faults_of_variant(candidate),
        _faults_of_methods(candidate),
    )
    fault = next(faults, None)
    return None if fault is None else f"{name}{fault}"


def _faults_of_site(cls: type[Strategy]) -> Iterator[str]:
    """Yield what is wrong with the kind and the site of a class, as ends of sentences that begin with its name."""
    if cls.kind not in KINDS:
        yield f".kind must be one of {', '.join(KINDS)}, got {cls.kind!r}"
    if cls.site not in SITES:
        yield f".site must be one of {', '.join(SITES)}, got {cls.site!r}"
    if cls.how == "rest" and (cls.site != "block" or cls.adaptive or cls.trained):
        yield " lets tokens rest, so its site must be 'block', and adaptive and trained must be False"
    if cls.site == "maps" and cls.adaptive:
        yield ".site is 'maps', so adaptive must be False"


def _faults_of_fit(cls: type[Strategy]) -> Iterator[str]:
    """Yield what is wrong with the training of a class, as `_faults_of_site`."""
    if cls.fits() and cls.module is Strategy.module:
        yield " has a fit and no module: write module(place), which returns a module with the tensors of fit"
    if cls.fits() and cls.trained:
        yield " has a fit and is trained: it is one or the other, leave out fit or trained = True"
    count = cls.fit_images
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        yield f".fit_images must be a number of images, 1 or more, got {count!r}"


def _faults_of_needs(cls: type[Strategy]) -> Iterator[str]:
    """Yield what is wrong with the parameters and the needs of a class, as `_faults_of_site`."""
    clash = set(cls.model_fields) & set(Budget.model_fields)
    if clash:
        yield f" has parameters with names of budget options; rename them: {', '.join(sorted(clash))}"
    if not isinstance(cls.needs, set | frozenset):
        yield f".needs must be a set, as frozenset({{'keys'}}), got {cls.needs!r}"
        return
    strange = cls.needs - NEEDS
    if strange:
        yield f".needs has unknown {', '.join(sorted(strange))}; allowed: {', '.join(sorted(NEEDS))}"
    if "relevance" in cls.needs and cls.kind != "oracle":
        yield f" needs the relevance mask, so its kind must be 'oracle', got '{cls.kind}'"
    if "previous_attention" in cls.needs and cls.site != "block":
        yield f" needs previous_attention, so its site must be 'block', got '{cls.site}'"


def _faults_of_variant(cls: type[Strategy]) -> Iterator[str]:
    """Yield that a variant does not say how it differs, as `_faults_of_site`."""
    if cls.variant and not cls.differs:
        yield " is a variant: say in `differs` how it differs from the published method"


def _faults_of_methods(cls: type[Strategy]) -> Iterator[str]:
    """Yield that a class with a budget has no method that decides, as `_faults_of_site`."""
    if not cls.budgeted or cls.plan is not Strategy.plan or cls.scores is not Strategy.scores:
        return
    near = [name for method in ("scores", "plan") for name in difflib.get_close_matches(method, vars(cls), n=1)]
    hint = f"rename {near[0]}" if near else "write one of them"
    yield f" has neither scores(self, view) nor plan(self, view, keep); {hint}"


def complaint_on_fields(cls: type[BaseModel], base: type[BaseModel]) -> str | None:
    """Return why a class cannot have its parameters, or None.

    Parameters are fields of pydantic. A dataclass has an `__init__` of its own, and they cannot have the name of an
    attribute of the base class.
    """
    if data := [each for each in cls.__mro__ if "__dataclass_fields__" in vars(each)]:
        which = "is" if data[0] is cls else f"has the base {data[0].__name__}, which is"
        return f"{cls.__name__} {which} a dataclass; write the parameters as fields of the class, without @dataclass"
    for name, field in cls.model_fields.items():
        if name in base.__class_vars__:
            kind = inspect.formatannotation(field.annotation)
            return f"{cls.__name__}.{name} cannot be a parameter; write {name}: ClassVar[{kind}] = {field.default!r}"
        if hasattr(base, name):
            return f"{cls.__name__} has a parameter '{name}', which is a method of {base.__name__}; rename it"
    return None


def complaint_on_revision(cls: type) -> str | None:
    """Return why the revision of a strategy, task or model class is invalid, or None."""
    revision = getattr(cls, "revision", None)
    if isinstance(revision, int) and not isinstance(revision, bool) and revision >= 1:
        return None
    return f"{getattr(cls, 'name', cls.__name__)}.revision must be a whole number, 1 or more, got {revision!r}"


def place_of(error: BaseException, strategy: Strategy) -> str:
    """Return " (FILE:LINE)", the last line of the strategy's package in the error's traceback; "" if there is none.

    For a StrategyError without such a line, such as an illegal plan, return where `plan` or `scores` begins.
    """
    cls = type(strategy)
    package = cls.__module__.partition(".")[0]
    place = last_line(error, lambda frame: str(frame.f_globals.get("__name__")).partition(".")[0] == package)
    if place or not isinstance(error, StrategyError):
        return place
    return line_of(strategy, "scores" if cls.plan is Strategy.plan else "plan")


def line_of(strategy: Strategy, method: str) -> str:
    """Return " (FILE:LINE)", where a method of a strategy begins; "" if unknown."""
    code = getattr(inspect.unwrap(getattr(type(strategy), method)), "__code__", None)
    return "" if code is None else f" ({Path(code.co_filename).name}:{code.co_firstlineno})"
