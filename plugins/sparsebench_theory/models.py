"""The models of the theories and their MACs. torch is imported only to build a network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import Field

from sparsebench import seeds
from sparsebench.errors import UserError
from sparsebench.measure.cost import CostModel, OneLayerCost, Step
from sparsebench.models.base import Model, Network, number_of
from sparsebench.tasks.base import Data, Inputs, Task

PRUNED = tuple(tenth / 10 for tenth in range(10))
"""The shares of the shallow model's neurons that are removed, for `trained_values`."""
Init = Literal["assumption", "scale", "worst", "literal"]
Attention = Literal["trained", "frozen"]


@dataclass(frozen=True)
class ShallowCost(OneLayerCost):
    """The one-layer network of Li et al. 2023, eq. (1): L tokens, width d, attention widths m_b and m_a, m neurons.

    Each head has its own attention. A skip connection costs no multiplications. Each output reads all neurons.
    """

    m_a: int
    m_b: int
    m: int
    heads: int = 1
    outputs: int = 1

    @property
    def head_width(self) -> int:
        """See `OneLayerCost.head_width`."""
        return self.m_b

    def macs(self, steps: Sequence[Step]) -> float:
        """Return the MACs of one sample. Removed tokens are not queries, not keys, and not read out."""
        (step,) = steps
        L, n = step.tokens_in, step.tokens_out
        scoring = 2 * L * self.d * self.m_b + L * L * self.m_b if step.scoring else 0
        scoring += sum(L * self.d * (self.m_a if letter == "v" else self.m_b) for letter in step.projected)
        attention = 2 * n * self.d * self.m_b + n * n * self.m_b + n * self.d * self.m_a + n * n * self.m_a
        return self.heads * (scoring + attention + n * self.m_a * self.m) + n * self.m * self.outputs + step.own


@dataclass(frozen=True)
class TwoLayerCost(OneLayerCost):
    """The network of Jiang et al. 2024: width d, attention width d_h. W_V w_O, the same for all samples, is free."""

    d_h: int
    d_v: int

    @property
    def head_width(self) -> int:
        """See `OneLayerCost.head_width`."""
        return self.d_h

    def macs(self, steps: Sequence[Step]) -> float:
        """Return the MACs of one sample. Removed tokens are not queries, keys or values."""
        (step,) = steps
        scoring = self._attention(step.tokens_in) if step.scoring else 0
        widths = (self.d_v if letter == "v" else self.d_h for letter in step.projected)
        scoring += sum(step.tokens_in * self.d * width for width in widths)
        return scoring + self._attention(step.tokens_out) + step.tokens_out * (self.d + 1) + step.own

    def _attention(self, n: float) -> float:
        return 2 * n * self.d * self.d_h + n * n * self.d_h


@dataclass(frozen=True)
class PositionalCost(OneLayerCost):
    """The network of Jelassi et al. 2022: one value per token; the attention does not depend on the sample.

    The count includes only kept tokens. The program multiplies by zeros instead of slicing A for each sample.
    """

    def macs(self, steps: Sequence[Step]) -> float:
        """Return the MACs of one sample. The attention that positions receive costs none."""
        (step,) = steps
        scoring = step.tokens_in * self.d if "v" in step.projected else 0
        return scoring + step.tokens_out * (self.d + step.tokens_out) + step.own


@dataclass(frozen=True)
class OneQueryCost(OneLayerCost):
    """The network of Barnfield et al. 2026: one score and one value per token. Tokens are their own keys and values."""

    def macs(self, steps: Sequence[Step]) -> float:
        """Return the MACs of one sample. Removed tokens have no score and no value."""
        (step,) = steps
        scoring = step.tokens_in * self.d if step.scoring else 0
        return scoring + step.tokens_out * (2 * self.d + 1) + step.own


class Shallow(Model):
    """The one-layer Vision Transformer of Li et al. (ICLR 2023), eq. (1), and its variants of Appendix G.

    Two classes are predicted by the sign of one output, the four classes y in {+1,-1}^2 by the signs of two.
    """

    name: ClassVar[str] = "shallow"
    inputs: ClassVar[Inputs] = "tokens"
    together: ClassVar[bool] = True
    added: ClassVar[frozenset[str]] = frozenset({"repacked"})

    m: int = Field(256, gt=0, description="number of neurons; the paper has 1000, with equal success curves")
    sigma: float = Field(0.1, ge=0, description="error of the initial value matrix")
    delta: float = Field(0.2, ge=0, description="error of the initial query and key matrices")
    xi: float = Field(0.01, gt=0, description="standard deviation of the initial W_O")
    init: Init = Field("assumption", description="kind of the initial errors; literal: as printed in the paper")
    attention: Attention = Field("trained", description="frozen: query and key matrices are not trained")
    heads: int = Field(1, gt=0, description="attention heads, concatenated before W_O")
    skip: bool = Field(False, description="add each token to the output of each head")
    repacked: bool = Field(False, description="read out kept tokens at the first positions instead of their own")
    precision: Literal["float32", "float64"] = Field("float32", description="of weights and training; float64 to check")

    def cost(self, task: Task, classes: int) -> CostModel:
        """See `Model.cost`."""
        tokens, d = number_of(task, "tokens"), number_of(task, "d")
        return ShallowCost(tokens, d, d, d, self.m, self.heads, {2: 1, 4: 2}.get(classes, classes))

    def build(self, data: Data, repetition: int) -> Network:
        """See `Model.build`. The first weights depend only on the patterns, m, sigma, delta, xi, init and heads."""
        from sparsebench_theory.shallow.network import FirstWeights, ShallowViT

        if data.patterns is None:
            raise UserError("model 'shallow' needs the patterns of the tokens, which this task does not have")
        outputs = {2: 1, 4: 2}.get(len(data.classes))
        if outputs is None:
            raise UserError("model 'shallow' predicts classes by signs", got=len(data.classes), allowed="2 or 4")
        law = self.model_dump_json(exclude={"attention", "skip", "repacked", "precision"})
        rng = seeds.generator("init", self.name, law, repetition)
        first = FirstWeights(self.sigma, self.delta, self.xi, self.init)
        params = self.model_dump(exclude={"precision", "sigma", "delta", "xi", "init"})
        network = ShallowViT(rng, data.patterns, data.train.inputs.shape[1], first=first, **params, outputs=outputs)
        return network.double() if self.precision == "float64" else network


