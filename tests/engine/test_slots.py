import pytest

from sparsebench.engine.slots import THREADS, slots


def gpus_of(device: str, workers: int, gpus: int, **environ: str) -> list[str]:
    """Return what each worker is told that it sees."""
    placed = slots(device, workers, gpus, environ)
    assert [slot.number for slot in placed] == list(range(workers))
    assert {slot.device for slot in placed} == {"cuda:0"}
    return [slot.environment["CUDA_VISIBLE_DEVICES"] for slot in placed]


def test_a_worker_on_the_cpu_has_one_thread_and_the_variables_of_the_run() -> None:
    (first, second) = slots("cpu", 2, environ={"HOME": "/home/me", "OMP_NUM_THREADS": "8"})
    assert first.environment == second.environment
    assert first.device == "cpu" and first.environment["HOME"] == "/home/me"
    assert THREADS.items() <= first.environment.items()
    assert "CUDA_VISIBLE_DEVICES" not in first.environment


def test_each_gpu_has_a_worker() -> None:
    assert gpus_of("cuda", 3, 3) == ["0", "1", "2"]


def test_more_workers_than_gpus_share_them_evenly() -> None:
    assert gpus_of("cuda", 5, 2) == ["0", "1", "0", "1", "0"]


def test_a_gpu_that_was_named_is_the_only_one_seen() -> None:
    assert gpus_of("cuda:2", 2, 4) == ["2", "2"]


@pytest.mark.parametrize("listed", ["3,1", "GPU-8932f937-d72c, MIG-GPU-5c89/1/0", " 3 , 1 "])
def test_gpus_that_the_run_was_given_are_called_what_it_calls_them(listed: str) -> None:
    names = [name.strip() for name in listed.split(",")]
    assert gpus_of("cuda", 2, 2, CUDA_VISIBLE_DEVICES=listed) == names
    assert gpus_of("cuda:1", 1, 2, CUDA_VISIBLE_DEVICES=listed) == names[1:]


def test_what_is_listed_after_the_last_gpu_that_is_there_is_not_used() -> None:
    assert gpus_of("cuda", 4, 2, CUDA_VISIBLE_DEVICES="1,0,-1,2") == ["1", "0", "1", "0"]
