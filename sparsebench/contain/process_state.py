"""What belongs to the whole process, by name: how it is read and how it is put back."""

from __future__ import annotations

import gc
import os
import random
import resource
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.utils._device
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimisers

from sparsebench.contain import functions

HANDLED = signal.SIGALRM, signal.SIGCHLD, signal.SIGTERM, signal.SIGINT
TIMERS = signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF
AUTOCAST = "cpu", "cuda"
CONVOLUTIONS: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined]


class Row(NamedTuple):
    """Something of which a process has one.

    Attributes:
        name: what messages call it.
        get: returns it, as a value to compare.
        set: puts such a value back; None where nothing can.
        names: says, by names of their own, which parts of such a value are no longer so; None where it has no parts.
    """

    name: str
    get: Callable[[], Any]
    set: Callable[[Any], object] | None = None
    names: Callable[[Any], list[str]] | None = None


def _set_device(device: torch.device) -> None:
    torch.set_default_device(None if device.type == "cpu" else device)


def _precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # torch does not say it once one backend has a precision of its own
        return "differs"


def _set_precision(value: str) -> None:
    if value != "differs":
        torch.set_float32_matmul_precision(value)


def _set_autocast(enabled: tuple[bool, ...]) -> None:
    for device, value in zip(AUTOCAST, enabled, strict=True):
        torch.set_autocast_enabled(device, value)


def _directory() -> str:
    with suppress(OSError):
        return os.getcwd()
    return "gone"


def _set_directory(path: str) -> None:
    with suppress(OSError):
        os.chdir(path)


def _timers() -> tuple[bool, ...]:
    return tuple(signal.getitimer(timer)[0] > 0 for timer in TIMERS)


def _stop_timers(running: tuple[bool, ...]) -> None:
    for timer, keep in zip(TIMERS, running, strict=True):
        if not keep:
            signal.setitimer(timer, 0)


def _set_handlers(handlers: tuple[Any, ...]) -> None:
    for number, handler in zip(HANDLED, handlers, strict=True):
        if handler is not None:  # None: not set by Python
            signal.signal(number, handler)


def _set_torch_random(value: bytes) -> None:
    torch.set_rng_state(torch.frombuffer(bytearray(value), dtype=torch.uint8))


def _numpy_random() -> tuple[Any, ...]:
    name, keys, *rest = np.random.get_state()
    return name, np.asarray(keys).tobytes(), *rest


def _set_numpy_random(value: tuple[Any, ...]) -> None:
    name, keys, *rest = value
    np.random.set_state((name, np.frombuffer(keys, dtype=np.uint32), *rest))


def _hooks() -> list[dict[Any, Any]]:
    """Return torch's hooks for all modules and optimisers."""
    return [
        value
        for of in (modules, optimisers)
        for name, value in vars(of).items()
        if name.startswith("_global_") and name.endswith("hooks") and isinstance(value, dict)
    ]


def _remove_hooks(before: tuple[tuple[Any, ...], ...]) -> None:
    for hooks, known in zip(_hooks(), before, strict=True):
        for key in set(hooks) - {key for key, _ in known}:
            del hooks[key]


def _modes() -> tuple[int, int]:
    """Return how many modes are open that see every call of torch's, but for that of the default device."""
    device = torch.utils._device.CURRENT_DEVICE is not None
    return torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack() - device


_TINY = 1e-310
"""Not 0 unless the processor takes such numbers for 0, as torch.set_flush_denormal has it do."""


def _backends() -> tuple[Any, ...]:
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return (
        torch._C._get_mkldnn_enabled(), torch._C._get_nnpack_enabled(), cudnn.enabled, cudnn.benchmark,
        cudnn.deterministic, cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(),
        _TINY * 1.0 > 0,
    )  # fmt: skip


def _set_backends(value: tuple[Any, ...]) -> None:
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    torch._C._set_mkldnn_enabled(value[0])
    cudnn.enabled, cudnn.benchmark, cudnn.deterministic = value[2:5]
    cuda.enable_flash_sdp(value[5])
    cuda.enable_mem_efficient_sdp(value[6])
    cuda.enable_math_sdp(value[7])
    torch.set_flush_denormal(not value[8])


