"""All that the author of a strategy imports: Strategy, the token view it sees, the plans it returns.

This module imports no torch, so that listing strategies stays fast; a strategy file need not import it either.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeAlias

from pydantic import BaseModel, ConfigDict

from sparsebench.errors import StrategyError, UserError

if TYPE_CHECKING:
    from torch import Tensor

Kind = Literal["baseline", "deployable", "oracle"]
Disposal = Literal["drop", "fuse", "merge", "squeeze"]
Schedule = Literal["stages", "every", "late"]
Site = Literal["input", "attention", "block"]
KINDS: tuple[Kind, ...] = ("baseline", "deployable", "oracle")
SITES: tuple[Site, ...] = ("input", "attention", "block")
NEEDS = frozenset(
    {"tokens", "branch", "queries", "keys", "values", "attention", "class_attention", "received_attention",
     "mean_query_attention", "attention_maps", "pixels", "relevance"}
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Keep:
    """Keep some tokens and drop the others, or fuse the others into one more token.

    Attributes:
        index: (B, M) integer positions of the kept tokens, each at most once, in any order.
        fuse: (B, N) weights, or None. With weights w the tokens not kept become one last token sum_i w_i x_i
            (EViT, Liang et al. 2022), so that M + 1 tokens go on.
        scores: (B, N) what the choice was made by, larger is kept; only used to measure the selection.
    """

    index: Tensor
    fuse: Tensor | None = None
    scores: Tensor | None = None

    @classmethod
    def top(cls, scores: Tensor, keep: int) -> Keep:
        """Keep the `keep` best of the (B, N) scores. Equal scores are decided by position: lower goes first."""
        order = scores.sort(dim=-1, descending=True, stable=True).indices
        return cls(index=order[:, :keep], scores=scores)


@dataclass(frozen=True, eq=False)
class Merge:
    """Send each token to a group; a group's token is the size-weighted mean of its members.

    Attributes:
        target: (B, N) integer group of each token, in 0..M-1, or -1 to drop it; every group has a member.
        scores: as in `Keep`.
        weight: (B, N), or None. With weights w a group's token is sum_i w_i x_i over its members instead of their mean.
        sizes: (B, N) what each token adds to the size of its group, or None for its own size.
    """

    target: Tensor
    scores: Tensor | None = None
    weight: Tensor | None = None
    sizes: Tensor | None = None

    @classmethod
    def into(cls, host: Tensor, scores: Tensor | None = None) -> Merge:
        """Merge each token into the one at position host (B, N). A token that is its own host goes on; order stays."""
        import torch

        stays = host == torch.arange(host.shape[1], device=host.device)
        return cls((stays.cumsum(dim=1) - 1).gather(1, host), scores)


@dataclass(frozen=True, eq=False)
class Mix:
    """Make each new token a weighted sum of the old ones.

    Attributes:
        weight: (B, M, N) real weights.
        scores: as in `Keep`.
    """

    weight: Tensor
    scores: Tensor | None = None


Plan: TypeAlias = Keep | Merge | Mix
"""What happens to the tokens: a linear map from N to M tokens. None in its place means that nothing happens."""


class TokenView:
    """What a strategy may see at its site. Fields that it does not declare in `needs` are not computed.

    Attributes:
        index: (B, N) which patch of the input each token is (its position there).
        sizes: (B, N) how many patches each token stands for; 1 before any merging.
        grid: (rows, columns) of the patches, or None where tokens have no places.
        block: which block it is, from 0; `depth` how many there are.
        training: whether the network is being trained.
    """

    def __init__(
        self,
        given: Mapping[str, Callable[[], Tensor | None]],
        *,
        index: Tensor,
        sizes: Tensor,
        block: int,
        depth: int,
        training: bool,
        grid: tuple[int, int] | None,
        random: Callable[[int], Tensor],
    ):
        self._given, self._seen, self._random = given, {}, random  # type: ignore[var-annotated]
        self.index, self.sizes, self.grid = index, sizes, grid
        self.block, self.depth, self.training = block, depth, training

    def _get(self, field: str) -> Tensor:
        if field not in self._given:
            raise StrategyError(
                f"view.{field} was read but not declared: add it to `needs` (declared: "
                f"{', '.join(sorted(self._given)) or 'nothing'})"
            )
        if field not in self._seen:
            self._seen[field] = self._given[field]()
        return self._seen[field]

    @property
    def tokens(self) -> Tensor:
        """(B, N, C) the patch tokens; class and register tokens are not among them and always stay."""
        return self._get("tokens")

    @property
    def branch(self) -> Tensor:
        """(B, N, C) what this block's attention added to each token."""
        return self._get("branch")

    @property
    def queries(self) -> Tensor:
        """(B, H, N, C / H) queries of the patch tokens in this block's attention."""
        return self._get("queries")

    @property
    def keys(self) -> Tensor:
        """(B, H, N, C / H) keys of the patch tokens in this block's attention."""
        return self._get("keys")

    @property
    def values(self) -> Tensor:
        """(B, H, N, C / H) values of the patch tokens in this block's attention."""
        return self._get("values")

    @property
    def class_attention(self) -> Tensor:
        """(B, N) attention from the class token to each patch, mean over heads (and over a distillation token)."""
        return self._get("class_attention")

    @property
    def received_attention(self) -> Tensor:
        """(B, N) attention that each patch receives, mean over heads and queries."""
        return self._get("received_attention")

    @property
    def mean_query_attention(self) -> Tensor:
        """(B, N) attention from the mean of the patches' queries to each patch, mean over heads."""
        return self._get("mean_query_attention")

    @property
    def attention_maps(self) -> Tensor:
        """(B, H, P + N, P + N) the whole attention of this block, class and register tokens first."""
        return self._get("attention_maps")

    @property
    def attention(self) -> Tensor:
        """(B, N) `class_attention` where the model has a class token, else `received_attention`."""
        return self._get("attention")

    @property
    def pixels(self) -> Tensor | None:
        """(B, N, channels, height, width) of each patch in [0, 1], at the input site; None on inputs without pixels."""
        return self._get("pixels")

    @property
    def relevance(self) -> Tensor:
        """(B, N) the share of each patch that matters to the label, in [0, 1]. Only for oracles."""
        return self._get("relevance")

    def random(self, draw: int = 0) -> Tensor:
        """Return (B, N) uniform numbers in [0, 1): one stream a sample, the same in whatever batch it comes."""
        return self._random(draw)


