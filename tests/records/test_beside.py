"""What lies beside records: machines and libraries, strategies, suites, and names of files."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from sparsebench import api
from sparsebench.plugin.registry import Registry
from sparsebench.records import environment, manifests, store

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


DESCRIBE = "import json; from sparsebench.records import environment as e; print(json.dumps(e.describe()))"


def described(**variables: str) -> dict[str, str]:
    known = {name: value for name, value in os.environ.items() if name not in environment.SETTINGS}
    done = subprocess.run(
        [sys.executable, "-c", DESCRIBE], env=known | variables, capture_output=True, text=True, check=True
    )
    return dict(json.loads(done.stdout))


@pytest.mark.slow
def test_the_environment_names_what_libraries_compute_with_and_no_numbers_of_threads() -> None:
    usual = described()
    assert usual["capability"] == torch.backends.cpu.get_cpu_capability()
    assert not usual.keys() & set(environment.SETTINGS)
    assert described(OMP_NUM_THREADS="3", MKL_NUM_THREADS="2") == usual
    default = described(ATEN_CPU_CAPABILITY="default")
    assert default == usual | {"capability": "DEFAULT", "ATEN_CPU_CAPABILITY": "default"}
    assert described(MKL_CBWR="COMPATIBLE") == usual | {"MKL_CBWR": "COMPATIBLE"}
