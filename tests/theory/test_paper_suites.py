import functools
import json

import pytest
from sparsebench_theory.models import TwoLayer
from sparsebench_theory.overfitting import figures as overfitting
from sparsebench_theory.overfitting.task import Overfitting
from sparsebench_theory.sparse_tokens import figures as sparse_tokens
from sparsebench_theory.spatial import figures as spatial

from sparsebench.paper import Paper
from sparsebench.plan import suite as suites
from sparsebench.plan.expand import expand
from sparsebench.plan.request import Request
from sparsebench.plugin.registry import Registry
from sparsebench.records.cell import Cell


@functools.cache
def cells_of(suite: str) -> tuple[Cell, ...]:
    return tuple(job.cell for job in expand(Request(suite=suite), Registry()))


EVERY = (overfitting.PAPER, spatial.PAPER, sparse_tokens.PAPER)
PAPERS = [(paper, preset) for paper in EVERY for preset in paper.presets]
papers = pytest.mark.parametrize(("paper", "preset"), PAPERS, ids=[paper.suites[preset] for paper, preset in PAPERS])


@papers
def test_a_suite_of_a_paper_has_every_figure(paper: Paper, preset: str) -> None:
    assert paper.presets[0] == "quick" and len(paper.presets) == 2
    assert {entry.figure for entry in suites.load(paper.suites[preset]).task} == set(paper.figures)


@papers
def test_every_cell_of_a_suite_of_a_paper_can_be_drawn_and_built(paper: Paper, preset: str) -> None:
    registry, drawn, built = Registry(), {}, set()
    for cell in cells_of(paper.suites[preset]):
        assert cell.n_train >= 2
        task = registry.task(cell.task.name)(**cell.task.params)
        model = registry.model(cell.model.name)(**cell.model.params)
        assert task.inputs == model.inputs
        if (key := json.dumps(cell.task.params)) not in drawn:
            task.check()
            drawn[key] = None
            if task.inputs == "tokens":
                drawn[key] = task.model_copy(update={"test": 5}).draw(2, cell.repetition, {})
                relevant = {
                    "overfitting": 1, "spatial": cell.task.params.get("group"),
                    "sparse_tokens": 4 * drawn[key].test.labels,
                }[cell.task.name]  # fmt: skip
                assert (drawn[key].test.relevance.sum(axis=1) == relevant).all()
        model.check(task)
        shape = drawn[key] and drawn[key].train.inputs.shape[1:]
        if drawn[key] is not None and (shape, model) not in built:
            network = model.build(drawn[key], 0)
            assert network.cost.tokens == shape[0]
            assert task.recipe().watch == 0 or hasattr(network, "observe")
            built.add((shape, model))
    assert len(drawn) >= 9 and built


@pytest.mark.parametrize("paper", EVERY, ids=lambda paper: paper.name)
def test_a_paper_says_how_long_its_cells_take_and_the_larger_preset_has_more(paper: Paper) -> None:
    seconds = [
        sum(paper.seconds(job) for job in expand(Request(suite=paper.suites[some]), Registry()))
        for some in paper.presets
    ]
    assert 10 < seconds[0] < 1000 and 2 * seconds[0] < seconds[1] < 20000
    assert len(cells_of(paper.suites["quick"])) < len(cells_of(paper.suites[paper.presets[1]]))


def test_the_published_map_of_overfitting_is_whole() -> None:
    cells = [job.cell for job in expand(Request(suite="overfitting-full", figures=("1",)), Registry())]
    found = {(cell.n_train, cell.task.params["signal"], cell.repetition) for cell in cells}
    assert found == {(n, float(s), r) for n in range(2, 21, 2) for s in range(1, 101) for r in range(10)}
    assert len(cells) == len(found) and {cell.strategy.name for cell in cells} == {"dense"}
    (own,) = {json.dumps(cell.task.params | {"signal": 0}) for cell in cells}
    assert json.loads(own) == Overfitting().model_dump(mode="json") | {"signal": 0}
    (model,) = {json.dumps(cell.model.params) for cell in cells}
    assert json.loads(model) == TwoLayer().model_dump(mode="json")


@pytest.mark.parametrize("preset", spatial.PAPER.presets)
def test_transfer_has_each_attention_at_each_n_and_structure(preset: str) -> None:
    jobs = expand(Request(suite=f"spatial-{preset}", figures=("transfer",)), Registry())
    first = [job.cell for job in jobs if job.keep_weights]
    rest = [job.cell for job in jobs if not job.keep_weights]
    structures = {cell.task.params["structure"] for cell in rest}
    assert [cell.task.params["structure"] for cell in first] == sorted(structures) and len(structures) >= 2
    assert {cell.model.params["attention"] for cell in first} == {"trained"}
    sizes = {cell.n_train for cell in rest}
    modes = {(c.task.params["start"], c.task.params["permuted"], c.model.params["attention"]) for c in rest}
    assert modes == {
        ("pretrained", False, "frozen"), ("pretrained", True, "frozen"), ("random", False, "frozen"),
        ("random", False, "trained"),
    }  # fmt: skip
    assert len(rest) == 4 * len(sizes) * len(structures) and min(sizes) <= 16 <= 4 * min(sizes) < max(sizes)
    assert {cell.task.params["feature"] for cell in rest} == {1}


def test_a_model_of_the_theory_leaves_the_trained_networks_alone() -> None:
    jobs = expand(Request(suite="quick", model="shallow:m=8", seeds=1), Registry())
    found = {(job.cell.task.name, job.cell.track, job.cell.model.params.get("m")) for job in jobs if job.asked}
    assert found == {("theory", "scratch", 8), ("composite", "frozen", None), ("spurious", "frozen", None)}
