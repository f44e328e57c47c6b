"""The Vision Transformer and the metrics of the pages on models and tasks, and errors if a part is missing."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pages import code
from running import run_without_board

import sparsebench
from sparsebench.errors import UnsupportedError
from sparsebench.models.actor import Actor
from sparsebench.models.deep import DeepViT, small_vit
from sparsebench.plan.request import values_of
from sparsebench.plugin.registry import Registry
from sparsebench.records import store
from sparsebench.records.record import Record
from sparsebench.runner import run as runs
from sparsebench.strategy.budget import Budget
from sparsebench.training.steps import outputs_of

pytestmark = pytest.mark.usefixtures("no_picture", "timed_once")

VIT = code("docs/write/model.md")[1]
TINY: dict[str, Any] = {"seeds": 1, "device": "cpu", "suite": "quick-scratch"}
LEARNER = """
from typing import ClassVar
import sparsebench

class Learner(sparsebench.Strategy):
    name: ClassVar[str] = "learner"
    trained: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"tokens"})
    site: ClassVar[str] = "block"

    def scores(self, view):
        return view.tokens.norm(dim=-1)

    def loss(self, inputs):
        return inputs.student.tokens.square().mean()

@sparsebench.hookimpl
def sparsebench_strategies():
    return [Learner]
"""
NAMES = {
    "cls_token": "first", "pos_embed": "positions", "patch_embed.proj": "embed", "attn.qkv": "qkv", "attn.proj": "proj",
    "mlp.fc1": "mlp.0", "mlp.fc2": "mlp.2",
}  # fmt: skip
"""Parts of the names of timm's weights, and the corresponding parts on the page."""


@pytest.fixture(scope="module")
def networks() -> tuple[Any, DeepViT]:
    """Return the page's network and timm's, with the same weights."""
    names: dict[str, Any] = {"__name__": __name__}
    exec(VIT, names)
    torch.manual_seed(0)
    sizes = {"patch": 4, "dim": 32, "depth": 4, "heads": 4}
    mine, vit = names["Network"](24, 5, **sizes), small_vit(24, 5, **sizes)
    state = vit.state_dict()
    for before, after in NAMES.items():
        state = {name.replace(before, after): value for name, value in state.items()}
    mine.load_state_dict(state)
    for module in mine.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = 1e-6
    return mine.eval(), DeepViT(vit.eval())


@pytest.mark.parametrize(
    "name",
    [
        "random",
        "attn_topk",
        "tome",
        "evit",
        "tps",
        "dpc_knn",
        "random_inside",
        "ats",
        "pitome",
        "rep_shift",
        "tome_cis",
    ],
)
def test_strategies_act_on_the_pages_transformer_as_on_timms(networks: tuple[Any, DeepViT], name: str) -> None:
    """Strategies do on the transformer of the page what they do on timm's."""
    strategy, images = Registry().strategy(name).cls(), torch.randint(0, 256, (6, 3, 24, 24), dtype=torch.uint8)
    outputs, passes = [], []
    for network in networks:
        actor = Actor(strategy, Budget(keep_rate=0.7), network.cost, network.grid, 0)
        acting = actor.begin(torch.arange(6), 0, None, training=False)
        with torch.no_grad():
            outputs.append(outputs_of(network, images, acting))
        passes.append(acting)
    assert passes[0].decisions and torch.equal(passes[0].index, passes[1].index)
    assert torch.allclose(outputs[0], outputs[1], atol=1e-4) and torch.allclose(passes[0].sizes, passes[1].sizes)
    assert [np.mean(step.tokens_out) for step in passes[0].steps] == [np.mean(s.tokens_out) for s in passes[1].steps]


def test_the_transformer_of_the_page_costs_what_timms_does(networks: tuple[Any, DeepViT]) -> None:
    mine, theirs = (network.cost.macs(network.cost.dense()) for network in networks)
    assert mine == theirs


def run_on(folder: Path, text: str, *strategies: str, jobs: int = 0) -> dict[str, Record]:
    """Return the records of a model on a small task, by strategy."""
    (folder / "plain_vit.py").write_text(text)
    (folder / "learner.py").write_text(LEARNER)
    plugins = [str(folder / name) if name == "learner.py" else name for name in strategies]
    task = "composite:canvas=16,foreground=8,epochs=1,test=8,pretrain_epochs=0"
    more = {"tasks": task, "n_train": [4], "macs": [0.6], "jobs": jobs, "model": "plain_vit:dim=16,depth=2,heads=2"}
    run_without_board(str(folder / "plain_vit.py"), *plugins, out=folder / "out", **TINY, **more)
    return {record.label: record for record in store.read(folder / "out").values()}


def reason_of(record: Record) -> str:
    assert record.status == "unsupported" and record.failure is not None
    return record.failure.reason


