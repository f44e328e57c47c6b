from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import timm
from measured import TINY
from safetensors.torch import save_file
from suite_text import suite_text

from sparsebench.errors import UserError
from sparsebench.inspection.pictures import Trainer
from sparsebench.plan import plan as planner
from sparsebench.plan import suite as suites
from sparsebench.plan.coverage import missing_cells
from sparsebench.plan.expand import expand
from sparsebench.plan.jobs import Job
from sparsebench.plan.locate import locate
from sparsebench.plan.plan import Plan
from sparsebench.plan.request import Execution, Files, Request
from sparsebench.plugin.registry import Registry
from sparsebench.records.record import Cell, Part
from sparsebench.runner import run
from sparsebench.strategy.budget import Budget
from sparsebench.tasks.sources import known

pytestmark = pytest.mark.usefixtures("no_picture", "timed_once")

BASELINES = {"dense", "random", "oracle", "anti_oracle"}
SMALL = "composite:epochs=1,test=40,pretrain_epochs=0"

TOML = suite_text(
    """name = "composite"
model = "vit"
model_params = {dim = 16, depth = 3, heads = 2}
params = {epochs = 1, test = 40, pretrain_epochs = 0}
n_train = [40, 80]""",
    baselines='"dense", "random"', seeds=2, budget="macs = 0.25\nblocks = [1, 2]",
)  # fmt: skip


@pytest.fixture
def own(tmp_path: Path) -> Any:
    def write(text: str = TOML) -> str:
        path = tmp_path / "own.toml"
        path.write_text(text, "latin-1")
        return str(path)

    return write


def jobs_of(*plugins: str, tasks: tuple[str, ...] = ("composite",), **options: Any) -> list[Job]:
    options = {"n_train": (8,), "seeds": 1, "suite": TINY} | options
    return expand(Request(plugins=plugins, tasks=tasks, **options), Registry())


def budgets_of(jobs: list[Job], strategy: str) -> list[Budget]:
    return [job.cell.budget for job in jobs if job.cell.strategy.name == strategy]


def strategies_of(jobs: list[Job]) -> set[str]:
    return {job.cell.strategy.name for job in jobs}


LARGE = {"overfitting-full", "samples", "theory-default", "theory-full"}
"""Suites of thousands of cells."""
SHIPPED = sorted(set(suites.names()) - {"folder", "imagenet"})


