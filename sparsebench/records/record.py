"""Cells, which are named by the hash of their content, and records, the results of cells."""

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
"""Model parameters that select trained weights: a file, a state dict in it, or the weights of the model's name."""
Where = Literal["both", "train", "test"]
Track = Literal["frozen", "probe", "tuned", "scratch"]
"""What is trained with the strategy: nothing; a probe on the features of a trained network; a trained network
(fine-tuning); or a network from its first step."""
ON_TRAINED: tuple[Track, ...] = ("frozen", "probe")
"""The tracks on which networks are trained already, and do not change."""
Pooling = Literal["model", "patches"]
"""What the features of an image are: what the model pools, or the mean of its patches after the last norm."""
Precision = Literal["float32", "bfloat16"]


class Value(BaseModel):
    """A value stored as JSON. Fields added later are omitted at their default, so that older hashes stay valid."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


SHIPPED = "sparsebench"
"""The distribution of the strategies that come with sparsebench."""


class Origin(Value):
    """The origin of a strategy.

    Attributes:
        plugin: name of the entry point or of the file.
        distribution, version: the installed package; "" for a file.
        revision: the declared number of an installed strategy, as "1"; for a file a hash of its code, never a number.
    """

    plugin: str
    distribution: str = ""
    version: str = ""
    revision: str = Field("", validation_alias=AliasChoices("revision", "sha256"))

    @property
    def identity(self) -> str:
        """The distribution, if any, and the revision. They distinguish strategies of the same name."""
        return f"{self.distribution} {self.revision}".strip()

    @property
    def is_shipped(self) -> bool:
        """Whether the strategy comes with sparsebench."""
        return self.distribution == SHIPPED


class Part(Value):
    """A task, model or strategy: its name and all its parameters, except `added` ones at their defaults.

    Attributes:
        revision: revision of a task or model; "" for the first revision. For a file it is a hash of the code. The
            revision of a strategy is in `Origin` and not part of the cell: its new records replace the old ones.
    """

    name: str
    params: dict[str, JsonValue] = Field(default_factory=dict)
    revision: str = Field("", exclude_if=not_)

    @classmethod
    def of(cls, instance: Any, revision: str = "") -> Part:
        """Return the part of a task, model or strategy object."""
        params = instance.model_dump(mode="json", exclude=unused_parameters(instance))
        return cls(name=instance.name, params=params, revision=revision)


class Probe(Value):
    """How a cell of the track probe is measured.

    Attributes:
        pool: number of training images of which features are computed. The cell's `n_train` images are some of them.
        pooling: what the features are. "none": each patch has features, and its class is predicted.
    """

    pool: Whole = Field(gt=0)
    pooling: Pooling | Literal["none"] = "model"

    @property
    def of_patches(self) -> bool:
        """Whether the probe predicts the class of each patch."""
        return self.pooling == "none"


class Cell(Value):
    """One combination of task, model, strategy, budget, number of training samples and repetition.

    Attributes:
        n_train: number of training samples; 0 for a task that only tests.
        where: whether tokens are removed in training, in the test, or in both.
        init: the cell whose trained weights this cell starts from; None for random initial weights.
        repetition: seeds the data, the initial weights and the order of samples, independently of other cells.
        track: the ranking that the cell is part of.
        precision: precision of matrix products when a trained network is tested; bfloat16 uses autocast. With float32,
            the parameters of the model determine the precision.
        probe: how the probe is measured, on the track probe.
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
    probe: Probe | None = Field(None, exclude_if=lambda probe: probe is None)

    @property
    def drawn(self) -> int:
        """The number of training images that the task draws."""
        return self.n_train if self.probe is None else self.probe.pool

    @property
    def model_params(self) -> dict[str, JsonValue]:
        """The parameters of the model in the test, including the cell's precision."""
        extra: dict[str, JsonValue] = {} if self.precision == "float32" else {"precision": self.precision}
        return self.model.params | extra

    @property
    def network(self) -> str:
        """The name of the trained weights that the cell only tests; "" if each repetition trains its own network.

        With trained weights, the repetition seeds the random numbers of the strategy and the task's choice of pictures.
        On the track probe each repetition trains its own probe, so the name is empty there.
        """
        trains = self.n_train > 0 and self.track != "frozen"
        if trains or self.init is not None:
            return ""
        weights, key, pretrained = (self.model.params.get(name) or "" for name in NETWORK)
        return f"{weights} {key}".strip() or (PRETRAINED if pretrained else "")

    @property
    def inits(self) -> tuple[Cell, ...]:
        """The chain of cells whose weights this cell starts from, in the order of training."""
        return () if self.init is None else (*self.init.inits, self.init)

    @cached_property
    def id(self) -> str:
        """Sixteen hexadecimal digits of the SHA-256 of the canonical JSON; see `digest`."""
        return digest(self.model_dump(mode="json"))

    @cached_property
    def draw(self) -> str:
        """Hash of the data: cells with the same draw have the same data, for all models and strategies."""
        return digest([self.task.model_dump(mode="json"), self.drawn, self.repetition])

    @property
    def features(self) -> str:
        """Hash of the features that the cell's probe learns from; "" on the other tracks.

        Cells that differ in the number of training samples alone have the same features.
        """
        return "" if self.probe is None else digest(self.model_dump(mode="json", exclude={"n_train"}))

    def __copy__(self) -> Cell:
        copy = super().__copy__()
        for name in ("id", "draw"):
            copy.__dict__.pop(name, None)  # `model_copy` then changes fields that are part of the hash
        return copy


