"""What the settings of a published number come to, and by which way of counting the number follows from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import lru_cache
from typing import Literal, get_args

from sparsebench.errors import UnsupportedError, UserError
from sparsebench.measure.cost import Step, VitCost
from sparsebench.measure.counts import check_fits, counts_at, solve, stages
from sparsebench.paper.claims.rows import Claim
from sparsebench.plan.contenders import fit_budget, settings_of
from sparsebench.plugin.registry import Registry
from sparsebench.strategy.base import Convention, Strategy, Traits
from sparsebench.strategy.budget import FULL, Budget
from sparsebench.strategy.spec import fill

Word = Literal["agrees", "other convention", "cannot be", "nothing claimed", "not recounted"]
TOLERANCE = 0.02
CLASSES = 1000


@dataclass(frozen=True)
class Recount:
    """What became of one row.

    Attributes:
        claim: the row.
        gmacs: what its settings cost here, in 10^9 MACs; None where that is not known.
        dense_gmacs: the same of the whole network.
        verdict: one of the words.
        why: the convention, or the reason.
        flags: what a reader should ask about.
    """

    claim: Claim
    gmacs: float | None
    dense_gmacs: float
    verdict: Word
    why: str = ""
    flags: tuple[str, ...] = ()

    @property
    def difference(self) -> float | None:
        """Claimed minus recounted GMACs, as a fraction of those recounted."""
        if self.gmacs is None or self.claim.gmacs is None:
            return None
        return float(self.claim.gmacs) / self.gmacs - 1

    @property
    def macs_ratio(self) -> float | None:
        """How many times fewer MACs than the dense network: as claimed where both are, else as recounted."""
        claim = self.claim
        if claim.gmacs is not None and claim.dense_gmacs is not None:
            return float(claim.dense_gmacs / claim.gmacs)
        return None if self.gmacs is None else self.dense_gmacs / self.gmacs


@dataclass(frozen=True)
class _Setting:
    """The token counts of a row on its network.

    Attributes:
        strategy: None where the counts are the source's and the strategy is not here.
        budget: as it fits the network.
        places: tokens that are left, by block.
    """

    cost: VitCost
    strategy: Strategy | None
    budget: Budget
    places: dict[int, int] = field(default_factory=dict)

    def steps(self, places: dict[int, int] | None = None) -> list[Step]:
        """Return the steps of the network, in which all tokens make queries, as published ones do."""
        places = self.places if places is None else places
        if self.strategy is None:
            return [Step(n, out) for n, out in _pairs(self.cost, places)]
        made = self.cost.steps(self.strategy.traits(), tuple(places), tuple(places.values()))
        return [replace(step, early=False) for step in made]


def recount_all(claims: Sequence[Claim], registry: Registry, ledger: Sequence[Claim] = ()) -> list[Recount]:
    """Return what became of each row.

    Args:
        claims: the rows.
        registry: where strategies come from.
        ledger: rows that may contradict them; the same ones unless given.

    Raises:
        UserError: the settings of a row cannot be typed.
    """
    each = [_recount(claim, registry) for claim in claims]
    return [replace(one, flags=tuple(_flags(one, ledger or claims))) for one in each]


def setting_of(claim: Claim, registry: Registry) -> tuple[Strategy, Budget]:
    """Return the strategy and the budget that a row's words are, on its network.

    Raises:
        UserError: the row has no words, or they cannot be typed.
    """
    if not claim.plugin:
        raise UserError(f"row {claim.id} has no settings that can be typed here", next_step="name another row")
    cost = _cost(claim.model, claim.canvas)
    settings = settings_of(claim.plugin, registry, [FULL])
    if len(settings) != 1:
        raise UserError(f"row {claim.id}: plugin is several settings", got=claim.plugin, allowed="one")
    ((strategy, budget),) = settings
    return strategy, fit_budget(budget or FULL, strategy, None, cost)


def _recount(claim: Claim, registry: Registry) -> Recount:
    try:
        cost = _cost(claim.model, claim.canvas)
        setting, why = _setting(claim, cost, registry)
        dense = cost.macs(cost.dense()) / 1e9
        if setting is None:
            return Recount(claim, None, dense, "not recounted", why)
        counted = _gmacs_of(setting)
        gmacs = counted[0] if claim.gmacs is None else _nearest(counted, float(claim.gmacs))
        return Recount(claim, gmacs, dense, *_verdict(claim, setting, gmacs))
    except (UserError, UnsupportedError) as error:
        raise UserError(f"row {claim.id}: {error}") from error


def _verdict(claim: Claim, setting: _Setting, gmacs: float) -> tuple[Word, str]:
    """Return the word, and the reason, for settings that come to so many GMACs."""
    if unreachable := _unreachable(claim, setting):
        return "cannot be", unreachable
    if claim.gmacs is None:
        return "nothing claimed", ""
    if _fits(claim.gmacs, gmacs):
        return "agrees", ""
    others = dict(_other_conventions(setting))
    name = min(others, key=lambda name: abs(others[name] - float(claim.gmacs or 0)))
    nearest = f"{name}: {others[name]:.2f} G"
    if not _fits(claim.gmacs, others[name]):
        return "cannot be", f"the nearest is {nearest}"
    return "other convention", nearest


def _setting(claim: Claim, cost: VitCost, registry: Registry) -> tuple[_Setting | None, str]:
    """Return the token counts of a row, or None and the reason why they are not known."""
    if not claim.plugin:
        if not claim.counts:
            return None, claim.note or "its settings cannot be typed here"
        return _Setting(cost, None, FULL, _places_of(claim, cost)), ""
    strategy, budget = setting_of(claim, registry)
    if strategy.adaptive:
        return None, f"what {strategy.name} costs is known when it has seen images"
    if not strategy.budgeted:
        return _Setting(cost, strategy, budget), ""
    traits = strategy.traits()
    blocks = stages(budget, traits, cost.depth)
    return _Setting(cost, strategy, budget, dict(zip(blocks, solve(budget, cost, traits), strict=True))), ""


def _places_of(claim: Claim, cost: VitCost) -> dict[int, int]:
    """Return the token counts that a source states, by block.

    Raises:
        UserError: no network of that size can have them.
    """
    if not claim.counts:
        return {}
    budget = fill(Budget, {"counts": claim.counts, "blocks": claim.blocks}, "the stated counts")
    check_fits(budget, Traits("attention"), cost.tokens, cost.depth)
    return dict(zip(claim.blocks, claim.counts, strict=True))


@lru_cache(maxsize=32)
def _cost(model: str, canvas: int) -> VitCost:
    """Return the closed form of a timm model, whose head has the classes of ImageNet-1k; built without numbers."""
    import torch

    from sparsebench.models.timm_models import cut_of, named_vit
    from sparsebench.models.timm_parts import vit_cost

    name = model.removeprefix("timm:")
    with torch.device("meta"):
        vit = named_vit(name, canvas or cut_of(name).get("canvas", 224), CLASSES)
    return vit_cost(vit, class_rows=int(vit.cls_token is not None))


def _gmacs_of(setting: _Setting) -> tuple[float, float]:
    """Return the GMACs with the strategy's own products and without: sources count them, or do not."""
    steps = setting.steps()
    return setting.cost.macs(steps) / 1e9, setting.cost.macs(_bare(steps)) / 1e9


