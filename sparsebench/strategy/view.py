"""The view, the data that a strategy can read at its site. Imports no torch."""

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
"""Fields that at the attention site exist only after the attention was computed."""


class TokenView:
    """The data that a strategy can read at its site. Fields that are not in `needs` are not computed.

    These attributes are always available:

    Attributes:
        index: (B, N) the patch of each token (its position in the input).
        sizes: (B, N) number of patches that each token represents: 1 before any merging, 0 for padding in batches whose
            images have different numbers of tokens (see `there`).
        weights: (B, N) weight of each token as a key, see `Mask`; 1 except with masks in training.
        grid: (rows, columns) of the patches, or None if tokens have no positions.
        prefix_count: P, number of class and register tokens; the N patch tokens do not include them.
        block: number of the block, from 0; `depth` is the number of blocks.
        training: whether this is a forward pass in training.
        learned: the strategy's module for this block, see `Strategy.module`, or None.
        memory: a dictionary in which the strategy can store values for later blocks of this forward pass and for
            `Strategy.loss`; empty at first. Store values of patches as (B, patches), see `index`.

    These attributes are available if they are in `needs`:

    Attributes:
        tokens: (B, N, C) the patch tokens, without class and register tokens, which always stay.
        prefix: (B, P, C) the class and register tokens, as `tokens`.
        branch: (B, N, C) what this block's attention adds to each token; at the site "mlp" what its MLP adds.
        attention_input: (B, N, C) at the site "attention", the tokens as this block's attention reads them: after its
            norm.
        queries, keys, values: (B, H, N, C / H) of the patch tokens in this block's attention.
        class_attention: (B, N) attention from the class token to each patch, mean over heads (and over a distillation
            token).
        received_attention: (B, N) attention that each patch receives, mean over heads and queries.
        mean_query_attention: (B, N) attention from the mean of the patches' queries to each patch, mean over heads.
        attention: (B, N) `class_attention` if the model has a class token, else `received_attention`.
        attention_maps: (B, H, P + N, P + N) the attention matrices of this block, class and register tokens first.
        previous_attention: (B, N) at the site "block": `attention` in the previous block, times the number of tokens in
            that attention (including the prefix). This product is comparable between blocks with different numbers of
            tokens, because each row of attention sums to 1. A token that rested there, see `Rest`, has the value of the
            last block in which it took part.
        pixels: (B, N, channels, height, width) the pixels of each patch in [0, 1], at the site "input"; None for inputs
            without pixels.
        outputs: at the site "input", a function that runs the network on changed tokens. Its arguments are (R, N, C)
            tokens and the (R,) sample numbers of the rows. It returns (R, classes) logits, or (R, 1) margins, with all
            tokens kept, in float32 or more, in evaluation mode and without gradients. It runs at most B rows at a time.
            Each row needs a forward pass, which `Strategy.own_macs` must count.
        relevance: (B, N) the share of each patch that matters to the label, in [0, 1]. Only for oracles.
    """

    tokens: Tensor
    prefix: Tensor
    branch: Tensor
    attention_input: Tensor
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
        fields: Mapping[str, Callable[[], Any]],
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
        self._fields, self._random = fields, random
        self.index = index
        self.sizes = sizes
        self.weights = weights
        self.grid = grid
        self.block = place.block
        self.depth = place.depth
        self.prefix_count = place.prefix
        self.training = training
        self.learned, self.memory = learned, {} if memory is None else memory

    def __getattr__(self, name: str) -> Any:
        """Compute a field when it is first read; the error for a missing or undeclared field says what is allowed."""
        if name not in NEEDS:
            attributes = {field for field in dir(self) if not field.startswith("_")}
            raise AttributeError(str(unknown("field of the view", name, NEEDS | attributes)))
        if name not in self._fields:
            may = "only kind = 'oracle' may declare it" if name == "relevance" else "add it to `needs`"
            names = ", ".join(sorted(self._fields)) or "nothing"
            raise StrategyError(f"view.{name} was read but not declared: {may} (declared: {names})")
        value = self._fields[name]()
        setattr(self, name, value)
        return value

    @property
    def there(self) -> Tensor:
        """(B, N) booleans, False for padding, which exists if images have different numbers of tokens."""
        return self.sizes > 0

    def rows(self, values: Tensor) -> Tensor:
        """Return the rows of the current tokens, (B, N, ...), from (B, patches, ...) values of all patches.

        A token that represents several patches has the values of the first, see `index`. Padding has those of patch 0.
        """
        index = self.index.clamp(min=0)
        shape = (*index.shape, *values.shape[2:])
        return values.gather(1, index.reshape(*index.shape, *[1] * (values.ndim - 2)).expand(shape))

    def pairs(self, graph: Tensor) -> Tensor:
        """Return the (B, N, N) part of a (B, patches, patches) graph that joins the current tokens, as `rows`."""
        return self.rows(self.rows(graph).mT).mT

    def random(self, draw: int = 0, width: int | None = None) -> Tensor:
        """Return (B, N) uniform numbers in [0, 1), or (B, N, width) of them.

        Each sample has its own stream, independent of its batch.
        """
        return self._random(draw, width)


NEEDS = frozenset(TokenView.__annotations__)
"""The fields that a strategy may declare."""


class Images:
    """Training images for `Strategy.fit`, or a part of them.

    Attributes:
        inputs: (n, 3, height, width) inputs of the network: uint8, or real numbers in [0, 1].
        items: (n,) int64 number of each image among the training images.
    """

    def __init__(self, inputs: Tensor, items: Tensor, labels: Tensor | None = None):
        self.inputs, self.items, self._labels = inputs, items, labels

    def __len__(self) -> int:
        return len(self.items)

    @property
    def labels(self) -> Tensor:
        """(n,) class numbers, for a strategy with `fit_labels`.

        Raises:
            StrategyError: the strategy has no `fit_labels`.
        """
        if self._labels is None:
            raise StrategyError("images.labels was read but not declared: add fit_labels = True to the class")
        return self._labels

    def split(self, size: int) -> Iterator[Images]:
        """Yield batches of this size, in order; the last batch may be smaller."""
        for start in range(0, len(self), size):
            rows = slice(start, start + size)
            yield Images(self.inputs[rows], self.items[rows], None if self._labels is None else self._labels[rows])


class FrozenNetwork(Protocol):
    """The trained network in `Strategy.fit`, in evaluation mode; a copy whose weights have no gradients."""

    def __call__(self, images: Images, look: Callable[[TokenView], Plan | None] | None = None, /) -> Tensor:
        """Return (n, classes) logits of images, with all tokens kept.

        `look` is called with the view wherever the strategy acts, like `Strategy.plan`. It returns None, or, with
        gradients, a `Shift` that is added to the tokens or a real-valued `Mask` that weights them.
        """

    def losses(self, logits: Tensor, labels: Tensor, /) -> Tensor:
        """Return the (n,) losses of logits, with the loss of the network's training but without label smoothing."""
