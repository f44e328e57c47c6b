import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forging import Tamper, flip, put, sealed

from sparsebench.errors import UserError
from sparsebench.publish.folder import MANIFEST, RECORDS, Unfit
from sparsebench.publish.lines import record_of
from sparsebench.publish.verify import badge_of, submissions_in, verify, verify_each
from sparsebench.records.cell import Part, canonical
from sparsebench.records.manifests import Asked
from sparsebench.records.record import Record, pack, pack_reals, unpack, unpack_reals

Raw = dict[str, Any]


def test_a_sound_submission_is_recounted(sound: Path) -> None:
    verdict = verify(sound)
    assert (verdict.badge, verdict.wrong, verdict.suite) == ("recounted", False, "tiny 3")
    assert verdict.why == ["give --replay N to run N of its cells again here"] and verdict.notes == []
    assert verdict.records == 17 and badge_of(sound) == "recounted"
    told = {"train_loss", "selection_auroc", "images_per_s", "train_samples", "macs_ratio_planned", "steps"}
    assert told <= set(verdict.as_reported)
    assert not {"accuracy", "success", "macs", "worst_group_accuracy", "test_loss"} & set(verdict.as_reported)


@pytest.mark.parametrize(
    ("name", "bit", "said"),
    [
        ("predicted", 0, "rank and its predicted class disagree"),
        ("rank", 0, "rank and its predicted class disagree"),
        ("label", 0, "rank and its predicted class disagree"),
        ("group", 0, "accuracy: "),
        ("loss", 22, "test_loss is"),
        ("loss", 5, "test_loss is"),
        ("loss", 31, "negative or not finite"),
    ],
)
def test_a_flipped_bit_of_one_outcome_is_found(tampered: Tamper, name: str, bit: int, said: str) -> None:
    verdict = verify(tampered(flip(name, bit=bit)))
    assert (verdict.badge, verdict.wrong) == ("reported", True) and said in " ".join(verdict.why), verdict.why


def test_outcomes_that_were_made_better_in_step_are_found_by_the_metrics(tampered: Tamper) -> None:
    def better(raw: Raw) -> None:
        outcomes = raw["outcomes"]
        outcomes |= {"predicted": outcomes["label"], "rank": pack(np.zeros(outcomes["n"], int))}

    verdict = verify(tampered(better, task="composite"))
    assert verdict.badge == "reported" and "accuracy is" in verdict.why[0] and "come to 1.0 [" in verdict.why[0]


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("metrics", "accuracy", "low"), 0.5001, "accuracy is"),
        (("metrics", "accuracy", "n"), 17, "accuracy is"),
        (("metrics", "accuracy", "unit"), "loss", "accuracy is"),
        (("metrics", "success", "value"), 0.5, "success is"),
        (("metrics", "success_loss", "value"), 0.5, "success_loss is"),
        (("metrics", "spurious_gap", "value"), -0.25, "spurious_gap is"),
        (("metrics", "average_train", "value"), 0.123, "average_train is"),
        (("metrics", "train_samples: +1 with spurious", "value"), 0.0, "train_samples: "),
        (("metrics", "accuracy: ghost"), {"value": 1.0, "unit": "fraction", "n": 4, "low": None, "high": None,
                                          "method": ""}, "accuracy: ghost"),
    ],
)  # fmt: skip
def test_metrics_that_outcomes_do_not_come_to_are_found(tampered: Tamper, path: Any, value: Any, said: str) -> None:
    verdict = verify(tampered(put(value, *path)))
    assert (verdict.badge, verdict.wrong) == ("reported", True) and said in " ".join(verdict.why), verdict.why


@pytest.mark.parametrize("name", ["accuracy", "test_loss", "worst_group_accuracy", "success", "success_loss"])
def test_metrics_that_are_left_out_are_found(tampered: Tamper, name: str) -> None:
    verdict = verify(tampered(lambda raw: raw["metrics"].pop(name)))
    assert verdict.badge == "reported" and f"{name} is missing" in verdict.why[0]


def test_names_of_groups_that_are_exchanged_are_found_where_their_sizes_differ(tampered: Tamper) -> None:
    def exchange(raw: Raw) -> None:
        metrics = raw["metrics"]
        for what in ("accuracy: ", "train_samples: "):
            one, other = (f"{what}{sign} with spurious" for sign in ("+1", "-1"))
            metrics[one], metrics[other] = metrics[other], metrics[one]

    verdict = verify(tampered(exchange))
    assert verdict.badge == "reported" and "training groups" in " ".join(verdict.why)


