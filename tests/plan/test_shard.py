from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from measured import TINY, what_was_measured
from running import execute

from sparsebench.errors import UserError
from sparsebench.plan import plan as planner
from sparsebench.plan.plan import shard
from sparsebench.plan.request import Request
from sparsebench.plugin.registry import Registry
from sparsebench.records import store

pytestmark = pytest.mark.usefixtures("no_picture", "timed_once")

SMALL = Request(suite=TINY, n_train=(4, 8), seeds=2)
STARTED = Request(
    suite="quick-scratch", tasks=("composite:epochs=1,test=20,pretrain_epochs=1,pretrain_samples=40",),
    model="vit:dim=16,depth=2,heads=2", n_train=(20,), seeds=2,
)  # fmt: skip


def plan(request: Request, out: Path, part: str = "0/1") -> planner.Plan:
    return planner.plan(request, planner.Files(), Registry(), out, "missing", shard(part))


def run(request: Request, out: Path, part: str = "0/1") -> None:
    execute(plan(request, out, part), Registry(), out)


def by_cell(out: Path) -> dict[str, dict[str, Any]]:
    return {cell: what_was_measured(record) for cell, record in store.read(out).items()}


@given(st.lists(st.text("0123456789abcdef", min_size=16, max_size=16), unique=True), st.integers(1, 50))
def test_each_cell_is_in_one_shard(cells: list[str], number: int) -> None:
    shards = [shard(f"{index}/{number}") for index in range(number)]
    assert all(sum(has(cell) for has in shards) == 1 for cell in cells)


def test_the_shard_of_a_cell_is_for_ever() -> None:
    assert [shard(f"{index}/3")("1eada12d71be1558") for index in range(3)] == [True, False, False]


@pytest.mark.parametrize("text", ["", "1", "4/4", "-1/4", "0/0", "1/2/3", "a/b", "1.0/2"])
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="--shard; got"):
        shard(text)


@pytest.mark.parametrize("share_a_folder", [True, False])
def test_the_shards_records_are_those_of_one_run(tmp_path: Path, share_a_folder: bool) -> None:
    run(SMALL, tmp_path / "whole")
    merged: dict[str, dict[str, Any]] = {}
    for index in range(3):
        out = tmp_path / ("shared" if share_a_folder else f"own-{index}")
        run(SMALL, out, f"{index}/3")
        merged |= by_cell(out)
    assert merged == by_cell(tmp_path / "whole")
    assert sum(len(plan(SMALL, tmp_path / "new", f"{index}/3").todo) for index in range(3)) == len(merged)


@pytest.mark.parametrize("alone", [False, True])
def test_each_shard_has_what_its_own_start_from_through_two_levels(tmp_path: Path, alone: bool) -> None:
    request = replace(STARTED, plugins=("dynamic_vit",), alone=alone, seeds=4)
    mixed = 0
    for index in range(4):
        todo = plan(request, tmp_path, f"{index}/4").todo
        ids, own = [job.cell.id for job in todo], [job for job in todo if shard(f"{index}/4")(job.cell.id)]
        for job in todo:
            places = [ids.index(cell.id) for cell in (*job.cell.inits, job.cell)]
            assert places == sorted(places)
        taught = [job for job in own if job.label == "dynamic_vit"]
        mixed += sum(not shard(f"{index}/4")(job.after) for job in taught)
        starts = {init.id for job in own for init in job.cell.inits}
        assert set(ids) == {job.cell.id for job in own} | starts
    assert mixed


@pytest.mark.slow
def test_shards_that_train_the_same_start_apart_agree(tmp_path: Path) -> None:
    run(STARTED, tmp_path / "whole")
    for index in range(2):
        run(STARTED, tmp_path / str(index), f"{index}/2")
    parts = [by_cell(tmp_path / str(index)) for index in range(2)]
    assert len(parts[0].keys() & parts[1].keys()) == 1, "the pre-trained cell"
    assert parts[0] | parts[1] == parts[1] | parts[0] == by_cell(tmp_path / "whole")


@pytest.mark.slow
def test_a_shard_that_finds_weights_in_a_shared_folder_trains_none(tmp_path: Path) -> None:
    run(STARTED, tmp_path, "0/2")
    assert not [job for job in plan(STARTED, tmp_path, "1/2").todo if job.keep_weights]
