"""Each check fails for strategies that break its rule, and passes for those that keep it."""

import random
import sys
from typing import ClassVar

import numpy as np
import pytest
import torch
from pydantic import PrivateAttr
from samples import SAMPLES

from sparsebench import Keep, Strategy, UserError
from sparsebench.models.deep import DeepViT
from sparsebench.plugin.registry import Registry
from sparsebench.records.record import Origin
from sparsebench.testing import checks, parametrize_with_strategies
from sparsebench.testing.process import resolve
from sparsebench.testing.trial import CHECKS, RuleError
from sparsebench.training.steps import Autograd, Samples


def report_of(strategy, *names):
    """Return the report of the named checks, run in this process."""
    report = checks.blank(strategy, Origin(plugin="test"))
    report = report.model_copy(update={"outcomes": tuple(o for o in report.outcomes if o.check in names)})
    return report.model_copy(update={"outcomes": tuple(checks.outcomes(strategy, report))})


def failed(report):
    return {outcome.check for outcome in report.outcomes if outcome.status == "failed"}


class FarFromMean(Strategy):
    """Keeps the tokens that are far from their mean; the broken strategies below are variants of it."""

    name: ClassVar[str] = "broken"

    def scores(self, view):
        return (view.tokens - view.tokens.mean(dim=1, keepdim=True)).norm(dim=-1)


@parametrize_with_strategies([FarFromMean])
def test_a_strategy_that_keeps_all_rules_passes_everything(strategy, check):
    check(strategy)


def caller(kind):
    """Return a local variable of this class in a calling function."""
    frame = sys._getframe()
    while frame:
        if values := [value for value in frame.f_locals.values() if isinstance(value, kind)]:
            return values[0]
        frame = frame.f_back
    return None


GOOD = {0: {"a": torch.zeros(1)}}
CALLS = []
GENERATOR = torch.Generator().manual_seed(0)


def odd_number(view):
    if view.index.shape[1] % 2:
        raise ValueError("pairs only")


def full_precision(view):
    if torch.equal(view.keys, view.keys.bfloat16().float()):
        raise ValueError("these keys are too coarse")


def scores_by_labels(self, view):
    trainer = caller(Autograd)
    turned = 0.0 if trainer is None else trainer.samples.labels[:, None] * torch.arange(view.index.shape[1])
    return torch.sin(FarFromMean.scores(self, view) + turned)


def scores_by_mask(self, view):
    samples = caller(Samples) if view.index.shape[1] > 20 else None
    hidden = 0.0 if samples is None else samples.relevance[: len(view.index), : view.index.shape[1]]
    return torch.sin(FarFromMean.scores(self, view) + hidden)


def hooks_the_model(self, view):
    network = caller(DeepViT)
    if network is not None:
        network.module.norm.register_forward_hook(lambda *_: None)
    return FarFromMean.scores(self, view)


def forgets_gradients(self, view):
    torch.set_grad_enabled(False)
    return FarFromMean.scores(self, view)


def of(change):
    """Return a method `scores` that calls `change` with the view before it returns FarFromMean's scores."""

    def scores(self, view):
        extra = change(view)
        return FarFromMean.scores(self, view) + (extra if isinstance(extra, torch.Tensor) else 0.0)

    return {"scores": scores}


def plan(decide):
    return {"plan": lambda self, view, keep: decide(view, keep)}


def counted(view):
    CALLS.append(view)
    return torch.arange(view.index.shape[1]) * float(len(CALLS) % 7)


class Remembers(FarFromMean):
    """Works until its third batch."""

    _batches: list[int] = PrivateAttr(default_factory=list)

    def scores(self, view):
        self._batches.append(len(view.index))
        if len(self._batches) > 2:
            raise IndexError("no room for another batch")
        return FarFromMean.scores(self, view)


class NeedsACount(FarFromMean):
    """Has a parameter without a default."""

    count: int


class Forgets(FarFromMean):
    secret: float = 1.0

    def model_dump_json(self, **options):
        return "{}"


