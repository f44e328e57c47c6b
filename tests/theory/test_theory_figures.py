import numpy as np
import pytest
from sparsebench_theory.models import PRUNED
from sparsebench_theory.shallow.paper import PAPER
from verdicts import NO, OPEN, PARTLY, YES, words

INFINITY = float("inf")
A = (0.5, 0.28, 0.2, 0.16, 0.14, 0.12, 0.1)
SIGMAS = (0.02, 0.065, 0.11, 0.155, 0.2)


def word_on(result, *claims):
    """Return the verdicts on the claims that contain these texts."""
    outcome = []
    for claim in claims:
        (verdict,) = (v for v in result.verdicts if claim in v.claim)
        outcome.append(verdict.verdict)
    return outcome


def row(result, table, **values):
    """Return the only row of a table with these values."""
    (outcome,) = (row for row in result.tables[table] if values.items() <= row.items())
    return outcome


# ---- Figure 1a


def sweep(grid_of, law, alphas=A, **options):
    """Return trials that need law(alpha_*) samples, with alpha_# at 0.04."""
    return [t for a in alphas for t in grid_of(law(a), task={"relevant": a, "confusion": 0.04}, **options)]


@pytest.mark.parametrize(
    ("law", "grows", "linear", "best"),
    [
        pytest.param(lambda a: 4 / a**2, YES, YES, "alpha_*^-2", id="as published"),
        pytest.param(lambda a: 2 / (a - 0.04) ** 2, YES, PARTLY, "gap^-2", id="the gap squared"),
        pytest.param(lambda a: 0.1 / a**4, YES, PARTLY, "alpha_*^-4", id="the fourth power"),
        pytest.param(lambda a: 40, NO, NO, None, id="the same everywhere"),
        pytest.param(lambda a: 100 * a, NO, NO, None, id="falls"),
        pytest.param(lambda a: 1, OPEN, OPEN, None, id="never more than the smallest N"),
        pytest.param(lambda a: 40 if a > 0.1 else 1e9, OPEN, OPEN, None, id="the same where it is reached"),
        pytest.param(lambda a: 1e9, OPEN, OPEN, None, id="never reached"),
    ],
)  # fmt: skip
def test_figure_1a_says_how_samples_grow(grid_of, law, grows, linear, best):
    result = PAPER.figures["1a"](sweep(grid_of, law))
    assert word_on(result, "N grows", "N is linear") == [grows, linear]
    if best:
        assert f"best: {best};" in result.verdicts[1].measured


def test_figure_1a_leaves_what_never_succeeds_out_of_the_fit_and_says_so(grid_of):
    result = PAPER.figures["1a"](sweep(grid_of, lambda a: 4 / a**2 if a > 0.1 else 1e9))
    assert word_on(result, "N is linear") == [YES]
    assert "6 of 7 alpha_* reach N50" in result.verdicts[1].measured
    assert row(result, "fig1a-n50", **{"alpha_*": 0.1})["N50"] == INFINITY


def test_figure_1a_judges_each_rule_for_the_confusing_tokens_apart(grid_of):
    printed = [
        t
        for a in (0.5, 0.43, 0.38, 0.34, 0.3)
        for t in grid_of(30, task={"relevant": a, "irrelevant": 0.5, "tokens": 100})
    ]
    result = PAPER.figures["1a"](sweep(grid_of, lambda a: 4 / a**2) + printed)
    assert word_on(result, "N grows as alpha_* falls (a fixed", "N grows as alpha_* falls (half") == [YES, NO]
    assert {r["setting"] for r in result.tables["fig1a"]} == {r["setting"] for r in result.tables["fig1a-n50"]}
    assert len(result.panels) == 5


