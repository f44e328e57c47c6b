import json

import pytest
from click.testing import CliRunner, Result

from sparsebench.board.fit import WIDTH
from sparsebench.cli import main
from sparsebench.cli.listing import WHAT
from sparsebench.plugin.registry import Registry


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


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
     ["show", "quick", "--bibtex"], ["show", "theory", "--bibtex"]],
    ids=" ".join,
)  # fmt: skip
def test_bibtex_of_what_has_none_is_refused(arguments: list[str]) -> None:
    done = call(*arguments)
    assert done.exit_code == 2 and done.stdout == "" and "bibtex" in done.stderr.lower()


@pytest.mark.parametrize("what", WHAT)
def test_lists_fit_a_terminal_unless_all_is_asked_for(what: str) -> None:
    fitting, whole = (call("list", what, *more).stdout.splitlines() for more in ((), ("--wide",)))
    assert max(map(len, fitting)) <= WIDTH < max(map(len, whole))
    assert [line.split()[0] for line in fitting] == [line.split()[0] for line in whole][: len(fitting)]


def test_a_list_that_is_too_wide_leaves_out_what_show_says() -> None:
    heading, whole = (call("list", *more).stdout.splitlines()[0].split() for more in ((), ("--wide",)))
    assert heading == ["name", "kind", "site", "trained", "exports", "what"]
    assert whole == ["name", "kind", "site", "needs", "trained", "exports", "from", "what", "citation"]
