"""What an author of a strategy begins with, written from templates."""

from __future__ import annotations

import importlib.util
import json
import keyword
import re
from importlib import metadata
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from sparsebench import __version__
from sparsebench.errors import UserError
from sparsebench.plugin.hooks import PROJECT
from sparsebench.plugin.registry import Registry

FILES = {"strategy.py.jinja": "{name}.py", "test.py.jinja": "test_{name}.py"}
PACKAGE = {
    "strategy.py.jinja": "{name}/src/{name}/strategy.py",
    "init.py.jinja": "{name}/src/{name}/__init__.py",
    "package_test.py.jinja": "{name}/tests/test_{name}.py",
    "pyproject.toml.jinja": "{name}/pyproject.toml",
    "README.md.jinja": "{name}/README.md",
    "workflow.yml.jinja": "{name}/.github/workflows/test.yml",
}
"""The place of what each template makes; the first is the strategy."""


def write(name: str, folder: Path, registry: Registry, *, package: bool = False) -> list[Path]:
    """Write a strategy with its test, or a distribution of it; return the files, the strategy's first.

    Raises:
        UserError: the name is taken or none, a file is there already, or the folder cannot be written.
    """
    places = {template: folder / place.format(name=name) for template, place in (PACKAGE if package else FILES).items()}
    _check_name(name)
    for path in (folder / name, *places.values()) if package else places.values():
        if path.exists():
            raise UserError(f"{path} is there already", next_step="choose another name, or --dir")
    if name in {*registry.entries, *(registered.cls.name for registered in registry.strategies())}:
        raise UserError(f"there is a strategy '{name}' already", next_step="choose another name")
    if importlib.util.find_spec(name) is not None:
        raise UserError(f"there is a Python module '{name}' already", next_step="choose another name")
    templates = Environment(
        loader=PackageLoader("sparsebench.plugin"), undefined=StrictUndefined, keep_trailing_newline=True
    )
    words = {
        "name": name,
        "cls": "".join(part[:1].upper() + part[1:] for part in name.split("_")) or name,
        "module": f"{name}.strategy" if package else name,
        "distribution": "sparsebench-" + name.strip("_").replace("_", "-"),
        "version": __version__,
        "requirement": _requirement(),
    }
    texts = {path: templates.get_template(template).render(words) for template, path in places.items()}
    try:
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
    return list(texts)


def _requirement() -> str:
    """Return what pip is given to install sparsebench as it is here: a repository or an archive, else its name."""
    name = f"{PROJECT}>={__version__}"
    try:
        place = json.loads(metadata.distribution(PROJECT).read_text("direct_url.json") or "{}")
        url, vcs = str(place.get("url", "")), place.get("vcs_info")
        if vcs is not None:
            url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    except (metadata.PackageNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return name
    host = re.fullmatch(r"(?:git\+)?(?:https|ssh)://([\w.-]+|git@[\w.-]+)/[\w./@+~-]+", url)
    return url if host else name  # a folder of this machine is nowhere else, and passwords are for nobody


def _check_name(name: str) -> None:
    if not (name.isascii() and name.isidentifier() and name[0].isalpha()) or keyword.iskeyword(name):
        raise UserError("the name of a strategy", got=f"'{name}'", allowed="letters, digits and _, as Python has names")