def test_figure_1a_has_the_planted_numbers_in_its_tables(grid_of):
    result = PAPER.figures["1a"](sweep(grid_of, lambda a: 4 / a**2, sizes=(8, 16, 32, 64, 128, 256, 512)))
    for a in A:
        outcome = row(result, "fig1a-n50", **{"alpha_*": a})
        assert (
            outcome["N50"] == pytest.approx(4 / a**2, rel=0.5)
            and outcome["N50_low"] <= outcome["N50"] <= outcome["N50_high"]
        )
        assert (outcome["alpha_#"], outcome["trials"]) == (0.04, 8)
    at = {n: row(result, "fig1a", N=n, **{"alpha_*": 0.1}) for n in (256, 512)}  # 400 samples are needed there
    assert [(at[n]["trials"], at[n]["successes"]) for n in at] == [(8, 0), (8, 8)]
    assert row(result, "fig1a-n50", **{"alpha_*": 0.1})["N95"] == 512


# ---- Figure 1b


@pytest.mark.parametrize(
    ("law", "word"),
    [
        pytest.param(lambda s: 16 * np.exp(10 * s), YES, id="rises"),
        pytest.param(lambda s: 40, NO, id="the same everywhere"),
        pytest.param(lambda s: 100 * np.exp(-10 * s), NO, id="falls"),
        pytest.param(lambda s: 16 * np.exp(10 * s) if s < 0.2 else 1e9, YES, id="rises out of the N tried"),
        pytest.param(lambda s: 1e9, OPEN, id="never reached"),
        pytest.param(lambda s: 1, OPEN, id="never more than the smallest N"),
    ],
)
def test_figure_1b_says_whether_samples_grow_with_sigma(grid_of, law, word):
    result = PAPER.figures["1b"]([t for s in SIGMAS for t in grid_of(law(s), model={"sigma": s})])
    assert word_on(result, "sigma") == [word] and len(result.verdicts) == len(result.panels) == 1
    for s in SIGMAS:
        known = law(s) if law(s) < 1e6 else INFINITY
        assert row(result, "fig1b", value=s)["N50"] == pytest.approx(max(known, 2), rel=0.15)


def test_figure_1b_judges_each_kind_of_first_weights_and_the_noise_apart(grid_of):
    by_init = {"assumption": 100.0, "scale": 10.0, "worst": 0.1}
    trials = [
        t for init, factor in by_init.items() for s in SIGMAS[1:]
        for t in grid_of(40 * factor**s, model={"init": init, "sigma": s})
    ] + [t for c in (0.01, 0.05, 0.1) for t in grid_of(10 * np.exp(20 * c), task={"noise": c})]  # fmt: skip
    result = PAPER.figures["1b"](trials)
    assert word_on(result, "(first weights: assumption)", "(first weights: worst)", "noise") == [YES, NO, YES]
    assert [r["value"] for r in result.tables["fig1b"] if r["swept"] == "c0"] == [0.01, 0.05, 0.1]
    assert len([r for r in result.tables["fig1b"] if r["swept"] == "sigma" and r["init"] == "scale"]) == 4


# ---- Figure 2


def steps(make_trial, law, trials=4):
    """Return trials that need about law(alpha_*) steps."""
    return [
        make_trial(200, r, task={"relevant": a, "confusion": 0.04}, iterations=some and some + r)
        for a in (0.2, 0.24, 0.3, 0.36, 0.44, 0.6) for some in [law(a)] for r in range(trials)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("law", "word"),
    [
        pytest.param(lambda a: 40 / a, YES, id="as published"),
        pytest.param(lambda a: 10 + 1e-3 / a**8, PARTLY, id="rises otherwise"),
        pytest.param(lambda a: 80, NO, id="the same everywhere"),
        pytest.param(lambda a: 200 * a, NO, id="falls"),
        pytest.param(lambda a: 80 if a > 0.2 else None, OPEN, id="some never get there and nothing rises"),
        pytest.param(lambda a: 40 / a if a > 0.25 else None, YES, id="four get there"),
        pytest.param(lambda a: 40 / a if a > 0.35 else None, OPEN, id="three get there"),
        pytest.param(lambda a: None, OPEN, id="none gets there"),
    ],
)
def test_figure_2_says_how_steps_grow(make_trial, law, word):
    assert word_on(PAPER.figures["2"](steps(make_trial, law)), "steps are linear") == [word]


