import os
import shutil
import subprocess
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

from sparsebench.strategy import Strategy

ROOT = Path(__file__).resolve().parents[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests that take more than a few seconds")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--slow"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="takes more than a few seconds; give --slow"))


@pytest.fixture(scope="session")
def scripted() -> Callable[..., Strategy]:
    """Return a maker of strategies whose plan is a function of the view and the number of tokens to keep."""

    def make(
        decide: Callable[..., Any], *, site: str = "input", needs: Collection[str] = ("tokens",), kind: str = "deployable"
    ) -> Strategy:
        class Scripted(Strategy):
            def plan(self, view: Any, keep: int) -> Any:
                return decide(view, keep)

        Scripted.name, Scripted.site, Scripted.needs, Scripted.kind = "scripted", site, frozenset(needs), kind
        return Scripted()

    return make


@pytest.fixture(scope="session")
def real_images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a folder with cifar10/{train,test}/<class>/*.jpg and plants/*.jpg, as in SPARSEBENCH_DATA."""
    given = os.environ.get("SPARSEBENCH_DATA")
    source = Path(given) if given else ROOT.parent / "shared" / "data"
    if (source / "cifar10").is_dir() and (source / "plants").is_dir():
        yield source
    elif (source / "unpack").is_file():
        folder = tmp_path_factory.mktemp("images")
        subprocess.run([source / "unpack", folder], check=True, timeout=300)
        yield folder
        shutil.rmtree(folder)
    else:
        pytest.skip("no real images: set SPARSEBENCH_DATA to a folder with cifar10 and plants, or with their `unpack`")