@pytest.mark.theory
def _weights_of(task: suites.SuiteTask, folder: Path) -> Path:
    """Return a file with weights of the model whose trained weights a task tests, for the ten digits."""
    path = folder / "weights.safetensors"
    save_file(timm.create_model(task.model_params["arch"], num_classes=10).half().state_dict(), path)
    return path


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LARGE)) for name in SHIPPED])
def test_a_shipped_suite_has_baselines_and_is_complete(name: str, tmp_path: Path) -> None:
    """A shipped suite has the baselines on and its cells answer all that it asks."""
    suite, registry = suites.load(name), Registry()
    assert suite.name == name
    taken = any("images" in registry.task(task.name).model_fields for task in suite.task)
    weights = [_weights_of(task, tmp_path) for task in suite.task if task.tests_weights]
    files = Files(("digits",) * taken, weights=tuple(weights))
    located = locate(files, [registry.task(task.name) for task in suite.task])
    jobs = expand(Request(suite=name), registry, located)
    own = {text.partition(":")[0] for task in suite.task for text in task.strategies or ()}
    assert strategies_of(jobs) == set(suite.baselines) | own
    assert own or suite.keep_weights or set(suite.baselines) >= BASELINES or name == "smoke"
    assert {job.cell.repetition for job in jobs} == set(range(max(task.seeds or suite.seeds for task in suite.task)))
    cells = [job.cell for job in jobs if job.requested]
    assert {cell.task.name for cell in cells} == {task.name for task in suite.task}
    assert missing_cells(suite, cells, registry, any_budget=True) == []
    last = cells[-1]
    key = attrgetter("task", "n_train", "repetition")
    fewer = [cell for cell in cells if key(cell) != key(last)]
    assert missing_cells(suite, fewer, registry, any_budget=True)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        pytest.param("seeds = 2", "seeds = 2\nseed = 2", "did you mean 'seeds'", id="key of a suite"),
        pytest.param("n_train =", "ntrain = 1\nn_train =", "did you mean 'n_train'", id="key of a task"),
        pytest.param("macs = 0.25", "macs = 0.25\nblock = 1", "did you mean 'per_block'", id="key of a budget"),
        pytest.param(
            "[40, 80]", "[40]\nbudgets = [{block = 1, macs = 0.5}]", "allowed: blocks, convention", id="of a task's"
        ),
        pytest.param("[40, 80]", "[40]\nbudgets = [{keep = 1}]", "one amount; got none", id="no budget of a task"),
        pytest.param("macs = 0.25", "keep = 0.25", "one amount; got none", id="no budget"),
        pytest.param("macs = 0.25", "macs = 1.25", "1.25; allowed: (0, 1]", id="budget out of range"),
        pytest.param(
            "macs = 0.25", "macs = 0.25\nkeep_rate = 0.5", "one amount; got macs=0.25, keep_rate=0.5", id="two budgets"
        ),
        pytest.param("seeds = 2", "seeds = 0", "seeds.*got 0", id="no seeds"),
        pytest.param("seeds = 2", "seeds = 'two'", "seeds.*got two", id="seeds in words"),
        pytest.param("[40, 80]", "[]", "n_train", id="no numbers of samples"),
        pytest.param("[40, 80]", "[0]", "n_train", id="no samples"),
        pytest.param("[40, 80]", "[-4]", "n_train", id="fewer than no samples"),
        pytest.param("[40, 80]", '[40]\ntrack = "frozen"', "tests trained weights", id="tests of no network"),
        pytest.param("[40, 80]", '[40]\ntrack = "tuned"', "tuned needs network", id="fine-tuning of no network"),
        pytest.param("[40, 80]", '[40]\nnetwork = "networks"', "scratch has no network", id="a network for no test"),
        pytest.param("[40, 80]", '[40]\nnetwork = "networks"\ntrack = "tuned"', "leave model out", id="two models"),
        pytest.param("[40, 80]", '[40]\ntrack = "cold"', "track", id="no track"),
        pytest.param('title = "own"', "", "title.*required", id="missing key"),
        pytest.param("seeds = 2", "seeds = ", "not valid TOML", id="no TOML"),
        pytest.param("own", "\xff\xfe", "not valid TOML", id="other bytes"),
    ],
)
def test_a_suite_with_a_mistake_is_refused_with_its_place(own: Any, old: str, new: str, says: str) -> None:
    assert old in TOML
    with pytest.raises(UserError, match=says.replace("(0, 1]", r"\(0, 1\]")):
        expand(Request(suite=own(TOML.replace(old, new))), Registry())


def test_all_is_every_strategy_that_is_installed_with_the_parameters_given() -> None:
    registry = Registry()
    jobs = expand(Request(plugins=("all:keep_rate=0.5",), suite=TINY, n_train=(4,), seeds=1), registry)
    assert {job.cell.strategy.name for job in jobs} == {entry.cls.name for entry in registry.strategies()}
    assert {job.cell.budget.keep_rate for job in jobs if job.label == "attn_topk"} == {0.5}


