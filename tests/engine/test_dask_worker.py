"""What a machine of a cluster refuses, and where it has what a run needs."""

import base64
import hashlib
from pathlib import Path
from typing import Any

import pytest
from sparsebench_dask import worker as dask_worker
from sparsebench_dask.cluster import _source

from sparsebench.engine import Limits, Setting
from sparsebench.errors import UserError
from sparsebench.planning.expand import expand
from sparsebench.planning.job import Job
from sparsebench.planning.request import Request
from sparsebench.plugin.registry import Registry
from sparsebench.records.origin import Origin
from sparsebench.version import __version__

TEXT = "# a plugin\n"


def source_of(text: str) -> dask_worker.Source:
    held = base64.b64encode(text.encode()).decode()
    return dask_worker.Source(sha256=hashlib.sha256(text.encode()).hexdigest(), name="mine.py", files={"mine.py": held})


@pytest.fixture
def setting(tmp_path: Path) -> dask_worker.Sent:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "proof").touch()
    setting = Setting(out=tmp_path / "run", device="cpu", checkpoint=0.0, limits=Limits(0.0))
    return dask_worker.Sent(setting=setting, version=__version__, proof="proof", must_share=False, files={})


def place(sent: dask_worker.Sent, folder: Path, **changes: Any) -> dask_worker._Place:
    return dask_worker._Place(sent.model_copy(update=changes), folder, 2, 0)


def test_a_folder_that_is_seen_is_used(setting: dask_worker.Sent, tmp_path: Path) -> None:
    here = place(setting, tmp_path / "own", must_share=True)
    assert here.shared and here.out == tmp_path / "run"


def test_a_folder_that_is_not_seen_is_replaced_unless_cells_start_from_it(
    setting: dask_worker.Sent, tmp_path: Path
) -> None:
    here = place(setting, tmp_path / "own", proof="another")
    assert not here.shared and here.out.is_relative_to(tmp_path / "own")
    with pytest.raises(UserError, match="which this machine does not see; give an --out that all machines share"):
        place(setting, tmp_path / "own", proof="another", must_share=True)


def test_images_that_are_not_there_are_named(setting: dask_worker.Sent, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the images 'mine' are not on this machine"):
        place(setting, tmp_path, setting=setting.setting.model_copy(update={"locations": {"mine": tmp_path / "none"}}))


def test_a_plugin_file_that_is_there_is_used(setting: dask_worker.Sent, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(TEXT)
    assert place(setting, tmp_path / "own", files={str(file): source_of(TEXT)}).files == {str(file): file}


def test_a_plugin_file_that_is_not_there_is_written(setting: dask_worker.Sent, tmp_path: Path) -> None:
    file = tmp_path / "gone" / "mine.py"
    found = place(setting, tmp_path / "own", files={str(file): source_of(TEXT)}).files[str(file)]
    assert found.name == "mine.py" and found.read_text() == TEXT and not file.exists()


def test_a_plugin_file_that_is_another_one_is_refused(setting: dask_worker.Sent, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(TEXT + "# edited\n")
    with pytest.raises(UserError, match=r"mine\.py is another one here"):
        place(setting, tmp_path, files={str(file): source_of(TEXT)})


def test_a_plugin_file_that_was_spoiled_on_its_way_is_refused(setting: dask_worker.Sent, tmp_path: Path) -> None:
    spoiled = source_of(TEXT).model_copy(update={"files": {"mine.py": "c3BvaWxlZA=="}})
    with pytest.raises(UserError, match="did not arrive as it was sent"):
        place(setting, tmp_path, files={str(tmp_path / "mine.py"): spoiled})


@pytest.fixture
def job() -> Job:
    return expand(Request(suite="quick-scratch", tasks=("theory",), n_train=(4,), seeds=1), Registry())[0]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"version": "99.0"}, "another sparsebench: got .*; allowed: 99.0"),
        ({"plugin": "none"}, "sparsebench .* has no plugin 'none'"),
        ({"distribution": "no-such-package"}, "no-such-package .* is not installed"),
    ],
)
def test_an_installed_plugin_that_differs_is_refused(
    setting: dask_worker.Sent, tmp_path: Path, job: Job, changes: dict[str, str], says: str
) -> None:
    assert job.label == "dense"
    here = place(setting, tmp_path)
    here.check([job])
    other = job.model_copy(update={"origin": Origin(**job.origin.model_dump() | changes)})
    with pytest.raises(UserError, match=says):
        here.check([job, other])


def test_as_many_workers_wait_as_there_are_threads_or_gpus(setting: dask_worker.Sent, tmp_path: Path) -> None:
    assert [slot.device for slot in place(setting, tmp_path).free] == ["cpu", "cpu"]
    on_cuda = setting.model_copy(update={"setting": setting.setting.model_copy(update={"device": "cuda"})})
    on_gpus = dask_worker._Place(on_cuda, tmp_path, 8, 2).free
    assert len({slot.environment["CUDA_VISIBLE_DEVICES"] for slot in on_gpus}) == len(on_gpus) == 2


def test_of_the_workers_that_wait_the_one_that_has_the_data_is_taken(setting: dask_worker.Sent, tmp_path: Path) -> None:
    here = place(setting, tmp_path)
    first, second = here._take("one"), here._take("two")
    here._put(first, "one")
    here._put(second, "two")
    try:
        assert here._take("one") is first and here._take("three") is second
    finally:
        for idle in here.idle:
            idle.timer.cancel()


def test_what_a_plugin_file_imports_from_beside_it_comes_with_it(setting: dask_worker.Sent, tmp_path: Path) -> None:
    (tmp_path / "run" / "mine.py").write_text("import near\n")
    (tmp_path / "run" / "near.py").write_text("x = 1\n")
    source = _source(tmp_path / "run" / "mine.py")
    gone = str(tmp_path / "gone" / "mine.py")
    path = place(setting, tmp_path / "own", files={gone: source}).files[gone]
    assert path.with_name("near.py").read_text() == "x = 1\n"
    (tmp_path / "run" / "near.py").write_text("x = 2\n")
    with pytest.raises(UserError, match="another one here"):
        place(setting, tmp_path / "own", files={str(tmp_path / "run" / "mine.py"): source})
