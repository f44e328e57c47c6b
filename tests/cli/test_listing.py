import json

import pytest
from commands import call

from sparsebench.plugin.registry import Registry


def test_the_list_says_what_was_trained_and_what_to_cite() -> None:
    rows = {row["name"]: row for row in json.loads(call("list", "plugins", "--json").stdout)}
    assert rows["dense"]["trained"] == "no"
    assert "ICLR 2022" in rows["attn_topk"]["citation"] and rows["dense"]["citation"] == ""


def test_what_looks_at_images_first_is_said() -> None:
    rows = {row["name"]: row for row in json.loads(call("list", "plugins", "--json").stdout)}
    assert rows["fisher_mask"]["trained"] == "fits" and rows["dynamic_vit"]["trained"] == "yes"
    assert "trained: no; it looks at 256 training images first, with labels" in call("show", "fisher_mask").stdout
    assert "trained: no\n" in call("show", "tome").stdout and "trained: yes\n" in call("show", "a_vit").stdout


def test_each_bibtex_entry_is_printed_once_and_belongs_to_a_citation() -> None:
    strategies = [found.cls for found in Registry().strategies() if found.cls.bibtex]
    printed = call("list", "--bibtex").stdout
    assert strategies and all(cls.citation and printed.count(cls.bibtex) == 1 for cls in strategies)
    assert all(cls.bibtex.count("{") == cls.bibtex.count("}") for cls in strategies)
    keys = [line for line in printed.splitlines() if line.startswith("@")]
    assert len(set(keys)) == len(keys) == len({cls.bibtex for cls in strategies})
    assert call("show", "attn_topk", "--bibtex").stdout.startswith("@inproceedings{liang2022evit,")


@pytest.mark.parametrize(
    "arguments",
    [["list", "tasks", "--bibtex"], ["list", "--json", "--bibtex"], ["show", "random", "--bibtex"],
     ["show", "quick", "--bibtex"], ["show", "composite", "--bibtex"]],
    ids=" ".join,
)  # fmt: skip
def test_bibtex_of_what_has_none_is_refused(arguments: list[str]) -> None:
    done = call(*arguments)
    assert done.exit_code == 2 and done.stdout == "" and "bibtex" in done.stderr.lower()