@pytest.mark.parametrize(
    ("plugins", "options", "budgets"),
    [
        ("attn_topk:keep_rate=0.5,0.7 noise:macs=0.3", {}, {
            "attn_topk": "keep 0.5 power-floor @0, keep 0.7 power-floor @0", "noise": "macs 0.3", "dense": "macs 1",
            "random": "keep 0.5 power-floor, keep 0.7 power-floor, macs 0.3",
        }),
        ("random:keep_rate=0.5 noise:keep_rate=0.7", {}, {"random": "keep 0.5 power-floor, keep 0.7 power-floor"}),
        ("noise", {"keep": (0.25, 0.75), "macs": (0.6,)}, dict.fromkeys(
            ("noise", "random"), "keep 0.25 power-floor, keep 0.75 power-floor, macs 0.6",
        )),
        ("noise:macs=0.3", {"keep": (0.25,)}, {"noise": "macs 0.3"}),
        ("dense:macs=0.3", {}, {"dense": "macs 1"}),
        ("attn_topk:macs=0.65,schedule=late", {"suite": "quick-scratch"}, {
            "attn_topk": "macs 0.65 late 2", "random": "macs 0.65",
        }),
        ("attn_topk:schedule=every,late tome:per_block=8", {"suite": "quick-scratch"}, {
            "attn_topk": "macs 0.5 every block, macs 0.5 late 2", "tome": "8 a block", "random": "macs 0.5",
            "oracle": "macs 0.5",
        }),
        ("tome:per_block=8", {"suite": "quick-scratch"}, {"random": "macs 0.5"}),
    ],
)  # fmt: skip
def test_baselines_have_each_budget_of_the_strategies(
    plugins: str, options: dict[str, Any], budgets: dict[str, str]
) -> None:
    """Strategies have budgets of their own or of the request and baselines each of them."""
    jobs = [job for job in jobs_of(*plugins.split(), **options) if job.requested]
    labels_of = {name: sorted({budget.label for budget in budgets_of(jobs, name)}) for name in budgets}
    assert labels_of == {name: labels.split(", ") for name, labels in budgets.items()}


def test_a_request_overrides_a_suite(own: Any) -> None:
    """A suite of one's own says what is run and a request says it instead."""

    def sets_of(**options: Any) -> tuple[set[Any], ...]:
        suite = own(TOML + "\nbudgets = [{macs = 0.75}]")
        cells = [job.cell for job in expand(Request(suite=suite, **options), Registry()) if job.label == "attn_topk"]
        assert {(cell.model.params["depth"], cell.task.params["epochs"]) for cell in cells} == {(3, 1)}
        tests = {cell.task.params["test"] for cell in cells}
        return tests, {(cell.n_train, cell.repetition) for cell in cells}, {cell.budget.label for cell in cells}

    both = {(n, k) for n in (40, 80) for k in (0, 1)}
    assert sets_of(plugins=("attn_topk",)) == ({40}, both, {"macs 0.75 @1,2"})
    options = {"tasks": ("composite:test=20,30",), "seeds": 3, "n_train": (4,), "keep": (0.5,)}
    assert sets_of(plugins=("attn_topk",), **options) == (
        {20, 30},
        {(4, k) for k in range(3)},
        {"keep 0.5 power-floor @1,2"},
    )
    repetitions = [job.cell.repetition for job in expand(Request(suite=own()), Registry())]
    assert repetitions == sorted(repetitions), "one is whole before the next begins"


def test_parameters_are_swept_over_and_named_in_the_label(samples: Path) -> None:
    jobs = jobs_of(f"{samples / 'good.py'}:largest=true,false,keep_rate=0.5,0.25", where="test")
    mine = [job for job in jobs if job.cell.strategy.name == "norm"]
    assert {(job.label, job.cell.strategy.params["largest"], job.cell.budget.keep_rate) for job in mine} == {
        (label, largest, rate) for label, largest in (("norm", True), ("norm(largest=False)", False))
        for rate in (0.5, 0.25)
    }  # fmt: skip
    where = {job.cell.strategy.name: job.cell.where for job in jobs}
    assert where == {"dense": "both"} | dict.fromkeys(("norm", "random", "oracle", "anti_oracle"), "test")


