import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from PIL import Image

from sparsebench.cli import main
from sparsebench.tasks.sources import cache
from sparsebench.tasks.sources.known import SETS

pytestmark = pytest.mark.usefixtures("no_picture", "timed_once")

NAMES = ["digits", "cifar10", "cifar100", "svhn", "photos", "flowers102", "waterbirds", "celeba"]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty cache folder; commands run in its parent, which has no data sets."""
    monkeypatch.setenv("SPARSEBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


def call(*arguments: Any) -> Result:
    return CliRunner().invoke(main, ["data", *map(str, arguments)])


def rows(*arguments: Any) -> dict[str, dict[str, Any]]:
    """Return the row of each data set."""
    return {row["name"]: row for row in json.loads(call("--json", *arguments).stdout)["sets"]}


def test_every_known_set_has_its_place_and_how_to_get_it() -> None:
    result = call()
    assert result.exit_code == 0
    lines = {line.split()[0]: line for line in result.stdout.splitlines()[2:10]}
    assert list(lines) == NAMES
    for name, line in lines.items():
        assert ("there" if name in ("digits", "photos") else "missing") in line
        assert str(SETS[name].pictures) in line
        for place in SETS[name].places:
            assert str(Path("data") / place) in line
        advice = [line for line in result.stdout.splitlines() if line.startswith(f"{name}: ")]
        assert len(advice) == ("missing" in line)
        for text in advice:
            assert SETS[name].source in text and ("--download" in text) == bool(SETS[name].torchvision)
    sets = rows("--data-root", "elsewhere")
    assert list(sets) == NAMES and sets["cifar10"]["place"] == [str(Path("elsewhere/cifar-10-batches-py"))]
    assert sets["svhn"]["for"] == ["foregrounds"] and sets["celeba"]["for"] == ["task"]
    assert all(row["licence"] and row["citation"] and row["source"].startswith("http") for row in sets.values())


def test_the_state_of_a_set_follows_from_its_files(tmp_path: Path) -> None:
    """The state of a set is known by file names and with verify by checksums."""
    for name in ("train_32x32.mat", "test_32x32.mat"):
        assert rows()["svhn"]["state"] == "missing"
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data" / name).write_bytes(b"hello")
    assert rows()["svhn"]["state"] == "there" and rows("--verify")["svhn"]["state"] == "corrupt"


def test_a_set_in_its_own_layout_is_there_when_all_its_pictures_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SETS, "celeba", replace(SETS["celeba"], pictures=2))
    folder = tmp_path / "data" / "celeba" / "img_align_celeba"
    folder.mkdir(parents=True)
    assert "list_attr_celeba.* is not there" in rows()["celeba"]["note"]
    for name in ("list_attr_celeba.csv", "list_eval_partition.txt"):
        (folder.parent / name).write_text("")
    assert rows()["celeba"]["state"] == "missing"
    Image.new("RGB", (2, 2)).save(folder / "1.jpg")
    assert (rows()["celeba"]["state"], rows()["celeba"]["note"]) == ("corrupt", "celeba holds 1 of 2 pictures")
    Image.new("RGB", (2, 2)).save(folder / "2.JPG", format="JPEG")
    assert rows()["celeba"]["state"] == "there"
    assert rows("--verify")["celeba"]["state"] == "corrupt"
    assert "list_attr_celeba.csv cannot be read" in rows("--verify")["celeba"]["note"]
    (folder.parent / "list_attr_celeba.csv").write_text("image_id,Male,Blond_Hair\n1.jpg,1,-1\n2.JPG,-1,-1\n")
    (folder.parent / "list_eval_partition.txt").write_text("1.jpg 0\n2.JPG 2\n")
    assert rows("--verify")["celeba"]["state"] == "there"


def test_the_cache_is_shown_and_emptied(place: Path) -> None:
    cache.Pixels("a", (2, 3, 3, 3), lambda i: np.zeros((3, 3, 3), dtype=np.uint8)).array()
    size = sum(path.stat().st_size for path in place.iterdir())
    assert json.loads(call("--json").stdout)["cache"] == {"place": str(place), "files": 1, "bytes": size}
    assert f"cache of decoded pictures: {place} (1 files, 0.0 MB)" in call().stdout
    result = call("--clear-cache")
    assert "removed: 1 files" in result.stderr and "(0 files" in result.stdout
    assert sum(path.stat().st_size for path in place.iterdir()) == 0


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root can remove every file")
def test_a_cache_that_cannot_be_emptied_leaves_with_2(place: Path) -> None:
    cache.Pixels("a", (1, 3, 3, 3), lambda i: np.zeros((3, 3, 3), dtype=np.uint8)).array()
    place.chmod(0o500)
    try:
        result = call("--clear-cache")
    finally:
        place.chmod(0o700)
    assert result.exit_code == 2 and "system error: Permission denied" in result.stderr
