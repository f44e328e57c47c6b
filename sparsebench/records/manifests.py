"""What lies beside records: what their strategies, metrics and files are, and which suites they answer.

Each of these is a file of its own, named after what it says, and no record hangs on it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from operator import not_
from pathlib import Path
from typing import Any

from pydantic import AliasChoices, Field

from sparsebench.errors import plain
from sparsebench.measure.metrics import MetricKind
from sparsebench.records import store
from sparsebench.records.record import Cell, Value, digest
from sparsebench.strategy.base import Kind, Site

STRATEGIES, SUITES, METRICS, ENVIRONMENTS = "strategies", "suites", "metrics", "environments"
FILES = "files"
OWN = "no-suite"
"""In place of a suite's name: other cells than those of any suite."""


class StrategyEntry(Value):
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
    file: str = Field("", exclude_if=not_)
    source: dict[str, str] = Field(default_factory=dict, exclude_if=not_)


class SuiteEntry(Value):
    """A suite as it was asked for.

    Attributes:
        name, version: the suite's, if all its cells were asked for; else `OWN`, 1.
        settings: the hashes of what every strategy of it is measured on, see `setting_of`, sorted.
        main_task, sample_complexity: the suite's, see `plan.request.Suite`; "" of no suite, or of an earlier version.
    """

    name: str
    version: int
    settings: tuple[str, ...]
    main_task: str = Field("", exclude_if=not_)
    sample_complexity: str = Field("", exclude_if=not_)


class FileEntry(Value):
    """A file or a folder of a user's.

    Attributes:
        name: what cells call it, as weights-0123456789ab, from its content.
        file: what the user calls it: its name, with those of folders where that tells it from another; "" of pictures.
        left_out: what lies in a folder of pictures and is left out, in one line.
    """

    name: str
    file: str = ""
    left_out: str = Field("", exclude_if=not_)


def setting_of(cell: Cell) -> str:
    """Return the hash of a cell's task, model, number of training samples, repetition and precision."""
    return digest(cell.model_dump(mode="json", include={"task", "model", "n_train", "repetition", "precision"}))


def strategies(out: Path) -> dict[tuple[str, str], StrategyEntry]:
    """Return what is known of the strategies of a run's folder, by name and revision."""
    values = sorted(
        store.values(out, STRATEGIES, StrategyEntry).values(), key=lambda value: (value.how != "", value.file)
    )
    return {(strategy.name, strategy.revision): strategy for strategy in values}


def suites(out: Path) -> list[SuiteEntry]:
    """Return the suites that a run's folder answers, by name and version."""
    values = store.values(out, SUITES, SuiteEntry).values()
    return sorted(values, key=lambda suite: (suite.name, suite.version, suite.settings))


def file_names(out: Path) -> dict[str, str]:
    """Return what users call the files of a run's folder, by the names that cells have for them.

    Of several names of one file the longest is taken; where two files have one name, what cells call them is added.
    """
    values = sorted(store.values(out, FILES, FileEntry).values(), key=lambda value: (len(value.file), value.file))
    names = {plain(value.name): plain(value.file) for value in values if value.file}
    count = Counter(names.values())
    return {name: f"{file} ({name})" if count[file] > 1 else file for name, file in names.items()}


def omissions(out: Path) -> list[tuple[str, str]]:
    """Return what was left out of folders of pictures, a line each behind the name that cells have for the folder."""
    values = store.values(out, FILES, FileEntry).values()
    return sorted((plain(value.name), plain(value.left_out, 1000)) for value in values if value.left_out)


def environments(out: Path, hashes: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return what a run's folder says of some machines and their libraries, by their hashes."""
    values = store.values(out, ENVIRONMENTS, dict[str, Any])
    machines = {name: values[f"{name}.json"] for name in hashes if f"{name}.json" in values}
    return {name: {plain(key): plain(x) for key, x in sorted(about.items())} for name, about in machines.items()}


def metrics(out: Path) -> tuple[MetricKind, ...]:
    """Return what a run's folder says of the metrics that its tasks declare, by name."""
    kinds = {kind.name: kind for kind in store.values(out, METRICS, MetricKind).values()}
    return tuple(
        replace(kind, unit=plain(kind.unit), what=plain(kind.what), title=plain(kind.title))
        for _, kind in sorted(kinds.items())
    )
