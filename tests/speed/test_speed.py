"""Rows of speed: what is measured, marked and written."""

import json
import time

import pytest
import timm
import torch

from sparsebench.errors import UserError
from sparsebench.speed import clock, rows
from sparsebench.speed.rows import Row

BASE = Row("m", "tome", "eager", "float32", 8, 32, 1_000_000, 5e8, 2.0, 8)


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


def test_marks_are_of_speed_ups_above_the_ratio_and_wide_spreads():
    from dataclasses import replace

    assert rows.marks(replace(BASE, speedup=1.9, spread=0.03)) == []
    assert rows.marks(replace(BASE, speedup=2.1, spread=0.031)) == ["above the MACs ratio", "spread over 3 %"]
    compiled = replace(BASE, mode="compiled", speedup=2.5, speedup_compiled=1.5)
    assert rows.marks(compiled) == []
    assert rows.marks(replace(compiled, speedup_compiled=2.5)) == ["above the MACs ratio"]
    assert rows.marks(replace(BASE, strategy="dense", macs_ratio=1, speedup=1.2)) == []


def test_ratios_are_of_the_same_turn():
    assert rows.ratio([1, 10, 4], [1, 5, 1]) == 2
    assert rows.percentile(range(1, 101), 0.95) == 95
    assert rows.percentile([3.0], 0.95) == 3


def test_the_header_is_timms():
    from dataclasses import replace

    header, line = rows.timm_csv([replace(BASE, p50=0.004), replace(BASE, problem="no")]).splitlines()
    assert header == (
        "model,infer_img_size,infer_samples_per_sec,infer_step_time,infer_batch_size,param_count,infer_gmacs,infer_macts"
    )
    assert line == "m+tome+eager+float32,32,2000.0,4.0,8,1.0,0.5,"


def test_a_strategy_that_sleeps_has_a_choice_that_costs_as_much(monkeypatch, eager):
    from sparsebench_plugins.attn_topk import AttnTopK

    plan = AttnTopK.plan
    monkeypatch.setattr(AttnTopK, "plan", lambda self, *args: (time.sleep(0.05), plan(self, *args))[1])
    measured = list(clock.measure(_model(), "m", ["attn_topk:keep_rate=0.5"], batches=[2], rounds=2))
    (row,) = [row for row in measured if row.mode == "eager" and row.strategy != "dense"]
    assert row.choice >= 0.05 and row.p50 >= row.choice
    assert row.macs_ratio > 1 and row.p95 >= row.p50


@pytest.mark.parametrize("words", ["dynamic_vit:keep_rate=0.5", "a_vit:beta=-75"])
def test_what_is_learned_is_timed_without_having_learned_it(words, eager):
    measured = list(clock.measure(_model(), "m", [words], batches=[2], rounds=2))
    (row,) = [row for row in measured if row.mode == "eager" and row.strategy != "dense"]
    assert not row.problem and row.p50 > 0


def test_without_a_compiler_the_compiled_rows_say_so_and_the_dense_one_is_there(eager):
    measured = list(clock.measure(_model(), "m", [], batches=[1], modes=["eager"], rounds=2))
    first, second = measured
    assert (first.strategy, first.mode, first.problem) == ("dense", "eager", "") and first.spread is not None
    assert (second.strategy, second.mode) == ("dense", "compiled")
    assert second.problem == "cannot be compiled: RuntimeError: no C++ compiler" and second.p50 is None
    assert [json.loads(line)["batch"] for line in rows.lines(measured).splitlines()] == [1, 1]


def test_a_batch_that_does_not_fit_says_so_and_the_others_go_on(monkeypatch, eager):
    model = _model()
    forward = model.forward

    def small(pixels):
        if len(pixels) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(pixels)

    monkeypatch.setattr(model, "forward", small)
    measured = list(clock.measure(model, "m", [], batches=[2, 1], rounds=2))
    dense = [row for row in measured if row.mode == "eager"]
    assert [row.problem for row in dense] == ["does not fit the memory", ""]


@pytest.mark.parametrize("wrong", [{"batches": [0]}, {"modes": ["fast"]}, {"precisions": ["int3"]}, {"rounds": 1}])
def test_what_is_not_known_is_refused(wrong):
    with pytest.raises(UserError):
        list(clock.measure(_model(), "m", [], **wrong))


def test_the_command_writes_records_a_picture_and_timms_table(tmp_path, eager):
    from click.testing import CliRunner

    from sparsebench.cli import main

    words = ["speed", "timm:deit_tiny_patch16_224", "--batch", "1", "--rounds", "2", "--device", "cpu"]
    result = CliRunner().invoke(main, [*words, "--out", str(tmp_path / "s")])
    assert result.exit_code == 0 and "no C++ compiler" in result.output
    assert {path.name for path in (tmp_path / "s").iterdir()} == {"speed.jsonl", "timm.csv", "speed.png"}
    again = CliRunner().invoke(main, [*words, "--out", str(tmp_path / "s")])
    assert again.exit_code == 2 and "is not written over" in again.output
