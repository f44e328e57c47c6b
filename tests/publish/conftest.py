"""A small run of a plugin file on pictures with groups and without, and what it publishes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from running import run_without_board

from sparsebench.publish.submission import submit

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import forge

SUITE = """
name = "tiny"
version = 3
title = "Every kind of outcome, small"
baselines = ["dense", "random", "oracle"]
seeds = 2

[budget]
macs = 0.5

[[task]]
name = "spurious"
params = {epochs = 1, test = 16, canvas = 16, foreground = 8, pretrain_epochs = 0}
model_params = {dim = 16, depth = 1, heads = 1}
n_train = [8]

[[task]]
name = "composite"
params = {epochs = 1, test = 40, pretrain_epochs = 1, pretrain_samples = 40}
model_params = {dim = 16, depth = 2, heads = 2}
n_train = [20]
"""


@pytest.fixture(scope="session")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("suite") / "tiny.toml"
    path.write_text(SUITE)
    return path


@pytest.fixture(scope="session")
def out(suite: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the run; do not write to it."""
    folder = tmp_path_factory.mktemp("run") / "out"
    run_without_board(str(forge.PLUGIN), suite=str(suite), out=folder)
    return folder


@pytest.fixture(scope="session")
def sound(out: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return what the run publishes; do not write to it."""
    return Path(submit(out, tmp_path_factory.mktemp("submissions")).folder)


@pytest.fixture(scope="session")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a submission of few cells, without pictures."""
    return forge.honest(tmp_path_factory.mktemp("few"), seeds=1)


@pytest.fixture(scope="session")
def few_out(few: Path) -> Path:
    """Return the folder of the run of few cells, as `forge.honest` makes it; do not write to it."""
    return few.parents[2] / "out"