def test_what_a_model_ignores_makes_a_strategy_unsupported(tmp_path: Path) -> None:
    """What a model does not do makes a strategy unsupported which says it."""
    reasons = {
        "a_vit": "it must call acting.read_out(prefix, tokens)", "dynamic_vit": "it must have tell(inputs)",
        "diffrate_search": "keys by acting.weights",
    }  # fmt: skip
    records = run_on(tmp_path, VIT, "tome", "evit", "learner.py", *reasons)
    assert {records[name].status for name in ("tome", "evit", "learner", "dense")} == {"ok"}
    assert all(reason in reason_of(records[name]) for name, reason in reasons.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "name", "reason"),
    [
        ("acting.student = ModelOutputs(logits, x[:, 1:])", "learner.py", "it must set acting.student = ModelOutputs"),
        ('x = act(acting, "input", 0, x)', "random", "it must call acting.decide(...) there"),
        ("acting.record_block(tokens_in, scoring=scoring)", "random_inside", "it must call acting.record_block(...)"),
    ],
)
def test_the_error_names_the_line_that_a_model_lacks(tmp_path: Path, line: str, name: str, reason: str) -> None:
    assert VIT.count(line) == 1
    records = run_on(tmp_path, VIT.replace(line, "pass"), name)
    assert reason in reason_of(records[name.removesuffix(".py")])


@pytest.mark.slow
def test_a_transformer_without_key_weights_refuses_masks(tmp_path: Path) -> None:
    """A transformer without weights of keys refuses strategies that need them."""
    without = VIT.replace('acting.bias(), ""', 'None, ""')
    assert without != VIT
    records = run_on(tmp_path, without, "tome", "attn_topk")
    assert "add acting.bias() to" in reason_of(records["tome"]) and records["attn_topk"].status == "ok"
    for text, heeds in ((VIT, True), (without, False)):
        names: dict[str, Any] = {"__name__": __name__}
        exec(text, names)
        torch.manual_seed(0)
        network = names["Network"](24, 5, patch=4, dim=32, depth=4, heads=4)
        with torch.no_grad():
            network.blocks[0].qkv.weight.mul_(20)  # so that attention differs between images
            images = torch.randint(0, 256, (6, 3, 24, 24), dtype=torch.uint8)
            actor = Actor(Registry().strategy("ats").cls(), Budget(keep_rate=0.7), network.cost, network.grid, 0)
            acting = actor.begin(torch.arange(6), 0, None, training=False)
            with nullcontext() if heeds else pytest.raises(UnsupportedError, match=r"add acting\.bias"):
                outputs_of(network, images, acting)
        assert acting.ragged


@pytest.mark.slow
def test_a_cell_that_fails_has_its_traceback_in_the_log(tmp_path: Path) -> None:
    wrong = VIT.replace("return x + self.mlp(self.norm2(x))", "assert len(x) == 0")
    assert wrong != VIT
    record = run_on(tmp_path, wrong, "attn_topk", jobs=1)["attn_topk"]
    log = "".join(path.read_text() for path in (tmp_path / "out" / "logs").iterdir())
    assert record.failure is not None and record.failure.kind == "AssertionError"
    assert f"cell {record.cell_id}, attn_topk: failed\nTraceback" in log
    assert "plain_vit.py" in log and "    assert len(x) == 0\n" in log


@pytest.mark.slow
def test_a_cost_model_that_plans_otherwise_than_its_network_runs_is_noted(tmp_path: Path) -> None:
    early = VIT.replace(", plain=False", "")
    assert early != VIT
    for text in (VIT, early):
        folder = tmp_path / str(len(text))
        folder.mkdir()
        run_on(folder, text, "attn_topk", "tome")
        board = (folder / "out" / "leaderboard.md").read_text()
        note = "plain_vit on composite: its cost model does not agree with the network's run for 1 strategy, such as"
        assert (note in board.replace("\\_", "_")) == (text is early)


def test_the_metrics_of_the_page_are_measured_and_on_boards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, block in zip(("stripes", "measured"), code("docs/write/task.md"), strict=True):
        (tmp_path / f"{name}.py").write_text(block)
    registry, calls = Registry(), list[tuple[Any, Any, Any]]()
    registry.load_file(tmp_path / "measured.py")
    cls: Any = registry.task("measured")
    measure = cls.measure

    def look(task: Any, items: Any, test: Any) -> Any:
        calls.append((items, test, measure(task, items, test)))
        return calls[-1][2]

    monkeypatch.setattr(cls, "measure", look)
    more = {"tasks": "measured:test=40,epochs=1", "n_train": [50], "macs": [0.5], "jobs": 0}
    runs.run_missing(*values_of({"plugins": (f"{tmp_path}/measured.py",), **TINY, **more}), registry, tmp_path / "out")
    for items, test, values in calls:
        assert items.kept.shape == (40, 36) and items.confidence.shape == (40,) and items.confidence.min() >= 0.5
        right = np.exp(-items.losses[items.correct].astype(float))
        assert np.allclose(items.confidence[items.correct], right, atol=1e-5)
        error = 0.0
        for tenth in range(10):
            rows = [i for i in range(40) if min(int(10 * items.confidence[i]), 9) == tenth]
            error += abs(sum(float(items.confidence[i]) - bool(items.correct[i]) for i in rows)) / 40
        assert values["calibration_error"] == pytest.approx(error, abs=1e-6)
        spread = []
        for image, kept in zip(test.inputs, items.kept, strict=True):
            tiles = [image[:, 4 * r : 4 * r + 4, 4 * c : 4 * c + 4].ravel() for r in range(6) for c in range(6)]
            spread.append(np.std([tiles[k] for k in np.flatnonzero(kept)], axis=0).mean())
        assert values["diversity"] == pytest.approx(np.mean(spread))
    assert sorted(bool(items.kept.all()) for items, *_ in calls) == [False, False, False, True]
    from_records = sparsebench.leaderboard(sparsebench.load_records(tmp_path / "out"))
    assert from_records["calibration_error"].notna().all() and from_records["diversity"].nunique() > 1
