"""Fine-tuning in a loop of one's own: what changes while training, a teacher, and the script of the docs."""

import copy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from vits import vit

import sparsebench
from sparsebench.errors import UserError
from sparsebench.strategy.base import ModelOutputs

SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "fine_tune.py"


def pixels(n: int = 3) -> torch.Tensor:
    return torch.randn(n, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def test_a_keep_rate_falls_with_the_share_of_the_training_that_is_done() -> None:
    sparse = sparsebench.apply(vit(), "evit:keep_rate=0.5").train()
    went_on = {}
    for done in (0.0, 0.2, 1.0):
        assert sparse.progress(done) == 1
        sparse(pixels())
        went_on[done] = int(sparse.kept().sum())
    assert went_on[0.0] == 3 * 16 > went_on[0.2] > went_on[1.0]
    untold = sparsebench.apply(vit(), "evit:keep_rate=0.5").train()
    untold(pixels())
    assert int(untold.kept().sum()) == went_on[1.0], "of whom nobody says how far the training is, it is done"


def test_a_strategy_says_how_fast_the_network_learns_beside_it() -> None:
    sparse = sparsebench.apply(vit(), "dynamic_vit:keep_rate=0.5", learned="random").train()
    rates = [sparse.progress(done) for done in (0.0, 1.0)]
    assert rates[0] == 0 < rates[1] < 1
    for wrong in (-0.1, 1.5, float("nan")):
        with pytest.raises(UserError, match="share of the training"):
            sparse.progress(wrong)


def test_a_teacher_is_asked_in_each_call_and_is_no_part_of_the_network() -> None:
    model, x = vit(), pixels()
    teacher = copy.deepcopy(model).train()
    sparse = sparsebench.apply(model, "dynamic_vit:keep_rate=0.5", learned="random", seed=3).train()
    names = sparse.state_dict().keys()
    sparse(x)
    alone = sparse.loss()
    tokens = teacher.eval().forward_features(x)
    by_hand = ModelOutputs(teacher.forward_head(tokens), tokens[:, 1:])
    sparse._visit = 0  # so that the same tokens are drawn
    sparse(x)
    expected = sparse.loss(by_hand)
    sparse.teach(teacher.train())
    sparse._visit = 0
    sparse(x)
    taught = sparse.loss()
    assert torch.equal(taught, expected) and taught != alone and not teacher.training
    taught.backward()
    assert all(weight.grad is None for weight in teacher.parameters()) and sparse.state_dict().keys() == names
    sparse.teach(None)
    sparse._visit = 0
    sparse(x)
    assert torch.equal(sparse.loss(), alone)


def test_what_is_no_teacher_is_the_users_mistake() -> None:
    model = vit()
    sparse = sparsebench.apply(model, "dynamic_vit:keep_rate=0.5", learned="random").train()
    for wrong in (model, sparse):
        with pytest.raises(UserError, match="is the network that learns"):
            sparse.teach(wrong)
    with pytest.raises(UserError, match="the teacher"):
        sparse.teach(torch.nn.Linear(2, 2))
    sparse(pixels())
    with pytest.raises(UserError, match="got Tensor; allowed: ModelOutputs"):
        sparse.loss(torch.zeros(3, 5))  # type: ignore[arg-type]


def test_gradient_checkpointing_is_refused_whenever_it_is_switched_on() -> None:
    model = vit()
    sparse = sparsebench.apply(model, "tome:per_block=2").train()
    sparse(pixels())
    model.set_grad_checkpointing(True)
    with pytest.raises(UserError, match="gradient checkpointing"):
        sparse(pixels())
    sparse.eval()(pixels())  # where it does nothing
    model.set_grad_checkpointing(False)
    sparse.train()(pixels()).sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [[], ["--strategy", "dynamic_vit:keep_rate=0.7", "--learned", "random"]])
def test_the_script_of_the_docs_trains_on_two_processes(tmp_path: Path, strategy: list[str]) -> None:
    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for k in range(12):
            picture = Image.fromarray(rng.integers(0, 255, (40, 36, 3), dtype=np.uint8))
            picture.save(tmp_path / "pictures" / name / f"{k}.png")
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT), "pictures"]
    words += ["--arch", "test_vit", "--batch", "4", "--epochs", "2", *strategy]
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert "epoch 1: loss " in done.stdout
    saved = torch.load(tmp_path / "sparse.pt", weights_only=True)
    assert saved["state_dict"].keys() >= saved["ema"].keys()
