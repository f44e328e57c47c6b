from collections.abc import Callable

import torch

from sparsebench.runner.worker import one_thread

SETTINGS: list[Callable[[], object]] = [
    torch.get_num_threads,
    torch.are_deterministic_algorithms_enabled,
    lambda: torch.backends.cudnn.conv.fp32_precision,
    lambda: torch.backends.cuda.matmul.fp32_precision,
    torch.get_default_dtype,
    torch.is_grad_enabled,
]


def values() -> list[object]:
    return [setting() for setting in SETTINGS]


def test_cells_have_one_thread_and_exact_kernels_and_nothing_stays() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        before = values()
        with one_thread():
            assert values()[:3] == [1, True, "ieee"]
            assert values()[4:] == before[4:]
        assert values() == before
    finally:
        torch.set_num_threads(threads)