class TwoLayer(Model):
    """The two-layer Vision Transformer of Jiang et al. (NeurIPS 2024): softmax attention, a linear head, w_O frozen."""

    name: ClassVar[str] = "two_layer"
    inputs: ClassVar[Inputs] = "tokens"
    together: ClassVar[bool] = True

    d_h: int = Field(512, gt=0, description="width of queries and keys")
    d_v: int = Field(512, gt=0, description="width of values")
    shrink: float = Field(16.0, gt=0, description="initial W_Q, W_K and W_V are U(+-1 / sqrt(d)) divided by this")
    precision: Literal["float32", "float64"] = Field("float32", description="of weights and training; float64 to check")

    def cost(self, task: Task, classes: int) -> CostModel:
        """See `Model.cost`."""
        return TwoLayerCost(number_of(task, "tokens"), number_of(task, "d"), self.d_h, self.d_v)

    def build(self, data: Data, repetition: int) -> Network:
        """See `Model.build`. The precision does not change the first weights."""
        from sparsebench_theory.overfitting.network import TwoLayerViT

        if len(data.classes) != 2:
            raise UserError("model 'two_layer' has one output, for two classes", got=len(data.classes), allowed="2")
        params = self.model_dump(exclude={"precision"})
        _, tokens, d = data.train.inputs.shape
        rng = seeds.generator("init", self.name, d, *params.values(), repetition)
        network = TwoLayerViT(rng, tokens, d, **params)
        return network.double() if self.precision == "float64" else network


class Positional(Model):
    """The simplified Vision Transformer with positional attention of Jelassi, Sander and Li (NeurIPS 2022)."""

    name: ClassVar[str] = "positional"
    inputs: ClassVar[Inputs] = "tokens"

    power: int = Field(5, ge=3, description="p of the activation x^p + nu x; odd")
    nu: float = Field(0.03, ge=0, description="nu of the activation")
    scale: float = Field(1.0, gt=0, description="factor before the activation; D in the theory")
    first: float = Field(0.001, gt=0, description="standard deviation of the initial A and v")
    attention: Attention = Field("trained", description="frozen: only the read-out v is trained")

    def check(self, task: Task) -> None:
        """See `Model.check`."""
        if self.power % 2 == 0:
            raise UserError("positional: the activation must be odd", got=f"power={self.power}", allowed="odd powers")

    def first_model(self) -> Model:
        """See `Model.first_model`: the attention is trained before it is frozen."""
        return self.model_copy(update={"attention": "trained"})

    def cost(self, task: Task, classes: int) -> CostModel:
        """See `Model.cost`."""
        return PositionalCost(number_of(task, "tokens"), number_of(task, "d"))

    def build(self, data: Data, repetition: int) -> Network:
        """See `Model.build`. Frozen attention does not change the first weights."""
        from sparsebench_theory.spatial.network import PositionalViT

        if data.patterns is None or data.patterns.shape[1] != 1:
            raise UserError("model 'positional' is for tasks with one feature, such as 'spatial'")
        tokens, d = data.train.inputs.shape[1:]
        rng = seeds.generator("init", self.name, tokens, d, self.first, repetition)
        return PositionalViT(rng, tokens, data.patterns[:, 0], **self.model_dump())


class OneQuery(Model):
    """The single-layer attention classifier of Barnfield, Cui and Lu (ICLR 2026): one query, and a linear read-out."""

    name: ClassVar[str] = "one_query"
    inputs: ClassVar[Inputs] = "tokens"

    attention: Attention = Field(
        "trained", description="frozen: the query stays 0, and the output is linear in the mean token"
    )

    def cost(self, task: Task, classes: int) -> CostModel:
        """See `Model.cost`."""
        return OneQueryCost(number_of(task, "tokens"), number_of(task, "d"))

    def build(self, data: Data, repetition: int) -> Network:
        """See `Model.build`. The first weights are 0."""
        from sparsebench_theory.sparse_tokens.network import OneQueryPool

        if data.patterns is None or data.patterns.shape[1] != 1:
            raise UserError("model 'one_query' is for tasks with one feature, such as 'sparse_tokens'")
        return OneQueryPool(data.train.inputs.shape[1], data.patterns[:, 0], **self.model_dump())
