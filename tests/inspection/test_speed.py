"""Rows of speeds: measurements, marks and files."""

import dataclasses
import io
import json
import time

import pytest
import timm
import torch
from click.testing import CliRunner
from PIL import Image
from sparsebench_plugins.attn_topk import AttnTopK

from sparsebench.cli import main
from sparsebench.errors import UserError
from sparsebench.inspection import speed


def _model():
    return timm.models.VisionTransformer(img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2, num_classes=3)


@pytest.fixture
def eager(monkeypatch):
    """No compiler: compiled networks fail at their first call."""

    def broken(model, dynamic):
        def call(_pixels):
            raise RuntimeError("no C++ compiler")

        return call

    monkeypatch.setattr(torch, "compile", broken)


def test_rows_have_the_names_of_records(eager):
    """Rows are of each network strategy and budget under the names of records."""
    words = ["attn_topk:keep_rate=0.5,0.7,attention=received", "tome:per_block=2"]
    measured = list(speed.measure({"a": _model(), "b": _model()}, words, batches=[1, 3], modes=["eager"], rounds=2))
    named = [(row.network, row.batch, row.label) for row in measured if row.mode == "eager"]
    labels = [
        "dense",
        *(f"attn_topk(attention=received), keep {rate} power-floor" for rate in (0.5, 0.7)),
        "tome, 2 a block",
    ]
    assert named == [(network, batch, name) for network in "ab" for batch in (1, 3) for name in labels]
    for row in measured:
        if row.mode == "eager":
            assert row.images_per_s == pytest.approx(row.batch / row.latency)
            assert (row.macs_ratio == 1) if row.strategy == "dense" else (0 < row.macs_ratio < 1)
            assert row.memory is None and row.device == "cpu"


def test_a_speed_up_that_disagrees_with_images_per_s_is_marked(eager):
    """A row whose speed up disagrees with its images per second is marked."""
    measured = list(speed.measure({"m": _model()}, ["tome:per_block=2"], batches=[2], modes=["eager"], rounds=3))
    dense, sparse = (row for row in measured if row.mode == "eager")
    for row in (dense, sparse):
        assert row.drift == pytest.approx(abs(row.speed_up / (row.images_per_s / dense.images_per_s) - 1), abs=1e-9)
    apart, near = (dataclasses.replace(sparse, drift=drift, spread=0.0, speed_up=1.0) for drift in (0.5, 0.01))
    assert len(apart.marks) == 1 and near.marks == []


def test_the_picture_has_room_for_each_strategy_and_for_rows_without_times(eager):
    words = [f"tome:per_block={count}" for count in (1, 2, 3)]
    measured = list(speed.measure({"m": _model()}, words, batches=[1, 2], modes=["eager"], rounds=2))
    lost = [dataclasses.replace(row, speed_up=None, problem="does not fit the memory") for row in measured]
    few = [row for row in measured if row.strategy == "dense"]
    sizes = [Image.open(io.BytesIO(speed.draw(rows))).size for rows in (few, measured, lost)]
    assert sizes[0][1] < sizes[1][1] == sizes[2][1]


def test_a_strategy_that_sleeps_has_a_choice_that_costs_as_much(monkeypatch, eager):
    plan = AttnTopK.plan
    monkeypatch.setattr(AttnTopK, "plan", lambda self, *args: (time.sleep(0.05), plan(self, *args))[1])
    measured = list(speed.measure({"m": _model()}, ["attn_topk:keep_rate=0.5"], batches=[2], rounds=2))
    (row,) = [row for row in measured if row.mode == "eager" and row.strategy != "dense"]
    assert row.choice >= 0.05 and row.latency >= 0.05
    assert row.macs_ratio < 1 and row.latency_p95 >= row.latency


@pytest.mark.parametrize("words", ["dynamic_vit:keep_rate=0.5", "a_vit:beta=-75"])
def test_what_is_learned_is_timed_without_having_learned_it(words, eager):
    measured = list(speed.measure({"m": _model()}, [words], batches=[2], rounds=2))
    (row,) = [row for row in measured if row.mode == "eager" and row.strategy != "dense"]
    assert not row.problem and row.latency > 0


def test_without_a_compiler_compiled_rows_say_so(eager):
    """Without a compiler the compiled rows say so and the dense one is there."""
    measured = list(speed.measure({"m": _model()}, [], batches=[1], modes=["eager"], rounds=2))
    first, second = measured
    assert (first.strategy, first.mode, first.problem) == ("dense", "eager", "") and first.spread is not None
    assert (second.strategy, second.mode) == ("dense", "compiled")
    assert second.problem == "cannot be compiled: RuntimeError: no C++ compiler" and second.latency is None
    assert [json.loads(line)["batch"] for line in speed.lines(measured).splitlines()] == [1, 1]


def test_a_batch_that_does_not_fit_is_reported(eager):
    """A batch that does not fit says so and the others go on and one of nothing is refused."""
    model = _model()

    def small(_model, arguments):
        if len(arguments[0]) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")

    model.register_forward_pre_hook(small)
    measured = list(speed.measure({"m": model}, [], batches=[2, 1], rounds=2))
    dense = [row for row in measured if row.mode == "eager"]
    assert [row.problem for row in dense] == ["does not fit the memory", ""]
    with pytest.raises(UserError, match="batch sizes"):
        speed.measure({"m": model}, [], batches=[0])


def test_the_command_writes_records_a_picture_and_timms_table(tmp_path, eager):
    words = ["speed", "timm:test_vit", "--batch", "2", "--batch", "1", "--rounds", "2", "--device", "cpu"]
    result = CliRunner().invoke(main, [*words, "--out", str(tmp_path / "s")])
    assert result.exit_code == 0 and "no C++ compiler" in result.output
    assert {path.name for path in (tmp_path / "s").iterdir()} == {"speed.jsonl", "timm.csv", "speed.png"}
    rows = [json.loads(line) for line in (tmp_path / "s" / "speed.jsonl").read_text().splitlines()]
    assert {row["batch"] for row in rows} == {1, 2}
    again = CliRunner().invoke(main, [*words, "--out", str(tmp_path / "s")])
    assert again.exit_code == 2 and "already exists" in again.output
    bare = CliRunner().invoke(main, ["speed", "test_vit", "--out", str(tmp_path / "t")])
    assert bare.exit_code == 2 and "did you mean 'timm:test_vit'?" in bare.output and "export" not in bare.output