BROKEN = {
    "declares_itself": {"requires": lambda self: frozenset({"labels"}), **plan(lambda view, keep: None)},
    "fits_on_images": {
        "fit": lambda self, images, network: {0: {"a": torch.rand(1, generator=GENERATOR)}},
        "module": lambda self, place: torch.nn.ParameterDict({"a": torch.zeros(1)}),
    },
    "acts_without_error": of(lambda view: 1 / 0),
    "reads_no_relevance": of(lambda view: view.relevance),
    "plans_are_legal": plan(lambda view, keep: Keep(view.index[:, :keep] * 0)),
    "plans_are_legal, NaN": of(lambda view: view.tokens[:, :, 0] * float("nan")),
    "plans_are_legal, too few": plan(lambda view, keep: Keep(view.index[:, :1] * 0)),
    "same_seed_same_bits": of(lambda view: torch.rand(view.index.shape, generator=GENERATOR)),
    "odd_sizes": {**of(odd_number)},
    "labels_change_nothing": {"scores": scores_by_labels},
    "relevance_changes_nothing": {"scores": scores_by_mask},
    "view_is_left_alone": of(lambda view: None if torch.is_grad_enabled() else view.tokens.mul_(2).sum(-1) * 0),
    "model_is_left_alone": {"scores": hooks_the_model},
    "random_state_is_left_alone": of(lambda view: torch.manual_seed(0) and None),
    "modes_are_left_alone": {"scores": forgets_gradients},
    "has_a_docstring": {"__doc__": None},
    "each_sample_on_its_own": of(lambda view: torch.sin(9 * view.tokens.mean() * torch.arange(view.index.shape[1]))),
    "acts_in_bfloat16": {"site": "attention", "needs": frozenset({"tokens", "keys"}), **of(full_precision)},
    "order_of_tokens_does_not_matter": of(lambda view: torch.arange(view.tokens.shape[1]) * 100.0),
    "macs_fall_with_the_budget": plan(lambda view, keep: None),
    "own_macs_are_all": of(lambda view: (view.tokens @ view.tokens.mT).sum(-1) * 0),
    "stays_on_its_device": of(lambda view: view.tokens.sum(-1) + torch.ones(view.index.shape)),
    "gradients_flow": {"trained": True, "module": lambda self, place: torch.nn.Linear(place.width, 1)},
    "constructs_with_defaults": NeedsACount(count=3),
    "parameters_survive_json": Forgets(secret=2.0),
    "pickles_by_reference": type("Hidden", (FarFromMean,), {"__module__": __name__})(),
    "labels_change_nothing, from outside": resolve(str(SAMPLES / "peeks_at_labels.py"), Registry())[0][0],
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_named_by_its_check(name):
    broken = BROKEN[name]
    if not isinstance(broken, Strategy):
        broken = type("Broken", (FarFromMean,), {"__module__": __name__, "__doc__": "Broken.", **broken})()
    name = name.partition(",")[0]
    assert failed(report_of(broken, name)) == {name}


class Carries(FarFromMean):
    """Scores a token by what was computed for its patch before the first block."""

    site: ClassVar[str] = "block"

    def start(self, view):
        view.memory["far"] = FarFromMean.scores(self, view)

    def scores(self, view):
        return view.rows(view.memory["far"])


class CarriesPairs(Carries):
    """Scores a token by its similarity to all others before the first block."""

    def start(self, view):
        view.memory["similar"] = view.tokens @ view.tokens.mT

    def scores(self, view):
        return view.pairs(view.memory["similar"]).sum(dim=2)


class AlternatesPatches(FarFromMean):
    """Prefers patches at even places, which it finds without their numbers."""

    site: ClassVar[str] = "block"

    def start(self, view):
        B, N = view.tokens.shape[:2]
        view.memory["odd"] = torch.arange(N).expand(B, -1) % 2

    def scores(self, view):
        return -100.0 * view.rows(view.memory["odd"])


class AlternatesColumns(AlternatesPatches):
    """Prefers patches in even columns of the grid, which it reads before the first block only."""

    def start(self, view):
        B, N = view.tokens.shape[:2]
        view.memory["odd"] = torch.arange(N).expand(B, -1) % view.grid[1] % 2


class Declared(FarFromMean):
    """Prefers patches at even places, and declares that it does."""

    expected_failures: ClassVar = {"order_of_tokens_does_not_matter": "it prefers even places"}

    def scores(self, view):
        return -100.0 * (view.index % 2)


class ReadsTheSize(FarFromMean):
    """Reads no more of the numbers of patches than how many there are."""

    def scores(self, view):
        return FarFromMean.scores(self, view) * view.index.shape[1]


@pytest.mark.parametrize(("strategy", "status", "says"), [
    (Carries(), "passed", ""), (CarriesPairs(), "passed", ""), (ReadsTheSize(), "passed", ""),
    (AlternatesPatches(), "failed", "logits differ"), (AlternatesColumns(), "unsupported", "view.grid"),
    (Declared(), "expected", "it prefers even places"),
])  # fmt: skip
def test_another_order_is_tested_unless_positions_were_read_and_mattered(strategy, status, says):
    (outcome,) = report_of(strategy, "order_of_tokens_does_not_matter").outcomes
    assert outcome.status == status and says in outcome.message


@pytest.mark.parametrize(
    ("fit", "fails", "says"),
    [
        (
            lambda images, network: 1 / 0,
            "fits_on_images",
            "fit raised ZeroDivisionError: division by zero (test_ch",
        ),
        (lambda images, network: {0: {"a": torch.zeros(1)}}, "", ""),
        (lambda images, network: torch.set_grad_enabled(False) and GOOD, "modes_are_left_alone", "gradients"),
        (lambda images, network: np.random.rand() and GOOD, "random_state_is_left_alone", "numpy"),
    ],
)
def test_a_fit_is_watched_as_choices_are(fit, fails, says):
    module = lambda self, place: torch.nn.ParameterDict({"a": torch.zeros(1)})  # noqa: E731
    body = {"fit": lambda self, images, network: fit(images, network), "module": module, "__doc__": "Fits."}
    strategy = type("Fitting", (FarFromMean,), {"__module__": __name__, **body})()
    names = {"fits_on_images", "acts_without_error", fails} - {""}
    says_of = {}
    for name in names:
        try:
            CHECKS[name](strategy)
        except RuleError as error:
            says_of[name] = error.check, str(error)
    assert (fails in says_of) == bool(fails) and says in says_of.get(fails, ("", ""))[1]
    assert says_of.keys() <= {fails, "acts_without_error"}
    assert "acts_without_error" not in says_of or says_of["acts_without_error"][0] == "fits_on_images"


def test_a_state_that_causes_errors_later_is_detected():
    report = report_of(Remembers(), "acts_without_error", "plans_are_legal", "fifth_batch_as_first")
    assert failed(report) == {"acts_without_error"} and not report.conforms
    assert any("no room for another batch" in outcome.message for outcome in report.outcomes)


def test_changes_of_a_strategy_to_the_process_are_undone():
    def spoils(view):
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)
        random.seed(0)

    before = random.getstate(), torch.get_rng_state()
    spoiling = type("Spoils", (FarFromMean,), {"__module__": __name__, **of(spoils)})()
    report = report_of(spoiling, "acts_without_error", "modes_are_left_alone")
    assert "modes_are_left_alone" in failed(report)
    assert torch.is_grad_enabled() and torch.get_default_dtype() == torch.float32
    assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("atn_topk", "did you mean 'attn_topk'"),
        ("random:size=3", "unknown parameter"),
        (str(SAMPLES / "brings_task.py"), "brings no strategy to check"),
        (str(SAMPLES / "empty.py"), "brings no strategy"),
        (str(SAMPLES / "import_error.py"), r"import_error\.py: ModuleNotFoundError"),
    ],
)
def test_an_invalid_target_is_a_user_error(target, says):
    with pytest.raises(UserError, match=says):
        resolve(target, Registry())