def digest(value: object) -> str:
    """Return sixteen hexadecimal digits of the SHA-256 of a value's canonical JSON.

    Raises:
        UserError: if the value has a text that UTF-8 cannot encode.
    """
    try:
        content = canonical(value).encode()
    except UnicodeEncodeError as error:
        near = error.object[max(0, error.start - 20) : error.end + 20]
        raise UserError("a parameter cannot be encoded as UTF-8", got=ascii(near)) from error
    return hashlib.sha256(content).hexdigest()[:16]


def canonical(value: object) -> str:
    """Return JSON with sorted keys, no spaces, and no NaN or infinity."""
    return _ENCODER.encode(value)


OLDEST, SCHEMA = 3, 4
"""Schema versions of records: the oldest that is read, whose revision is a hash of the source, and the current one."""
Status = Literal["ok", "failed", "oom", "timeout", "crashed", "unsupported", "skipped"]
ANSWERS: tuple[Status, ...] = ("ok", "unsupported")
"""Statuses of cells that are run again only with `--rerun always`."""
MOST_ITEMS = 200_000
"""Maximum number of test items of a cell."""


class VersionError(UserError):
    """The schema version of a record is not supported."""


class Failure(Value):
    """Why a cell has no metrics."""

    reason: str
    kind: str = ""
    traceback: str = ""


class Outcomes(Value):
    """The outcomes of n test items as bytes; see `bytes_of` and `measure.metrics.Items`.

    In JSON they are zlib-compressed 16-bit integers in base 64. `foreground` is empty if items have no foreground, or
    if a picture's number does not fit into 16 bits. `neighbour` has the predictions of the nearest neighbours on the
    track probe, and is empty on the others.
    """

    model_config = ConfigDict(extra="ignore")  # earlier versions stored losses here

    n: int = Field(ge=0, le=MOST_ITEMS)
    predicted: bytes
    label: bytes
    group: bytes
    rank: bytes
    foreground: bytes
    neighbour: bytes = Field(b"", exclude_if=not_)

    @field_validator("predicted", "label", "group", "rank", "foreground", "neighbour", mode="before")
    @classmethod
    def _unpack(cls, content: Any, info: ValidationInfo) -> Any:
        if isinstance(content, str):
            try:
                numbers = zlib.decompressobj().decompress(base64.b64decode(content, validate=True), 2 * MOST_ITEMS + 2)
            except zlib.error as error:
                raise ValueError(f"packed outcomes are corrupt ({error})") from error
            content = bytes_of(np.frombuffer(numbers, "<u2"))
        n = info.data.get("n", 0)
        may_lack = info.field_name not in ("predicted", "label")
        if isinstance(content, bytes) and len(content) not in (n, 2 * n) and (content or not may_lack):
            raise ValueError(f"{len(content)} bytes for {n} test items")
        return content

    @field_serializer("predicted", "label", "group", "rank", "foreground", "neighbour", when_used="json")
    def _pack(self, content: bytes) -> str:
        numbers = numbers_of(content, self.n).astype("<u2").tobytes()
        return base64.b64encode(zlib.compress(numbers)).decode() if content else ""


