import pytest

from sparsebench.runner import devices
from sparsebench.runner.devices import THREADS, slots, variables


@pytest.fixture(autouse=True)
def no_gpus_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def gpus_of(device: str, workers: int, gpus: int) -> list[str]:
    """Return what each worker is told that it sees."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "gpus", lambda: gpus)
        placed = slots(device, workers)
    assert [slot.number for slot in placed] == list(range(workers))
    assert {slot.device for slot in placed} == {"cuda:0"}
    return [slot.environment["CUDA_VISIBLE_DEVICES"] for slot in placed]


def test_a_worker_has_one_thread_and_the_variables_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert (variables() | THREADS).items() == variables().items() and variables()["HOME"] == "/home/me"
    assert [(slot.device, slot.environment) for slot in slots("cpu", 2)] == [("cpu", {})] * 2


def test_workers_share_gpus_evenly_or_have_the_one_that_was_named() -> None:
    assert gpus_of("cuda", 5, 2) == ["0", "1", "0", "1", "0"] and gpus_of("cuda:2", 2, 4) == ["2", "2"]


@pytest.mark.parametrize("listed", ["3,1", "GPU-8932f937-d72c, MIG-GPU-5c89/1/0", " 3 , 1 "])
def test_gpus_that_the_run_was_given_are_called_what_it_calls_them(
    listed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    names = [name.strip() for name in listed.split(",")]
    assert gpus_of("cuda", 2, 2) == names
    assert gpus_of("cuda:1", 1, 2) == names[1:]
