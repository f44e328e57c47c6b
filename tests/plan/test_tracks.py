"""The tracks frozen and tuned, which start from networks that another suite trained."""

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from suite_text import suite_text

from sparsebench.cli import main
from sparsebench.errors import UserError
from sparsebench.plan import plan as planner
from sparsebench.plan.expand import expand
from sparsebench.plan.locate import Networks
from sparsebench.plan.request import Request
from sparsebench.plan.suite import load
from sparsebench.plugin.registry import Registry
from sparsebench.records import store
from sparsebench.records.record import Record

pytestmark = pytest.mark.usefixtures("no_picture", "timed_once")

NETWORKS = suite_text(
    """name = "composite"
model = "vit"
model_params = {dim = 16, depth = 3, heads = 2}
params = {canvas = 16, foreground = 8, pretrain_epochs = 0, epochs = 1, test = 40}
n_train = [80]""",
    seeds=2, more="keep_weights = true",
)  # fmt: skip
FROZEN = 'name = "composite"\ntrack = "frozen"\nnetwork = "NETWORKS"\n'
TUNED = 'name = "composite"\ntrack = "tuned"\nnetwork = "NETWORKS"\nparams = {lr = 1e-12, batch = 32}\nn_train = [40]'
TESTS = suite_text(f"{FROZEN}n_train = [24]\nbudgets = [{{macs = 1.0}}, {{macs = 0.5}}]", TUNED, seeds=2)
PLUGINS = ("attn_topk", "dynamic_vit", "patch_dropout")


LATE = """
import sparsebench
from sparsebench_plugins.cropr import Cropr
from sparsebench_plugins.dtem import DTEM

class LateDTEM(DTEM):
    name = "late_dtem"
    adaptive = True

    def plan(self, view, keep):
        return super().plan(view, keep) if view.training else None

class LateCropr(Cropr):
    name = "late_cropr"
    adaptive = True

    def plan(self, view, keep):
        return super().plan(view, keep) if view.training else None

@sparsebench.hookimpl
def sparsebench_strategies():
    return [LateDTEM, LateCropr]
"""


