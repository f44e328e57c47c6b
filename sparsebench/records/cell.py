"""A cell: one question to the benchmark, as a value with a content hash; and where its strategy came from."""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from operator import not_
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, JsonValue

from sparsebench.errors import UserError
from sparsebench.strategy.budget import Budget
from sparsebench.strategy.spec import unused_parameters

_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
PRETRAINED = "pretrained"
NETWORK = ("weights", "weights_key", PRETRAINED)
"""Parameters of a model that say which trained weights it starts from: a file's, or some of it, or its name's."""
Whole = Annotated[int, Field(gt=-(2**63), lt=2**63)]
"""A number that files with columns of 64 bits can hold."""
Where = Literal["both", "train", "test"]
Track = Literal["frozen", "tuned", "scratch"]
"""What is trained with the strategy: nothing, a trained network for a little longer, or one from its first step."""
Precision = Literal["float32", "bfloat16"]


class Value(BaseModel):
    """What is written as JSON. Fields that came later are left out at their default: hashes from before still hold."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Origin(Value):
    """Where a strategy came from.

    Attributes:
        plugin: the entry point's name, or the file's.
        distribution, version: the installed package, "" for a file.
        revision: what its class declares where it is installed, as "1"; of a file a hash of its code, never a number.
    """

    plugin: str
    distribution: str = ""
    version: str = ""
    revision: str = Field("", validation_alias=AliasChoices("revision", "sha256"))

    @property
    def identity(self) -> str:
        """What tells a strategy from others of its name: the distribution, if any, and the revision."""
        return f"{self.distribution} {self.revision}".strip()

    @property
    def is_shipped(self) -> bool:
        """Whether it came with sparsebench."""
        return self.distribution == "sparsebench"


class Part(Value):
    """A task, model or strategy by name, with its parameters spelled out, but for `added` ones at their defaults.

    Attributes:
        revision: of a task or model, but for the first; of one from a file a hash of its code. That of a strategy is
            not part of the cell, see `Origin`: its new records take the place of the old ones.
    """

    name: str
    params: dict[str, JsonValue] = Field(default_factory=dict)
    revision: str = Field("", exclude_if=not_)

    @classmethod
    def of(cls, thing: Any, revision: str = "") -> Part:
        """Return the part that names a task, model or strategy object."""
        params = thing.model_dump(mode="json", exclude=unused_parameters(thing))
        return cls(name=thing.name, params=params, revision=revision)


class Cell(Value):
    """Task, model, strategy, budget, number of training samples, where it applies, and which repetition.

    Attributes:
        n_train: 0 for a task that only tests.
        where: whether tokens are removed in training, in the test, or in both.
        init: the cell whose trained weights this one starts from, or None for random ones.
        repetition: numbers the seeds: data, initial weights and order depend on it, and on no other cell.
        track: the ranking that it is part of.
        precision: of the products of a trained network in its test, bfloat16 by autocast; at float32 its model says it.
    """

    task: Part
    model: Part
    strategy: Part
    budget: Budget
    n_train: Whole = Field(ge=0)
    repetition: Whole = Field(ge=0)
    where: Where = "both"
    init: Cell | None = None
    track: Track = Field("scratch", exclude_if=lambda track: track == "scratch")
    precision: Precision = Field("float32", exclude_if=lambda precision: precision == "float32")

    @property
    def model_params(self) -> dict[str, JsonValue]:
        """The parameters of the model as it is tested: in the cell's precision."""
        own: dict[str, JsonValue] = {} if self.precision == "float32" else {"precision": self.precision}
        return self.model.params | own

    @property
    def network(self) -> str:
        """Which trained weights it tests as they are, by their name; "" where each repetition has a network of its own.

        Then a repetition numbers what the strategy, or the task's choice of pictures, draws in the test.
        """
        if self.n_train or self.init is not None:
            return ""
        weights, key, pretrained = (self.model.params.get(name) or "" for name in NETWORK)
        return f"{weights} {key}".strip() or (PRETRAINED if pretrained else "")

    @property
    def inits(self) -> tuple[Cell, ...]:
        """The cell that it starts from, and those that this one does, the first to be trained first."""
        return () if self.init is None else (*self.init.inits, self.init)

    @cached_property
    def id(self) -> str:
        """Sixteen hexadecimal digits of the SHA-256 of the canonical JSON; see `digest`."""
        return digest(self.model_dump(mode="json"))

    @cached_property
    def draw(self) -> str:
        """Name of the draw of its data: cells with the same have the same data, whatever model and strategy."""
        return digest([self.task.model_dump(mode="json"), self.n_train, self.repetition])

    def __copy__(self) -> Cell:
        copy = super().__copy__()
        for name in ("id", "draw"):
            copy.__dict__.pop(name, None)  # `model_copy` goes on to change what it is the hash of
        return copy


def digest(value: object) -> str:
    """Return sixteen hexadecimal digits of the SHA-256 of a value's canonical JSON.

    Raises:
        UserError: it holds what is no text.
    """
    try:
        content = canonical(value).encode()
    except UnicodeEncodeError as error:
        near = error.object[max(0, error.start - 20) : error.end + 20]
        raise UserError("a parameter is no text that UTF-8 can write", got=ascii(near)) from error
    return hashlib.sha256(content).hexdigest()[:16]


def canonical(value: object) -> str:
    """Return JSON with sorted keys, no spaces, and no NaN or infinity."""
    return _ENCODER.encode(value)
