"""A small run of a plugin file on tokens with groups and on pictures, and what it publishes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forging import PLUGIN, Tamper, sealed

from sparsebench import api
from sparsebench.publish.folder import RECORDS
from sparsebench.publish.submit import submit
from sparsebench.records.cell import canonical

SUITE = """
name = "tiny"
version = 3
title = "Every kind of outcome, small"
baselines = ["dense", "random", "oracle"]
seeds = 2

[budget]
macs = 0.5

[[task]]
name = "theory"
params = {steps = 2, test = 16, tokens = 20, spurious = 0.2, relevant = 0.4, criterion = "error"}
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
    api.run(str(PLUGIN), suite=str(suite), out=folder, jobs=0, device="cpu")
    return folder


@pytest.fixture(scope="session")
def sound(out: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return what the run publishes; do not write to it."""
    return submit(out, tmp_path_factory.mktemp("submissions")).folder


@pytest.fixture
def tampered(sound: Path, tmp_path: Path) -> Tamper:
    """Return a function that changes raw records in a copy of what is published, and seals it."""

    def tamper(change: Callable[[dict[str, Any]], Any], *, task: str = "theory", strategy: str | None = "norm") -> Path:
        folder = tmp_path / "norm" / sound.name
        shutil.copytree(sound, folder)
        lines = []
        for line in (folder / RECORDS).read_bytes().splitlines():
            raw = json.loads(line)
            if raw["cell"]["task"]["name"] == task and strategy in (None, raw["cell"]["strategy"]["name"]):
                change(raw)
            lines.append(canonical(raw).encode() + b"\n")
        (folder / RECORDS).write_bytes(b"".join(lines))
        return sealed(folder)

    return tamper
