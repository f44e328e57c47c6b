"""From the words of a request to the budgets of cells: one name on all tasks, blocks as asked, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
from suite_text import suite_text

from sparsebench.errors import UserError
from sparsebench.plan.expand import expand
from sparsebench.plan.request import Request
from sparsebench.plugin.registry import Registry

SUITE = suite_text(
    'name = "plain"\nmodel = "vit"\nparams = {epochs = 1, test = 40}\nn_train = [8]',
    'name = "composite"\nmodel = "vit"\nparams = {epochs = 1, test = 40, pretrain_epochs = 0}\nn_train = [40]',
    baselines='"dense", "random"', budget="macs = 0.5\nblocks = [0, 1, 2]",
)  # fmt: skip


@pytest.fixture
def labels(tmp_path: Path) -> Any:
    """Return a function from a plugin's words to its budgets' names by task."""

    def find(words: str, text: str = SUITE) -> dict[str, set[str]]:
        path = tmp_path / "mine.toml"
        path.write_text(text)
        jobs = expand(Request(plugins=(words,), suite=str(path)), Registry())
        name = words.partition(":")[0]
        return {
            task: {j.cell.budget.label for j in jobs if (j.cell.task.name, j.cell.strategy.name) == (task, name)}
            for task in ("plain", "composite")
        }

    return find


@pytest.mark.parametrize(
    ("words", "label"),
    [
        ("attn_topk:macs=0.65", "macs 0.65 @0,1,2"),
        ("attn_topk:schedule=late,macs=0.65", "macs 0.65 late 2"),
        ("attn_topk:schedule=every", "macs 0.5 every block"),
        ("tome:per_block=4", "4 a block"),
        ("pitome:ratio=.9", "ratio 0.9 a block"),
        ("random:keep_rate=0.5", "keep 0.5 power-floor"),
    ],
)
def test_a_budget_has_one_name_on_all_tasks(labels: Any, words: str, label: str) -> None:
    assert labels(words) == {"plain": {label}, "composite": {label}}


@pytest.mark.parametrize(
    ("words", "label"),
    [
        ("ats:macs=0.5,blocks=0+1+2", "macs 0.5 @0,1,2"),
        ("ats:macs=0.5", "macs 0.5 @0,1,2"),  # the suite's, where ats by itself acts in blocks 1 and 2
        ("tome:macs=0.5,blocks=1+2", "macs 0.5 @1,2"),
        ("evit:keep_rate=0.5", "keep 0.5 compound-ceil @0,1,2"),
        ("evit:keep_rate=0.5,convention=power-floor", "keep 0.5 power-floor @0,1,2"),
        ("evit:macs=0.5,convention=compound-ceil", "macs 0.5 compound-ceil @0,1,2"),
        ("attn_topk:counts=40+30+20", "counts 40,30,20 @0,1,2"),
        ("attn_topk:counts=40+30,blocks=1+2", "counts 40,30 @1,2"),
    ],
)
def test_blocks_and_convention_are_those_asked_for_or_the_suites_or_the_strategys(
    labels: Any, words: str, label: str
) -> None:
    assert labels(words)["composite"] == {label}


def test_a_tasks_own_budgets_keep_their_blocks(labels: Any) -> None:
    text = SUITE + "budgets = [{keep_rate = 0.5, blocks = [2]}, {macs = 0.5}]\n"
    assert labels("attn_topk", text)["composite"] == {"keep 0.5 power-floor @2", "macs 0.5 @0,1,2"}
    with pytest.raises(UserError, match="budget blocks; got 9; allowed: 0 to 2 for this model"):
        labels("attn_topk", SUITE + "budgets = [{keep_rate = 0.5, blocks = [9]}]\n")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            "tome:counts=60+30+10",
            "of 60 tokens no more than 30 can leave this strategy at once|of 30 tokens no more than 15",
        ),
        (
            "attn_topk:macs=0.5,gamma=3",
            "gamma is for the late schedule, which 'attn_topk' does not have here; got gamma=3",
        ),
        ("a_vit:gamma=10", "gamma is for the late schedule"),
        ("random:macs=0.5,blocks=1", "acts at the input only, once"),
        ("random:schedule=late", "'random' acts at the input only, once; got budget .*; allowed: macs or keep"),
        ("random:per_block=8", "acts at the input only, once; got budget .*; allowed: macs or keep"),
    ],
)
def test_what_would_be_changed_or_passed_over_in_silence_is_refused(labels: Any, words: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        labels(words)


def test_a_budget_that_is_named_twice_is_one() -> None:
    def cells(*macs: float) -> list[str]:
        request = Request(suite="quick", plugins=("attn_topk",), tasks=("composite",), seeds=1, macs=macs)
        return [job.cell.id for job in expand(request, Registry())]

    assert cells(0.5, 0.7, 0.5) == cells(0.5, 0.7)
