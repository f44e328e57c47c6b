"""What a submission's own files, or the sources that are here, contradict."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from forging import Tamper, put, sealed

from sparsebench.cli import main
from sparsebench.publish import rescore
from sparsebench.publish.folder import RECORDS
from sparsebench.publish.lines import record_of
from sparsebench.publish.redraw import Redraw
from sparsebench.publish.verify import verify
from sparsebench.records.cell import canonical
from sparsebench.records.record import pack, pack_reals
from sparsebench.tasks.images import Composite
from sparsebench.tasks.overfitting import Overfitting
from sparsebench.tasks.sparse_tokens import SparseTokens
from sparsebench.tasks.spatial import Spatial
from sparsebench.tasks.theory import Theory

Raw = dict[str, Any]


def reverse(raw: Raw) -> None:
    """Put other test items in the place of the task's own, as many, and all that follows in step."""
    items = rescore.items_of(record_of(canonical(raw).encode())[0])
    assert items is not None
    for name, values in (("predicted", items.predicted), ("label", items.labels), ("group", items.groups)):
        raw["outcomes"][name] = pack(values[::-1])
    raw["outcomes"] |= {"rank": pack(items.ranks[::-1]), "loss": pack_reals(items.losses[::-1])}
    if items.foregrounds is not None:
        raw["outcomes"]["foreground"] = pack(items.foregrounds[::-1])


@pytest.mark.parametrize("task", ["theory", "composite"])
def test_test_items_that_are_not_the_tasks_are_found_though_all_strategies_have_them(
    tampered: Tamper, task: str
) -> None:
    verdict = verify(tampered(reverse, task=task, strategy=None))
    assert (verdict.badge, verdict.wrong) == ("reported", True)
    assert f"its test items have other labels than task '{task}' draws" in verdict.why[0]


def test_groups_that_are_not_the_tasks_are_found(tampered: Tamper) -> None:
    def rename(raw: Raw) -> None:
        for what in ("accuracy: ", "train_samples: "):
            raw["metrics"][f"{what}the easy ones"] = raw["metrics"].pop(f"{what}+1 with spurious")

    verdict = verify(tampered(rename, strategy=None))
    assert verdict.badge == "reported" and "its groups are not those of task 'theory'" in verdict.why[0]


@pytest.mark.parametrize(
    "task", [Theory(test=6), Overfitting(test=6), Spatial(test=6), SparseTokens(test=6), Composite(test=6)]
)
def test_test_items_hang_on_no_number_of_training_samples(task: Any) -> None:
    few, many = (task.draw(n, 1, {}).test for n in (2, 40))
    assert np.array_equal(few.labels, many.labels) and np.array_equal(few.groups, many.groups)


@pytest.mark.parametrize(
    "task",
    [
        Theory(test=10**9), Theory(d=10**6), Spatial(d=10**6), SparseTokens(tokens=10**6), Composite(canvas=10**5),
        Composite(images="svhn"),
    ],
)  # fmt: skip
def test_what_is_too_large_or_not_here_is_not_drawn(task: Any) -> None:
    assert Redraw()._draw(task, 0) is None


@pytest.mark.parametrize("label", ["norm(power=2)", "norm()", "norm(", "norm(p=2, score=x)", "norm)", "other"])
def test_a_label_that_is_not_the_cells_is_refused(tampered: Tamper, label: str) -> None:
    verdict = verify(tampered(put(label, "label")))
    assert verdict.badge == "rejected" and "is not that of strategy 'norm'" in verdict.why[0]


def test_a_label_has_parameters_in_any_order(sound: Path) -> None:
    raw = next(json.loads(line) for line in (sound / RECORDS).read_bytes().splitlines() if b'"label":"norm"' in line)
    raw["cell"]["strategy"]["params"] = {"b": [1, 2], "a": "x, b=3", "c": 0.5}
    for label in ("norm(b=[1, 2], a=x, b=3)", "norm(c=0.5, b=[1, 2])", "norm"):
        raw["label"] = label
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sparsebench.publish.lines.digest", lambda cell: raw["cell_id"])
            assert record_of(canonical(raw).encode())[0].label == label


def test_a_shipped_name_with_another_revision_is_not_recounted(sound: Path, tmp_path: Path) -> None:
    """A stranger's strategy that calls itself attn_topk, all else in step."""
    folder = shutil.copytree(sound, tmp_path / "copy")
    for path in (folder / "strategies").iterdir():
        if json.loads(path.read_bytes())["name"] == "norm":
            shipped = canonical(json.loads(path.read_bytes()) | {"name": "attn_topk"}).encode()
            path.unlink()
            import hashlib

            (path.parent / f"{hashlib.sha256(shipped).hexdigest()[:16]}.json").write_bytes(shipped)
    lines = []
    for line in (folder / RECORDS).read_bytes().splitlines():
        raw = json.loads(line)
        if raw["label"] == "norm":
            raw["label"] = raw["cell"]["strategy"]["name"] = "attn_topk"
            raw["cell_id"] = record_id(raw)
        lines.append(raw)
    lines.sort(key=lambda raw: raw["cell_id"])
    (folder / RECORDS).write_bytes(b"".join(canonical(raw).encode() + b"\n" for raw in lines))
    manifest = json.loads((folder / "manifest.json").read_bytes()) | {"strategy": "attn_topk"}
    (folder / "manifest.json").write_bytes(canonical(manifest).encode())
    verdict = verify(sealed(folder))
    assert verdict.badge == "rescored", verdict.why
    assert "'attn_topk' comes with sparsebench, and this is another revision" in " ".join(verdict.why)


def record_id(raw: Raw) -> str:
    from sparsebench.records.cell import digest

    return digest(raw["cell"])


def test_a_baseline_is_no_oracle(tampered: Tamper) -> None:
    verdict = verify(tampered(put("oracle", "kind"), strategy="random"))
    assert verdict.badge == "rejected"
    assert "its kind is oracle, and the source of 'random' says baseline" in verdict.why[0]


def test_the_folder_is_called_as_what_it_holds(sound: Path, tmp_path: Path) -> None:
    for name in (f"attn_topk/{sound.name}", "norm/quick-1-000000000000"):
        shutil.copytree(sound, tmp_path / name)
        result = CliRunner().invoke(main, ["verify", str(tmp_path / name)])
        assert result.exit_code == 1 and f"its folder is called {name}, and it is norm/{sound.name}" in result.stdout
        shutil.rmtree(tmp_path / name)
