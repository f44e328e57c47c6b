"""A cell, one question to the benchmark as a value with a content hash, and a record, what it produced."""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Mapping
from functools import cached_property
from operator import not_
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    ValidationInfo,
    field_serializer,
    field_validator,
)

from sparsebench.errors import UserError
from sparsebench.measure.cost import Step
from sparsebench.measure.metrics import Metric, Real, Whole
from sparsebench.strategy.base import Kind
from sparsebench.strategy.budget import Budget
from sparsebench.strategy.spec import unused_parameters

_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
PRETRAINED = "pretrained"
NETWORK = ("weights", "weights_key", PRETRAINED)
"""Parameters of a model that say which trained weights it starts from: a file's, or some of it, or its name's."""
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
        extra: dict[str, JsonValue] = {} if self.precision == "float32" else {"precision": self.precision}
        return self.model.params | extra

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


OLDEST, SCHEMA = 3, 4
"""Versions of a record: the first that is read, which has a hash of its source as revision, and the one written."""
Status = Literal["ok", "failed", "oom", "timeout", "crashed", "unsupported", "skipped"]
ANSWERS: tuple[Status, ...] = ("ok", "unsupported")
"""Statuses of cells that are not run again unless all are."""
MOST_ITEMS = 200_000
"""Test items of a cell."""


class VersionError(UserError):
    """A record is of a version that is not read."""


class Failure(Value):
    """Why a cell has no metrics."""

    reason: str
    kind: str = ""
    traceback: str = ""


class Outcomes(Value):
    """What came out for each of n test items, as bytes, see `bytes_of` and `measure.metrics.Items`.

    In JSON they are zlib-compressed 16-bit integers in base 64. `foreground` is empty where items show none, and where
    a source has more pictures than 16 bits can number.
    """

    model_config = ConfigDict(extra="ignore")  # earlier versions had losses here

    n: int = Field(ge=0, le=MOST_ITEMS)
    predicted: bytes
    label: bytes
    group: bytes
    rank: bytes
    foreground: bytes

    @field_validator("predicted", "label", "group", "rank", "foreground", mode="before")
    @classmethod
    def _unpack(cls, content: Any, info: ValidationInfo) -> Any:
        if isinstance(content, str):
            try:
                numbers = zlib.decompressobj().decompress(base64.b64decode(content, validate=True), 2 * MOST_ITEMS + 2)
            except zlib.error as error:
                raise ValueError(f"packed outcomes are corrupt ({error})") from error
            content = bytes_of(np.frombuffer(numbers, "<u2"))
        n, may_lack = info.data.get("n", 0), info.field_name not in ("predicted", "label")
        if isinstance(content, bytes) and len(content) not in (n, 2 * n) and (content or not may_lack):
            raise ValueError(f"{len(content)} bytes for {n} test items")
        return content

    @field_serializer("predicted", "label", "group", "rank", "foreground", when_used="json")
    def _pack(self, content: bytes) -> str:
        numbers = numbers_of(content, self.n).astype("<u2").tobytes()
        return base64.b64encode(zlib.compress(numbers)).decode() if content else ""


def numbers_of(content: bytes, n: int) -> np.ndarray:
    """Return the (n,) whole numbers of outcomes: little-endian, of one byte or two each."""
    return np.frombuffer(content, "<u1" if len(content) == n else "<u2").astype(np.int64)


def bytes_of(numbers: np.ndarray | None) -> bytes:
    """Return (n,) whole numbers as `numbers_of` reads them; none where there are none, or one is above 65535."""
    if numbers is None or not numbers.size or numbers.max() >= 2**16:
        return b""
    return numbers.astype("<u1" if numbers.max() < 256 else "<u2").tobytes()


class Head(NamedTuple):
    """What a run must know of a record that is there; `setting` is what its cell tests, see `table.setting_text`."""

    cell_id: str
    status: Status
    notes: Mapping[str, str]
    origin: Origin
    started: str
    setting: str
    seconds: float
    memory: int


class Record(Value):
    """What one cell produced.

    Attributes:
        notes: facts that are no numbers, such as which attention a strategy was given.
        started: UTC, in ISO 8601. Of two records of a cell the later one is the newer.
        trajectory: realised token counts, block by block, mean over the test samples.
        samples: series of numbers by name: raw timings in seconds a batch, what was watched while training, selection
            quality by block; None where there is nothing to measure.
        environment: hash of the machine and library description beside the records.
        label: the strategy's name, with the parameters that are not its defaults.
        seconds: wall time; as `started` it belongs to the run and not to the cell.
        memory: the most bytes that the worker process had meanwhile, 0 if unknown; of the run too.
    """

    schema_version: int = SCHEMA
    cell: Cell
    cell_id: str
    status: Status
    metrics: dict[str, Metric] = Field(default_factory=dict)
    trajectory: tuple[Step, ...] = ()
    samples: dict[str, tuple[float | None, ...]] = Field(default_factory=dict)
    outcomes: Outcomes | None = None
    notes: dict[str, str] = Field(default_factory=dict)
    failure: Failure | None = None
    origin: Origin
    kind: Kind
    label: str
    environment: str = ""
    device: str = ""
    started: str = ""
    seconds: Real = 0.0
    memory: Whole = 0

    @field_validator("schema_version")
    @classmethod
    def _check_version(cls, version: int) -> int:
        if not OLDEST <= version <= SCHEMA:
            step = "upgrade sparsebench" if version > SCHEMA else "read it with the sparsebench that wrote it"
            raise VersionError(f"a record of version {version}", allowed=f"{OLDEST} to {SCHEMA}", next_step=step)
        return SCHEMA