def test_test_items_are_the_same_for_all_strategies(tampered: Tamper) -> None:
    """Labels and predictions of one record are changed in step: its metrics stay as they are."""

    def other(raw: Raw) -> None:
        n = raw["outcomes"]["n"]
        for name in ("label", "predicted"):
            raw["outcomes"][name] = pack(np.roll(unpack(raw["outcomes"][name], n), 1))
        raw["outcomes"]["loss"] = pack_reals(np.roll(unpack_reals(raw["outcomes"]["loss"], n), 1))
        raw["outcomes"]["rank"] = pack(np.roll(unpack(raw["outcomes"]["rank"], n), 1))

    verdict = verify(tampered(other, task="composite"))
    assert verdict.badge == "reported"
    assert "test labels or groups are others than those of cell" in " ".join(verdict.why)


def lengthen(raw: Raw) -> None:
    n, text = raw["outcomes"]["n"], raw["outcomes"]["foreground"]
    raw["outcomes"]["foreground"] = pack(np.append(unpack(text, n), 0))


def apart(raw: Raw) -> None:
    """Let each item show a foreground of its own, as if all were independent."""
    raw["outcomes"]["foreground"] = pack(np.arange(raw["outcomes"]["n"]))


def mixed(raw: Raw) -> None:
    raw["outcomes"]["foreground"] = pack(np.zeros(raw["outcomes"]["n"]))


@pytest.mark.parametrize(
    ("task", "change", "said"),
    [
        ("composite", lengthen, "packed outcomes do not hold 40 numbers"),
        ("composite", put("torn", "outcomes", "foreground"), "packed"),
        ("composite", flip("foreground", bit=3), "its foregrounds are others than those of cell"),
        ("composite", apart, "its foregrounds are others than those of cell"),
        ("composite", mixed, "a foreground of its test items is of two classes"),
        ("theory", apart, "those of task 'theory' have none"),
    ],
)
def test_forged_foregrounds_are_found(tampered: Tamper, task: str, change: Any, said: str) -> None:
    verdict = verify(tampered(change, task=task))
    assert (verdict.badge, verdict.wrong) == ("reported", True) and said in " ".join(verdict.why), verdict.why


P_LABEL = {"value": 0.5, "unit": "fraction", "n": 16, "low": None, "high": None, "method": ""}


@pytest.mark.parametrize(
    ("task", "change", "said"),
    [
        ("composite", put(0.5, "metrics", "p_label", "value"), "p_label is 0.5 fraction of 40, and its outcomes come"),
        ("composite", put(41, "metrics", "p_label", "n"), "p_label is"),
        ("composite", put("loss", "metrics", "p_label", "unit"), "p_label is"),
        ("theory", put(P_LABEL, "metrics", "p_label"), "p_label is there, and outcomes do not have it"),
    ],
)
def test_a_forged_probability_of_the_label_is_found(tampered: Tamper, task: str, change: Any, said: str) -> None:
    verdict = verify(tampered(change, task=task))
    assert (verdict.badge, verdict.wrong) == ("reported", True) and said in " ".join(verdict.why), verdict.why


def test_the_probability_of_the_label_is_made_again_of_records_that_have_it(sound: Path, tampered: Tamper) -> None:
    assert "p_label" not in verify(sound).as_reported

    def older(raw: Raw) -> None:
        raw["schema_version"] = 2
        del raw["metrics"]["p_label"], raw["outcomes"]["foreground"]

    assert verify(tampered(older, task="composite")).badge == "recounted"


def test_records_of_schema_1_are_rescored_in_part_and_said_to_be_so(tampered: Tamper) -> None:
    older = put("", "outcomes", "rank"), put("", "outcomes", "loss")
    verdict = verify(tampered(lambda raw: [change(raw) for change in older], strategy=None))
    assert (verdict.badge, verdict.wrong) == ("reported", False) and "schema 1" in verdict.why[0]


def test_what_is_wrong_in_records_of_schema_1_is_found(tampered: Tamper) -> None:
    older = put("", "outcomes", "rank"), put("", "outcomes", "loss"), put(0.99, "metrics", "accuracy", "value")
    verdict = verify(tampered(lambda raw: [change(raw) for change in older]))
    assert (verdict.badge, verdict.wrong) == ("reported", True) and "accuracy is 0.99" in verdict.why[0]