class Habits(NamedTuple):
    """What of a strategy decides how a budget becomes token counts; see `Strategy`.

    Attributes:
        site: where it acts.
        needs: the fields of the view that it reads.
        schedule: its own.
        most: the largest share of the tokens that can leave at once.
        fuses: whether one token more goes on, in which those that left are fused.
    """

    site: str
    needs: Collection[str] = ()
    schedule: Schedule = "stages"
    most: float = 1.0
    fuses: bool = False


class Strategy(BaseModel):
    """Decides which tokens stay. Subclass it, name it, and write `scores` (or `plan`).

    Fields of the class are its parameters: typed, checked, and settable from the command line.

    Attributes:
        name: what users type.
        kind: "baseline", "deployable", or "oracle" for one that reads the relevance mask.
        site: where it acts: "input" (before the first block), "attention" (between attention and MLP of the
            scheduled blocks) or "block" (before the scheduled blocks).
        needs: the fields of the view that it reads; `tokens` among them if its plans fuse, merge or mix them.
        budgeted: False for one that spends the same whatever the budget, and so has one row.
        trains_only: True for one that acts in training only: the budget is the training's, the test is dense.
        trained: whether it has learned parameters of its own.
        citation: where the method was published; `bibtex` the same as a BibTeX entry.
        expected_failures: conformance checks that it cannot pass, each with the reason; see `sparsebench check`.
        schedule: in which blocks it acts where the budget does not say, see `Budget`.
        most: the largest share of the tokens that it can remove at once; 0.5 for those that merge pairs.
        fuses: whether one of the tokens that go on is made of those that do not.
        proportional: whether attention after it weighs a token by its size, softmax(qk^T / sqrt(d) + log s), as in
            ToMe (Bolya et al. 2023).
        disposal: what becomes of the tokens that its scores do not keep, see `sparsebench.disposal.dispose`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: ClassVar[str]
    kind: ClassVar[Kind] = "deployable"
    site: ClassVar[Site] = "input"
    needs: ClassVar[frozenset[str]] = frozenset({"tokens"})
    budgeted: ClassVar[bool] = True
    trains_only: ClassVar[bool] = False
    trained: ClassVar[bool] = False
    citation: ClassVar[str] = ""
    bibtex: ClassVar[str] = ""
    expected_failures: ClassVar[Mapping[str, str]] = {}
    schedule: ClassVar[Schedule] = "stages"
    most: ClassVar[float] = 1.0
    fuses: ClassVar[bool] = False
    proportional: ClassVar[bool] = False

    disposal: Disposal = "drop"

    def model_post_init(self, _context: Any) -> None:
        """Refuse a disposal for a strategy that makes its plans itself."""
        if self.disposal != "drop" and type(self).plan is not Strategy.plan:
            raise UserError(
                f"strategy '{self.name}' decides itself what becomes of tokens", got=f"disposal={self.disposal}",
                next_step="leave disposal out",
            )  # fmt: skip

    def requires(self) -> frozenset[str]:
        """Return the fields of the view it reads with these parameters; by default `needs`."""
        return self.needs

    def reads(self) -> frozenset[str]:
        """Return what it requires, and what its disposal needs."""
        from sparsebench.disposal import NEEDS

        return self.requires() | NEEDS[self.disposal]

    def habits(self) -> Habits:
        """Return what of it decides how a budget becomes token counts."""
        fuses = self.fuses or self.disposal == "fuse"
        return Habits(self.site, self.reads(), self.schedule, self.most, fuses)

    def scores(self, view: TokenView) -> Tensor:
        """Return (B, N) scores; the tokens with the largest stay."""
        raise StrategyError(f"strategy '{self.name}' has neither `scores` nor `plan`")

    def plan(self, view: TokenView, keep: int) -> Plan | None:
        """Return what happens to the view's N tokens so that `keep` go on; None leaves them all as they are."""
        from sparsebench.disposal import dispose

        return dispose(self.disposal, self.scores(view), keep, view)


def complaint(candidate: object) -> str | None:
    """Return what is wrong with a would-be strategy class, or None."""
    if not (isinstance(candidate, type) and issubclass(candidate, Strategy)):
        return f"{candidate!r} is not a subclass of sparsebench.Strategy"
    name = getattr(candidate, "name", None)
    if not isinstance(name, str) or not name.isidentifier():
        return f"{candidate.__name__}.name must be a plain identifier, got {name!r}"
    if candidate.kind not in KINDS:
        return f"{name}.kind must be one of {', '.join(KINDS)}, got {candidate.kind!r}"
    if candidate.site not in SITES:
        return f"{name}.site must be one of {', '.join(SITES)}, got {candidate.site!r}"
    if extra := sorted(set(candidate.needs) - NEEDS):
        return f"{name}.needs has unknown {', '.join(extra)}; allowed: {', '.join(sorted(NEEDS))}"
    if "relevance" in candidate.needs and candidate.kind != "oracle":
        return f"{name} needs the relevance mask, so its kind must be 'oracle', got '{candidate.kind}'"
    return None
