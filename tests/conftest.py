import os
import posixpath
import tarfile
from collections import Counter
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


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep decoded pictures away from the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARSEBENCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def scripted() -> Callable[..., Strategy]:
    """Return a maker of strategies whose plan is a function of the view and the number of tokens to keep."""

    def make(
        decide: Callable[..., Any],
        *,
        site: str = "input",
        needs: Collection[str] = ("tokens",),
        kind: str = "deployable",
    ) -> Strategy:
        class Scripted(Strategy):
            def plan(self, view: Any, keep: int) -> Any:
                return decide(view, keep)

        Scripted.name, Scripted.site, Scripted.needs, Scripted.kind = "scripted", site, frozenset(needs), kind
        return Scripted()

    return make


@pytest.fixture(scope="session")
def real_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with some of cifar10/{train,test}/<class>/*.jpg and plants/*.jpg."""
    given = os.environ.get("SPARSEBENCH_DATA")
    source = Path(given) if given else ROOT.parent / "shared" / "data"
    if (source / "cifar10").is_dir() and (source / "plants").is_dir():
        return source
    archives = [source / "cifar10-jpeg.tar.xz", source / "plants.tar.xz"]
    if not all(archive.is_file() for archive in archives):
        pytest.skip(
            "no real images: set SPARSEBENCH_DATA to a folder with cifar10 and plants, or their archives, in it"
        )
    folder = tmp_path_factory.mktemp("images")
    for archive in archives:
        _extract_some(archive, folder)
    return folder


def _extract_some(archive: Path, folder: Path, each: int = 40) -> None:
    """Extract the first files of each folder only: all 64 311 would keep a busy disk occupied for minutes."""
    seen: Counter[str] = Counter()
    with tarfile.open(archive, "r|xz") as tar:
        for member in tar:
            parent = posixpath.dirname(member.name)
            if member.isfile() and seen[parent] < each:
                seen[parent] += 1
                tar.extract(member, folder, filter="data")