def test_figure_2_has_the_planted_numbers_and_counts_who_got_there(make_trial):
    trials = steps(make_trial, lambda a: 40 / a)
    lost = [make_trial(200, 9, task={"relevant": 0.2, "confusion": 0.04}, iterations=None),
            make_trial(200, 10, task={"relevant": 0.2, "confusion": 0.04}, diverged=True)]  # fmt: skip
    result = PAPER.figures["2"](trials + lost)
    outcome = row(result, "fig2", **{"alpha_*": 0.2})
    assert (outcome["trials"], outcome["reached"], outcome["steps"]) == (6, 4, pytest.approx(201.5))
    assert "24 of 26 trials" in result.verdicts[0].measured and word_on(result, "steps") == [YES]


# ---- Figure 3


@pytest.mark.parametrize(
    ("frozen", "trained", "expected"),
    [
        pytest.param(lambda a: 0.5 / a**4, lambda a: 2 / a**2, [YES, YES, YES], id="as published"),
        pytest.param(lambda a: 2 / a**2, lambda a: 0.5 / a**4, [NO, YES, PARTLY], id="frozen is better"),
        pytest.param(lambda a: 40, lambda a: 40 if a > 0.2 else 10, [PARTLY, NO, NO], id="better at some"),
        pytest.param(lambda a: 40, lambda a: 40, [OPEN, NO, NO], id="as good"),
        pytest.param(lambda a: 1e9, lambda a: 40, [YES, OPEN, OPEN], id="frozen never gets there"),
        pytest.param(lambda a: 1e9, lambda a: 1e9, [OPEN, OPEN, OPEN], id="none gets there"),
    ],
)
def test_figure_3_says_whether_trained_attention_saves_samples(grid_of, frozen, trained, expected):
    trials = sweep(grid_of, frozen, A[:5], model={"attention": "frozen"}) + sweep(grid_of, trained, A[:5])
    result = PAPER.figures["3"](trials)
    assert word_on(result, "saves samples", "N grows", "N is linear in alpha_*^-4") == expected
    for a in A[1:5]:
        ratio = row(result, "fig3-ratio", **{"alpha_*": a})["frozen / trained"]
        if frozen(a) < 1e6:
            assert ratio == pytest.approx(frozen(a) / trained(a), rel=0.2)
        else:
            assert ratio == INFINITY or trained(a) > 1e6


def test_figure_3_speaks_of_hard_problems_only(grid_of):
    trials = sweep(grid_of, lambda a: 8, (0.5,), model={"attention": "frozen"}) + sweep(grid_of, lambda a: 80, (0.5,))
    assert word_on(PAPER.figures["3"](trials), "saves samples") == [OPEN]


# ---- Figures 4 and 7


def attention(make_trial, *curve, trials=5, **task):
    """Return trials watched every 10 steps from 0 on, with this curve up to 0.002."""
    return [
        make_trial(
            200, r, task={"relevant": 0.5, "confusion": 0.05, "watch": 10} | task,
            curves={"watched_steps": tuple(range(0, 10 * len(curve), 10)),
                    "watched_attention_on_relevant": tuple(v + 0.002 * (r / trials - 0.5) for v in curve)},
        ) for r in range(trials)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("curve", "rises", "to_1"),
    [
        pytest.param((0.56, 0.8, 0.92), YES, PARTLY, id="as published"),
        pytest.param((0.56, 0.8, 0.97), YES, YES, id="to one"),
        pytest.param((0.56, 0.7, 0.85), YES, NO, id="not so far"),
        pytest.param((0.56, 0.92, 0.85), PARTLY, NO, id="falls on the way"),
        pytest.param((0.3, 0.8, 0.92), PARTLY, PARTLY, id="begins elsewhere"),
        pytest.param((0.56, 0.6, 0.7), PARTLY, NO, id="ends low"),
        pytest.param((0.56, 0.56, 0.56), NO, NO, id="stands still"),
        pytest.param((0.56, 0.5, 0.4), NO, NO, id="falls"),
    ],
)
def test_figure_4_says_whether_attention_concentrates(make_trial, curve, rises, to_1):
    result = PAPER.figures["4"](attention(make_trial, *curve))
    assert word_on(result, "attention concentrates", "it tends to 1") == [rises, to_1]
    for step, value in ((0, curve[0]), (10, curve[1]), (20, curve[2]), (100, curve[2])):  # the last value is repeated
        assert row(result, "fig4", step=step)["attention on relevant"] == pytest.approx(value, abs=1e-3)