@pytest.mark.parametrize(("sample", "check"), {
    "duplicates": "plans_are_legal", "leaves": "acts_without_error", "unsupported": "acts_without_error",
    "draws": "same_seed_same_bits", "scales": "view_is_left_alone",
}.items())  # fmt: skip
def test_bad_plugins_fail_one_required_check_which_says_why(sample, check):
    ((strategy, _),) = resolve(str(SAMPLES / f"{sample}.py"), Registry())
    others = ("labels_change_nothing", "relevance_changes_nothing", "each_sample_on_its_own", "fifth_batch_as_first",
             "order_of_tokens_does_not_matter", "keep_all_is_dense", "view_is_left_alone")  # fmt: skip
    report = report_of(strategy, "acts_without_error", "plans_are_legal", "odd_sizes", "same_seed_same_bits", *others)
    assert failed(report) == {check}
    assert all(o.message == f"see {check}" for o in report.outcomes if o.status == "not run")
    assert not report.conforms and all(len(o.message.splitlines()) <= 1 for o in report.outcomes)


def test_learned_counts_are_not_said_to_differ_between_images():
    ((searches, _),) = resolve("diffrate_search", Registry())
    remarks = [CHECKS[name](searches) for name in ("exports", "plans_are_legal")]
    assert all("counts" in remark and "in each image" not in remark for remark in remarks)
    assert remarks[0].startswith("no: ") and "learned" in remarks[0]