@pytest.fixture(scope="module")
def suites(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the files of a suite that trains networks, and of one that tests and tunes them."""
    folder = tmp_path_factory.mktemp("suites")
    networks, tests = folder / "networks.toml", folder / "tests.toml"
    networks.write_text(NETWORKS)
    tests.write_text(TESTS.replace("NETWORKS", str(networks)))
    return networks, tests


def run(suite: Path, out: Path, *options: str):
    words = ["run", "--suite", str(suite), "--out", str(out), "--device", "cpu", "--jobs", "0", *options]
    return CliRunner().invoke(main, words)


@pytest.fixture(scope="module")
def trained(suites: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the networks."""
    out = tmp_path_factory.mktemp("networks")
    assert run(suites[0], out).exit_code == 0
    return out


@pytest.fixture(scope="module")
def records(suites: tuple[Path, Path], trained: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Record]:
    """Return the records of the suite that starts from these networks."""
    out = tmp_path_factory.mktemp("tests")
    plugins = [word for name in PLUGINS for word in ("--plugin", name)]
    result = run(suites[1], out, "--networks", str(trained), *plugins)
    assert result.exit_code == 0, result.output
    assert not (out / "weights").exists()  # no network was trained for other cells
    return list(store.read(out).values())


def chosen(records: list[Record], track: str, label: str, macs: float, repetition: int = 0) -> Record:
    (record,) = (
        r for r in records if (r.cell.track, r.label, r.cell.budget.macs) == (track, label, macs)
        and r.cell.repetition == repetition
    )  # fmt: skip
    return record


@pytest.mark.parametrize("repetition", [0, 1])
def test_keeping_all_tokens_is_dense_to_the_bit(records: list[Record], trained: Path, repetition: int) -> None:
    """Keeping all is dense to the bit and dense is the network that was trained."""
    dense = chosen(records, "frozen", "dense", 1.0, repetition)
    whole = chosen(records, "frozen", "attn_topk", 1.0, repetition)
    (first,) = (r for r in store.read(trained).values() if r.cell.repetition == repetition)
    assert dense.outcomes == whole.outcomes == first.outcomes
    assert dense.cell.init == first.cell
    assert dense.metrics["train_loss"].value == first.metrics["train_loss"].value
    assert chosen(records, "frozen", "attn_topk", 0.5, repetition).outcomes != dense.outcomes


def test_trained_strategies_are_unsupported_in_the_frozen_track(records: list[Record]) -> None:
    """What must be trained is unsupported in the frozen track which names its own."""
    for name in ("dynamic_vit", "patch_dropout"):
        record = chosen(records, "frozen", name, 0.5)
        assert record.status == "unsupported" and record.failure is not None
        assert "tracks tuned and scratch" in record.failure.reason
        assert chosen(records, "tuned", name, 0.5).status == "ok"


def test_tuning_begins_with_the_whole_network_and_trains_it(records: list[Record], trained: Path) -> None:
    tuned, frozen = chosen(records, "tuned", "dense", 1.0), chosen(records, "frozen", "dense", 1.0)
    assert tuned.outcomes is not None and frozen.outcomes is not None
    assert tuned.outcomes.predicted == frozen.outcomes.predicted  # a step size near 0, and the same output layer
    assert frozen.cell.init is not None
    assert tuned.notes["initial_weights"] == store.read(trained)[frozen.cell.init.id].notes["weights"]
    assert tuned.metrics["steps"].value == 2


def test_training_with_a_frozen_network_moves_only_the_weights_of_the_strategy(
    records: list[Record], suites: tuple[Path, Path], trained: Path, tmp_path: Path
) -> None:
    """The strategies of LATE keep all tokens in the test, so its outputs are those of the network alone."""
    late, tuned = tmp_path / "late.py", dict[tuple[str, str], Record]()
    late.write_text(LATE)
    for rate in ("1e-12", "0.02"):
        suite, out = tmp_path / f"{rate}.toml", tmp_path / rate
        suite.write_text(suite_text(TUNED.replace("NETWORKS", str(suites[0])).replace("1e-12", rate)))
        plugins = ["--plugin", "dtem", "--plugin", "cropr", "--plugin", str(late), "--macs", "0.6"]
        result = run(suite, out, "--networks", str(trained), *plugins)
        assert result.exit_code == 0, result.output
        tuned |= {(record.label, rate): record for record in store.read(out).values()}
    dense = chosen(records, "frozen", "dense", 1.0)
    assert tuned["late_dtem", "0.02"].outcomes == dense.outcomes
    assert tuned["late_cropr", "0.02"].outcomes != dense.outcomes
    for name in ("dtem", "cropr"):
        assert tuned[name, "1e-12"].metrics["p_label"].value != tuned[name, "0.02"].metrics["p_label"].value


def test_the_board_never_ranks_two_tracks_together(records: list[Record]) -> None:
    from flats import flatten

    from sparsebench.board.judge import judge

    rankings = judge(map(flatten, records), by="task").rankings
    assert len(rankings) == 2
    assert sorted(set(ranking.rows["strategy"]) for ranking in rankings) == sorted(
        [{"dense", "attn_topk"}, {"dense", "attn_topk", "dynamic_vit", "patch_dropout"}]
    )


def test_a_second_run_does_nothing_and_a_lacking_network_is_trained(
    suites: tuple[Path, Path], trained: Path, tmp_path: Path
) -> None:
    request = Request(plugins=("attn_topk",), suite=str(suites[1]), seeds=3)
    registry = Registry()
    plan = planner.plan(request, planner.Files(networks=trained), registry, tmp_path, "missing")
    trainings = [job for job in plan.todo if job.cell.track == "scratch"]
    assert [job.cell.repetition for job in trainings] == [2] and trainings[0].keep_weights
    assert not trainings[0].requested
    alone = planner.plan(request, planner.Files(), registry, tmp_path, "missing")
    assert [job.cell.repetition for job in alone.todo if job.cell.track == "scratch"] == [0, 1, 2]


def test_changed_or_missing_networks_are_one_line(suites: tuple[Path, Path], trained: Path, tmp_path: Path) -> None:
    """Networks that were changed or are others or are not there are one line."""
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    path = next((copy / "weights").iterdir())
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    for suite, folder, says in (
        (suites[1], copy, "is not the trained network"),
        (suites[1], tmp_path, "has none of the networks"),
        (Path("quick"), trained, "has none of the networks"),
    ):
        result = run(suite, tmp_path / "out", "--networks", str(folder), "--task", "composite")
        assert result.exit_code == 2 and says in result.output and "Traceback" not in result.output
        assert not (tmp_path / "out" / "records").exists()


@pytest.mark.parametrize(("old", "new"), [("[80]", "[80, 90]"), ("composite", "spurious")])
def test_two_trainings_or_none_are_no_network(suites: tuple[Path, Path], tmp_path: Path, old: str, new: str) -> None:
    file = tmp_path / "other.toml"
    file.write_text(NETWORKS.replace(old, new))
    suite = tmp_path / "suite.toml"
    suite.write_text(suites[1].read_text().replace(str(suites[0]), str(file)))
    with pytest.raises(UserError, match="one training of task 'composite'"):
        load(str(suite))


def test_a_suite_of_trained_networks_is_not_trained(
    suites: tuple[Path, Path],
) -> None:
    """A suite of trained networks is not trained as a whole and its tasks are if they are named."""
    whole = Request(plugins=("attn_topk",), suite=str(suites[1]), n_train=(50,))
    with pytest.raises(UserError, match="tests trained networks on composite"):
        expand(whole, Registry())
    named = Request(plugins=("attn_topk",), suite=str(suites[1]), tasks=("composite",), n_train=(50,))
    assert {job.cell.track for job in expand(named, Registry())} == {"scratch"}
    with pytest.raises(UserError, match="track frozen; got train; allowed: both, test"):
        expand(Request(suite=str(suites[1]), where="train"), Registry())


@pytest.mark.parametrize(
    ("suite", "expected"),
    [("networks", ["composite"] * 24 + ["spurious"] * 6), ("detail-networks", ["composite"] * 3)],
)
def test_the_networks_that_come_with_sparsebench_are_those_of_their_suite(
    suite: str, expected: list[str], tmp_path: Path
) -> None:
    networks = Networks(tmp_path, {})
    jobs = expand(Request(suite=suite), Registry())
    tasks = [job.cell.task.name for job in jobs if networks.elsewhere(job.cell.id) is not None]
    assert sorted(tasks) == expected


def test_what_a_training_decided_is_not_asked_of_its_test(suites: tuple[Path, Path]) -> None:
    for parameter in ("epochs=3", "canvas=32"):
        request = Request(suite=str(suites[1]), tasks=(f"composite:{parameter}",))
        with pytest.raises(UserError, match=", set by training"):
            expand(request, Registry())
    assert expand(Request(suite=str(suites[1]), tasks=("composite:test=20",)), Registry())


def test_networks_of_two_trainings_are_two_settings(records: list[Record]) -> None:
    from sparsebench.records.table import row_of

    record = chosen(records, "frozen", "dense", 1.0)
    assert record.cell.init is not None
    longer = record.cell.init.model_copy(update={"n_train": 160})
    other = record.model_copy(update={"cell": record.cell.model_copy(update={"init": longer})})
    again = chosen(records, "frozen", "dense", 1.0, repetition=1)
    assert row_of(record)["setting"] == row_of(again)["setting"] != row_of(other)["setting"]
