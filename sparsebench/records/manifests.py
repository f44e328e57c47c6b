"""Files stored beside the records: descriptions of strategies, suites, metrics, machines and the user's files.

Each description is a file of its own, named after the hash of its content. Records can be read without them.
The functions take an open store, or the path of a run's folder, which they open for one question.
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
from sparsebench.records.record import Cell, Value, digest
from sparsebench.records.store import Store
from sparsebench.strategy.base import Kind, Site

STRATEGIES, SUITES, METRICS, ENVIRONMENTS = "strategies", "suites", "metrics", "environments"
FILES = "files"
MANIFEST = "manifest.json"
"""The file that makes a folder a submission; see `publish.submission.Manifest`."""
OWN = "no-suite"
"""Stands for the name of a suite if the cells are not those of a suite."""


class StrategyEntry(Value):
    """The description of a strategy by its class; see `Strategy`.

    Attributes:
        revision: see `Origin`. Earlier versions wrote the hash of the source.
        how: the default disposal of tokens; "" if unknown.
        variant: if it is a variant of its paper's method, how it differs, in one sentence; otherwise, and if an
            earlier version wrote it, "".
        file: name of the plugin file in `source`; "" for an installed strategy.
        source: texts of this file and of the modules of its author that it imports, by name; empty if installed.
        data: files of these modules that are no text, in base64, by name.
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
    variant: str = Field("", exclude_if=not_)
    file: str = Field("", exclude_if=not_)
    source: dict[str, str] = Field(default_factory=dict, exclude_if=not_)
    data: dict[str, str] = Field(default_factory=dict, exclude_if=not_)


class SuiteEntry(Value):
    """A suite as requested by a run.

    Attributes:
        name, version: those of the suite if all its cells were requested; otherwise `OWN` and 1.
        settings: sorted hashes of the settings in which every strategy is measured, see `setting_of`.
        main_task, sample_complexity, target: see `plan.suite.Suite`; "" or 0 without a suite or if an earlier version
            wrote it.
    """

    name: str
    version: int
    settings: tuple[str, ...]
    main_task: str = Field("", exclude_if=not_)
    sample_complexity: str = Field("", exclude_if=not_)
    target: float = Field(0.0, exclude_if=not_)


class FileEntry(Value):
    """A file or folder of the user.

    Attributes:
        name: the name in cells, computed from the content, such as weights-0123456789ab.
        file: the user's file name, with as many folders as distinguish it from others; "" for pictures.
        left_out: one line about the files that were left out of a folder of pictures.
    """

    name: str
    file: str = ""
    left_out: str = Field("", exclude_if=not_)


def setting_of(cell: Cell) -> str:
    """Return the hash of a cell's task, model, number of training samples, repetition and precision."""
    return digest(cell.model_dump(mode="json", include={"task", "model", "n_train", "repetition", "precision"}))


def strategies(folder: Path | Store) -> dict[tuple[str, str], StrategyEntry]:
    """Return the descriptions of the strategies in a run's folder, by name and revision."""
    values = sorted(
        Store.open(folder).values(STRATEGIES, StrategyEntry).values(),
        key=lambda value: (value.how != "", value.variant != "", value.file),
    )
    return {(strategy.name, strategy.revision): strategy for strategy in values}


def suites(folder: Path | Store) -> list[SuiteEntry]:
    """Return the suites of a run's folder, sorted by name and version."""
    values = Store.open(folder).values(SUITES, SuiteEntry).values()
    return sorted(values, key=lambda suite: (suite.name, suite.version, suite.settings))


def file_names(folder: Path | Store) -> dict[str, str]:
    """Return the user's names of files, by the names in cells.

    If a file has several names, the longest is used. If two files have the same name, the name in cells is appended.
    """
    entries = Store.open(folder).values(FILES, FileEntry).values()
    values = sorted(entries, key=lambda value: (len(value.file), value.file))
    names = {plain(value.name): plain(value.file) for value in values if value.file}
    count = Counter(names.values())
    return {name: f"{file} ({name})" if count[file] > 1 else file for name, file in names.items()}


def omissions(folder: Path | Store) -> list[tuple[str, str]]:
    """Return pairs: the name of a folder of pictures in cells, and one line about the files that were left out."""
    values = Store.open(folder).values(FILES, FileEntry).values()
    return sorted((plain(value.name), plain(value.left_out, 1000)) for value in values if value.left_out)


def environments(folder: Path | Store, hashes: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return the descriptions of machines and their libraries with the given hashes, by hash."""
    values = Store.open(folder).values(ENVIRONMENTS, dict[str, Any])
    machines = {}
    for name in hashes:
        about = values.get(f"{name}.json")
        if about is not None:
            machines[name] = {plain(key): plain(value) for key, value in sorted(about.items())}
    return machines


def metrics(folder: Path | Store) -> tuple[MetricKind, ...]:
    """Return the metrics that tasks declare, as stored in a run's folder, sorted by name."""
    kinds = {kind.name: kind for kind in Store.open(folder).values(METRICS, MetricKind).values()}
    return tuple(
        replace(kind, unit=plain(kind.unit), what=plain(kind.what), title=plain(kind.title))
        for _, kind in sorted(kinds.items())
    )
