"""What lies beside records: what their strategies, metrics and files are, and which suites they answer.

OUT/strategies/<hash>.json      one for each revision of a strategy
OUT/suites/<hash>.json          one for each suite, as it was asked for
OUT/metrics/<hash>.json         one for each metric that a task declares, see `MetricKind`
OUT/files/<hash>.json           one for each file of a user's that cells name by its content
OUT/strays/<hash>.json          one for each folder of pictures in which lies what is none of them
OUT/pictures/<hash>.json        one for each folder of pictures of which some were left out

Each file is named after what it says, and no record hangs on it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
)

from sparsebench.errors import UserError
from sparsebench.measure.metrics import MetricKind, check
from sparsebench.records import files
from sparsebench.records.cell import Cell, digest
from sparsebench.strategy import Kind, Site, Strategy
from sparsebench.text import plain

STRATEGIES, SUITES, METRICS = "strategies", "suites", "metrics"
FILES, STRAYS, PICTURES = "files", "strays", "pictures"
OWN = "no-suite"
"""In place of a suite's name: other cells than those of any suite."""
DISPOSED = {"drop": "drop", "fuse": "fuse", "merge": "merge", "squeeze": "mix"}
"""How tokens are disposed of, by the disposals."""
_DISPOSAL = re.compile(rf"[(\s]disposal=({'|'.join(DISPOSED)})[,)]")


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Described(_Model):
    """A strategy as its class describes it. See `Strategy`.

    Attributes:
        revision: see `Origin`; earlier versions wrote the hash of the source.
        how: how it disposes of tokens unless its parameters say otherwise; "" where that is not known.
        file: its plugin file, by its name in `source`; "" where it is installed.
        source: the text of that file and of the modules beside it that it imports, by name; none where it is installed.
    """

    name: str
    revision: str = Field(validation_alias=AliasChoices("revision", "sha256"))
    kind: Kind
    site: Site
    trained: bool
    adaptive: bool
    citation: str
    bibtex: str
    how: str = ""
    file: str = ""
    source: dict[str, str] = Field(default_factory=dict)

    @model_serializer(mode="wrap")
    def _without_source(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what there is of plugin files alone, so that what else is described is named as ever."""
        said: dict[str, Any] = dump(self)
        return said if self.source else {key: one for key, one in said.items() if key not in ("file", "source")}


class Asked(_Model):
    """A suite as it was asked for.

    Attributes:
        name, version: the suite's, if all its cells were asked for; else `OWN`, 1.
        settings: the hashes of what every strategy of it is measured on, see `setting_of`, sorted.
        main_task, sample_complexity: the suite's, see `planning.suite.Suite`; "" of no suite, or of an earlier version.
    """

    name: str
    version: int
    settings: tuple[str, ...]
    main_task: str = ""
    sample_complexity: str = ""

    @model_serializer(mode="wrap")
    def _without_empty(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what is empty, so that the hashes of earlier versions still hold."""
        return {name: value for name, value in dump(self).items() if value != ""}

    @property
    def sha256(self) -> str:
        """The hash that two runs share if they asked for the same."""
        return digest(self.model_dump(mode="json"))


class Given(_Model):
    """A file of a user's.

    Attributes:
        name: what cells call it, as weights-0123456789ab, from its content.
        file: what the user calls it: its name, with those of folders where that tells it from another.
    """

    name: str
    file: str


class Strays(_Model):
    """What lies in a folder of pictures, by the name that cells have for them, and is left out; in one line."""

    name: str
    left_out: str


class LeftOut(_Model):
    """Pictures of a folder that were left out, as they cannot be read.

    Attributes:
        images: what cells call those that were not.
        count: how many these are.
        names: the paths of the others in the folder.
    """

    images: str
    count: int
    names: tuple[str, ...]


T = TypeVar("T", Described, Asked, Given, Strays, LeftOut)


def setting_of(cell: Cell) -> str:
    """Return the hash of a cell's task, model, number of training samples and repetition."""
    return digest(cell.model_dump(mode="json", include={"task", "model", "n_train", "repetition"}))


def how_of(cls: type[Strategy]) -> str:
    """Return how a strategy disposes of tokens: "trained" where it learns it, "truth" for oracles, "-" for dense."""
    if cls.kind == "oracle" or not cls.budgeted:
        return "truth" if cls.kind == "oracle" else "-"
    if cls.trained:
        return "trained"
    return (cls.how or "") if cls.plan is not Strategy.plan else DISPOSED[cls.model_fields["disposal"].default]


def how_of_label(how: str, label: str) -> str:
    """Return how a strategy with parameters disposes of tokens: as its `disposal`, if it has one there."""
    given = _DISPOSAL.search(label)
    return how if given is None or how in ("trained", "truth") else DISPOSED[given[1]]


def strategies(out: Path) -> dict[tuple[str, str], Described]:
    """Return what is known of the strategies of a run's folder, by name and revision."""
    every = sorted(_read(out, STRATEGIES, Described), key=lambda described: (described.how != "", described.file))
    return {(described.name, described.revision): described for described in every}


def suites(out: Path) -> list[Asked]:
    """Return the suites that a run's folder answers, by name and version."""
    return sorted(_read(out, SUITES, Asked), key=lambda asked: (asked.name, asked.version, asked.settings))


def file_names(out: Path) -> dict[str, str]:
    """Return what users call the files of a run's folder, by the names that cells have for them.

    Of several names of one file the longest is taken; where two files have one name, what cells call them is added.
    """
    shown: dict[str, str] = {}
    for one in sorted(_read(out, FILES, Given), key=lambda one: (len(one.file), one.file)):
        shown[plain(one.name)] = plain(one.file)
    count = Counter(shown.values())
    return {name: f"{file} ({name})" if count[file] > 1 else file for name, file in shown.items()}


def strays(out: Path) -> list[Strays]:
    """Return what was left out of folders of pictures, by their names."""
    return sorted(_read(out, STRAYS, Strays), key=lambda one: (one.name, one.left_out))


def left_out(out: Path) -> list[LeftOut]:
    """Return what pictures were left out of the data of a run's folder."""
    return sorted(_read(out, PICTURES, LeftOut), key=lambda one: one.images)


def metrics(out: Path) -> tuple[MetricKind, ...]:
    """Return what a run's folder says of the metrics that its tasks declare, by name."""
    from sparsebench.records import store

    kinds = {}
    for name, content in store.beside(out, METRICS).items():
        try:
            said: dict[str, Any] = {k: plain(x) if isinstance(x, str) else x for k, x in json.loads(content).items()}
            kind = MetricKind(**said)
            check([kind])
            kinds[kind.name] = kind
        except (ValueError, TypeError, AttributeError, RecursionError, UserError) as error:
            files.leave_out(Path(name), error)
    return tuple(kinds[name] for name in sorted(kinds))


def _read(out: Path, folder: str, kind: type[T]) -> Iterator[T]:
    from sparsebench.records import store  # numpy comes with it, which a list of strategies need not

    for name, content in store.beside(out, folder).items():
        try:
            yield kind.model_validate_json(content)
        except ValidationError as error:
            files.leave_out(Path(folder, name), error)
