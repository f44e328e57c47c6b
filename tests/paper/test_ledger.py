"""The ledger of published numbers: its rows, recounts, and errors."""

import csv
import io
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from sparsebench.board.judge import judge
from sparsebench.board.views import paper
from sparsebench.cli import main
from sparsebench.paper import claims
from sparsebench.paper.claims import Claim, Recount, add_published
from sparsebench.plugin.registry import Registry

LEDGER = claims.load()
FIELDS = {
    "id": "mine", "paper": "P", "method": "M", "model": "timm:deit_small_patch16_224", "weights": "trained",
    "source": "S",
}  # fmt: skip


AGREE = ("evit-deit-s-0.7", "tome-deit-s-13", "dynamic_vit-deit-s-0.7", "diffrate-deit-s-2.9", "ppt-deit-s")
DENSE = {"tome-deit-t-8": 1.254, "tome-deit-s-8": 4.599, "dynamic_vit-deit-b-0.7": 17.564}
TRAPS = ("mame-mae-l", "tome-deit-s-0.25-stages", "ats-deit-s-paper", "ats-deit-s-user")
NO_TRAPS = ("tome-augreg-s-13", "mame-deit-b")


@pytest.fixture(scope="module")
def recounts() -> dict[str, Recount]:
    """Return the recounts of the named rows."""
    named = [claim for claim in LEDGER if claim.id in {*AGREE, *DENSE, *TRAPS, *NO_TRAPS}]
    return {one.claim.id: one for one in claims.recount_all(named, Registry())}


def judged(**more: Any) -> Recount:
    (one,) = claims.recount_all([Claim(**FIELDS | more)], Registry())
    return one


@pytest.mark.parametrize("name", AGREE)
def test_known_agreements_are_within_two_percent(name: str, recounts: dict[str, Recount]) -> None:
    difference = recounts[name].difference
    assert recounts[name].verdict == "agrees" and difference is not None and abs(difference) <= 0.02


def test_the_dense_networks_cost_what_is_known_of_them(recounts: dict[str, Recount]) -> None:
    assert {name: round(recounts[name].dense_gmacs, 3) for name in DENSE} == DENSE


def test_known_traps_are_flagged_and_nothing_else(recounts: dict[str, Recount]) -> None:
    assert recounts["tome-augreg-s-13"].claim.claimed_speedup == pytest.approx(1564 / 953)
    assert recounts["tome-augreg-s-13"].flags == recounts["mame-deit-b"].flags == ()
    assert recounts["mame-mae-l"].flags == ("speed-up 3.65 above dense / MACs 1.99",)
    capped = recounts["tome-deit-s-0.25-stages"]
    assert capped.verdict == "cannot be" and capped.flags == ("MACs do not follow from the stated settings",)
    assert capped.why == "49+12+3 tokens would be 1.70 G; tome leaves 98+61+52: 2.48 G"
    assert recounts["ats-deit-s-paper"].flags == ("row ats-deit-s-user has 3.4 G for the same settings",)
    assert recounts["ats-deit-s-user"].flags == ("row ats-deit-s-paper has 2.9 G for the same settings",)


def vit(places: dict[int, int], D: int, N: int, embed: int, before: bool = False, attention: bool = True) -> float:
    """Return the GMACs of twelve blocks by a loop; tokens leave after the attention, or before the block."""
    total, n = embed * N + D * 1000, N
    for block in range(12):
        out = places.get(block, n)
        t, after = 1 + (out if before else n), 1 + out
        total += 4 * t * D * D + (2 * t * t * D if attention else 0) + 8 * after * D * D
        n = out
    return total / 1e9


S = {"D": 384, "N": 196, "embed": 768 * 384}
HALF = {3: 98, 6: 49, 9: 24}
HALF_WORDS = "attn_topk:keep_rate=0.5,convention=power-floor"


@pytest.mark.parametrize(
    ("words", "gmacs", "verdict", "why"),
    [
        (HALF_WORDS, vit(HALF, **S), "agrees", ""),
        (HALF_WORDS, 1.019 * vit(HALF, **S), "agrees", ""),
        (HALF_WORDS, 2 * vit(HALF, **S), "other convention", "two operations a MAC"),
        (HALF_WORDS, vit(HALF, **S, before=True), "other convention", "tokens leave before the block"),
        (HALF_WORDS, vit(HALF, **S, attention=False), "other convention", "without the two products of attention"),
        ("dense", 4.241, "other convention", "without the two products of attention"),
        (HALF_WORDS, 0.7 * vit(HALF, **S), "cannot be", "the nearest is "),
        ("", 1.0, "not recounted", "its settings cannot be typed here"),
        ("a_vit", 1.0, "not recounted", "what a_vit costs is known when it has seen images"),
    ],
)
def test_a_number_gets_its_verdict(words: str, gmacs: float, verdict: str, why: str) -> None:
    one = judged(plugin=words, gmacs=Decimal(f"{gmacs:.6f}"))
    assert one.verdict == verdict and one.why.startswith(why) and bool(one.why) == bool(why)


def test_another_rounding_of_a_keep_rate_is_a_convention() -> None:
    """A keep rate of 0.6 leaves 3, 2 and 2 of four tokens rounded up, and 2, 1 and 1 by powers rounded down."""
    down = vit({3: 2, 6: 1, 9: 1}, D=192, N=4, embed=768 * 192)
    words, small = "attn_topk:keep_rate=0.6,convention=compound-ceil", "timm:deit_tiny_patch16_224"
    one = judged(model=small, canvas=32, plugin=words, gmacs=Decimal(f"{down:.6f}"))
    assert one.verdict == "other convention" and one.why.startswith("counts by power-floor")


