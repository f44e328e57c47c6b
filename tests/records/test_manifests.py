import inspect
import json
from pathlib import Path

import pytest

from sparsebench import api
from sparsebench.plugin.registry import Registry
from sparsebench.records import manifests, store
from sparsebench.records.store import merge

SMALL = {"tasks": "theory:steps=2,test=4", "n_train": (4,), "jobs": 0}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("described") / "out"
    api.run("attn_topk", seeds=2, out=folder, **SMALL)
    return folder


def test_a_run_says_what_its_strategies_are(out: Path) -> None:
    found = manifests.strategies(out)
    registry = Registry()
    for name in ("attn_topk", "dense", "random", "oracle"):
        shipped = registry.strategy(name)
        one = found[name, shipped.origin.revision]
        assert (one.kind, one.site, one.trained) == (shipped.cls.kind, shipped.cls.site, shipped.cls.trained)
        assert (one.citation, one.bibtex) == (shipped.cls.citation, shipped.cls.bibtex)


def test_a_run_says_that_it_answers_no_whole_suite_and_another_extent_is_another(out: Path, tmp_path: Path) -> None:
    (asked,) = manifests.suites(out)
    assert (asked.name, asked.version, len(asked.settings)) == (manifests.OWN, 1, 2)  # a part of it
    api.run("noise", seeds=2, out=out, **SMALL)
    assert manifests.suites(out) == [asked]  # whatever the strategies
    api.run("attn_topk", seeds=1, out=tmp_path / "less", **SMALL)
    (less,) = manifests.suites(tmp_path / "less")
    assert less.sha256 != asked.sha256 and set(less.settings) < set(asked.settings)


def test_what_is_said_of_strategies_and_suites_is_merged(out: Path, tmp_path: Path) -> None:
    merge([out], tmp_path / "merged")
    assert manifests.strategies(tmp_path / "merged") == manifests.strategies(out)
    assert manifests.suites(tmp_path / "merged") == manifests.suites(out)


def test_what_cannot_be_read_is_left_out_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / manifests.SUITES
    folder.mkdir()
    (folder / "a.json").write_text("{")
    (folder / "b.json").write_text(json.dumps({"name": "x", "version": 1, "settings": ["a"], "more": 1}))
    (folder / "c.json").write_text(json.dumps({"name": "x", "version": 1, "settings": ["a"]}))
    assert [asked.settings for asked in manifests.suites(tmp_path)] == [("a",)]
    assert caplog.text.count("is left out") == 2


HOW = {
    "drop": {"Keep", "Mask"}, "fuse": {"Keep"}, "merge": {"Merge"}, "mix": {"Mix"}, "drop+merge": {"Merge"},
    "rest": {"Rest"},
}  # fmt: skip


def test_every_strategy_says_how_it_disposes_of_tokens_as_its_plans_do() -> None:
    said = {found.cls.name: manifests.how_of(found.cls) for found in Registry().strategies()}
    assert said["dense"] == "-" and said["oracle"] == said["anti_oracle"] == "truth"
    assert said["attn_topk"] == "drop" and said["tps"] == "mix" and said["evit"] == "fuse" and said["ats"] == "drop"
    assert said["dynamic_vit"] == said["patch_merger"] == "trained" and said["tofu"] == "drop+merge"
    for found in Registry().strategies():
        if found.cls.how is not None:
            text = inspect.getsource(inspect.getmodule(found.cls))  # type: ignore[arg-type]
            assert any(f"{plan}(" in text or f"{plan}." in text for plan in HOW[found.cls.how]), found.cls.name
        assert said[found.cls.name], found.cls.name


def test_a_disposal_among_the_parameters_says_how(tmp_path: Path) -> None:
    assert manifests.how_of_label("drop", "attn_topk") == "drop"
    assert manifests.how_of_label("drop", "attn_topk(disposal=squeeze)") == "mix"
    assert manifests.how_of_label("drop", "mine(a=1, disposal=merge, b=2)") == "merge"
    assert manifests.how_of_label("trained", "dynamic_vit(disposal=squeeze)") == "trained"
    old = {"name": "mine", "sha256": "0", "kind": "deployable", "site": "input", "trained": False, "adaptive": False,
           "citation": "", "bibtex": ""}  # fmt: skip
    store.keep(tmp_path / "strategies", old)  # as it was written before strategies said it
    assert manifests.strategies(tmp_path)["mine", "0"].how == ""
    store.keep(tmp_path / "strategies", old | {"how": "merge"})
    assert manifests.strategies(tmp_path)["mine", "0"].how == "merge"