def _umask() -> int:
    value = os.umask(0o077)
    os.umask(value)
    return value


_LIMITS = tuple(number for name, number in sorted(vars(resource).items()) if name.startswith("RLIMIT_"))


def _watchers() -> tuple[Any, ...]:
    return sys.gettrace(), sys.getprofile(), gc.isenabled(), len(gc.callbacks), sys.getrecursionlimit()


def _set_watchers(value: tuple[Any, ...]) -> None:
    sys.settrace(value[0])
    sys.setprofile(value[1])
    (gc.enable if value[2] else gc.disable)()
    del gc.callbacks[value[3] :]
    sys.setrecursionlimit(value[4])


STATE = (
    Row("the default dtype", torch.get_default_dtype, torch.set_default_dtype),
    Row("the default device", torch.get_default_device, _set_device),
    Row("the number of threads", torch.get_num_threads, torch.set_num_threads),
    Row("torch's gradient mode", torch.is_grad_enabled, torch.set_grad_enabled),
    Row("torch's inference mode", torch.is_inference_mode_enabled),
    Row("torch's deterministic mode", torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    Row("torch's matmul precision", _precision, _set_precision),
    Row(
        "cuDNN's precision",
        lambda: CONVOLUTIONS.fp32_precision,
        lambda value: setattr(CONVOLUTIONS, "fp32_precision", value),
    ),
    Row("torch's autocast", lambda: tuple(torch.is_autocast_enabled(device) for device in AUTOCAST), _set_autocast),
    Row(
        "torch's anomaly detection",
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda value: torch.set_anomaly_enabled(*value),
    ),
    Row("torch's global hooks", lambda: tuple(tuple(hooks.items()) for hooks in _hooks()), _remove_hooks),
    Row("torch's modes", _modes),
    Row("torch's backends", _backends, _set_backends),
    Row("NumPy's error handling", np.geterr, lambda value: np.seterr(**value)),
    Row("the working directory", _directory, _set_directory),
    Row("the umask", _umask, os.umask),
    Row("the limits of the process", lambda: tuple(resource.getrlimit(number) for number in _LIMITS)),
    Row("what watches the interpreter", _watchers, _set_watchers),
    Row("the environment", lambda: dict(os.environ), os.environ.update),
    Row("a timer", _timers, _stop_timers),
    Row("signal handlers", lambda: tuple(signal.getsignal(number) for number in HANDLED), _set_handlers),
)
"""What changes results, or what a worker needs."""

RANDOM = (
    Row("torch", lambda: torch.get_rng_state().numpy().tobytes(), _set_torch_random),
    Row("numpy", _numpy_random, _set_numpy_random),
    Row("random", random.getstate, random.setstate),
)
"""The global random states, by library. A cell begins with its own, so they need not stay as they are."""

FUNCTIONS = Row("functions", functions.table, None, functions.changes)
"""The functions of torch, timm, torchvision, NumPy and sparsebench. Milliseconds to compare, so apart from `STATE`."""

_ROWS = {row.name: row for row in (*STATE, *RANDOM, FUNCTIONS)}


def values(rows: Iterable[Row] = STATE) -> dict[str, Any]:
    """Return what rows have now, by name."""
    return {row.name: row.get() for row in rows}


def changes(before: Mapping[str, Any]) -> list[str]:
    """Return the names of those values that are no longer so."""
    names: list[str] = []
    for name, value in before.items():
        row = _ROWS[name]
        if row.names is not None:
            names += row.names(value)
        elif not _same(value, row.get()):
            names.append(name)
    return names


def _same(before: Any, now: Any) -> bool:
    """Say whether nothing was changed; in a mapping there may be more: importing scikit-learn adds variables, say."""
    return before.items() <= now.items() if isinstance(before, dict) else bool(before == now)


def put(new: Mapping[str, Any]) -> None:
    """Set values by name; what cannot be set stays."""
    for name, value in new.items():
        setter = _ROWS[name].set
        if setter is not None:
            setter(value)


@contextmanager
def preserve(rows: Iterable[Row] = (*STATE, *RANDOM)) -> Iterator[None]:
    """Put back afterwards what was changed meanwhile."""
    before = values(rows)
    try:
        yield
    finally:
        put({name: before[name] for name in changes(before)})