@pytest.mark.slow
def test_measurements_report_what_a_strategy_cannot_do():
    broken = type(
        "Breaks", (FarFromMean,), {"__module__": __name__, **of(lambda view: view.tokens.sum().item() and None)}
    )
    assert CHECKS["compiles_a_choice"](broken()).startswith("no: ")
    assert CHECKS["exports"](broken()).startswith("no: ") and CHECKS["exports"](FarFromMean()) == "yes"
    assert CHECKS["compiles_a_choice"](FarFromMean()) == "yes"


@pytest.mark.parametrize(("site", "blocks"), [("attention", ["block 4 of 5"]), ("block", [])])
def test_blocks_without_an_effect_are_named(site, blocks):
    class Acts(FarFromMean):
        pass

    Acts.site = site
    remark = CHECKS["choices_have_an_effect"](Acts())
    assert all(text in remark for text in blocks) and remark.startswith("no" if blocks else "yes")


def test_fused_tokens_count_for_the_budget():
    def fuse(view, keep):
        N = view.index.shape[1]
        return Keep(view.index[:, : keep - 1] * 0 + torch.arange(keep - 1), torch.full(view.index.shape, 1 / N))

    fuses = type("Fuses", (FarFromMean,), {"__module__": __name__, "__doc__": "F.", **plan(fuse)})()
    (outcome,) = report_of(fuses, "plans_are_legal").outcomes
    assert outcome.status == "passed"


class Declares(FarFromMean):
    """Keeps a state, and declares it."""

    expected_failures: ClassVar = {"fifth_batch_as_first": "it learns while it runs", "odd_sizes": "none really"}

    def scores(self, view):
        return FarFromMean.scores(self, view) + counted(view)


def test_failures_that_are_declared_are_shown_as_such():
    outcomes = {o.check: o for o in report_of(Declares(), *Declares.expected_failures).outcomes}
    assert outcomes["fifth_batch_as_first"].status == "expected"
    assert outcomes["fifth_batch_as_first"].message.startswith("it learns while it runs (")
    assert outcomes["odd_sizes"].message.startswith("it passes, though it is declared to fail")
    cases = parametrize_with_strategies([Declares]).args[1]
    marked = {case.id for case in cases if case.marks}
    assert marked == {"broken-fifth_batch_as_first", "broken-odd_sizes"}


def test_a_declared_failure_of_no_check_is_refused():
    misspelt = type("Misspelt", (FarFromMean,), {"expected_failures": {"odd_size": "no"}})
    with pytest.raises(UserError, match=r"unknown check .*did you mean 'odd_sizes'"):
        parametrize_with_strategies([misspelt])


def test_a_check_with_nothing_to_check_is_skipped_by_pytest():
    cases = {case.id: case for case in parametrize_with_strategies(["random"]).args[1]}
    strategy, check = cases["random-order_of_tokens_does_not_matter"].values
    with pytest.raises(pytest.skip.Exception, match=r"it reads view\.random"):
        check(strategy)