@pytest.mark.theory
def test_initial_models_come_first_and_are_shared() -> None:
    """Initial models come first and are shared by tasks with equal parameters."""
    jobs = expand(Request(plugins=("attn_topk",), suite="quick-scratch"), Registry())
    first, *rest = jobs
    assert first.keep_weights and first.cell.task.name == "plain" and first.cell.strategy.name == "dense"
    assert not any(job.keep_weights for job in rest)
    waiting = {job.cell.task.name for job in rest if job.after}
    assert waiting == {"composite", "spurious"}
    assert {job.after for job in rest} == {first.cell.id, ""}
    assert all(job.cell.init == (first.cell if job.after else None) for job in rest)


TAUGHT = "composite:epochs=1,test=40,pretrain_epochs=1,pretrain_samples=40"


@pytest.mark.parametrize("alone", [False, True])
def test_a_taught_strategy_starts_from_the_dense_network_of_its_repetition(alone: bool) -> None:
    (ordinary,) = (job for job in jobs_of(tasks=(TAUGHT,), n_train=(20,)) if job.label == "dense" and job.requested)
    jobs = jobs_of("dynamic_vit", tasks=(TAUGHT,), n_train=(20, 40), seeds=2, alone=alone)
    assert len({job.cell.id for job in jobs}) == len(jobs)
    place = {job.cell.id: at for at, job in enumerate(jobs)}
    taught = [job for job in jobs if job.label == "dynamic_vit"]
    assert len(taught) == 4 and all(job.requested and not job.keep_weights for job in taught)
    for job in taught:
        dense = jobs[place[job.after]]
        assert job.cell.init == dense.cell and dense.keep_weights and dense.requested is not alone
        assert dense.cell.draw == job.cell.draw and dense.cell.model == job.cell.model
        first = jobs[place[dense.after]]
        assert first.cell.task.name == "plain" and first.keep_weights and not first.requested
        assert place[first.cell.id] < place[dense.cell.id] < place[job.cell.id]
        assert job.cell.inits == (first.cell, dense.cell)
    assert ordinary.cell.id in place and jobs[place[ordinary.cell.id]].label == "dense"
    assert {job.label for job in jobs if job.requested} == {"dynamic_vit", *(() if alone else BASELINES)}


def test_the_dense_network_that_teaches_is_one_job_whoever_comes_first() -> None:
    for plugins in (("dense", "dynamic_vit"), ("dynamic_vit", "dense"), ("dynamic_vit",)):
        jobs = jobs_of(*plugins, tasks=(SMALL,), n_train=(20,), alone=plugins != ("dynamic_vit",))
        (dense,) = (job for job in jobs if job.label == "dense")
        assert dense.requested and dense.keep_weights and dense.cell.init is None and jobs[0] == dense


@pytest.mark.parametrize(
    ("task", "options"),
    [pytest.param("theory", {"suite": "quick-scratch"}, marks=pytest.mark.theory), (TAUGHT, {"where": "test"})],
)
def test_where_nothing_can_be_taught_no_dense_network_is_trained_for_it(task: str, options: dict[str, Any]) -> None:
    jobs = jobs_of("dynamic_vit", tasks=(task,), alone=True, **options)
    assert not [job for job in jobs if job.label == "dense" and job.cell.task.name != "plain"]


def test_tasks_with_other_pictures_do_not_share_an_initial_model() -> None:
    jobs = jobs_of(tasks=("composite:foreground=20", "spurious:foreground=24"), n_train=(40,), suite="quick-scratch")
    assert len({job.cell.id for job in jobs if job.keep_weights}) == 2


@pytest.mark.theory
def test_without_tasks_a_model_goes_to_the_tasks_that_it_fits() -> None:
    models = {
        job.cell.task.name: job.cell.model
        for job in jobs_of(tasks=(), model="vit:dim=16,heads=2", suite="quick-scratch")
    }
    assert models["theory"].name == "shallow"
    assert models["composite"].params["dim"] == models["spurious"].params["dim"] == 16


