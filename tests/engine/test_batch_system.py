from pathlib import Path

import pytest
from sparsebench_dask import batch_system
from sparsebench_dask import cluster as clusters

from sparsebench import engine
from sparsebench.errors import UserError
from sparsebench.planning.expand import expand
from sparsebench.planning.request import Request
from sparsebench.plugin.registry import Registry

pytest.importorskip("dask_jobqueue")

SLURM = """
jobqueue:
  slurm:
    cores: 8
    processes: 4
    memory: 16GB
    queue: long
    walltime: "04:00:00"
    job-extra-directives: ["--gres=gpu:4"]
    worker-extra-args: ["--resources", "GPU=1"]
"""
LOCAL = """
jobqueue:
  local:
    cores: 1
    memory: 2GB
    scheduler-options: {dashboard_address: null, host: 127.0.0.1}
    worker-extra-args: ["--no-dashboard"]
"""


def written(folder: Path, text: str) -> Path:
    file = folder / "cluster.yaml"
    file.write_text(text)
    return file


def test_the_job_script_is_what_the_file_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dask_jobqueue import SLURMCluster

    asked: list[tuple[int, int, str]] = []
    monkeypatch.setattr(SLURMCluster, "scale", lambda self, n=0, jobs=0: asked.append((n, jobs, self.job_script())))
    with batch_system.start(written(tmp_path, SLURM), None):
        pass
    workers, jobs, script = asked[0]
    assert (workers, jobs) == (0, 1)
    for line in ("#SBATCH -p long", "#SBATCH -t 04:00:00", "#SBATCH --gres=gpu:4", "--nworkers 4", "--nthreads 2"):
        assert line in script
    assert "--resources GPU=1" in script


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "cannot be read"),
        ("", "allowed: dask-jobqueue's"),
        ("slurm: {cores: 1}", "allowed: dask-jobqueue's"),
        ("jobqueue: {slurm: {cores: 1}, pbs: {cores: 1}}", "one system"),
        ("jobqueue: {slrum: {cores: 1}}", "unknown batch system.*did you mean 'slurm'"),
        ("jobqueue: {slurm: null}", "has no options"),
        ("jobqueue: {slurm: {memory: 1GB}}", "cores"),
        ("jobqueue: {slurm: {cores: 1, memory: 1GB, walltim: x}}", "walltim"),
    ],
)
@pytest.mark.filterwarnings("ignore:unclosed cluster:ResourceWarning")  # dask's, of what was never begun
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(UserError, match=says), batch_system.start(written(tmp_path, text), 1):
        pass


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        batch_system.read(tmp_path / "none.yaml")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # dask-jobqueue leaves the pipes of its jobs to the collector
def test_cells_run_on_workers_that_a_job_script_starts(tmp_path: Path) -> None:
    request = Request(suite="quick-scratch", tasks=("theory:steps=40,test=20,tokens=20",), n_train=(4,), seeds=1)
    jobs = expand(request, Registry())
    with clusters.connect(None, written(tmp_path, LOCAL), 2, "cpu") as connection:
        found = list(connection.records(jobs, engine.Setting(out=tmp_path / "out", device="cpu"), engine.Stop()))
    assert {record.status for record in found} == {"ok"} and len(found) == len(jobs)