def test_figure_4_goes_on_as_long_as_any_trial_trained(make_trial):
    trials = attention(make_trial, *np.linspace(0.56, 0.9, 16)) + attention(make_trial, 0.56, 0.8, trials=1)
    assert [r["step"] for r in PAPER.figures["4"](trials).tables["fig4"]] == list(range(0, 151, 10))
    assert [r["step"] for r in PAPER.figures["4"](trials[-1:]).tables["fig4"]] == list(range(0, 101, 10))


def test_figure_7_judges_each_number_of_patterns_apart(make_trial):
    trials = attention(make_trial, 0.3, 0.6, 0.97, d=20, patterns=10) + attention(
        make_trial, 0.5, 0.4, d=20, patterns=20
    )
    result = PAPER.figures["7"](trials)
    assert word_on(result, "concentrates on relevant tokens (M=10)", "concentrates on relevant tokens (M=20)") == [
        YES,
        NO,
    ]
    assert word_on(result, "tends to 1 (M=10)", "tends to 1 (M=20)") == [YES, NO]
    assert row(result, "fig7", M=20, step=10)["attention on relevant"] == pytest.approx(0.4, abs=1e-3)


# ---- Figures 5 and 8, and the spurious pattern

FLAT, FALLS, RISES, LATE = (0.08,) * 3, (0.05, 0.04, 0.02), (0.12, 0.14, 0.16), (0.08, 0.08, 0.02)


def removals(make_trial, dense, curves, metric="test_loss", where="both", **task):
    """Return four trials each of dense and of removals of 20, 40 and 60 %, with equal differences up to 0.0004."""
    others = {"accuracy": 0.9, "worst_group_accuracy": 0.8, "spurious_gap": 0.1, "test_loss": 0.1}

    def some(value, r, wobble=0.0, **options):
        values = others | {metric: value + 0.01 * r + wobble}
        return make_trial(32, r, task=task, **values, **options)

    return [some(dense, r) for r in range(4)] + [
        some(value, r, 2e-4 * (-1) ** (r + k), strategy=name, removed=round(0.2 * (k + 1), 6), where=where)
        for name, curve in curves.items() for k, value in enumerate(curve) for r in range(4)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("irrelevant", "noisy", "random", "expected"),
    [
        pytest.param(FALLS, FALLS, FLAT, [YES, YES, YES, YES, YES], id="as published"),
        pytest.param(RISES, RISES, FLAT, [NO, NO, NO, NO, YES], id="removal harms"),
        pytest.param(LATE, FLAT, FLAT, [PARTLY, OPEN, PARTLY, OPEN, YES], id="late or not at all"),
        pytest.param(FALLS, FALLS, RISES, [YES, YES, YES, YES, NO], id="random removal harms"),
        pytest.param(FALLS, FALLS, FALLS, [YES, YES, OPEN, OPEN, NO], id="random removal is as good"),
        pytest.param(FALLS, FALLS, (0.08, 0.09, 0.14), [YES, YES, YES, YES, PARTLY], id="random removal harms late"),
    ],
)
def test_figure_5_says_what_removal_does(make_trial, irrelevant, noisy, random, expected):
    result = PAPER.figures["5"](removals(make_trial, 0.08, {"oracle": irrelevant, "noise": noisy, "random": random}))
    irrelevant_, noisy_ = "removing irrelevant tokens", "removing noisy tokens"
    claims = [f"{irrelevant_} lowers", f"{noisy_} lowers", f"{irrelevant_} is better", f"{noisy_} is better"]
    assert word_on(result, *claims, "removing random tokens leaves") == expected
    for name, curve in (("irrelevant", irrelevant), ("noisy", noisy), ("random", random)):
        for share, value in zip((0.2, 0.4, 0.6), curve, strict=True):
            outcome = row(result, "fig5", removed=name, share=share)
            assert outcome["value"] == pytest.approx(value + 0.015, abs=1e-6) and outcome["trials"] == 4
            assert outcome["change"] == pytest.approx(value - 0.08, abs=1e-6)
        assert row(result, "fig5", removed=name, share=0.0)["change"] == 0.0