def test_cells_do_not_depend_on_the_order_of_options() -> None:
    """Cells do not depend on the order of options or on what runs beside."""

    def ids(*plugins: str, **options: Any) -> dict[str, set[str]]:
        jobs = jobs_of(*plugins, seeds=2, **options)
        return {name: {j.cell.id for j in jobs if j.cell.strategy.name == name} for name in strategies_of(jobs)}

    alone = ids("attn_topk:keep_rate=0.5,attention=auto")
    beside = ids(
        "noise:keep_rate=0.5",
        "attn_topk:attention=auto,keep_rate=0.5",
        tasks=("composite", "composite:foreground=12"),
        n_train=(16, 8),
    )
    for name, mine in alone.items():
        assert mine <= beside[name]


def test_a_parameter_at_its_default_makes_no_other_cell() -> None:
    spelled = jobs_of(
        "attn_topk:attention=auto", tasks=("composite:intensity=1",), model="vit:dim=16,patch=4,depth=1,heads=1"
    )
    assert [job.cell.id for job in spelled] == [
        job.cell.id for job in jobs_of("attn_topk", model="vit:dim=16,depth=1,heads=1")
    ]


def test_the_suite_of_ones_own_weights_asks_for_no_network() -> None:
    cell = Cell(
        task=Part(name="folder", params={"images": "folder-0123"}), model=Part(name="timm", params={"name": "mine"}),
        strategy=Part(name="noise"), budget=Budget(macs=0.7), n_train=0, repetition=0,
    )  # fmt: skip
    folder, registry = suites.load("folder"), Registry()
    assert missing_cells(folder, [cell], registry, any_budget=False) == []
    other = cell.model_copy(update={"budget": Budget(macs=0.6)})
    assert missing_cells(folder, [other], registry, any_budget=False) == [
        "folder with 0 samples, repetition 0, macs 0.7"
    ]


TWO_TASKS = suite_text(
    'name = "plain"\nmodel = "vit"\nparams = {epochs = 1, test = 40}\nn_train = [8]',
    'name = "composite"\nmodel = "vit"\nparams = {epochs = 1, test = 40, pretrain_epochs = 0}\nn_train = [40]',
    baselines='"dense", "random"', budget="macs = 0.5\nblocks = [0, 1, 2]",
)  # fmt: skip


@pytest.fixture
def labels(tmp_path: Path) -> Any:
    """Return a function that returns the labels of a plugin's budgets by task."""

    def find(words: str, text: str = TWO_TASKS) -> dict[str, set[str]]:
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
    ("words", "label", "everywhere"),
    [
        ("attn_topk:macs=0.65", "macs 0.65 @0,1,2", True),
        ("attn_topk:schedule=late,macs=0.65", "macs 0.65 late 2", True),
        ("attn_topk:schedule=every", "macs 0.5 every block", True),
        ("attn_topk:macs=0.5,0.7,0.5", "macs 0.5 @0,1,2, macs 0.7 @0,1,2", True),
        ("tome:per_block=4", "4 a block", True),
        ("pitome:ratio=.9", "ratio 0.9 a block", True),
        ("random:keep_rate=0.5", "keep 0.5 power-floor", True),
        ("ats:macs=0.5,blocks=0+1+2", "macs 0.5 @0,1,2", False),
        ("ats:macs=0.5", "macs 0.5 @0,1,2", False),  # the suite's, where ats by itself acts in blocks 1 and 2
        ("tome:macs=0.5,blocks=1+2", "macs 0.5 @1,2", False),
        ("evit:keep_rate=0.5", "keep 0.5 compound-ceil @0,1,2", False),
        ("evit:keep_rate=0.5,convention=power-floor", "keep 0.5 power-floor @0,1,2", False),
        ("evit:macs=0.5,convention=compound-ceil", "macs 0.5 compound-ceil @0,1,2", False),
        ("attn_topk:counts=40+30+20", "counts 40,30,20 @0,1,2", False),
        ("attn_topk:counts=40+30,blocks=1+2", "counts 40,30 @1,2", False),
    ],
)
def test_a_budget_has_one_name_on_all_tasks(labels: Any, words: str, label: str, everywhere: bool) -> None:
    """A budget has one name on all tasks and blocks as asked for or the suite's or the strategy's."""
    budgets = labels(words)
    assert budgets["composite"] == set(label.split(", "))
    assert not everywhere or budgets["plain"] == budgets["composite"]