@pytest.mark.parametrize(("gmacs", "agrees"), [("0.9", True), ("0.90", False), ("0.91", True), ("1", True)])
def test_a_number_is_compared_as_it_was_rounded(gmacs: str, agrees: bool) -> None:
    one = judged(model="timm:deit_tiny_patch16_224", plugin="tome:per_block=8", gmacs=Decimal(gmacs))
    assert (one.verdict == "agrees") == agrees, (one.gmacs, one.difference)


def invoked(tmp_path: Path, text: str, *words: str) -> Any:
    (tmp_path / "mine.toml").write_text(text, encoding="utf-8")
    return CliRunner().invoke(main, ["claims", "--file", str(tmp_path / "mine.toml"), *words])


def toml(**more: Any) -> str:
    return "[[claim]]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in (FIELDS | more).items())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (toml().replace('paper = "P"\n', ""), "row mine: paper: Field required"),
        (toml().replace('id = "mine"\n', ""), "row number 1: id: Field required"),
        (toml(gmacs="four"), "row mine: gmacs: Input should be a valid decimal"),
        (toml(gmacs=-1), "row mine: gmacs: Input should be greater than 0"),
        (toml() + "gmacs = nan\n", "row mine: gmacs: "),
        (toml() + "gmacs = 1e999999\n", "row mine: gmacs: "),
        (toml(top1=101), "row mine: top1: Input should be less than or equal to 100"),
        (toml(gmac=4), "row mine: gmac: Extra inputs are not permitted"),
        (toml(weights="maybe"), "row mine: weights: "),
        (toml(counts=[5]), "row mine: budget blocks; got none"),
        (toml(counts=[500], blocks=[3]), "row mine: token counts (counts); got 500; allowed: 196 at most"),
        (toml(counts=[5], blocks=[12]), "row mine: budget blocks; got 12; allowed: 0 to 11"),
        (toml(counts=[-5], blocks=[3]), "row mine: "),
        (toml() + toml(), "rows of"),
        (toml(plugin="tomb"), "row mine: unknown strategy; got 'tomb'"),
        (toml(plugin="tome:per_blok=3"), "row mine: "),
        (toml(plugin="tome:per_block=3,4"), "row mine: plugin has several settings"),
        (toml(plugin="tome"), ""),
        (toml(model="timm:resnet18"), "row mine: "),
        (toml(model="timm:deit_huge"), "row mine: unknown timm model"),
        (toml(canvas=7), "row mine: "),
        ("claim = 3", "is not a ledger"),
        ("claim = [3]", "row number 1: "),
        ("", "is not a ledger"),
        ("[[claim", "cannot be read as TOML"),
    ],
)
def test_a_broken_ledger_is_one_clear_line(tmp_path: Path, text: str, says: str) -> None:
    done = invoked(tmp_path, text)
    if not says:
        assert done.exit_code == 0
        return
    assert done.exit_code == 2 and says in done.stderr and done.stderr.count("\n") == 1, done.output


def test_the_command_shows_rows_in_each_form(tmp_path: Path) -> None:
    words = ["claims", "evit-deit-s-0.7", "mame-mae-l"]
    shown = CliRunner().invoke(main, words).stdout
    assert "evit-deit-s-0.7" in shown and "speed-up 3.65 above dense / MACs 1.99" in shown
    listed = list(csv.DictReader(io.StringIO(CliRunner().invoke(main, [*words, "--format", "csv"]).stdout)))
    assert [row["claimed"] for row in listed] == ["3.0", "31.0"] and listed[0].keys() == {c.key for c in claims.COLUMNS}
    flagged = json.loads(CliRunner().invoke(main, [*words, "--flagged", "--format", "json"]).stdout)
    assert [row["row"] for row in flagged] == ["mame-mae-l"]
    done = CliRunner().invoke(main, [*words, "--format", "md", "-o", str(tmp_path / "x.md")])
    assert done.exit_code == 0 and (tmp_path / "x.md").read_text().startswith("| row ")
    wrong = CliRunner().invoke(main, ["claims", "evit-deit-s-0.75"])
    assert wrong.exit_code == 2 and "did you mean 'evit-deit-s-0.7'" in wrong.stderr


def test_a_published_number_stands_beside_the_same_settings_only() -> None:
    """The table of a paper has the published number of the same settings alone."""

    def records(labels: str, arch: str, **more: str) -> list[dict[str, Any]]:
        setting = json.dumps([{"params": {"labels": labels, "canvas": 224, **more}}, {"params": {"arch": arch}}])
        shared = {"status": "ok", "task": "folder", "model": "timm", "setting": setting, "n_train": 0, "repetition": 0,
                  "kind": "deployable", "device": "cpu"}  # fmt: skip
        claims = [("dense", "", 1.0, 0.8), ("tome", "13 a block", 0.588, 0.79), ("tome", "12 a block", 0.6, 0.79)]
        return [{**shared, "cell_id": budget, "strategy": name, "budget": budget, "macs_ratio": macs, "accuracy": value}
                for name, budget, macs, value in claims]  # fmt: skip

    def published(labels: str, arch: str, **more: str) -> dict[str, float | None]:
        rankings = judge(records(labels, arch, **more)).rankings
        return {row["budget"]: row.get("published") for row in add_published(paper(rankings), rankings).data.rows}

    result = published("imagenet", "vit_small_patch16_224")
    assert result["13 a block"] == pytest.approx(0.793) and result["12 a block"] is None
    assert not any(published("names", "vit_small_patch16_224").values())
    assert not any(published("imagenet", "vit_tiny_patch16_224").values())
    assert not any(published("imagenet", "vit_small_patch16_224", among="folders").values())
