"""Finds strategies, tasks, models, suites, papers and observers. A broken installed plugin affects no other plugin."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from importlib.resources.abc import Traversable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import pluggy
from pydantic import BaseModel, PydanticSchemaGenerationError

from sparsebench.errors import UserError, as_utf8, last_line, one_line, unknown
from sparsebench.measure.metrics import METRICS, MetricKind, value_of
from sparsebench.models.base import Model
from sparsebench.plugin.content import Content
from sparsebench.plugin.hooks import PROJECT, Hooks
from sparsebench.plugin.observer import Observer
from sparsebench.records.record import Cell, Origin, Part
from sparsebench.strategy.base import Strategy, complaint, complaint_on_fields, complaint_on_revision
from sparsebench.strategy.spec import fill
from sparsebench.tasks.base import Task

if TYPE_CHECKING:
    from sparsebench.paper import Paper


log = logging.getLogger(__name__)

HIDDEN = "SPARSEBENCH_HIDE"
"""The environment variable with names of distributions or packages, separated by commas, whose plugins are ignored."""


@lru_cache(64)
def distribution(dist: metadata.Distribution | None) -> tuple[str, str]:
    """Return a distribution's name and version, "" without one. Cached, as parsing takes a millisecond."""
    if dist is None:
        return "", ""
    name, version = (str((dist.metadata.get_all(key) or [""])[0]) for key in ("Name", "Version"))
    return name, version


def module_of(entry: metadata.EntryPoint) -> str:
    """Return the module that an entry point names; "" if its value is not the name of a module."""
    match = entry.pattern.match(entry.value)
    module = "" if match is None else str(match["module"])
    return module if all(part.isidentifier() for part in module.split(".")) else ""


def entries() -> dict[str, metadata.EntryPoint]:
    """Return the installed entry points by name. Of two with the same name, the shipped one counts, else the first."""
    points: dict[str, metadata.EntryPoint] = {}
    names = set(os.environ.get(HIDDEN, "").split(",")) - {""}
    present = (
        entry
        for entry in metadata.entry_points(group=PROJECT)
        if not {distribution(entry.dist)[0], module_of(entry).partition(".")[0]} & names
    )
    for entry in sorted(present, key=lambda e: (e.name, not is_shipped(e))):
        first = points.setdefault(entry.name, entry)
        if first.value != entry.value:
            dist = distribution(entry.dist)[0] or "?"
            log.warning("plugin '%s' of %s is ignored: its name is taken", entry.name, dist)
    return points


def files_of(entry: metadata.EntryPoint) -> list[Path]:
    """Return the Python files of the package, or of the single module, of an entry point, without importing them."""
    name = module_of(entry).partition(".")[0]
    specs = (finder.find_spec(name, None) for finder in sys.meta_path if name)
    spec = next((spec for spec in specs if spec is not None), None)
    if spec is None:
        return []
    if spec.submodule_search_locations is not None:
        return sorted(path for place in spec.submodule_search_locations for path in Path(place).rglob("*.py"))
    return [Path(spec.origin)] if spec.origin and Path(spec.origin).is_file() else []


def is_shipped(entry: metadata.EntryPoint) -> bool:
    """Return whether an entry point belongs to sparsebench itself."""
    return distribution(entry.dist)[0] == PROJECT


FIRST = ("tasks", "models")
"""Entry points of sparsebench's own tasks and models, loaded first so that no plugin takes their names."""


BRINGS: dict[str, tuple[type[BaseModel], str]] = {
    "strategy": (Strategy, "sparsebench_strategies"),
    "task": (Task, "sparsebench_tasks"),
    "model": (Model, "sparsebench_models"),
    "observer": (Observer, "sparsebench_observers"),
}
"""For each kind of class that plugins provide, the base class and the hook that returns the classes."""


SHADOWS = (
    f'Field name ".*" in ".*" shadows an attribute in parent "({"|".join(cls.__name__ for cls, _ in BRINGS.values())})"'
)
"""The warnings of pydantic that are not shown, because such a class is refused, see `complaint_on_fields`."""


@dataclass(frozen=True)
class PluginClass:
    """A class that a plugin provides, and its origin.

    Attributes:
        file: the plugin file of the class, or None for an installed plugin.
    """

    cls: type[Any]
    origin: Origin
    file: Path | None = None


class ResolvedCell(NamedTuple):
    """A cell with its task and its model, with all their parameters."""

    cell: Cell
    task: Task
    model: Model


class PluginError(UserError):
    """A plugin cannot be loaded."""


