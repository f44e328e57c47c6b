"""What a run says of its strategies and suites beside its records."""

from pathlib import Path
from typing import Any

import pytest

from sparsebench import api
from sparsebench.plugin.registry import Registry
from sparsebench.records import manifests, store

SMALL: dict[str, Any] = {"tasks": "theory:steps=2,test=4", "n_train": (4,), "jobs": 0}


def test_a_run_says_what_its_strategies_are_and_that_it_answers_no_whole_suite(tmp_path: Path) -> None:
    out, less, merged = tmp_path / "out", tmp_path / "less", tmp_path / "merged"
    api.run("attn_topk", seeds=2, out=out, **SMALL)
    found = manifests.strategies(out)
    for name in ("attn_topk", "dense", "random", "oracle"):
        shipped = Registry().strategy(name)
        one = found[name, shipped.origin.revision]
        for each in ("kind", "site", "trained", "citation", "bibtex"):
            assert getattr(one, each) == getattr(shipped.cls, each)
    (asked,) = manifests.suites(out)
    assert (asked.name, asked.version, len(asked.settings)) == (manifests.OWN, 1, 2)
    store.merge([out], merged)
    assert manifests.strategies(merged) == found and manifests.suites(merged) == [asked]
    api.run("noise", seeds=2, out=out, **SMALL)
    assert manifests.suites(out) == [asked], "whatever the strategies"
    api.run("attn_topk", seeds=1, out=less, **SMALL)
    (other,) = manifests.suites(less)
    assert other.sha256 != asked.sha256 and set(other.settings) < set(asked.settings)


def test_every_strategy_says_how_it_disposes_of_tokens_as_its_plans_do() -> None:
    said = {found.cls.name: manifests.how_of(found.cls) for found in Registry().strategies()}
    known = {
        "dense": "-", "oracle": "truth", "anti_oracle": "truth", "attn_topk": "drop", "tps": "mix", "evit": "fuse",
        "ats": "drop", "dynamic_vit": "trained", "patch_merger": "trained", "tofu": "drop+merge",
    }  # fmt: skip
    assert {name: said[name] for name in known} == known and all(said.values())


@pytest.mark.parametrize(
    ("how", "label", "shown"),
    [
        ("drop", "attn_topk", "drop"),
        ("drop", "attn_topk(disposal=squeeze)", "mix"),
        ("drop", "mine(a=1, disposal=merge, b=2)", "merge"),
        ("trained", "dynamic_vit(disposal=squeeze)", "trained"),
    ],
)
def test_a_disposal_among_the_parameters_says_how(how: str, label: str, shown: str) -> None:
    assert manifests.how_of_label(how, label) == shown


def test_what_was_said_before_there_was_more_to_say_gives_way(tmp_path: Path) -> None:
    old = {"name": "mine", "sha256": "0", "kind": "deployable", "site": "input", "trained": False, "adaptive": False,
           "citation": "", "bibtex": ""}  # fmt: skip
    for said in ({}, {"how": "merge"}):
        store.keep(tmp_path / "strategies", old | said)
        assert manifests.strategies(tmp_path)["mine", "0"].how == said.get("how", "")
    for name, file in (("a", "w.pt"), ("a", "x/w.pt"), ("b", "x/w.pt"), ("c", "v.pt")):
        store.keep(tmp_path / "files", {"name": name, "file": file})
    assert manifests.file_names(tmp_path) == {"a": "x/w.pt (a)", "b": "x/w.pt (b)", "c": "v.pt"}
