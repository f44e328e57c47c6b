"""The hooks, by which plugins register classes and observe records. None runs while tokens are removed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from collections.abc import Iterable
    from importlib.resources.abc import Traversable
    from pathlib import Path

    from sparsebench.models.base import Model
    from sparsebench.paper import Paper
    from sparsebench.plugin.observer import Observer
    from sparsebench.records.record import Record
    from sparsebench.strategy.base import Strategy
    from sparsebench.tasks.base import Task

PROJECT = "sparsebench"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class Hooks:
    """The functions that a plugin module may define, each decorated with `sparsebench.hookimpl`."""

    @hookspec
    def sparsebench_strategies(self) -> list[type[Strategy]]:  # type: ignore[empty-body]
        """Return the strategies of the plugin."""

    @hookspec
    def sparsebench_tasks(self) -> list[type[Task]]:  # type: ignore[empty-body]
        """Return the tasks of the plugin."""

    @hookspec
    def sparsebench_models(self) -> list[type[Model]]:  # type: ignore[empty-body]
        """Return the models of the plugin."""

    @hookspec
    def sparsebench_suites(self) -> Iterable[Path | Traversable]:  # type: ignore[empty-body]
        """Return the TOML files of the plugin's suites; each suite is named like its file."""

    @hookspec
    def sparsebench_papers(self) -> list[Paper]:  # type: ignore[empty-body]
        """Return the papers that the plugin reproduces. Called only when papers are needed, so it may import slowly."""

    @hookspec
    def sparsebench_observers(self) -> list[type[Observer]]:  # type: ignore[empty-body]
        """Return the observers of the plugin; each is turned on by its name."""

    @hookspec
    def sparsebench_record_finished(self, record: Record) -> None:
        """Receive a record that has just been stored. An exception turns the observer off; records are not affected."""
