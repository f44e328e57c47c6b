"""The token view: what a strategy may see at its site. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from sparsebench.errors import StrategyError, unknown

if TYPE_CHECKING:
    from torch import Tensor

    from sparsebench.strategy.plans import Place, Plan

Outputs = Callable[["Tensor", "Tensor"], "Tensor"]
"""See `outputs` of `TokenView`."""
RESULTS = frozenset({"tokens", "branch", "prefix"})
"""Those that at the attention site are there only when attention has run."""


class TokenView:
    """What a strategy may see at its site. Fields that it does not declare in `needs` are not computed.

    These are always there:

    Attributes:
        index: (B, N) which patch of the input each token is (its position there).
        sizes: (B, N) how many patches each token stands for; 1 before any merging, 0 for what only fills up the rows
            of a batch whose images kept different numbers of tokens (see `there`).
        weights: (B, N) how much each token counts as a key, see `Mask`; 1 but for masks in training.
        grid: (rows, columns) of the patches, or None where tokens have no places.
        prefix_count: P, the class and register tokens, which come before the N patch tokens and are not among them.
        block: which block it is, from 0; `depth` how many there are.
        training: whether the network is being trained.
        learned: the module that the strategy made for this block, see `Strategy.module`; None where it made none.
        memory: a dictionary for what the strategy wants to know again in later blocks of this forward pass, and in
            `Strategy.loss`; empty at first. What belongs to patches is best kept as (B, patches), see `index`.

    These are there if `needs` declares them:

    Attributes:
        tokens: (B, N, C) the patch tokens; class and register tokens are not among them and always stay.
        prefix: (B, P, C) the class and register tokens, as `tokens`.
        branch: (B, N, C) what this block's attention added to each token.
        queries, keys, values: (B, H, N, C / H) of the patch tokens in this block's attention.
        class_attention: (B, N) attention from the class token to each patch, mean over heads (and over a distillation
            token).
        received_attention: (B, N) attention that each patch receives, mean over heads and queries.
        mean_query_attention: (B, N) attention from the mean of the patches' queries to each patch, mean over heads.
        attention: (B, N) `class_attention` where the model has a class token, else `received_attention`.
        attention_maps: (B, H, P + N, P + N) the whole attention of this block, class and register tokens first.
        previous_attention: (B, N) before a block: `attention` in the block before it, times the tokens that took part
            there. A token that rested there, see `Rest`, has that of the last block in which it took part. Each row of
            attention sums to 1: times the number of tokens, prefix included, it compares between blocks with more of
            them and fewer.
        pixels: (B, N, channels, height, width) of each patch in [0, 1], at the input site; None on inputs without
            pixels.
        outputs: at the input site a function from changed tokens to what the network says of them. It takes (R, N, C)
            tokens and (R,) which of the B samples each row is of, and returns (R, classes) logits, or (R, 1) margins:
            with all tokens kept, in float32 or more, as in a test (no dropout) and without gradients. It runs no more
            than B rows at a time. Each row costs a forward pass, which `Strategy.own_macs` has to count.
        relevance: (B, N) the share of each patch that matters to the label, in [0, 1]. Only for oracles.
    """

    tokens: Tensor
    prefix: Tensor
    branch: Tensor
    queries: Tensor
    keys: Tensor
    values: Tensor
    class_attention: Tensor
    received_attention: Tensor
    mean_query_attention: Tensor
    attention: Tensor
    attention_maps: Tensor
    previous_attention: Tensor
    pixels: Tensor | None
    outputs: Outputs
    relevance: Tensor

    def __init__(
        self,
        given: Mapping[str, Callable[[], Any]],
        *,
        index: Tensor,
        sizes: Tensor,
        weights: Tensor,
        place: Place,
        training: bool,
        grid: tuple[int, int] | None,
        random: Callable[[int, int | None], Tensor],
        learned: Any = None,
        memory: dict[str, Any] | None = None,
    ):
        self._given, self._random = given, random
        self.index, self.sizes, self.weights, self.grid = index, sizes, weights, grid
        self.block, self.depth, self.prefix_count, self.training = place.block, place.depth, place.prefix, training
        self.learned, self.memory = learned, {} if memory is None else memory

    def __getattr__(self, name: str) -> Any:
        """Compute a field when it is first read; say what there is in place of one that there is not."""
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in NEEDS:
            always = {field for field in dir(self) if not field.startswith("_")}
            raise AttributeError(str(unknown("field of the view", name, NEEDS | always)))
        if name not in self._given:
            may = "only kind = 'oracle' may declare it" if name == "relevance" else "add it to `needs`"
            declared = ", ".join(sorted(self._given)) or "nothing"
            raise StrategyError(f"view.{name} was read but not declared: {may} (declared: {declared})")
        value = self._given[name]()
        setattr(self, name, value)
        return value

    @property
    def there(self) -> Tensor:
        """(B, N) booleans, which tokens are an image's own: all, unless images kept different numbers of them."""
        return self.sizes > 0

    def random(self, draw: int = 0, width: int | None = None) -> Tensor:
        """Return (B, N) uniform numbers in [0, 1), or (B, N, width) of them.

        One stream a sample, the same in whatever batch it comes.
        """
        return self._random(draw, width)


NEEDS = frozenset(TokenView.__annotations__)
"""The fields that a strategy may declare."""


class Images:
    """Training images that `Strategy.fit` looks at, or some of them.

    Attributes:
        inputs: (n, 3, height, width) as the network takes them: uint8, or real in [0, 1].
        items: (n,) int64, which of the training images each is.
    """

    def __init__(self, inputs: Tensor, items: Tensor, labels: Tensor | None = None):
        self.inputs, self.items, self._labels = inputs, items, labels

    def __len__(self) -> int:
        return len(self.items)

    @property
    def labels(self) -> Tensor:
        """(n,) class numbers, for a strategy with `fit_labels`.

        Raises:
            StrategyError: it has none of that.
        """
        if self._labels is None:
            raise StrategyError("images.labels was read but not declared: add fit_labels = True to the class")
        return self._labels

    def split(self, size: int) -> Iterator[Images]:
        """Yield the images in their order, so many at a time; the last ones may be fewer."""
        for start in range(0, len(self), size):
            rows = slice(start, start + size)
            yield Images(self.inputs[rows], self.items[rows], None if self._labels is None else self._labels[rows])


class FrozenNetwork(Protocol):
    """The trained network in `Strategy.fit`: as in a test, with weights that have no gradients and must not change."""

    def __call__(self, images: Images, look: Callable[[TokenView], Plan | None] | None = None, /) -> Tensor:
        """Return (n, classes) logits of images, with all tokens there.

        `look` is called with the view wherever the strategy acts, as `Strategy.plan` would be. It returns None, or a
        `Shift` or a `Mask` of real numbers: what it adds to the tokens or weighs them by, with gradients.
        """

    def losses(self, logits: Tensor, labels: Tensor, /) -> Tensor:
        """Return the (n,) losses of logits: those that the network was trained with, without label smoothing."""
