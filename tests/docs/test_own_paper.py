"""The page on writing a paper: the paper is listed if installed, and its figure is made."""

import csv
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from pages import blocks, code
from plugin_files import write_distribution

from sparsebench.cli import main
from sparsebench.paper import Result

pytestmark = pytest.mark.usefixtures("no_picture", "timed_once")

PAGE = "docs/write/paper.md"


def test_the_paper_of_the_page_is_listed_and_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suite = next(block.code for block in blocks(PAGE, "text") if block.code.startswith("name ="))
    assert len((code(PAGE)[0] + suite).splitlines()) < 60
    site = write_distribution(tmp_path / "site", {"half_paper": "half_paper"}, half_paper=code(PAGE)[0])
    (site / "half.toml").write_text(suite, encoding="utf-8")
    monkeypatch.syspath_prepend(site)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Result, "pictures", lambda result: {"png": b"drawn elsewhere"})
    assert "half" in CliRunner().invoke(main, ["reproduce", "--help"]).output
    done = CliRunner().invoke(main, ["reproduce", "half", "--figure", "1", "--jobs", "0", "--out", "out"])
    assert done.exit_code == 0, done.output
    rows = list(csv.DictReader(Path("out/fig1.csv").read_text().splitlines()))
    assert {row["strategy"] for row in rows} == {"dense", "random"} and Path("out/fig1.png").is_file()
    (verdict,) = json.loads(Path("out/verdicts.json").read_text())["verdicts"]
    assert verdict["figure"] == "1" and verdict["claim"] in done.output
