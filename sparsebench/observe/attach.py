"""Turning observers on."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from sparsebench.errors import UserError
from sparsebench.observe.aside import Aside
from sparsebench.observe.base import Observer, See
from sparsebench.plugin.registry import Registry
from sparsebench.plugin.spec import fill, parse
from sparsebench.sweep import store


def attach(texts: Sequence[str], registry: Registry, out: Path) -> None:
    """Turn on the observers that were asked for as NAME[:param=value] or FILE.py[:param=value].

    Raises:
        UserError: there is no such observer or parameter, or it cannot be opened.
    """
    for text in dict.fromkeys(texts):
        spec = parse(text)
        for key, values in spec.params.items():
            if len(values) > 1:
                raise UserError(f"--observe: parameter '{key}' takes one value", got=f"'{text}'")
        classes = registry.observers_named(spec.name)
        if spec.params and not classes:
            raise UserError(f"observer '{spec.name}' has no parameters", got=f"'{text}'")
        for cls in classes:
            given = {key: value for key, (value,) in spec.params.items()}
            aside = Aside()
            registry.attach(cls.name, _opened(fill(cls, given, f"observer '{cls.name}'"), out, aside), aside)


def tell(texts: Sequence[str], folder: Path) -> tuple[int, list[str]]:
    """Tell observers of all records of a run's folder; return how many those are, and which observers failed.

    Raises:
        UserError: as `attach`, or the folder holds no records.
    """
    if not (records := store.read(folder)):
        raise UserError(f"no records in {folder}", next_step="run `sparsebench run --out` with this folder first")
    registry = Registry()
    attach(texts, registry, folder)
    for _, record in sorted(records.items()):
        registry.observe(record)
    return len(records), registry.turned_off


def _opened(observer: Observer, out: Path, aside: Aside) -> See:
    try:
        see = aside.call(partial(observer.open, out))
    except UserError:
        raise
    except Exception as error:  # a stranger's code, or a library's own mind about a folder
        raise UserError(f"observer '{observer.name}' cannot be opened: {type(error).__name__}: {error}") from error
    if not callable(see):
        raise UserError(f"`open` of observer '{observer.name}' must return a function", got=see)
    return see