def test_figure_5_judges_each_place_apart(make_trial):
    """Figure 5 judges each place of removal apart against the same dense."""
    trials = removals(make_trial, 0.08, {"oracle": FALLS, "attn_topk": RISES})
    trials += [t for t in removals(make_trial, 0.08, {"oracle": RISES}, where="test") if t.strategy != "dense"]
    result = PAPER.figures["5"](trials)
    assert [(v.claim, v.verdict) for v in result.verdicts] == [
        ("removing irrelevant tokens lowers the loss", YES),
        ("removing irrelevant tokens lowers the loss (in the test only)", NO),
    ]
    assert row(result, "fig5", where="test", share=0.6)["change"] == pytest.approx(0.08, abs=1e-6)
    assert row(result, "fig5", removed="little attended", share=0.2)["value"] == pytest.approx(0.135, abs=1e-6)


def test_figure_8_judges_each_number_of_patterns_apart(make_trial):
    trials = removals(make_trial, 0.08, {"oracle": FALLS, "random": FLAT}, d=20, patterns=10)
    trials += removals(make_trial, 0.3, {"oracle": RISES, "random": RISES}, d=20, patterns=20)
    result = PAPER.figures["8"](trials)
    assert word_on(result, "irrelevant tokens lowers the loss (M=10)", "leaves the loss as it is (M=10)") == [YES, YES]
    assert word_on(result, "irrelevant tokens lowers the loss (M=20)", "leaves the loss as it is (M=20)") == [YES, NO]
    assert row(result, "fig8", M=20, removed="random", share=0.0)["value"] == pytest.approx(0.315)


@pytest.mark.parametrize(
    ("worst", "word"),
    [
        pytest.param((0.7, 0.8, 0.9), YES, id="rises"),
        pytest.param((0.6, 0.6, 0.9), YES, id="rises late"),
        pytest.param((0.8, 0.7, 0.9), PARTLY, id="rises and falls on the way"),
        pytest.param((0.5, 0.4, 0.3), NO, id="falls"),
        pytest.param((0.8, 0.6, 0.5), NO, id="falls in the end"),
        pytest.param((0.6, 0.6, 0.6), OPEN, id="does not change"),
    ],
)
def test_the_spurious_figure_says_whether_removal_frees(make_trial, worst, word):
    trials = removals(make_trial, 0.6, {"oracle": worst, "random": FLAT}, "worst_group_accuracy", spurious=0.3)
    result = PAPER.figures["spurious"](trials)
    assert word_on(result, "frees") == [word]
    for share, value in zip((0.2, 0.4, 0.6), worst, strict=True):
        outcome = row(result, "spurious", metric="worst-group accuracy", removed="irrelevant", share=share)
        assert outcome["value"] == pytest.approx(value + 0.015) and outcome["change"] == pytest.approx(value - 0.6)
    assert row(result, "spurious", metric="accuracy", removed="random", share=0.0)["value"] == pytest.approx(0.9)
    assert row(result, "spurious", metric="spurious gap", removed="random", share=0.4)["change"] == 0.0