def test_a_tasks_own_budgets_keep_their_blocks(labels: Any) -> None:
    """A task's own budgets keep their blocks and another model has its own."""
    (other,) = {
        job.cell.budget.blocks for job in jobs_of("attn_topk", model="timm:test_vit") if job.label == "attn_topk"
    }
    assert other is None
    text = TWO_TASKS + "budgets = [{keep_rate = 0.5, blocks = [2]}, {macs = 0.5}]\n"
    assert labels("attn_topk", text)["composite"] == {"keep 0.5 power-floor @2", "macs 0.5 @0,1,2"}
    with pytest.raises(UserError, match="budget blocks; got 9; allowed: 0 to 2 for this model"):
        labels("attn_topk", TWO_TASKS + "budgets = [{keep_rate = 0.5, blocks = [9]}]\n")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            "tome:counts=60+30+10",
            "can remove at most 30 of 60 tokens at once|at most 15 of 30",
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


# ---- official sets that a suite names without a word of the user's

OFFICIAL = suite_text('name = "composite"\nparams = {images = "cifar10", pretrain_epochs = 0}\nn_train = [10]')


def planned(suite: str, out: Path, **files: Any) -> Plan:
    return planner.plan(Request(suite=suite), Files(**files), Registry(), out, "missing")


def test_each_kind_is_looked_for_below_the_data_root_before_anything_runs(own: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cifar10 is missing in .*root .*--data-root DIR .* or --download"):
        planned(own(OFFICIAL), tmp_path, data_root=tmp_path / "root")
    first = OFFICIAL.replace('images = "cifar10", pretrain_epochs = 0', 'pretrain_images = "cifar100"')
    with pytest.raises(UserError, match="cifar100 is missing"):
        planned(own(first), tmp_path)
    named = planned(own(OFFICIAL), tmp_path, images=("digits",))
    assert {job.cell.task.params["images"] for job in named.todo} == {"digits"} and named.locations == {}


def test_what_is_drawn_needs_its_pictures_though_nothing_is_to_be_trained(
    own: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known, "check", lambda *_, **__: None)
    done = replace(planned(own(OFFICIAL), tmp_path, data_root=tmp_path), todo=[], locations={})
    monkeypatch.setattr(run, "plan_of", lambda *_: done)
    shown = Trainer(Files(data_root=tmp_path), Execution("cpu"), tmp_path / "out").plan(Request(), Registry())
    assert shown.todo == [] and shown.locations == {"cifar10": tmp_path}


@pytest.mark.parametrize(
    ("where", "requested", "is_chosen"),
    [
        ("test", "both", True),
        ("both", "test", True),
        ("train", "test", True),
        ("both", "both", False),
        ("train", "both", False),
        ("test", "train", False),
    ],
)
def test_a_schedule_is_chosen_only_where_strategies_act_in_the_test_alone(
    own: Any, where: str, requested: str, is_chosen: bool
) -> None:
    suite = own(TOML.replace("n_train", f'where = "{where}"\nn_train'))
    request = Request(plugins=("attn_topk:macs=0.5,schedule=auto",), suite=suite, where=requested)
    if is_chosen:
        assert {budget.schedule for budget in budgets_of(expand(request, Registry()), "attn_topk")} == {"auto"}
    else:
        with pytest.raises(UserError, match="schedule=auto"):
            expand(request, Registry())
