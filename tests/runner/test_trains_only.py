from pathlib import Path

import pytest
import sparsebench_plugins.patch_dropout
from measured import Measure


@pytest.fixture(scope="module")
def only_in_training(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return PatchDropout as a plugin file under another name."""
    source = Path(sparsebench_plugins.patch_dropout.__file__).read_text()
    path = tmp_path_factory.mktemp("plugin") / "mine.py"
    path.write_text(source.replace('"patch_dropout"', '"mine"'))
    return f"{path}:keep_rate=0.5"


@pytest.mark.parametrize("where", ["both", "train", "test"])
def test_a_strategy_of_training_alone_is_tested_dense_whatever_is_asked(
    measured: Measure, only_in_training: str, where: str
) -> None:
    record, dense = measured(only_in_training, where=where), measured("dense")
    control = measured("random:keep_rate=0.5", where="train")
    assert record.status == "ok" and record.cell.where == "train"
    assert record.metrics["macs_ratio"].value == record.metrics["macs_ratio_planned"].value == 1
    assert record.trajectory == dense.trajectory
    for name in ("train_loss", "test_loss"):
        assert record.metrics[name].value == control.metrics[name].value != dense.metrics[name].value
