"""The interface of models and networks. Does not import torch before a model is built."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, Self

from pydantic import BaseModel, ConfigDict

from sparsebench.errors import UnsupportedError, UserError
from sparsebench.tasks.base import Data, Inputs, Locations, Task

if TYPE_CHECKING:
    from torch import Tensor

    from sparsebench.measure.cost import CostModel
    from sparsebench.models.actor import Pass

HEADS = ("head.", "head_dist.")
"""Prefixes of the names of the output layers' weights."""

TRANSFORMERS = "hf:"
"""Beginning of the names of models of the transformers library: hf:FOLDER, or hf:USER/NAME."""


class Start(NamedTuple):
    """The trained weights that a network starts from.

    Attributes:
        name: their name, or a name from their content; "" without trained weights.
        head: whether they include the output layer, so that the outputs are meaningful before training.
    """

    name: str = ""
    head: bool = False


class Network(Protocol):
    """A built model. It is called with inputs and, if a strategy acts, with a `Pass`.

    It may have more methods, all optional:

    - `trainer(actor, samples, recipe)` returns its own trainer, see `training.steps.Steps`, or None for automatic
      differentiation. The actor is None if no strategy acts.
    - `train_together(trainings)`, a static method, trains several networks in one program, each to its end or
      to its failure. Networks that it does not train are then trained one by one.
    - `drop_head(pooling)` makes the features that a probe learns from its outputs, see `record.Probe`.
    - `patches(inputs, acting)` returns the (B, M, C) patch tokens that remain at the end, for probes of patches.
    - `observe(train, test)` measures what `shows` names, with units, during training. `trained_values(first, test)`
      returns what is stored of the trained weights; `first` are the initial ones.
    """

    @property
    def grid(self) -> tuple[int, int] | None:
        """(rows, columns) of the patches, or None if tokens have no positions."""

    @property
    def cost(self) -> CostModel:
        """The cost model: MACs in closed form."""

    @property
    def attention_source(self) -> str:
        """Source of the view's field `attention`: "class", "class+distillation" or "received"."""

    @property
    def module(self) -> Any:
        """The torch module that holds the weights."""

    def __call__(self, inputs: Tensor, acting: Pass | None = None, /) -> Tensor:
        """Return (B, classes) logits, or (B,) margins."""


class Model(BaseModel):
    """Builds networks on which strategies can act. The fields are the parameters.

    Attributes:
        name: the name on the command line.
        inputs: "tokens" or "images"; the task must have the same.
        positional: the parameter that NAME:VALUE sets, if any.
        together: whether several networks train faster together on a GPU, see `Network`.
        added: parameters that cells of older records do not have; cells do not contain them if they have their
            defaults.
        revision: increase it if the outputs change; the cells are then run again.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: ClassVar[str]
    inputs: ClassVar[Inputs]
    positional: ClassVar[str | None] = None
    together: ClassVar[bool] = False
    added: ClassVar[frozenset[str]] = frozenset()
    revision: ClassVar[int] = 1

    def check(self, task: Task) -> None:
        """Raise UserError if the model cannot be built for the task."""

    def with_weights(self, locations: Locations) -> Self:
        """Return the model with the parameters that follow from its trained weights, if they are at a location."""
        return self

    def located(self, locations: Locations) -> Self:
        """Return the model with the files that it needs to be built, if they are at a location."""
        return self

    def cut(self) -> Mapping[str, Any]:
        """Return the transform of pictures for its trained weights: canvas, crop, resize, filter, as far as known."""
        return {}

    def patch_size(self) -> int | None:
        """Return the side in pixels of its patches, for a task that takes its sizes from them; None if unknown."""
        return None

    def first_model(self) -> Model:
        """Return the model for pre-training, if the task has pre-training."""
        return self

    def cost(self, task: Task, classes: int) -> CostModel:
        """Return the cost model of the network for a task's data, without building the network.

        Args:
            task: the task; its parameters give the number and the width of the tokens, or the pixels of the images.
            classes: number of classes of the data.

        Raises:
            UserError: the model cannot be built for the task, or the cost is known only after building.
        """
        raise UserError(f"the cost of model '{self.name}' is not known from its parameters")

    def build(self, data: Data, repetition: int) -> Network:
        """Return the network for these data with the initial weights of this repetition."""
        raise NotImplementedError(f"model '{self.name}' must define build(data, repetition)")

    def classes(self, locations: Locations) -> int | None:
        """Return the number of classes of the head of its trained weights, 0 without a head, or None if unknown."""
        return None

    def check_weights(self, task: Task, locations: Locations) -> str:
        """Return a line that describes how trained weights are converted for the task, or "".

        Raises:
            UserError: the weights are missing, or do not fit the model and the task.
        """
        return ""

    def start(self, network: Network, task: Task, locations: Locations) -> Start:
        """Load the trained weights into the built network, and return their description.

        Raises:
            UserError: the weights are missing or do not fit.
        """
        return Start()


@contextmanager
def supported(what: str, **facts: Any) -> Iterator[None]:
    """Raise a UserError, with these facts, in place of an UnsupportedError."""
    try:
        yield
    except UnsupportedError as error:
        raise UserError(f"{what} is not supported: {error}", **facts) from error


def number_of(task: Task, name: str) -> int:
    """Return an integer parameter of a task; raise UserError if the task does not have it."""
    value = getattr(task, name, None)
    if not isinstance(value, int):
        raise UserError(f"task '{task.name}' has no {name}, which the model needs")
    return value


def stem_widths(dim: int, patch: int) -> tuple[int, ...]:
    """Return the channels of the image and of each convolution of a stem; each convolution halves the image."""
    halvings = patch.bit_length() - 1
    return (3, *(dim // 2**k for k in reversed(range(halvings))))


def stem_macs(dim: int, patch: int) -> int:
    """Return the MACs per patch of a stem of convolutions and a last 1x1 convolution, without normalisation."""
    widths = stem_widths(dim, patch)
    places = [(patch >> k) ** 2 for k in range(1, len(widths))]
    return dim**2 + sum(n * 9 * C * wider for n, (C, wider) in zip(places, pairwise(widths), strict=True))
