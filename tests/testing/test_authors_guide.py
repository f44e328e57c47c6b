"""The Python code of README.md and docs/ is run, and the names in the guide are checked."""

import re
import subprocess
import sys

import pytest
import torch
from measured import TINY, TOKENS
from pages import code, text_of
from running import run_without_board
from torch.utils.flop_counter import FlopCounterMode

import sparsebench
from sparsebench.records.record import Origin
from sparsebench.strategy.base import SITES, Strategy
from sparsebench.strategy.view import NEEDS, TokenView
from sparsebench.testing import checks

pytestmark = pytest.mark.usefixtures("no_picture", "timed_once")

GUIDE = "docs/write/strategy.md"
CODE = code(GUIDE)
SMALL = {"suite": TINY, "n_train": [4], "seeds": 1, "jobs": 0, "device": "cpu"}


def strategy_in(code):
    """Return the strategy that the code defines."""
    names: dict = {"__name__": __name__}
    exec(code, names)
    (cls,) = (x for x in names.values() if isinstance(x, type) and issubclass(x, Strategy) and x is not Strategy)
    return cls(), names


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [*CODE[:9], *code("README.md")],
    ids=["far_out", "hubs", "crowded", "neighbours", "small_rest", "gate", "unusual", "half", "lonely", "mine"],
)
def test_the_strategies_of_the_pages_conform(code):
    strategy, names = strategy_in(code)
    assert names.get("sparsebench_strategies", lambda: [type(strategy)])() == [type(strategy)]
    outcomes = list(checks.outcomes(strategy, checks.blank(strategy, Origin(plugin="page"))))
    bad = [(o.check, o.message) for o in outcomes if o.status not in ("passed", "unsupported")]
    assert [check for check, _ in bad] == ["pickles_by_reference"], bad  # they live in no module


@pytest.mark.slow
def test_the_test_of_the_page_collects_its_checks(tmp_path):
    (tmp_path / "far_out.py").write_text(CODE[0])
    (tmp_path / "test_far_out.py").write_text(CODE[9])
    line = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", "-k", "plans_are_legal"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout


def test_the_page_names_every_field_site_and_declaration():
    text = text_of(GUIDE)
    fields = {name for name in vars(TokenView) if not name.startswith("_")} | NEEDS
    declared = {name for name in Strategy.__class_vars__ if name != "model_config"}
    for name in (*fields, *SITES, *declared):
        assert re.search(rf"`[^`]*\b{name}\b[^`]*`", text), name


def test_the_observer_of_the_page_writes_a_line_a_record(tmp_path):
    (tmp_path / "lines.py").write_text(code("docs/write/observer.md")[0])
    run_without_board(observe=f"{tmp_path}/lines.py:file=log.txt", out=tmp_path / "out", **SMALL)
    records = sparsebench.load_records(tmp_path / "out")
    lines = sorted((tmp_path / "out" / "log.txt").read_text().splitlines())
    assert [line.split()[:3] for line in lines] == records[["cell_id", "strategy", "status"]].values.tolist()
    assert [float(line.split()[3]) for line in lines] == records["accuracy"].tolist()


def test_the_task_of_the_page_knows_where_its_stripes_are(tmp_path):
    (tmp_path / "stripes.py").write_text(code("docs/write/task.md")[0])
    tiny = SMALL | {"tasks": "stripes:test=40,epochs=1", "n_train": [50], "macs": [0.5]}
    run_without_board(f"{tmp_path}/stripes.py", out=tmp_path / "out", **tiny)
    records = sparsebench.load_records(tmp_path / "out").set_index("strategy")
    assert set(records["status"]) == {"ok"}
    auroc = records["selection_auroc"]
    assert auroc["oracle"] == 1 and auroc["anti_oracle"] == 0 and 0.2 < auroc["random"] < 0.8


def test_the_model_of_the_page_costs_what_it_says(tmp_path):
    (tmp_path / "deep_sets.py").write_text(code("docs/write/model.md")[0])
    options = SMALL | {"macs": [0.5], "tasks": "sets:steps=10,test=10", "suite": "quick-scratch"}
    run_without_board(f"{tmp_path}/deep_sets.py", TOKENS, model="deep_sets", out=tmp_path / "out", **options)
    records = sparsebench.load_records(tmp_path / "out").set_index("strategy")
    assert set(records["status"]) == {"ok"}
    assert abs(records["macs_ratio"]["oracle"] - 0.5) < 0.03
    names: dict = {"__name__": __name__}
    exec((tmp_path / "deep_sets.py").read_text(), names)
    network = names["Network"](20, 7, 64)
    with FlopCounterMode(display=False) as counter:
        network(torch.zeros(1, 20, 7))
    assert counter.get_total_flops() == 2 * network.cost.macs(network.cost.dense())


def test_the_trainer_of_the_page_takes_the_steps(tmp_path):
    (tmp_path / "mean_token.py").write_text(code("docs/write/model.md")[2])
    options = {"tasks": "sets:steps=1,test=20", "n_train": [64], "seeds": 1, "jobs": 0, "device": "cpu"}
    run_without_board(f"{tmp_path}/mean_token.py", TOKENS, model="mean_token", out=tmp_path / "out", **options)
    records = sparsebench.load_records(tmp_path / "out").set_index("strategy")
    assert set(records["status"]) == {"ok"}
    assert records["accuracy"]["dense"] == 1 and records["accuracy"]["oracle"] == 1


@pytest.mark.slow
def test_the_lines_of_python_on_runs_give_boards(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(code("docs/how-to/run.md")[0], names)
    assert list(names["table"]["strategy"]) == list(names["same"]["strategy"]) and len(names["records"]) == 6