def test_the_spurious_figure_takes_no_rounding_for_a_fall(make_trial):
    shares = {0.2: (0.1, 0.2, 0.3), 0.4: (0.3, 0.2, 0.1), 0.6: (0.5, 0.6, 0.7)}  # 0.1 + 0.2 + 0.3 > 0.3 + 0.2 + 0.1
    assert np.mean(shares[0.2]) > np.mean(shares[0.4])
    values = {0.0: (0.01, 0.02, 0.03)} | shares
    trials = [
        make_trial(
            16, r, strategy="oracle" if share else "dense", removed=share, task={"spurious": 0.3}, accuracy=0.9,
            worst_group_accuracy=value, spurious_gap=0.1,
        ) for share, some in values.items() for r, value in enumerate(some)
    ]  # fmt: skip
    assert word_on(PAPER.figures["spurious"](trials), "frees") == [YES]


# ---- strategies


def test_each_strategy_has_its_samples_beside_dense_and_its_steps(grid_of):
    trials = [
        t
        for name, n50, taken in (("dense", 32, 50.0), ("oracle", 8, 20.0), ("anti_oracle", 1e9, None))
        for t in grid_of(n50, strategy=name, removed=0.0 if name == "dense" else 0.2, steps=taken)
    ]
    result = PAPER.figures["strategies"](trials)
    assert result.verdicts == []
    oracle, dense = row(result, "strategies", strategy="oracle"), row(result, "strategies", strategy="dense")
    assert oracle["N50 / dense"] == pytest.approx(0.25, rel=0.1) and oracle["ratio_high"] < 1
    assert (oracle["median steps there"], oracle["removed"], oracle["trials"]) == (20, 0.2, 8)
    assert (dense["N50 / dense"], dense["median steps there"]) == (1, 50)
    never = row(result, "strategies", strategy="anti_oracle")
    assert never["N50"] == never["N50 / dense"] == INFINITY and np.isnan(never["median steps there"])


# ---- weights

MATRICES = ("W_Q", "W_K", "W_V")
TWO, NEARLY, NONE = (3.0, 2.0, 0.2, 0.1), (5.0, 1.0, 0.75, 0.5), (2.0, 1.9, 1.8, 1.7)
"""The two largest have 0.996, 0.970 and 0.556 of the square; the third over the second is 0.1, 0.75 and 0.95."""


def ranks(make_trial, *values, trials=4, scale=5.0):
    """Return trials whose updates of W_Q, W_K, W_V have these singular values times a factor of the trial."""
    return [
        make_trial(200, r, curves={
            f"trained_singular_{name}": tuple(scale**r * v * (1 + 0.01 * r * (i == 1)) for i, v in enumerate(some))
            for name, some in zip(MATRICES, values, strict=True)
        }) for r in range(trials)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((TWO, TWO, TWO), [YES, YES, YES]),
        ((TWO, NEARLY, NONE), [YES, PARTLY, NO]),
        ((NONE, TWO, NEARLY), [NO, YES, PARTLY]),
    ],
)
def test_each_matrix_is_judged_by_what_two_directions_hold(make_trial, sound, values, expected):
    result = PAPER.figures["rank"](ranks(make_trial, *values))
    sound(result)
    assert [v.claim.split()[3] for v in result.verdicts] == list(MATRICES)
    assert words(result) == expected
    for name, some in zip(MATRICES, values, strict=True):
        rows = [row for row in result.tables["rank"] if row["matrix"] == name]
        assert [row["number"] for row in rows] == [1, 2, 3, 4]
        means = [row["over the largest"] for row in rows]
        assert means == pytest.approx([v * (1.015 if i == 1 else 1) / some[0] for i, v in enumerate(some)])
        assert rows[0]["std"] == 0 < rows[1]["std"]
    share = 1 - (0.2**2 + 0.1**2) / (3**2 + 2**2 + 0.2**2 + 0.1**2)
    if values[0] == TWO:
        assert f"two hold {share:.3g}" in result.verdicts[0].measured


def test_a_share_that_differs_between_trials_is_not_certain(make_trial):
    other = make_trial(200, 1, curves={f"trained_singular_{name}": NONE for name in MATRICES})
    assert words(PAPER.figures["rank"]([*ranks(make_trial, TWO, TWO, TWO, trials=1), other])) == [OPEN] * 3


