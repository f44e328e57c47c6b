"""A cell: one question to the benchmark, as a value with a content hash."""

from __future__ import annotations

import hashlib
import json
import math
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
)

from sparsebench.budget import Budget
from sparsebench.errors import UserError
from sparsebench.spec import unused_parameters

_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
LARGEST = 2**63
PRETRAINED = "pretrained"
NETWORK = ("weights", "weights_key", PRETRAINED)
"""Parameters of a model that say which trained weights it starts from: a file's, or some of it, or its name's."""
Whole = Annotated[int, Field(gt=-LARGEST, lt=LARGEST)]
"""A number that files with columns of 64 bits can hold."""
Where = Literal["both", "train", "test"]
Track = Literal["frozen", "tuned", "scratch"]
"""What is trained with the strategy: nothing, a trained network for a little longer, or one from its first step."""


class Part(BaseModel):
    """A task, model or strategy by name, with its parameters spelled out, but for `added` ones at their defaults.

    Attributes:
        revision: of a task or model, see `said_of`; of one from a file a hash of its code. That of a strategy is not
            part of the cell, see `Origin`: its new records take the place of the old ones.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    params: dict[str, JsonValue] = Field(default_factory=dict)
    revision: str = ""

    @model_serializer(mode="wrap")
    def _without_first_revision(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out the first revision, so that the hashes of cells from before there were any still hold."""
        fields: dict[str, Any] = dump(self)
        return fields if self.revision else {key: value for key, value in fields.items() if key != "revision"}

    @field_validator("params")
    @classmethod
    def _check_numbers(cls, params: dict[str, JsonValue]) -> dict[str, JsonValue]:
        todo: list[JsonValue] = list(params.values())
        for value in todo:  # which grows meanwhile
            if isinstance(value, dict | list):
                todo += value.values() if isinstance(value, dict) else value
            elif isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"a parameter is {value}")
            elif isinstance(value, int) and abs(value) >= LARGEST:
                raise ValueError(f"a parameter is a number of {value.bit_length()} bits")
        return params

    @classmethod
    def of(cls, thing: Any, revision: str = "") -> Part:
        """Return the part that names a task, model or strategy object."""
        params = thing.model_dump(mode="json", exclude=unused_parameters(thing))
        return cls(name=thing.name, params=params, revision=revision)


class Cell(BaseModel):
    """Task, model, strategy, budget, number of training samples, where it applies, and which repetition.

    Attributes:
        n_train: 0 for a task that only tests.
        where: whether tokens are removed in training, in the test, or in both.
        init: the cell whose trained weights this one starts from, or None for random ones.
        repetition: numbers the seeds: data, initial weights and order depend on it, and on no other cell.
        track: the ranking that it is part of.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: Part
    model: Part
    strategy: Part
    budget: Budget
    n_train: Whole = Field(ge=0)
    repetition: Whole = Field(ge=0)
    where: Where = "both"
    init: Cell | None = None
    track: Track = "scratch"

    @model_serializer(mode="wrap")
    def _without_default(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out the track that came before there were several, so that the hashes of its cells still hold."""
        content: dict[str, Any] = dump(self)
        if self.track == "scratch":
            content.pop("track", None)  # a part of a cell need not have it
        return content

    @property
    def tests_only(self) -> bool:
        """Whether the strategy acts in the test only, so that nothing need be trained for it."""
        return self.where == "test"

    @property
    def network(self) -> str:
        """Which trained weights it tests as they are, by their name; "" where each repetition has a network of its own.

        Then a repetition numbers what is drawn in the test: by the strategy, or by a task that tests on a part of its
        pictures.
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
        """Sixteen hexadecimal digits of the SHA-256 of the canonical JSON.

        Raises:
            UserError: a parameter holds what is no text.
        """
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


def said_of(revision: int) -> str:
    """Return how the part of a cell says the revision that a task or model declares: the first is not said."""
    return "" if revision == 1 else str(revision)


def digest(value: object) -> str:
    """Return sixteen hexadecimal digits of the SHA-256 of a value's canonical JSON.

    Raises:
        UserError: it holds what is no text.
    """
    try:
        content = canonical(value).encode()
    except UnicodeEncodeError as error:
        near = error.object[max(0, error.start - 20) : error.end + 20]
        raise UserError(
            "a parameter of a cell holds half a surrogate pair, which no file can", got=ascii(near),
            allowed="text that UTF-8 can write", next_step="give it anew: names of files may have other bytes",
        ) from error  # fmt: skip
    return hashlib.sha256(content).hexdigest()[:16]


def canonical(value: object) -> str:
    """Return JSON with sorted keys, no spaces, and no NaN or infinity."""
    return _ENCODER.encode(value)
