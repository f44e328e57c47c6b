"""Official sets that a suite names without a word of the user's."""

from dataclasses import replace
from pathlib import Path

import pytest
from suite_text import suite_text

from sparsebench.deploy.pictures import Trainer
from sparsebench.errors import UserError
from sparsebench.plan import plan as planner
from sparsebench.plan.request import How, Request
from sparsebench.plugin.registry import Registry
from sparsebench.runner import run
from sparsebench.tasks.sources import known

SUITE = suite_text('name = "composite"\nparams = {images = "cifar10", pretrain_epochs = 0}\nn_train = [10]')


def plan(tmp_path: Path, files: planner.Files, text: str = SUITE) -> planner.Plan:
    (tmp_path / "own.toml").write_text(text)
    return planner.plan(Request(suite=str(tmp_path / "own.toml")), files, Registry(), tmp_path / "out", "missing")


def test_each_kind_is_looked_for_below_the_data_root_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cifar10 is missing in .*root .*--data-root DIR .* or --download"):
        plan(tmp_path, planner.Files(data_root=tmp_path / "root"))
    first = SUITE.replace('images = "cifar10", pretrain_epochs = 0', 'pretrain_images = "cifar100"')
    with pytest.raises(UserError, match="cifar100 is missing"):
        plan(tmp_path, planner.Files(), first)


def test_pictures_that_the_user_names_take_its_place(tmp_path: Path) -> None:
    made = plan(tmp_path, planner.Files(images=("digits",)))
    assert {job.cell.task.params["images"] for job in made.todo} == {"digits"} and made.locations == {}


def test_what_is_drawn_needs_its_pictures_though_nothing_is_to_be_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known, "check", lambda *_, **__: None)
    files = planner.Files(data_root=tmp_path)
    done = replace(plan(tmp_path, files), todo=[], locations={})
    monkeypatch.setattr(run, "plan_of", lambda *_: done)
    shown = Trainer(files, How("cpu"), tmp_path / "out").plan(Request(), Registry())
    assert shown.todo == [] and shown.locations == {"cifar10": tmp_path}
