"""Declarations of published methods: settings that can be typed, published token counts and MACs, names."""

import json
from dataclasses import replace
from functools import cache
from typing import ClassVar

import pytest
import timm
import torch
from click.testing import CliRunner
from tiny import SHIPPED

from sparsebench.cli import main
from sparsebench.measure.cost import VitCost
from sparsebench.measure.schedule import TokenSchedule
from sparsebench.models.timm_parts import vit_cost
from sparsebench.plan.expand import expand
from sparsebench.plan.request import Request
from sparsebench.plugin.registry import Registry
from sparsebench.strategy.base import complaint
from sparsebench.strategy.spec import fill

ALL = [setting for cls in SHIPPED.values() for setting in cls.published]


@cache
def deit_small() -> VitCost:
    with torch.device("meta"):
        return vit_cost(timm.create_model("deit_small_patch16_224"))


REGISTRY = Registry()


@cache
def typed(words: str, model: str = "timm:deit_small_patch16_224"):
    """Return the strategy and the budget of a value for --plugin, with a model."""
    request = Request(plugins=(words,), tasks=("composite:canvas=224,patch=16",), model=model, n_train=(8,), seeds=1)
    name = words.partition(":")[0]
    (cell,) = [job.cell for job in expand(request, REGISTRY) if job.cell.strategy.name == name]
    return fill(SHIPPED[name], cell.strategy.params, name), cell.budget


def counts_of(words: str) -> dict[int, int]:
    strategy, budget = typed(words)
    schedule = TokenSchedule(budget, strategy.traits(), deit_small())
    return dict(zip(schedule.blocks, schedule.counts, strict=True))


def gmacs_of(words: str) -> list[float]:
    """Return the GMACs with and without the strategy's own products, because some authors do not count them."""
    strategy, _ = typed(words)
    counts = counts_of(words)
    steps = deit_small().steps(strategy.traits(), tuple(counts), tuple(counts.values()))
    # Here removed tokens have no query unless the selection needs attention; published networks compute all queries.
    every = [replace(step, early=False) for step in steps]
    return [deit_small().macs(some) / 1e9 for some in (every, [replace(step, own=0.0) for step in every])]


EVERY = range(12)
DIFFRATE = (196, 193, 175, 155, 140, 132, 120, 106, 87, 63, 55, 2)


@pytest.mark.parametrize(
    ("words", "counts"),
    [
        ("evit:keep_rate=0.7", {3: 139, 6: 99, 9: 71}),
        ("evit:keep_rate=0.5", {3: 99, 6: 51, 9: 27}),
        ("evit:keep_rate=0.7,convention=power-floor", {3: 137, 6: 96, 9: 67}),
        ("attn_topk:keep_rate=0.7,convention=compound-ceil", {3: 138, 6: 97, 9: 68}),
        ("tome:per_block=13", {block: 196 - 13 * (block + 1) for block in EVERY}),
        ("tome:per_block=26..0", dict(enumerate((170, 147, 126, 108, 92, 78, 67, 58, 51, 47, 45, 45)))),
        ("dynamic_vit:keep_rate=0.7", {3: 137, 6: 96, 9: 67}),
        ("pitome:ratio=0.9", dict(enumerate((177, 160, 144, 130, 117, 106, 96, 87, 79, 72, 65, 59)))),
        ("ats:blocks=3+4+5+6+7+8+9+10+11,counts=" + "+".join(["196"] * 9), dict.fromkeys(range(3, 12), 196)),
        ("diffrate:counts=" + "+".join(map(str, DIFFRATE)), dict(enumerate(DIFFRATE))),
    ],
)
def test_published_settings_give_the_published_token_counts_of_deit_small(words, counts):
    assert counts_of(words) == counts


@pytest.mark.parametrize("setting", ALL, ids=str)
def test_published_methods_can_be_typed_and_cost_as_stated(setting):
    """The words of a published method can be typed and cost what its authors say."""
    strategy, _ = typed(setting.words)
    assert setting in type(strategy).published
    if setting.gmacs is None or strategy.adaptive:
        return  # the cost of an adaptive strategy is known after calibration on images
    assert setting.network == "DeiT-S"
    assert any(gmacs == pytest.approx(setting.gmacs, rel=0.02) for gmacs in gmacs_of(setting.words))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("evit:counts=9+x,blocks=3+6", "counts"),
        ("diffrate:keep_rate=0.7,undropped=9+8", "got 2 of them; allowed: 12, one for each block of this model"),
        ("diffrate:keep_rate=0.7,undropped=8+9", "undropped: numbers must not increase"),
        ("pitome:ratio=1.2", "got 1.2; allowed: (0, 1]"),
        ("tome:per_block=26..", "26..0"),
        ("tome:blocks=3+12", "got 3+12; allowed: 0 to 11 for this model"),
        ("tome:counts=9,blocks=3,schedule=late", "counts says how many tokens leave each block, and schedule=late"),
    ],
)
def test_a_wrong_setting_is_one_clear_line_before_anything_runs(tmp_path, words, says):
    options = ["--task", "composite:canvas=224,patch=16", "--model", "timm:deit_small_patch16_224", "--n-train", "8"]
    done = CliRunner().invoke(main, ["run", "--plugin", words, *options, "--out", str(tmp_path / "out"), "--dry-run"])
    assert done.exit_code == 2 and says in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_variant_is_marked_in_the_list_and_says_how_it_differs():
    rows = {row["name"]: row for row in json.loads(CliRunner().invoke(main, ["list", "--json"]).output)}
    variants = [name for name, cls in SHIPPED.items() if cls.variant]
    assert variants and {name for name in SHIPPED if rows[name]["variant"]} == set(variants)
    assert not {"tome", "mctf", "gtp"} & set(variants)
    for name in variants[:2]:
        assert SHIPPED[name].differs in CliRunner().invoke(main, ["show", name]).output

    class Silent(SHIPPED["tome"]):
        variant: ClassVar[bool] = True

    assert "differs" in (complaint(Silent) or "")