@pytest.mark.parametrize("task", ["theory", "composite"])
def test_one_other_token_count_is_found(tampered: Tamper, task: str) -> None:
    def one_less(raw: Raw) -> None:
        raw["trajectory"][-1]["tokens_out"] -= 1

    verdict = verify(tampered(one_less, task=task))
    assert (verdict.badge, verdict.wrong) == ("rescored", True), verdict.why


@pytest.mark.parametrize(
    ("task", "path", "value", "said"),
    [
        ("composite", ("metrics", "macs", "value"), 1.0, "macs is 1.0"),
        ("composite", ("metrics", "macs_dense", "value"), 2e9, "macs_dense is"),
        ("composite", ("metrics", "macs_ratio", "value"), 0.1, "macs_ratio is 0.1"),
        ("composite", ("metrics", "macs", "unit"), "GMACs", "macs is in GMACs"),
        ("composite", ("trajectory", 1, "tokens_in"), 64.0, "do not fall"),
        ("composite", ("trajectory", 0, "tokens_in"), 65.0, "do not fall from the model's 64"),
        ("composite", ("trajectory",), [], "0 blocks, and the model 2"),
        ("composite", ("trajectory", 0, "scoring"), "magic", "has scoring 'magic'"),
        ("composite", ("trajectory", 0, "projected"), "vv", "has projections 'vv'"),
        ("composite", ("trajectory", 0, "spread"), -1e9, "larger spread"),
        ("composite", ("trajectory", 1, "tokens_out"), 0.5, "below 1"),
        ("theory", ("trajectory", 0, "tokens_in"), 19.0, "both inside blocks and between them"),
        ("theory", ("trajectory", 0, "own"), 5.0, "macs is"),
    ],
)
def test_costs_that_a_trajectory_does_not_come_to_are_found(
    tampered: Tamper, task: str, path: Any, value: Any, said: str
) -> None:
    verdict = verify(tampered(put(value, *path), task=task))
    assert (verdict.badge, verdict.wrong) == ("rescored", True) and said in " ".join(verdict.why), verdict.why


def test_a_lower_badge_for_want_of_anything_to_tell_it_by_hides_nothing(tampered: Tamper) -> None:
    def older_and_forged(raw: Raw) -> None:
        raw["outcomes"] |= {"rank": "", "loss": ""}
        raw["metrics"]["macs"]["value"] = 1.0

    verdict = verify(tampered(older_and_forged))
    assert (verdict.badge, verdict.wrong) == ("reported", True) and "macs is 1.0" in verdict.why[-1]


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("cell", "n_train"), 9, "its cell has another hash"),
        (("origin", "revision"), "0" * 64, "of another revision"),
        (("kind",), "baseline", "of another kind"),
        (("label",), "dense", "its label 'dense' is not that of strategy 'norm'"),
        (("environment",), "0" * 16, "its machine is not described"),
        (("status",), "failed", "its status is failed, and it has no failure"),
        (("memory",), -1, "memory is negative"),
        (("seconds",), "1.0", "another type"),
        (("outcomes", "n"), 2**40, "outcomes.n: "),
        (("more",), 1, "more: Extra inputs"),
        (("schema_version",), 99, "schema version 99"),
    ],
)
def test_records_that_are_not_as_they_must_be_are_rejected(tampered: Tamper, path: Any, value: Any, said: str) -> None:
    verdict = verify(tampered(put(value, *path)))
    assert (verdict.badge, verdict.wrong) == ("rejected", True) and said in " ".join(verdict.why), verdict.why


