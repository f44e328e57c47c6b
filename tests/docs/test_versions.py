"""The lowest versions in pyproject.toml are those that .ci/lowest tries."""

import tomllib

from packaging.requirements import Requirement
from packaging.version import Version
from pages import ROOT

EXTRAS = ("tensorboard", "mlflow", "cluster", "export", "transformers")


def test_each_dependency_has_the_lowest_version_that_is_tried() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *(line for name in EXTRAS for line in project["optional-dependencies"][name])]
    lowest = {}
    for requirement in map(Requirement, lines):
        (bound,) = requirement.specifier
        assert bound.operator == ">=", requirement
        lowest[requirement.name] = bound.version
    tried = {}
    for line in (ROOT / ".ci" / "lowest.txt").read_text(encoding="utf-8").splitlines():
        name, exact, version = line.partition("==")
        if exact:
            tried[name] = version
    assert tried.keys() == lowest.keys()
    for name, version in lowest.items():
        assert Version(tried[name]) == Version(version), name
