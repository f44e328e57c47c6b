"""sparsebench show."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sparsebench.cli.guide import Guided
from sparsebench.cli.width import show as in_width
from sparsebench.errors import UserError, unknown

if TYPE_CHECKING:
    from sparsebench.plugin.registry import Registry


@click.command(cls=Guided)
@click.argument("name")
@click.option("--bibtex", is_flag=True, help="Only where the strategy was published, as BibTeX.")
def show(name: str, bibtex: bool) -> None:
    """Show what is known of a strategy, task, model, observer or suite NAME, or of the strategies of a FILE.py."""
    from sparsebench.planning import suite as suites
    from sparsebench.plugin.registry import Registry

    registry = Registry()
    if name.endswith(".py"):
        for strategy in registry.load_file(Path(name)):
            registered = registry.strategy(strategy)
            if registered.failure:
                raise UserError(f"{name} does not load: {registered.failure}")
            _class("strategy", registered.cls, bibtex)
        return
    known = _classes_of(Registry(shipped_only=True))
    if name not in {*known, *suites.names()}:  # others' plugins may take seconds to load
        known = _classes_of(registry)
    if name in registry.broken:
        raise UserError(f"plugin '{name}' does not load: {registry.broken[name]}")
    if name in known:
        _class(*known[name], bibtex)
    elif bibtex and name in suites.names():
        raise UserError("only strategies have a BibTeX entry", got=f"suite '{name}'")
    elif name in suites.names():
        in_width(suites.text(name))
    else:
        bare = name.partition(":")[0]
        names = {*known, *suites.names()}
        raise unknown("strategy, task, model, observer or suite", name, names, meant=bare if bare in names else None)


def _classes_of(registry: Registry) -> dict[str, tuple[str, Any]]:
    """Return, by their names, what a registry has and of which kind it is."""
    classes: dict[str, list[Any]] = {
        "strategy": [registered.cls for registered in registry.strategies()],
        "task": registry.tasks(),
        "model": registry.models(),
        "observer": registry.observers(),
    }
    return {cls.name: (what, cls) for what, several in classes.items() for cls in several}


def _say(text: str) -> None:
    in_width(f"{text}\n")


def _class(what: str, cls: Any, bibtex: bool) -> None:
    if bibtex:
        if not (entry := getattr(cls, "bibtex", "")):
            raise UserError(f"{what} '{cls.name}' has no BibTeX entry", next_step="sparsebench list --bibtex")
        click.echo(entry)
        return
    _say(f"{what} {cls.name}\n")
    if what == "strategy":
        _say("\n".join(f"published: {setting}" for setting in cls.published or ("no setting is known here",)))
        _say(f"differs from the published method: {_differs(cls)}\n")
    _say(f"{inspect.cleandoc(cls.__doc__ or '')}\n")
    if what == "strategy":
        _say(f"kind: {cls.kind}\nsite: {cls.site}\nneeds: {', '.join(sorted(cls.needs)) or 'nothing'}")
        _say(f"trained: {_training(cls)}\nexports: {_exports(cls)}\ncitation: {cls.citation or '-'}\n")
    if what == "strategy" and cls.budgeted:
        from sparsebench.planning.budgets import BUDGET_KEYS  # NumPy

        _say(f"words of its budget: {', '.join(BUDGET_KEYS)}\n")
    for key, info in cls.model_fields.items():
        if key == "disposal" and len(cls.allowed_disposals()) == 1:
            continue
        kind = str(info.annotation) if not isinstance(info.annotation, type) else info.annotation.__name__
        if key == "disposal":
            kind = f"Literal{list(cls.allowed_disposals())}"
        default = "required" if info.is_required() else repr(info.default)
        about = f"  {info.description}" if info.description else ""
        _say(f"  {key} = {default}  ({kind.replace('typing.', '')}){about}")
        if key == "disposal":
            _disposals(cls)


def _training(cls: Any) -> str:
    """Return whether a strategy is trained, or what it looks at before the test."""
    if not cls.fits():
        return "yes" if cls.trained else "no"
    return f"no; it looks at {cls.fit_images} training images first" + (", with labels" if cls.fit_labels else "")


def _exports(cls: Any) -> str:
    """Return whether a network with a strategy can be written as a file, and who knows where nobody said."""
    from sparsebench.deploy.exportable import exportable, never_exported

    why = never_exported(cls) or "its choices read numbers from tensors"
    return {"yes": "yes", "no": f"no: {why}", "?": "sparsebench check says"}[exportable(cls)]


def _differs(cls: Any) -> str:
    """Return how a strategy differs from the published method, as far as it is known."""
    return cls.differs or ("nothing known" if cls.citation or cls.published else "none is published")


def _disposals(cls: Any) -> None:
    """Print what each disposal does that the strategy can have."""
    from sparsebench.disposal import DOES

    for kind in cls.allowed_disposals():
        _say(f"    {kind}: {DOES[kind]}")