def test_a_changed_byte_is_found_by_the_manifest(sound: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(sound, tmp_path / "copy")
    path = folder / RECORDS
    path.write_bytes(path.read_bytes().replace(b'"seconds":', b'"seconds" :', 1))
    assert verify(folder).why == [f"'{RECORDS}' has another SHA-256 than {MANIFEST} says"]


def test_records_of_another_deployable_strategy_do_not_belong(tampered: Tamper) -> None:
    verdict = verify(tampered(put("deployable", "kind"), strategy="random"))
    assert verdict.badge == "rejected" and "of another strategy, 'random'" in verdict.why[0]


def test_missing_settings_and_other_suites_are_named(sound: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(sound, tmp_path / "copy")
    lines = (folder / RECORDS).read_bytes().splitlines(keepends=True)
    (folder / RECORDS).write_bytes(b"".join(x for x in lines if b'"norm"' not in x or b'"theory"' not in x))
    other = Asked(name="tiny", version=4, settings=("a",))
    verdict = verify(sealed(folder), [other])
    assert verdict.notes == [
        "incomplete: it lacks 2 of the 4 settings of suite tiny 3, such as theory with 8 samples, repetition 0; "
        "theory with 8 samples, repetition 1",
        "not of the board: it answers suite tiny 3 with 4 settings, and the board suite tiny 4 with 1",
    ]


def test_a_suite_is_that_of_the_board_if_its_settings_are_the_same(sound: Path, out: Path, tmp_path: Path) -> None:
    (same,) = verify_each([sound], out)
    (unknown,) = verify_each([sound], tmp_path)
    assert same.notes == [] and "the board does not say what" in unknown.notes[0]


def test_tasks_of_plugins_are_not_wholly_rescored_and_nothing_of_them_is_imported(
    sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sparsebench.publish import parts as module

    monkeypatch.setattr(module, "TASKS", ())  # as if the tasks were somebody else's
    module._make.cache_clear()
    verdict = verify(sound)
    module._make.cache_clear()
    assert (verdict.badge, verdict.wrong) == ("reported", False)
    assert "does not come with sparsebench" in verdict.why[0]


def test_submissions_are_found_below_a_folder_and_links_are_not_followed(sound: Path, tmp_path: Path) -> None:
    root = tmp_path / "submissions"
    copy = shutil.copytree(sound, root / "norm" / sound.name)
    (root / "README.md").write_text("about")
    (root / "norm" / "b").symlink_to(sound)
    (root / "mine" / "c").mkdir(parents=True)
    found = submissions_in(root)
    assert found == [root / "mine" / "c", root / "norm" / "b", root / "norm" / sound.name]
    assert [v.badge for v in verify_each(found)] == ["rejected", "rejected", "recounted"]
    assert verify(found[1]).why == ["it is a link"] and submissions_in(copy) == [copy]
    (tmp_path / "link").symlink_to(root)
    assert submissions_in(tmp_path / "link") == [tmp_path / "link"]
    for nothing in (tmp_path / "none", tmp_path / "submissions" / "README.md"):
        with pytest.raises(UserError, match="is no folder"):
            submissions_in(nothing)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no submissions in"):
        submissions_in(tmp_path / "empty")


def test_verifying_imports_no_torch_and_no_plugin(sound: Path) -> None:
    code = f"""
import sys
from sparsebench.cli import main
try:
    main(["verify", {str(sound)!r}, "--json"])
except SystemExit as leave:
    assert not leave.code, leave.code
assert not {{'torch', 'timm', 'torchvision', 'matplotlib'}} & set(sys.modules)
assert not [name for name in sys.modules if name.startswith(("sparsebench_plugins", "sparsebench_local"))]
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[0]["badge"] == "recounted"


@pytest.mark.parametrize(
    ("started", "said"),
    [("zzz", "no time in ISO 8601"), ("2026-01-01T00:00:00", "no time in ISO 8601"),
     ("9999-12-31T23:59:59.999999+00:00", "in the future")],
)  # fmt: skip
def test_a_record_that_no_later_one_could_replace_is_refused(tampered: Tamper, started: str, said: str) -> None:
    verdict = verify(tampered(put(started, "started")))
    assert verdict.badge == "rejected" and said in verdict.why[0]


@pytest.mark.parametrize("name", ["<img src=x onerror=a>", "[x](http://a.b)", "=cmd|a", "a\nb", "\x1b[31m", "a" * 5000])
def test_a_name_that_no_class_has_is_refused(make_record: Callable[..., Record], name: str) -> None:
    record = make_record()
    cell = record.cell.model_copy(update={"strategy": Part(name=name)})
    raw = record.model_dump(mode="json") | {"cell": cell.model_dump(mode="json"), "cell_id": cell.id, "label": name}
    with pytest.raises(Unfit, match="which is no name of a class"):
        record_of(canonical(raw).encode())


def test_test_items_that_were_left_out_are_found(tampered: Tamper) -> None:
    def fewer(raw: Raw) -> None:
        outcomes = raw["outcomes"]
        n, outcomes["n"] = outcomes["n"], 13
        for name in ("predicted", "label", "group", "rank"):
            outcomes[name] = pack(unpack(outcomes[name], n)[:13])
        outcomes["loss"] = pack_reals(unpack_reals(outcomes["loss"], n)[:13])

    verdict = verify(tampered(fewer, strategy=None))
    assert verdict.badge == "reported" and "it has 13 test items, and its task " in " ".join(verdict.why)
