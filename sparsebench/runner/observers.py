"""The observers of a run: turned on by name, shown each record, and turned off when they fail."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

from sparsebench.errors import UserError, one_line
from sparsebench.plugin.observer import Observer, ObserverThread, See
from sparsebench.plugin.registry import Registry
from sparsebench.records import store
from sparsebench.records.record import Record
from sparsebench.strategy.spec import fill, parse

log = logging.getLogger(__name__)


class Observers:
    """Those that were turned on by name, and the plugins that look at records without being named.

    Attributes:
        registry: where they are found.
        failed: names of those that raised or hung, and are turned off.
    """

    def __init__(self, registry: Registry):
        self.registry = registry
        self.failed: list[str] = []
        self._seeing: dict[str, tuple[Callable[[Record], object], ObserverThread, str]] = {}
        self._off = set[str]()

    def attach(self, texts: Sequence[str], out: Path) -> None:
        """Turn on the observers that were asked for as NAME[:param=value] or FILE.py[:param=value].

        Raises:
            UserError: there is no such observer or parameter, or it cannot be opened.
        """
        for text in dict.fromkeys(texts):
            spec = parse(text)
            for key, values in spec.params.items():
                if len(values) > 1:
                    raise UserError(f"--observe: parameter '{key}' takes one value", got=f"'{text}'")
            classes = self.registry.observers_named(spec.name)
            if spec.params and not classes:
                raise UserError(f"observer '{spec.name}' has no parameters", got=f"'{text}'")
            for cls in classes:
                given = {key: value for key, (value,) in spec.params.items()}
                observer = fill(cls, given, f"observer '{cls.name}'")
                thread = ObserverThread()
                self._seeing[f"{text} {cls.name}"] = _open(observer, out, thread), thread, f"observe:{cls.name}"

    def observe(self, record: Record) -> None:
        """Show a finished record to each; one that raises or hangs is reported and turned off."""
        for hook in self.registry.record_hooks():
            self._seeing.setdefault(hook.plugin_name, (hook.function, ObserverThread(), hook.plugin_name))
        for key, (see, thread, name) in self._seeing.items():
            if key in self._off:
                continue
            try:
                with redirect_stdout(sys.stderr):
                    thread.call(partial(see, record))
            except (Exception, SystemExit) as error:  # an observer must never cost a record
                self._off.add(key)
                self.failed.append(name)
                log.warning("observer '%s' failed and is turned off: %s", name, one_line(error))


def show_folder(texts: Sequence[str], folder: Path) -> tuple[int, list[str]]:
    """Show observers all records of a run's folder; return how many those are, and which observers failed.

    Raises:
        UserError: as `Observers.attach`, or the folder holds no records.
    """
    if not (records := store.read(folder)):
        raise UserError(f"no records in {folder}", next_step="run `sparsebench run --out` with this folder first")
    observers = Observers(Registry())
    observers.attach(texts, folder)
    for _, record in sorted(records.items()):
        observers.observe(record)
    return len(records), observers.failed


def _open(observer: Observer, out: Path, thread: ObserverThread) -> See:
    try:
        see = thread.call(partial(observer.open, out))
    except UserError:
        raise
    except Exception as error:  # a stranger's code, or a library's own mind about a folder
        raise UserError(f"observer '{observer.name}' cannot be opened: {type(error).__name__}: {error}") from error
    if not callable(see):
        raise UserError(f"`open` of observer '{observer.name}' must return a function", got=see)
    return see
