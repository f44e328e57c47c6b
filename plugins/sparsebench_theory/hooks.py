"""The hooks of the theories. Each subpackage is a plugin with a task, a model, suites and papers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module, resources
from importlib.resources.abc import Traversable
from typing import Any

from sparsebench.models.base import Model
from sparsebench.paper import Paper
from sparsebench.plugin.hooks import hookimpl
from sparsebench.tasks.base import Task


def hooks_of(package: str, task: type[Task], model: type[Model], *papers: str) -> tuple[Callable[[], Any], ...]:
    """Return the hooks for tasks, models, suites and papers of a package, in that order; see `Hooks`.

    Args:
        package: name of the package; its suites are in its folder `suites`.
        task, model: its task and its model.
        papers: its modules with a `PAPER`, imported when the hook for papers is called.
    """

    @hookimpl
    def tasks() -> list[type[Task]]:
        return [task]

    @hookimpl
    def models() -> list[type[Model]]:
        return [model]

    @hookimpl
    def suites() -> Iterable[Traversable]:
        return (resources.files(package) / "suites").iterdir()

    @hookimpl
    def papers_of() -> list[Paper]:
        return [import_module(f"{package}.{name}").PAPER for name in papers]

    return tasks, models, suites, papers_of