class Registry:
    """Everything that can be named on the command line.

    Installed plugins are modules in the entry-point group `sparsebench`. A name that is also the name of an entry point
    imports only this plugin. All plugins are imported only for a list, or if a name is not found this way.

    Attributes:
        broken: the reasons why installed plugins could not be loaded, by plugin name.
        files: the plugin files that were loaded.

    Args:
        shipped_only: whether to ignore all installed plugins except sparsebench's own.
    """

    def __init__(self, *, shipped_only: bool = False) -> None:
        self.manager = pluggy.PluginManager(PROJECT)
        self.manager.add_hookspecs(Hooks)
        self.broken: dict[str, str] = {}
        self.entries = {name: entry for name, entry in entries().items() if not shipped_only or is_shipped(entry)}
        self.files: list[Path] = []
        self._items: dict[str, dict[str, PluginClass]] = {kind: {} for kind in BRINGS}
        for name in FIRST:
            self.load_entry(name)

    def strategy(self, name: str) -> PluginClass:
        """Return the strategy of that name; imports no other plugin if an entry point has the name."""
        return self._require("strategy", name, f"{name}.py" if Path(f"{name}.py").is_file() else None)

    def task(self, name: str) -> type[Task]:
        """Return the task of that name."""
        return self._require("task", name).cls

    def model(self, name: str) -> type[Model]:
        """Return the model of that name."""
        return self._require("model", name, f"timm:{name}" if re.match(r"vit_|deit|eva", name) else None).cls

    def _require(self, kind: str, name: str, meant: str | None = None) -> PluginClass:
        """Return the class of that name; the error for a missing one suggests `meant`, or says why it did not load."""
        if (item := self._look_for(kind, name)) is not None:
            return item
        if name in self.broken:
            raise PluginError(f"plugin '{name}' does not load: {self.broken[name]}")
        raise unknown(kind, name, {*self._items[kind], *self.broken}, meant=meant)

    def observers_for(self, name: str) -> list[type[Observer]]:
        """Return the observers to turn on for a name or a plugin file; none if the plugin observes records by a hook.

        Raises:
            UserError: there is no such observer.
            PluginError: the plugin cannot be loaded.
        """
        plugin, items = name, list[PluginClass]()
        if name.endswith(".py"):
            plugin = str(Path(name).resolve())
            items = [item for kind, item in self.brought_by(Path(name)) if kind == "observer"]
        elif (item := self._look_for("observer", name)) is not None:
            items = [item]
        if not items and plugin not in (hook.plugin_name for hook in self.record_hooks()):
            if name.endswith(".py"):
                hooks = "sparsebench_observers() or sparsebench_record_finished(record)"
                raise UserError(f"plugin file {name} brings no observer", next_step=f"write {hooks} with hookimpl")
            items = [self._require("observer", name)]
        return [item.cls for item in items]

    def brought_by(self, file: Path) -> list[tuple[str, PluginClass]]:
        """Load a plugin file; return its strategies, tasks, models and observers, each after its kind."""
        self.load_file(file)
        file = file.resolve()
        return [(kind, item) for kind, items in self._items.items() for item in items.values() if item.file == file]

    def _look_for(self, kind: str, name: str) -> PluginClass | None:
        """Return the class of that name, or None. Loads all plugins unless the name's entry point provides it."""
        if name not in self._items[kind] and name in self.entries:
            self.load_entry(name)
        if name not in self._items[kind]:
            self.load_all()
        return self._items[kind].get(name)

    def strategies(self) -> list[PluginClass]:
        """Return every strategy that is installed or loaded from a file."""
        return self._list("strategy")

    def tasks(self) -> list[type[Task]]:
        """Return every task."""
        return [item.cls for item in self._list("task")]

    def models(self) -> list[type[Model]]:
        """Return every model."""
        return [item.cls for item in self._list("model")]

    def observers(self) -> list[type[Observer]]:
        """Return every observer that can be turned on."""
        return [item.cls for item in self._list("observer")]

    def _list(self, kind: str) -> list[PluginClass]:
        self.load_all()
        return [item for _, item in sorted(self._items[kind].items())]

    def suites(self) -> dict[str, Path | Traversable]:
        """Return the TOML file of every suite of the plugins, by name."""
        return self._answers("sparsebench_suites", lambda file: str(file.name).removesuffix(".toml"))

    def papers(self) -> dict[str, Paper]:
        """Return every paper that plugins reproduce, by name."""
        return self._answers("sparsebench_papers", lambda paper: paper.name)

    def _answers(self, hook: str, name_of: Callable[[Any], str]) -> dict[str, Any]:
        """Return the results of a hook by name. If two have the same name, the shipped one counts, or else the first.

        A plugin that fails is named in `broken`.
        """
        self.load_all()
        results: dict[str, Any] = {}
        shipped = {name for name, entry in self.entries.items() if is_shipped(entry)}
        implementations = getattr(self.manager.hook, hook).get_hookimpls()
        for impl in sorted(implementations, key=lambda impl: (impl.plugin_name not in shipped, impl.plugin_name)):
            try:
                for result in impl.function():
                    results.setdefault(name_of(result), result)
            except Exception as error:
                self.broken[impl.plugin_name] = one_line(error)
        return dict(sorted(results.items()))

    def load_all(self) -> None:
        """Load every installed plugin; those that fail are named in `broken`."""
        for name in self.entries:
            self.load_entry(name)

    def load_entry(self, name: str) -> None:
        """Load one installed plugin, unless it was loaded, or failed to load, before."""
        if name in self.broken or self.manager.has_plugin(name):
            return
        if name not in self.entries:
            raise UserError(
                f"the installation has no entry point for plugin '{name}'", next_step="install sparsebench again"
            )
        entry = self.entries[name]
        dist, version = distribution(entry.dist)
        try:
            if not module_of(entry):
                raise PluginError(f"its entry point names no module: '{entry.value}'")
            self._take(entry.load, Origin(plugin=name, distribution=dist, version=version))
        except PluginError as error:
            self.broken[name] = str(error)

    def load_file(self, path: Path) -> list[str]:
        """Load a plugin from a .py file under a private module name; return the names of its strategies.

        Raises:
            UserError: the file does not exist, cannot be read, or provides nothing.
            PluginError: it fails to load, or one of its names is taken.
        """
        if not path.is_file():
            raise UserError(f"plugin file {path} does not exist")
        path = path.resolve()
        if path not in self.files:
            content = Content.of_file(path)
            origin = Origin(plugin=as_utf8(f"file:{path.name}"), revision=content.revision)
            try:
                self._take(lambda: _execute(content), origin, path)
            except PluginError as error:
                cause = error.__cause__ or error
                place = last_line(cause, lambda frame: Path(frame.f_code.co_filename) in content.paths)
                place = "" if isinstance(cause, SyntaxError) else place  # its text has the place
                raise PluginError(f"plugin file {path}: {error}{place}") from error
            if not self.manager.get_hookcallers(self.manager.get_plugin(str(path))):
                raise UserError(
                    f"plugin file {path.name} brings no strategy, task, model, suite, paper or observer",
                    next_step="return its classes from sparsebench_strategies(), decorated with sparsebench.hookimpl",
                )
            self.files.append(path)
        return [name for name, item in self._items["strategy"].items() if item.file == path]

    def _take(self, load: Callable[[], ModuleType], origin: Origin, file: Path | None = None) -> None:
        """Load a module and add the classes that its hooks return.

        What it prints goes to standard error, because standard output belongs to the command.

        Raises:
            PluginError: the module or one of its classes cannot be loaded; the text gives the reason.
        """
        name = origin.plugin if file is None else str(file)
        before = {kind: dict(items) for kind, items in self._items.items()}
        try:
            with redirect_stdout(sys.stderr), warnings.catch_warnings():
                warnings.filterwarnings("ignore", SHADOWS)
                module = load()
                self.manager.register(module, name=name)
                _check_hooks(module)
                for kind, (_, hook) in BRINGS.items():
                    for cls in self._classes(name, hook):
                        self._add(kind, cls, origin, file)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a plugin may raise anything, such as SystemExit
            self._items = before
            if self.manager.has_plugin(name):
                self.manager.unregister(name=name)
            raise PluginError(_reason(error)) from error

    def owners(self, strategy: str, task: str, model: str) -> list[PluginClass]:
        """Return the strategy, the task and the model of these names, with their origins."""
        return [self.strategy(strategy), self._require("task", task), self._require("model", model)]

    def resolve(self, cell: Cell) -> ResolvedCell:
        """Return a cell with its task and its model, which has the precision of the test.

        Raises:
            UserError: task or model is unknown, or lacks one of the parameters.
        """
        task = fill(self.task(cell.task.name), cell.task.params, f"task '{cell.task.name}'")
        model = fill(self.model(cell.model.name), cell.model_params, f"model '{cell.model.name}'")
        return ResolvedCell(cell, task, model)

    def part_of(self, instance: Task | Model) -> Part:
        """Return the part of a cell that names a task or a model, with the revision of its code."""
        item = self._items["task" if isinstance(instance, Task) else "model"].get(instance.name)
        if item is None or item.cls is not type(instance) or item.file is None:
            return Part.of(instance, "" if instance.revision == 1 else str(instance.revision))
        return Part.of(instance, item.origin.revision)

    def check_revision(self, instance: Task | Model, part: Part) -> None:
        """Raise UserError if a task or a model has another revision than the part of the cell that it was made from."""
        if (revision := self.part_of(instance).revision) != part.revision:
            raise UserError(
                f"'{part.name}' has another revision here than in its cell",
                got=revision or "1",
                allowed=part.revision or "1",
                next_step="run it again",
            )

    def _classes(self, name: str, hook: str) -> Iterator[Any]:
        """Yield the classes that a plugin returns from a hook."""
        for implementation in getattr(self.manager.hook, hook).get_hookimpls():
            if implementation.plugin_name == name:
                returned = implementation.function()
                if not isinstance(returned, Iterable) or isinstance(returned, str | Strategy):
                    raise UserError(f"{hook} must return a list of classes, as [MyClass]", got=repr(returned))
                yield from returned

    def _add(self, kind: str, cls: Any, origin: Origin, file: Path | None) -> None:
        """Add a class under its name.

        Raises:
            UserError: the class is not valid for its kind, or its name is taken.
        """
        if problem := complaint(cls) if kind == "strategy" else _complaint(kind, cls):
            raise UserError(problem)
        if kind == "strategy" and file is None:
            origin = origin.model_copy(update={"revision": str(cls.revision)})
        elif kind == "task":
            self._check_metrics(cls)
        entry = self.entries.get(cls.name)
        holder = self._items[kind].get(cls.name)
        if kind == "strategy" and entry is not None and origin.plugin != cls.name:
            raise UserError(f"its strategy '{cls.name}' has the name of installed plugin '{entry.name}'; rename it")
        if holder is None:
            self._items[kind][cls.name] = PluginClass(cls, origin, file)
        elif holder.cls is not cls:
            other = holder.file or holder.origin.plugin
            raise UserError(f"its {kind} '{cls.name}' has the name of one of plugin '{other}'; rename it")

    def _check_metrics(self, cls: type[Task]) -> None:
        """Raise UserError if a task's metrics are invalid, have no values, or differ from others of the same name."""
        if cls.metrics and cls.measure is Task.measure and cls.successes is Task.successes:
            raise UserError(
                f"task '{cls.name}' declares metrics, and nothing gives their values",
                next_step="write measure(self, items, test), which returns them by name",
            )
        others = (kind for other in self._items["task"].values() for kind in other.cls.metrics)
        kinds = {kind.name: kind for kind in (*METRICS, *others)}
        for kind in cls.metrics:
            if not isinstance(kind, MetricKind):
                raise UserError("metrics of a task", got=kind, allowed="sparsebench.measure.metrics.MetricKind")
            name = value_of(kind.name)
            if kinds.get(name, kind) != kind:
                raise UserError(f"there is another metric '{name}', which is not the same", next_step="rename it")

    def record_hooks(self) -> list[pluggy.HookImpl]:
        """Return the hooks that receive every record, each with a `plugin_name` and a `function`."""
        return self.manager.hook.sparsebench_record_finished.get_hookimpls()


