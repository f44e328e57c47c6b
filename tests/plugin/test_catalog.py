"""What plugins say is kept: a list need not load them again."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparsebench.plugin import catalog
from sparsebench.records.cell import Origin

MODULE = '''
import sys
from typing import ClassVar

import {imports}
import sparsebench


class Other(sparsebench.Strategy):
    """{what}"""

    name: ClassVar = "other"
    bibtex: ClassVar = "@misc{{other}}"

    def scores(self, view):
        return view.tokens.sum(dim=-1)


@sparsebench.hookimpl
def sparsebench_strategies():
    return [Other]
'''


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Return a folder with a plugin of somebody else that imports torch."""
    info = tmp_path / "site" / "other_plugin-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-plugin\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[sparsebench]\nother = other_plugin.strategy\n")
    (tmp_path / "site" / "other_plugin").mkdir()
    (tmp_path / "site" / "other_plugin" / "__init__.py").touch()
    write(tmp_path / "site", "Keeps some.")
    return tmp_path / "site"


def write(site: Path, what: str, imports: str = "torch") -> None:
    (site / "other_plugin" / "strategy.py").write_text(MODULE.format(what=what, imports=imports))


def run(site: Path, *arguments: str, **variables: str) -> tuple[str, bool]:
    """Return what a command prints, and whether torch was imported for it."""
    code = f"""
import sys
from sparsebench.cli import main
try:
    main({arguments!r})
except SystemExit as leave:
    assert not leave.code, leave.code
print('torch' in sys.modules)
"""
    places = {"PYTHONPATH": str(site), "SPARSEBENCH_CACHE": str(site.parent / "cache")}
    env = os.environ | places | variables
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    printed, _, torch = done.stdout.rstrip("\n").rpartition("\n")
    return printed, torch == "True"


def row_of(printed: str) -> dict[str, str]:
    rows = {row["name"]: row for row in json.loads(printed)}
    assert {"dense", "attn_topk"} <= rows.keys()
    return rows.get("other", {})


@pytest.mark.slow
def test_a_list_loads_others_plugins_once_until_they_change(site: Path) -> None:
    first, loaded = run(site, "list", "--json")
    assert loaded and row_of(first) | {"needs": ""} == {
        "name": "other", "kind": "deployable", "site": "input", "needs": "", "trained": "no",
        "from": "other-plugin 1", "what": "Keeps some.", "citation": "", "exports": "?",
    }  # fmt: skip
    assert run(site, "list", "--json") == (first, False)
    printed, loaded = run(site, "list", "--bibtex")
    assert "@misc{other}" in printed and not loaded
    assert not run(site, "show", "attn_topk")[1] and not run(site, "list", "tasks")[1]
    write(site, "Keeps others.")
    printed, loaded = run(site, "list", "--json")
    assert loaded and row_of(printed)["what"] == "Keeps others."
    assert row_of(run(site, "list", "--json", SPARSEBENCH_HIDE="a,other-plugin")[0]) == {}


def test_a_list_that_is_known_loads_no_plugin_at_all(site: Path) -> None:
    code = """
import sys
from sparsebench.cli import main
try:
    main(["list"])
except SystemExit:
    pass
print('sparsebench_plugins.attn_topk' in sys.modules, 'numpy' in sys.modules)
"""
    env = os.environ | {"SPARSEBENCH_CACHE": str(site.parent / "cache")}
    line = [sys.executable, "-c", code]
    runs = [subprocess.run(line, capture_output=True, text=True, timeout=300, env=env).stdout for _ in range(2)]
    assert [printed.splitlines()[-1] for printed in runs] == ["True True", "False False"]
    assert runs[0].splitlines()[:-1] == runs[1].splitlines()[:-1]


@pytest.mark.slow
@pytest.mark.parametrize("content", ["", "{", "[]", '{"key": "another", "tables": {}}', '{"tables": 3}', "\xff"])
def test_a_cache_file_that_is_broken_or_anothers_is_ignored(content: str, site: Path) -> None:
    first, _ = run(site, "list", "--json")
    (file,) = (site.parent / "cache").glob("plugins-*.json")
    file.write_text(content, "latin-1")
    assert run(site, "list", "--json") == (first, True)
    assert json.loads(file.read_text())["tables"]


@pytest.mark.slow
def test_what_a_plugin_lacks_today_may_be_there_tomorrow(site: Path) -> None:
    write(site, "Keeps some.", imports="module_to_come")
    for _ in range(2):
        row = row_of(run(site, "list", "--json")[0])
        assert row["kind"] == "broken" and "module_to_come" in row["what"]
    (site / "module_to_come.py").touch()
    assert row_of(run(site, "list", "--json")[0])["what"] == "Keeps some."


@pytest.mark.slow
def test_without_a_place_for_it_a_list_is_the_same(site: Path) -> None:
    (site.parent / "cache").touch()
    first, loaded = run(site, "list", "--json")
    assert loaded and row_of(first) and run(site, "list", "--json") == (first, True)


@pytest.mark.slow
def test_a_list_says_what_a_check_found_of_exports(site: Path) -> None:
    assert row_of(run(site, "list", "--json")[0])["exports"] == "?"
    run(site, "check", "other", "random")
    assert row_of(run(site, "list", "--json")[0])["exports"] == "yes"


def test_what_a_check_found_is_kept_by_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSEBENCH_CACHE", str(tmp_path))
    first, other = Origin(plugin="p", revision="1"), Origin(plugin="p", revision="2")
    catalog.save("key", {"plugins": []})
    catalog.note_export("mine", first, True)
    catalog.note_export("other", first, False)
    assert catalog.load("key") is None  # it would have said "?"
    assert (catalog.exports("mine", first), catalog.exports("other", first)) == (True, False)
    assert catalog.exports("mine", other) is None
    catalog.save("key", {"plugins": []})
    catalog.note_export("mine", first, True)
    assert catalog.load("key") is not None
    next(tmp_path.glob("exports-*")).write_text("{")
    assert catalog.exports("mine", first) is None
    catalog.note_export("mine", first, True)
    assert catalog.exports("mine", first) is True
