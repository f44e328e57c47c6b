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
    "patches_judge": (
        "",
        "import sparsebench.training.loop as e; own = e.predictions; e.predictions = lambda *x: own(*x)",
    ),

    "hooks": ("", "torch.nn.modules.module.register_module_forward_hook(lambda module, args, out: out)"),
    "optimiser": ("", "torch.optim.AdamW.step = lambda self, closure=None: None"),
    "breaks": ("", "torch.Tensor.norm = lambda *given, **more: 1 / 0"),
    "dtype": ("", "torch.set_default_dtype(torch.float64)"),
    "seeds": ("import random, numpy", "torch.manual_seed(1); numpy.random.seed(1); random.seed(1)"),
    "environment": ("import os", "os.environ['ATEN_CPU_CAPABILITY'] = 'default'; os.environ['MKL_CBWR'] = 'SSE2'"),
    "signals": ("import signal", "signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.alarm(600)"),
    "threads": (
        "import threading, time",
        "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
    ),
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


@pytest.mark.slow
def test_no_kind_of_change_reaches_another(samples: Path, tmp_path: Path) -> None:
    (tmp_path / "clean").mkdir()
    clean, records = records_of({}, samples, tmp_path / "clean"), records_of(KINDS, samples, tmp_path)
    own = {"started", "seconds", "memory", "samples", "metrics"}
    for label in (*HONEST, "norm"):
        assert records[label].outcomes == clean[label].outcomes is not None
        assert records[label].model_dump(exclude=own) == clean[label].model_dump(exclude=own)


def test_a_job_has_only_the_files_that_bring_its_strategy_and_task(samples: Path) -> None:
    request = Request(
        suite=TINY, plugins=(str(samples / "good.py"), str(samples / "brings_task.py")),
        tasks=("composite", "small"), n_train=(20,), seeds=1,
    )  # fmt: skip
    found = {(job.cell.task.name, job.label): job for job in expand(request, Registry())}
    names = {key: {Path(path).name for path in job.files} for key, job in found.items()}
    assert names["composite", "dense"] == set() and found["composite", "dense"].code == ()
    assert names["composite", "norm"] == {"good.py"}
    assert names["small", "dense"] == {"brings_task.py"}
    assert names["small", "norm"] == {"good.py", "brings_task.py"}
    assert len(found["small", "norm"].code) == 3
