import torch

from sparsebench.contain.process_state import changes, preserve, values
from sparsebench.engine.worker import one_thread


def test_cells_have_one_thread_and_exact_kernels_and_nothing_stays() -> None:
    with preserve():
        torch.set_num_threads(2)
        before = values()
        with one_thread():
            during, other = values(), changes(before)
        assert changes(before) == []
    assert other == ["the number of threads", "torch's deterministic mode", "cuDNN's precision"]
    assert during["the number of threads"] == 1 and during["torch's deterministic mode"] == 1
    assert during["cuDNN's precision"] == "ieee"