# ---- neurons


def pruned(make_trial, short, long, M=5, trials=4, wobble=1e-4):
    """Return trials with these losses without the shortest and the longest rows, by share, plus a term of the trial."""
    return [
        make_trial(200, r, task={"patterns": M, "d": 20}, curves={
            f"trained_loss_without_{what}": tuple(0.1 * r + law(share) + wobble * r * (share > 0) for share in PRUNED)
            for what, law in (("short", short), ("long", long))
        }) for r in range(trials)
    ]  # fmt: skip


def flat(share):
    return 0.1


def rises(share):
    return 0.1 + share


def late(share):
    return 0.1 + 0.3 * (share > 0.65)


def jumps(share):
    return 0.1 + share * (1 - 1.2 * (share > 0.75))


@pytest.mark.parametrize(
    ("short", "long", "M", "expected"),
    [
        pytest.param(flat, rises, 5, [YES, YES], id="as published"),
        pytest.param(late, rises, 5, [YES, YES], id="short rows matter beyond the share"),
        pytest.param(late, rises, 10, [NO, YES], id="short rows matter within the larger share"),
        pytest.param(rises, jumps, 5, [NO, PARTLY], id="the loss falls again"),
        pytest.param(flat, flat, 5, [YES, OPEN], id="nothing matters, with some rise"),
        pytest.param(flat, lambda share: 0.1 + 0.3 * (0.05 < share < 0.45), 5, [YES, OPEN], id="only few matter"),
        pytest.param(flat, lambda share: 0.5 - 0.5 * share, 5, [YES, NO], id="the loss falls"),
        pytest.param(lambda share: 0.1 + 0.04 * (share > 0), rises, 5, [YES, YES], id="a small change is none"),
        pytest.param(lambda share: 0.5 - 0.3 * share, rises, 5, [OPEN, YES], id="short rows do harm"),
    ],
)
def test_neurons_are_judged_by_what_goes_without_them(make_trial, sound, short, long, M, expected):
    trials = pruned(make_trial, short, long, M)
    if long is flat:  # as often up as down
        trials = [
            make_trial(200, r, task={"patterns": M, "d": 20}, curves={
                "trained_loss_without_short": (0.1,) * 10,
                "trained_loss_without_long": (0.1,) + (0.1 + 0.01 * sign,) * 9,
            }) for r, sign in enumerate((1, -1, 1, -1))
        ]  # fmt: skip
    result = PAPER.figures["neurons"](trials)
    sound(result)
    assert words(result) == expected
    assert f"the {1 - 2 / M:.0%} of neurons with the shortest" in result.verdicts[0].claim
    assert f"(M={M})" in result.verdicts[1].claim
    rows = {(row["removed"], row["share"]): row for row in result.tables["neurons"]}
    assert len(rows) == 20 and {row["M"] for row in rows.values()} == {M}
    if long is rises:
        assert rows["longest", 0.5]["test loss"] == pytest.approx(0.6 + 0.15, abs=1e-3)
        assert rows["shortest", 0.9]["test loss"] == pytest.approx(short(0.9) + 0.15, abs=1e-3)


def test_a_change_of_exactly_nought_is_no_rise(make_trial):
    assert words(PAPER.figures["neurons"](pruned(make_trial, flat, flat, wobble=0.0))) == [YES, NO]


@pytest.mark.parametrize(("M", "share"), [(3, "30%"), (4, "50%"), (5, "60%"), (10, "80%"), (15, "80%"), (20, "90%")])
def test_the_share_is_that_of_the_patterns_rounded_down(make_trial, M, share):
    assert f"the {share} of neurons" in PAPER.figures["neurons"](pruned(make_trial, flat, rises, M)).verdicts[0].claim


def test_each_number_of_patterns_is_judged_apart(make_trial, sound):
    result = PAPER.figures["neurons"](pruned(make_trial, late, rises, 5) + pruned(make_trial, late, rises, 10))
    sound(result)
    assert words(result) == [YES, YES, NO, YES] and len(result.panels) == 2
