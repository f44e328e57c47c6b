"""What a model is to the harness, and the models that come with it. Imports no torch until one is built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol

from pydantic import BaseModel, ConfigDict, Field

from sparsebench import seeds
from sparsebench.errors import UserError
from sparsebench.tasks.base import Data, Inputs, Locations, Task

if TYPE_CHECKING:
    from torch import Tensor

    from sparsebench.measure.cost import CostModel
    from sparsebench.models.acting import Look, Pass

HEADS = ("head.", "head_dist.")
"""How the names of the weights of output layers begin."""
PRUNED = tuple(tenth / 10 for tenth in range(10))
"""Shares of the shallow model's neurons whose removal is looked at."""
Init = Literal["assumption", "scale", "worst", "literal"]
Attention = Literal["trained", "frozen"]


class Start(NamedTuple):
    """What trained weights a network starts from.

    Attributes:
        name: which, by content or by name; "" for none.
        head: whether the output layer is among them, so that its answers mean something before it is trained.
    """

    name: str = ""
    head: bool = False


class Network(Protocol):
    """A built model: called with inputs and, when a strategy acts on it, with the pass that carries it."""

    @property
    def grid(self) -> tuple[int, int] | None:
        """(rows, columns) of its patches, or None where tokens have no places."""

    @property
    def cost(self) -> CostModel:
        """The closed form of its MACs."""

    @property
    def attention_source(self) -> str:
        """What "attention" means here: "class", "class+distillation" or "received"."""

    @property
    def module(self) -> Any:
        """The torch module that holds the weights."""

    def __call__(self, inputs: Tensor, acting: Pass | None = None, /) -> Tensor:
        """Return (B, classes) logits, or (B,) margins."""


class Watchable(Network, Protocol):
    """A network that tells of itself while it trains.

    Attributes:
        shows: what it tells, by name, with the unit of each.
    """

    shows: ClassVar[Mapping[str, str]]

    def observe(self, train: Look, test: Look) -> dict[str, float]:
        """Return each of `shows`, measured on these splits."""

    def portrait(self, first: Mapping[str, Tensor], test: Look) -> dict[str, tuple[float, ...]]:
        """Return what is to be kept of the trained weights, given the first ones, all tokens there."""