def numbers_of(content: bytes, n: int) -> np.ndarray:
    """Return (n,) integers from bytes: little-endian, one or two bytes each."""
    return np.frombuffer(content, "<u1" if len(content) == n else "<u2").astype(np.int64)


def bytes_of(numbers: np.ndarray | None) -> bytes:
    """Return (n,) integers as bytes for `numbers_of`; b"" if there are none, or if one is above 65535."""
    if numbers is None or not numbers.size or numbers.max() >= 2**16:
        return b""
    return numbers.astype("<u1" if numbers.max() < 256 else "<u2").tobytes()


class ScheduleCandidate(Value):
    """A schedule that was compared with others, see `ScheduleChoice`.

    Attributes:
        name: such as "default", "once in block 1".
        blocks, counts: the blocks in which tokens leave, and the tokens after each of them.
        macs_ratio: its planned share of the dense MACs.
        distance, error: the mean distance of the outputs from those of the dense network, and its standard error; None
            if there was nothing to compare.
        images: the number of images.
    """

    name: str
    blocks: tuple[Whole, ...]
    counts: tuple[Whole, ...]
    macs_ratio: Real
    distance: float | None = None
    error: float | None = None
    images: Whole = 0


class ScheduleChoice(Value):
    """How the schedule of a cell with schedule=auto was chosen, see `sparsebench.training.schedules`.

    Attributes:
        chosen: the number of the chosen candidate.
        distance: what the distances are.
        source: the images; "" if there was nothing to compare.
        candidates: the candidates, in order.
    """

    chosen: Whole
    distance: str
    source: str
    candidates: tuple[ScheduleCandidate, ...]

    @property
    def best(self) -> ScheduleCandidate:
        """The chosen schedule."""
        return self.candidates[self.chosen]


class RecordSummary(NamedTuple):
    """The fields of an existing record that a run needs. `setting` describes its test, see `table.setting_text`."""

    cell_id: str
    status: Status
    notes: Mapping[str, str]
    origin: Origin
    started: str
    setting: str
    seconds: float
    memory: int


class Record(Value):
    """The result of one cell.

    Attributes:
        notes: facts as text, such as which attention the strategy read.
        started: start of the cell, UTC in ISO 8601. Of two records of a cell, the one that started later is newer.
        trajectory: realised token counts of each block, mean over the test samples.
        schedule: the choice of the schedule; None if the cell's budget or the strategy determines it.
        samples: series of numbers by name: raw timings in seconds per batch, values watched during training, selection
            quality of each block; None if there is nothing to measure.
        environment: hash of the description of the machine and its libraries, stored beside the records.
        label: the strategy's name, with the parameters that differ from the defaults.
        seconds: wall time. Like `started` and `memory`, it differs between runs of the same cell.
        memory: peak memory of the worker process in bytes; 0 if unknown.
    """

    schema_version: int = SCHEMA
    cell: Cell
    cell_id: str
    status: Status
    metrics: dict[str, Metric] = Field(default_factory=dict)
    trajectory: tuple[Step, ...] = ()
    schedule: ScheduleChoice | None = Field(None, exclude_if=lambda choice: choice is None)
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
            raise VersionError(f"record of version {version}", allowed=f"{OLDEST} to {SCHEMA}", next_step=step)
        return SCHEMA