def _bare(steps: list[Step]) -> list[Step]:
    return [replace(step, own=0.0) for step in steps]


def _nearest(counts: Sequence[float], to: float) -> float:
    return min(counts, key=lambda count: abs(count - to))


def _fits(claimed: Decimal, counted: float) -> bool:
    """Say whether a number is what was counted, within `TOLERANCE` or as it was rounded."""
    exponent = claimed.as_tuple().exponent
    assert isinstance(exponent, int)
    off = abs(float(claimed) - counted)
    return off <= TOLERANCE * counted or off <= 0.5 * 10.0**exponent * (1 + 1e-9)


def _other_conventions(setting: _Setting) -> Iterator[tuple[str, float]]:
    """Yield other ways in which sources count, each with its GMACs."""
    cost, steps = setting.cost, _bare(setting.steps())
    yield "two operations a MAC", 2 * cost.macs(steps) / 1e9
    bare = replace(cost, blocks=tuple(replace(block, width=0) for block in cost.blocks))
    yield "without the two products of attention", bare.macs(steps) / 1e9
    yield "without patch embedding and head", replace(cost, embed=0, head=0).macs(steps) / 1e9
    pairs = list(_pairs(cost, setting.places))
    yield "tokens leave before the block", cost.macs([Step(out, out) for _, out in pairs]) / 1e9
    yield "tokens leave after the block", cost.macs([Step(n, n) for n, _ in pairs]) / 1e9
    if setting.budget.keep_rate is None or setting.strategy is None:
        return
    for convention in get_args(Convention):
        if convention != setting.budget.convention:
            fuses = setting.strategy.traits().fuses
            counts = counts_at(setting.budget.keep_rate, convention, cost.tokens, len(setting.places), fuses)
            other = setting.steps(dict(zip(setting.places, counts, strict=True)))
            yield f"counts by {convention}", cost.macs(_bare(other)) / 1e9


def _pairs(cost: VitCost, places: dict[int, int]) -> Iterator[tuple[int, int]]:
    """Yield how many tokens come to each block, and how many leave it."""
    n = cost.tokens
    for block in range(cost.depth):
        out = places.get(block, n)
        yield n, out
        n = out


def _unreachable(claim: Claim, setting: _Setting) -> str:
    """Say that a strategy cannot leave as few tokens as the source states, or ""."""
    stated = _places_of(claim, setting.cost)
    if setting.strategy is None or not stated or stated == setting.places:
        return ""
    as_stated = setting.cost.macs([Step(n, out) for n, out in _pairs(setting.cost, stated)]) / 1e9
    real = setting.cost.macs(_bare(setting.steps())) / 1e9
    said, left = ("+".join(map(str, places.values())) for places in (stated, setting.places))
    return f"{said} tokens would be {as_stated:.2f} G; {setting.strategy.name} leaves {left}: {real:.2f} G"


def _flags(one: Recount, claims: Sequence[Claim]) -> Iterator[str]:
    """Yield what a reader should ask about; what other rows say that the same settings cost is among it."""
    claim, speedup, ratio = one.claim, one.claim.claimed_speedup, one.macs_ratio
    if speedup is not None and ratio is not None and speedup > ratio * (1 + TOLERANCE):
        yield f"speed-up {speedup:.2f} above the MACs ratio {ratio:.2f}"
    if one.verdict == "cannot be":
        yield "MACs do not follow from the stated settings"
    for other in claims:
        same = (claim.method, claim.model, claim.canvas, claim.plugin, claim.weights) == (
            other.method, other.model, other.canvas, other.plugin, other.weights,
        )  # fmt: skip
        if other is claim or not same or not claim.plugin or claim.gmacs is None or other.gmacs is None:
            continue
        if not (_fits(claim.gmacs, float(other.gmacs)) or _fits(other.gmacs, float(claim.gmacs))):
            yield f"row {other.id} has {other.gmacs} G for the same settings"
