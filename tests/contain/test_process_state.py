"""Each row of what belongs to the whole process is seen when it changes, and put back."""

import builtins
import gc
import os
import random
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from timm.models import vision_transformer
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision import transforms

from sparsebench import seeds
from sparsebench.contain import process_state
from sparsebench.contain.process_state import FUNCTIONS, RANDOM, STATE, changes, preserve, put, values
from sparsebench.view import TokenView

CHANGES: dict[str, Callable[[], Any]] = {
    "the default dtype": lambda: torch.set_default_dtype(torch.float64),
    "the default device": lambda: torch.set_default_device("meta"),
    "the number of threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "torch's gradient mode": lambda: torch.set_grad_enabled(False),
    "torch's deterministic mode": lambda: torch.set_deterministic_debug_mode("warn"),
    "torch's matmul precision": lambda: torch.set_float32_matmul_precision("medium"),
    "cuDNN's precision": lambda: setattr(process_state.CONVOLUTIONS, "fp32_precision", "ieee"),
    "torch's autocast": lambda: torch.set_autocast_enabled("cpu", True),
    "torch's anomaly detection": lambda: torch.set_anomaly_enabled(True),
    "torch's global hooks": lambda: torch.nn.modules.module.register_module_forward_hook(lambda *given: None),
    "torch's backends": lambda: torch._C._set_mkldnn_enabled(False),
    "NumPy's error handling": lambda: np.seterr(over="ignore"),
    "the working directory": lambda: os.chdir("/"),
    "the umask": lambda: os.umask(0o027),
    "what watches the interpreter": lambda: gc.disable(),
    "the environment": lambda: os.environ.update(HOME="/nowhere"),
    "a timer": lambda: signal.setitimer(signal.ITIMER_VIRTUAL, 1000),
    "signal handlers": lambda: signal.signal(signal.SIGALRM, signal.SIG_IGN),
    "torch": lambda: torch.rand(1),
    "numpy": lambda: np.random.rand(),
    "random": lambda: random.random(),
}


def test_every_row_that_can_be_set_is_tried() -> None:
    rows = [row for row in (*STATE, *RANDOM) if row.set is not None]
    assert [row.name for row in rows] == list(CHANGES)


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen_and_put_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    before = values((*STATE, *RANDOM))
    with preserve():
        CHANGES[name]()
        assert changes(before) == [name]
    assert changes(before) == []
    assert values((*STATE, *RANDOM)) == before


def test_a_variable_that_is_added_is_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    before = values()
    monkeypatch.setenv("ADDED_BY_AN_IMPORT", "1")
    assert changes(before) == []


def test_a_variable_that_is_gone_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINE", "1")
    with preserve():
        del os.environ["MINE"]
    assert os.environ["MINE"] == "1"


def test_a_precision_of_one_backend_is_a_change_too() -> None:
    before = values()
    with preserve():
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert changes(before) == ["torch's matmul precision"]
        put({"torch's matmul precision": "differs"})
    assert changes(before) == []


def test_inference_mode_is_seen() -> None:
    before = values()
    with torch.inference_mode():
        assert "torch's inference mode" in changes(before)


def test_modes_and_limits_are_seen() -> None:
    before = values()

    class Open(TorchDispatchMode):
        pass

    with Open():
        assert changes(before) == ["torch's modes"]
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (1 if soft == 0 else 0, hard))
    assert changes(before) == ["the limits of the process"]
    resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))
    assert changes(before) == []


FUNCTION: dict[str, Callable[[pytest.MonkeyPatch], Any]] = {
    "torch.Tensor.norm": lambda patch: patch.setattr(torch.Tensor, "norm", lambda *given: 1 / 0),
    "torch.nn.modules.activation.GELU.forward": lambda patch: patch.setattr(torch.nn.GELU, "forward", torch.relu),
    "torch.optim.adamw.AdamW.step": lambda patch: patch.setattr(torch.optim.AdamW, "step", lambda self: None),
    "timm.models.vision_transformer.Block.forward": lambda patch: patch.setattr(
        vision_transformer.Block, "forward", lambda self, x: x
    ),
    "torchvision.transforms.functional.crop": lambda patch: patch.setattr(transforms.functional, "crop", len),
    "numpy.argsort": lambda patch: patch.setattr(np, "argsort", np.sort),
    "builtins.hash": lambda patch: patch.setattr(builtins, "hash", id),
    "sparsebench.seeds.seed_of": lambda patch: patch.setattr(seeds, "seed_of", lambda *names: 3),
    "sparsebench.view.TokenView.random": lambda patch: patch.setattr(
        TokenView.random, "__code__", (lambda self, *shape: 0).__code__
    ),
    "numpy": lambda patch: patch.setitem(sys.modules, "numpy", sys),
}


@pytest.mark.parametrize("name", FUNCTION)
def test_a_function_that_is_replaced_is_seen_by_its_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = values([FUNCTIONS])
    with monkeypatch.context() as patch:
        FUNCTION[name](patch)
        names = changes(before)
    assert name in names
    assert changes(before) == []


def test_what_torch_wraps_of_its_own_is_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    before = values([FUNCTIONS])
    monkeypatch.setattr(torch, "manual_seed", torch._disable_dynamo(torch.manual_seed))
    assert changes(before) == []