class Model(BaseModel):
    """A network a strategy can act on; its fields are its parameters.

    Attributes:
        name: what users type.
        inputs: "tokens" or "images", what the tasks it fits must give.
        positional: the parameter that NAME:VALUE sets, if any.
        together: whether a GPU trains several of them faster in one program.
        added: parameters that cells of older records do not have; at their defaults they are in no cell.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: ClassVar[str]
    inputs: ClassVar[Inputs]
    positional: ClassVar[str | None] = None
    together: ClassVar[bool] = False
    added: ClassVar[frozenset[str]] = frozenset()

    def check(self, task: Task) -> None:
        """Raise UserError if the model cannot be built for that task."""

    def cut(self) -> Mapping[str, Any]:
        """Return how its trained weights want pictures: canvas, crop, resize, filter; less where it does not say."""
        return {}

    def first_model(self) -> Model:
        """Return the model that is trained where a task begins with trained weights."""
        return self

    def build(self, data: Data, repetition: int) -> Network:
        """Return the network for that data with the initial weights of that repetition."""
        raise NotImplementedError(f"model '{self.name}' must define build(data, repetition)")

    def check_weights(self, task: Task, locations: Locations) -> None:
        """Raise UserError if trained weights that it starts from are not to be had, or do not fit it and the task."""

    def start(self, network: Network, task: Task, locations: Locations) -> Start:
        """Put the trained weights that it starts from into the built network, and say which they are.

        Raises:
            UserError: they are missing or do not fit.
        """
        return Start()


class Shallow(Model):
    """The one-layer Vision Transformer of Li et al. (ICLR 2023), eq. (1), and its variants of Appendix G.

    Two classes are read from the sign of one output, the four of y in {+1,-1}^2 from the signs of two.
    """

    name: ClassVar[str] = "shallow"
    inputs: ClassVar[Inputs] = "tokens"
    together: ClassVar[bool] = True
    added: ClassVar[frozenset[str]] = frozenset({"repacked"})

    m: int = Field(256, gt=0, description="neurons; the paper has 1000, with which success curves agree")
    sigma: float = Field(0.1, ge=0, description="error of the initial value matrix")
    delta: float = Field(0.2, ge=0, description="error of the initial query and key matrices")
    xi: float = Field(0.01, gt=0, description="standard deviation of the initial W_O")
    init: Init = Field("assumption", description="what the initial errors look like; literal is as the paper prints")
    attention: Attention = Field("trained", description="frozen leaves the query and key matrices as they began")
    heads: int = Field(1, gt=0, description="attention heads, concatenated before W_O")
    skip: bool = Field(False, description="add each token to what each head gives for it")
    repacked: bool = Field(False, description="read the tokens that stay out at the first positions, not at their own")
    precision: Literal["float32", "float64"] = Field("float32", description="of weights and training; float64 to check")

    def build(self, data: Data, repetition: int) -> Network:
        """See `Model.build`. The first weights are those of the patterns, m, sigma, delta, xi, init and heads alone."""
        from sparsebench.models.shallow import ShallowViT

        if data.patterns is None:
            raise UserError("model 'shallow' needs the patterns of the tokens, which this task does not give")
        outputs = {2: 1, 4: 2}.get(len(data.classes))
        if outputs is None:
            raise UserError("model 'shallow' tells classes apart by signs", got=len(data.classes), allowed="2 or 4")
        law = self.model_dump_json(exclude={"attention", "skip", "repacked", "precision"})
        rng = seeds.generator("init", self.name, law, repetition)
        own = self.model_dump(exclude={"precision"})
        network = ShallowViT(rng, data.patterns, data.train.inputs.shape[1], **own, outputs=outputs)
        return network.double() if self.precision == "float64" else network


class TwoLayer(Model):
    """The two-layer Vision Transformer of Jiang et al. (NeurIPS 2024): softmax attention, a linear head, w_O frozen."""

    name: ClassVar[str] = "two_layer"
    inputs: ClassVar[Inputs] = "tokens"
    together: ClassVar[bool] = True

    d_h: int = Field(512, gt=0, description="width of queries and keys")
    d_v: int = Field(512, gt=0, description="width of values")
    shrink: float = Field(16.0, gt=0, description="W_Q, W_K and W_V begin as U(+-1 / sqrt(d)) over this")
    precision: Literal["float32", "float64"] = Field("float32", description="of weights and training; float64 to check")

    def build(self, data: Data, repetition: int) -> Network:
        """See `Model.build`. The precision does not change the first weights."""
        from sparsebench.models.two_layer import TwoLayerViT

        if len(data.classes) != 2:
            raise UserError("model 'two_layer' has one output, for two classes", got=len(data.classes), allowed="2")
        own = self.model_dump(exclude={"precision"})
        _, tokens, d = data.train.inputs.shape
        rng = seeds.generator("init", self.name, d, *own.values(), repetition)
        network = TwoLayerViT(rng, tokens, d, **own)
        return network.double() if self.precision == "float64" else network


class Positional(Model):
    """The simplified Vision Transformer with positional attention of Jelassi, Sander and Li (NeurIPS 2022)."""

    name: ClassVar[str] = "positional"
    inputs: ClassVar[Inputs] = "tokens"

    power: int = Field(5, ge=3, description="p of the activation x^p + nu x; odd")
    nu: float = Field(0.03, ge=0, description="nu of the activation")
    scale: float = Field(1.0, gt=0, description="factor before the activation; the theory has D")
    first: float = Field(0.001, gt=0, description="standard deviation of the initial A and v")
    attention: Attention = Field("trained", description="frozen trains the read-out v alone")

    def check(self, task: Task) -> None:
        """See `Model.check`."""
        if self.power % 2 == 0:
            raise UserError(
                "positional: the activation keeps the sign", got=f"power={self.power}", allowed="odd powers"
            )

    def first_model(self) -> Model:
        """See `Model.first_model`: attention is learned before it is frozen."""
        return self.model_copy(update={"attention": "trained"})

    def build(self, data: Data, repetition: int) -> Network:
        """See `Model.build`. Frozen attention does not change the first weights."""
        from sparsebench.models.positional import PositionalViT

        if data.patterns is None or data.patterns.shape[1] != 1:
            raise UserError("model 'positional' is for tasks with one feature, such as 'spatial'")
        tokens, d = data.train.inputs.shape[1:]
        rng = seeds.generator("init", self.name, tokens, d, self.first, repetition)
        return PositionalViT(rng, tokens, data.patterns[:, 0], **self.model_dump())
