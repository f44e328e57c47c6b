"""What a third-party strategy changes of a process no other strategy's cell meets."""

from pathlib import Path

import pytest
import torch
from measured import COMPOSITE, TINY
from plugin_files import write_strategy
from running import local

from sparsebench import seeds
from sparsebench.plan.expand import expand
from sparsebench.plan.request import Request
from sparsebench.plugin.registry import Registry
from sparsebench.records.record import Record

GELU = "torch.nn.GELU.forward = lambda self, x: x"
KINDS = {
    "at_import": (f"{GELU}; sparsebench.seeds.seed_of = lambda *names: 3", "pass"),
    "patches_timm": ("import timm.models.vision_transformer as vits", "vits.Block.forward = lambda self, x, **more: x"),
    "patches_judge": (
        "",
        "import sparsebench.training.evaluate as e; own = e.predictions; e.predictions = lambda *x: own(*x)",
    ),

    "hooks": ("", "torch.nn.modules.module.register_module_forward_hook(lambda module, args, out: out)"),
    "modes": (
        "from torch.utils._python_dispatch import TorchDispatchMode as Mode\n"
        "class Open(Mode):\n    def __torch_dispatch__(self, f, types, args=(), kwargs=None):\n"
        "        return f(*args, **(kwargs or {}))\n",
        "Open().__enter__()",
    ),
    "backends": ("", "torch.backends.mkldnn.enabled = False"),
    "optimiser": ("", "torch.optim.AdamW.step = lambda self, closure=None: None"),
    "code": ("", "import timm.models.vision_transformer as v; "
             "v.Attention.forward.__code__ = (lambda self, x, attn_mask=None: x).__code__"),
    "umask": ("import os", "os.umask(0o077)"),
    "limits": ("import resource", "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))"),
    "breaks": ("", "torch.Tensor.norm = lambda *given, **more: 1 / 0"),
    "dtype": ("", "torch.set_default_dtype(torch.float64)"),
    "determinism": ("", "torch.use_deterministic_algorithms(True)"),
    "precision": ("", "torch.set_float32_matmul_precision('medium')"),
    "numpy": ("import numpy", "numpy.mean = lambda *given, **more: 0.5; numpy.seterr(all='raise')"),
    "builtins": ("import builtins", "builtins.sum = lambda *given, **more: 0"),
    "modules": ("import sys, types", "sys.modules['sparsebench.measure.metrics'] = types.ModuleType('scores')"),
    "seeds": ("import random, numpy", "torch.manual_seed(1); numpy.random.seed(1); random.seed(1)"),
    "environment": ("import os", "os.environ['ATEN_CPU_CAPABILITY'] = 'default'; os.environ['MKL_CBWR'] = 'SSE2'"),
    "folder": ("import os", "os.chdir('/')"),
    "signals": ("import signal", "signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.alarm(600)"),
    "threads": (
        "import threading, time",
        "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
    ),
    "shadow": ("import sys, os", "sys.path.insert(0, os.path.dirname(__file__))"),
}  # fmt: skip
HONEST = ("dense", "random", "oracle", "anti_oracle")


def records_of(kinds: dict[str, tuple[str, str]], samples: Path, out: Path) -> dict[str, Record]:
    paths = [samples / "good.py"]
    for name, (first, then) in kinds.items():
        paths.insert(0, write_strategy(out / f"{name}.py", f"import torch; {then}", f"import torch\n{first}"))
    request = Request(suite="quick-scratch", plugins=tuple(map(str, paths)), tasks=(COMPOSITE,), n_train=(20,), seeds=1)
    with pytest.MonkeyPatch.context() as patch:  # a file is loaded here too
        patch.setattr(torch.nn.GELU, "forward", torch.nn.GELU.forward)
        patch.setattr(seeds, "seed_of", seeds.seed_of)
        jobs = sorted(expand(request, Registry()), key=lambda job: job.label in HONEST)
    return {record.label: record for record in local(jobs, 1, out)}


def check(kinds: dict[str, tuple[str, str]], samples: Path, out: Path) -> None:
    (out / "clean").mkdir()
    clean, records = records_of({}, samples, out / "clean"), records_of(kinds, samples, out)
    own = {"started", "seconds", "memory", "samples", "metrics"}
    for label in (*HONEST, "norm"):
        assert records[label].outcomes == clean[label].outcomes is not None
        assert records[label].model_dump(exclude=own) == clean[label].model_dump(exclude=own)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(2))  # two processes share a test of minutes
def test_no_kind_of_change_reaches_another(part: int, samples: Path, tmp_path: Path) -> None:
    check(dict(list(KINDS.items())[part::2]), samples, tmp_path)


def test_a_job_has_only_the_files_that_bring_its_strategy_and_task(samples: Path) -> None:
    request = Request(
        suite=TINY, plugins=(str(samples / "good.py"), str(samples / "brings_task.py")),
        tasks=("composite", "small"), n_train=(20,), seeds=1,
    )  # fmt: skip
    found = {(job.cell.task.name, job.label): job for job in expand(request, Registry())}
    names = {key: {Path(path).name for path in job.files} for key, job in found.items()}
    assert names["composite", "dense"] == set() and found["composite", "dense"].strangers == ()
    assert names["composite", "norm"] == {"good.py"}
    assert names["small", "dense"] == {"brings_task.py"}
    assert names["small", "norm"] == {"good.py", "brings_task.py"}
    assert len(found["small", "norm"].strangers) == 2