def _execute(content: Content) -> ModuleType:
    """Execute a plugin file as a module with a private name, and return the module."""
    path = content.path
    name = f"sparsebench_local_{as_utf8(path.stem)}_{hashlib.sha256(bytes(path)).hexdigest()[:8]}"
    spec = spec_from_file_location(name, path)
    assert spec is not None
    sys.modules[name] = module = module_from_spec(spec)  # dataclasses and pydantic look it up during the execution
    try:
        content.execute(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _reason(error: BaseException) -> str:
    """Return why a plugin does not load. pydantic's advice on types of fields is replaced by what parameters may be."""
    if not isinstance(error, PydanticSchemaGenerationError):
        return one_line(error)
    kind = re.search(r"schema for (.+?)\. Set", error.message)
    allowed = "int, float, str, bool, None, Literal, Enum, and tuples or lists of them"
    return str(
        UserError(
            "the type of a parameter",
            got=kind[1] if kind else one_line(error),
            allowed=allowed,
            next_step="write ClassVar for what is no parameter",
        )
    )


def _check_hooks(module: ModuleType) -> None:
    """Raise UserError for a hook implementation whose name is not that of a hook."""
    hooks = [name for name in vars(Hooks) if name.startswith(PROJECT)]
    for name, value in vars(module).items():
        if isinstance(getattr(value, f"{PROJECT}_impl", None), dict) and name not in hooks:
            raise unknown("hook", name, hooks)


def _complaint(kind: str, cls: Any) -> str | None:
    """Return why a class is not a valid task, model or observer, or None."""
    if not (isinstance(cls, type) and issubclass(cls, BRINGS[kind][0])):
        return f"{cls!r} is not a subclass of {BRINGS[kind][0].__name__}"
    if problem := complaint_on_fields(cls, BRINGS[kind][0]):
        return problem
    if not isinstance(getattr(cls, "name", None), str):
        return f"{cls.__name__} has no name"
    return None if kind == "observer" else complaint_on_revision(cls)
