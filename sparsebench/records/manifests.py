"""What lies beside records: what their strategies and metrics are, and which suites they answer.

OUT/strategies/<hash>.json      one for each source of a strategy
OUT/suites/<hash>.json          one for each suite, as it was asked for
OUT/metrics/<hash>.json         one for each metric that a task declares, see `MetricKind`
OUT/pictures/<hash>.json        one for each folder of pictures of which some were left out

Each file is named after what it says, and no record hangs on it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from sparsebench.records import files
from sparsebench.records.cell import Cell, digest
from sparsebench.strategy import Kind, Site, Strategy

STRATEGIES, SUITES, METRICS, PICTURES = "strategies", "suites", "metrics", "pictures"
DISPOSED = {"drop": "drop", "fuse": "fuse", "merge": "merge", "squeeze": "mix"}
"""How tokens are disposed of, by the disposals."""
_DISPOSAL = re.compile(rf"[(\s]disposal=({'|'.join(DISPOSED)})[,)]")


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Described(_Model):
    """A strategy as its class describes it; `sha256` is that of its source. See `Strategy`.

    Attributes:
        how: how it disposes of tokens unless its parameters say otherwise; "" where that is not known.
    """

    name: str
    sha256: str
    kind: Kind
    site: Site
    trained: bool
    adaptive: bool
    citation: str
    bibtex: str
    how: str = ""


class Asked(_Model):
    """A suite as it was asked for.

    Attributes:
        name, version: the suite's.
        settings: the hashes of what every strategy of it is measured on, see `setting_of`, sorted.
    """

    name: str
    version: int
    settings: tuple[str, ...]

    @property
    def sha256(self) -> str:
        """The hash that two runs share if they asked for the same."""
        return digest(self.model_dump(mode="json"))


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


T = TypeVar("T", Described, Asked, LeftOut)


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
    """Return what is known of the strategies of a run's folder, by name and hash of the source."""
    every = sorted(_read(out / STRATEGIES, Described), key=lambda described: described.how != "")
    return {(described.name, described.sha256): described for described in every}


def suites(out: Path) -> list[Asked]:
    """Return the suites that a run's folder answers, by name and version."""
    return sorted(_read(out / SUITES, Asked), key=lambda asked: (asked.name, asked.version, asked.settings))


def left_out(out: Path) -> list[LeftOut]:
    """Return what pictures were left out of the data of a run's folder."""
    return sorted(_read(out / PICTURES, LeftOut), key=lambda one: one.images)


def _read(folder: Path, kind: type[T]) -> Iterator[T]:
    for path, content in files.contents_in(folder):
        try:
            yield kind.model_validate_json(content)
        except ValidationError as error:
            files.leave_out(path, error)
