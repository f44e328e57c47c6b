"""The ledger of published numbers of token reduction: recounting of MACs, and comparison with measured accuracies."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import lru_cache
from importlib import resources
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sparsebench.board import tables
from sparsebench.board.columns import Column
from sparsebench.board.judge import Ranking
from sparsebench.board.tables import ALL, Choice, Report, Table
from sparsebench.errors import UnsupportedError, UserError, reason_of, unknown
from sparsebench.measure.cost import Step, VitCost
from sparsebench.measure.schedule import TokenSchedule, counts_at
from sparsebench.plan.contenders import fit_budget, settings_of
from sparsebench.plugin.registry import Registry
from sparsebench.strategy.base import Strategy, Traits
from sparsebench.strategy.budget import FULL, Budget, Convention
from sparsebench.strategy.spec import fill, label

MOST = 10**9
TOLERANCE = 0.02
CLASSES = 1000
Word = Literal["agrees", "other convention", "cannot be", "nothing claimed", "not recounted"]


Positive = Annotated[Decimal, Field(gt=0, le=MOST)]


class LedgerRow(BaseModel):
    """A row of a ledger, with the id by which users name it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str = Field(pattern=r"^[\w.-]+$")


R = TypeVar("R", bound=LedgerRow)


class Claim(LedgerRow):
    """A row of the ledger: the numbers that a source states for one setting of a method.

    Attributes:
        id: the name of the row on the command line.
        paper: the paper of the method, or of the comparison.
        method: name of the method in the paper.
        model: the argument of --model.
        canvas: side of the images in pixels; 0 for the model's default.
        plugin: the argument of --plugin; "" if the strategy is not available or its settings are unknown.
        counts, blocks: token counts that the source states, and the blocks after whose attention they remain.
        weights: whether the network was trained with the method.
        gmacs, dense_gmacs: 10^9 of what the source counts, with and without the method.
        top1: accuracy on ImageNet-1k in percent.
        speed, dense_speed: images/s with and without the method.
        speedup: the speed-up, if the source states no speeds.
        hardware: the hardware of the speeds.
        source: the place of the numbers in the literature.
        note: remarks on the settings.
    """

    paper: str = Field(min_length=1)
    method: str = Field(min_length=1)
    model: str = Field(pattern=r"^timm:.")
    canvas: int = Field(0, ge=0)
    plugin: str = ""
    counts: tuple[int, ...] = ()
    blocks: tuple[int, ...] = ()
    weights: Literal["off the shelf", "trained"]
    gmacs: Positive | None = None
    dense_gmacs: Positive | None = None
    top1: Annotated[Positive, Field(le=100)] | None = None
    speed: Positive | None = None
    dense_speed: Positive | None = None
    speedup: Positive | None = None
    hardware: str = ""
    source: str = Field(min_length=1)
    note: str = ""

    @property
    def claimed_speedup(self) -> float | None:
        """The speed-up over the dense network that the source claims, or None."""
        if self.speedup is not None:
            return float(self.speedup)
        return float(self.speed / self.dense_speed) if self.speed and self.dense_speed else None


def load(path: Path | None = None) -> list[Claim]:
    """Return the rows of a TOML file with [[claim]] tables, by default of sparsebench's ledger; see `read_ledger`."""
    return read_ledger("claims.toml", path, "claim", Claim)


def read_ledger(shipped: str, path: Path | None, key: str, cls: type[R]) -> list[R]:
    """Return the rows of a TOML file that has only tables [[key]].

    Args:
        shipped: name of the file of sparsebench that is read without a path.
        path: a user's file.
        key: name of the tables.
        cls: class of the rows, which have an id.

    Raises:
        UserError: the file cannot be read, a row has a missing, wrong or unknown field, or two rows have the same id.
    """
    place = resources.files(__package__) / shipped if path is None else path
    name = shipped if path is None else str(path)
    try:
        tables = tomllib.loads(place.read_bytes().decode("utf-8"), parse_float=Decimal)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{name} cannot be read as TOML: {error}") from error
    rows = tables.get(key)
    if set(tables) != {key} or not isinstance(rows, list) or not rows:
        raise UserError(f"{name} is not a ledger", got=sorted(tables), allowed=f"only [[{key}]] tables")
    by_id: dict[str, R] = {}
    for number, table in enumerate(rows, 1):
        try:
            row = cls.model_validate(table)
        except ValidationError as error:
            where = table.get("id", f"number {number}") if isinstance(table, dict) else f"number {number}"
            raise UserError(f"{name}, row {where}: {reason_of(error)}") from error
        if by_id.setdefault(row.id, row) is not row:
            raise UserError(f"rows of {name} with the same id", got=row.id)
    return list(by_id.values())


def find(claims: list[R], id: str) -> R:
    """Return the row with this id.

    Raises:
        UserError: there is no such row.
    """
    by_id = {claim.id: claim for claim in claims}
    if id not in by_id:
        raise unknown("row of the ledger", id, by_id)
    return by_id[id]


@dataclass(frozen=True)
class Recount:
    """A row of the ledger with its recounted MACs.

    Attributes:
        claim: the row.
        gmacs: 10^9 MACs of its settings, as counted by sparsebench; None if unknown.
        dense_gmacs: the same for the dense network.
        verdict: whether the claim agrees with `gmacs`.
        why: the convention of counting, or the reason of the verdict.
        flags: doubts about the claim.
    """

    claim: Claim
    gmacs: float | None
    dense_gmacs: float
    verdict: Word
    why: str = ""
    flags: tuple[str, ...] = ()

    @property
    def difference(self) -> float | None:
        """Claimed minus recounted GMACs, as a fraction of the recounted ones, or None."""
        if self.gmacs is None or self.claim.gmacs is None:
            return None
        return float(self.claim.gmacs) / self.gmacs - 1

    @property
    def macs_ratio(self) -> float | None:
        """Dense MACs over the method's: as claimed if the source states both, otherwise as recounted, or None."""
        claim = self.claim
        if claim.gmacs is not None and claim.dense_gmacs is not None:
            return float(claim.dense_gmacs / claim.gmacs)
        return None if self.gmacs is None else self.dense_gmacs / self.gmacs


@dataclass(frozen=True)
class _Setting:
    """The token counts of a row on its network.

    Attributes:
        strategy: None if the strategy is not available and the counts are those of the source.
        budget: the budget, fitted to the network.
        places: number of remaining tokens, by block.
    """

    cost: VitCost
    strategy: Strategy | None
    budget: Budget
    places: dict[int, int] = field(default_factory=dict)

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """The numbers of tokens that enter and leave each block."""
        sizes = accumulate(range(self.cost.depth), lambda n, block: self.places.get(block, n), initial=self.cost.tokens)
        return list(pairwise(sizes))

    def gmacs(self, *, overhead: bool = False) -> float:
        """Return 10^9 MACs, with or without the strategy's own products. All tokens make queries, as in papers."""
        steps = [Step(n, out) for n, out in self.pairs]
        if self.strategy is not None:
            steps = self.cost.steps(self.strategy.traits(), tuple(self.places), tuple(self.places.values()))
        return self.cost.macs([replace(step, early=False, own=step.own if overhead else 0.0) for step in steps]) / 1e9


def recount_all(claims: Sequence[Claim], registry: Registry, ledger: Sequence[Claim] = ()) -> list[Recount]:
    """Recount the MACs of each row.

    Args:
        claims: the rows.
        registry: the registry of strategies.
        ledger: the rows to compare with, by default the same.

    Raises:
        UserError: the settings of a row are invalid.
    """
    recounts = [_recount(claim, registry) for claim in claims]
    return [replace(recount, flags=tuple(_flags(recount, ledger or claims))) for recount in recounts]


def _recount(claim: Claim, registry: Registry) -> Recount:
    try:
        cost = _cost(claim.model, claim.canvas)
        setting, why = _setting(claim, cost, registry)
        dense = cost.macs(cost.dense()) / 1e9
        if setting is None:
            return Recount(claim, None, dense, "not recounted", why)
        # Some sources count the strategy's own products, others do not.
        counts = setting.gmacs(overhead=True), setting.gmacs()
        gmacs = min(counts, key=lambda count: abs(count - float(claim.gmacs or "inf")))
        return Recount(claim, gmacs, dense, *_verdict(claim, setting, gmacs))
    except (UserError, UnsupportedError) as error:
        raise UserError(f"row {claim.id}: {error}") from error


def _verdict(claim: Claim, setting: _Setting, gmacs: float) -> tuple[Word, str]:
    """Return the verdict and its reason for settings with these recounted GMACs."""
    source = replace(setting, strategy=None, places=_places_of(claim, setting.cost))
    if setting.strategy is not None and source.places and source.places != setting.places:
        text, counts = ("+".join(map(str, part.places.values())) for part in (source, setting))
        here = f"{setting.strategy.name} leaves {counts}: {setting.gmacs():.2f} G"
        return "cannot be", f"{text} tokens would be {source.gmacs():.2f} G; {here}"
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
    """Return the token counts of a row, or None and the reason why they are unknown."""
    if not claim.plugin:
        if not claim.counts:
            return None, claim.note or "its settings cannot be typed here"
        return _Setting(cost, None, FULL, _places_of(claim, cost)), ""
    settings = settings_of(claim.plugin, registry, [FULL])
    if len(settings) != 1:
        raise UserError("plugin has several settings", got=claim.plugin, allowed="one")
    ((strategy, stated),) = settings
    budget = fit_budget(stated or FULL, strategy, None, cost)
    if strategy.adaptive:
        return None, f"what {strategy.name} costs is known when it has seen images"
    if not strategy.budgeted:
        return _Setting(cost, strategy, budget), ""
    schedule = TokenSchedule(budget, strategy.traits(), cost)
    return _Setting(cost, strategy, budget, dict(zip(schedule.blocks, schedule.counts, strict=True))), ""


def _places_of(claim: Claim, cost: VitCost) -> dict[int, int]:
    """Return the token counts that a source states, by block.

    Raises:
        UserError: the network cannot have these counts.
    """
    if not claim.counts:
        return {}
    budget = fill(Budget, {"counts": claim.counts, "blocks": claim.blocks}, "the stated counts")
    TokenSchedule(budget, Traits("attention"), cost)  # raises if the network cannot have them
    return dict(zip(claim.blocks, claim.counts, strict=True))


@lru_cache(maxsize=32)
def _cost(model: str, canvas: int) -> VitCost:
    """Return the closed form of a timm model with the head of ImageNet-1k, built on the meta device."""
    import torch

    from sparsebench.models.timm_models import create_vit, cut_of
    from sparsebench.models.timm_parts import vit_cost

    name = model.removeprefix("timm:")
    with torch.device("meta"):
        vit = create_vit(name, canvas or cut_of(name).get("canvas", 224), CLASSES)
    return vit_cost(vit)


def _fits(claimed: Decimal, counted: float) -> bool:
    """Return whether a claimed number agrees with the counted one, within TOLERANCE or rounding."""
    exponent = claimed.as_tuple().exponent
    assert isinstance(exponent, int)
    rounding = 0.5 * 10.0**exponent * (1 + 1e-9)
    return abs(float(claimed) - counted) <= max(TOLERANCE * counted, rounding)


def _other_conventions(setting: _Setting) -> Iterator[tuple[str, float]]:
    """Yield the other conventions of counting by name, with their GMACs."""
    cost, pairs = setting.cost, setting.pairs
    yield "two operations a MAC", 2 * setting.gmacs()
    without = replace(cost, blocks=tuple(replace(block, width=0) for block in cost.blocks))
    yield "without the two products of attention", replace(setting, cost=without).gmacs()
    yield "without patch embedding and head", replace(setting, cost=replace(cost, embed=0, head=0)).gmacs()
    yield "tokens leave before the block", cost.macs([Step(out, out) for _, out in pairs]) / 1e9
    yield "tokens leave after the block", cost.macs([Step(n, n) for n, _ in pairs]) / 1e9
    rate, strategy = setting.budget.keep_rate, setting.strategy
    if rate is None or strategy is None:
        return
    for convention in get_args(Convention):
        if convention != setting.budget.convention:
            counts = counts_at(rate, convention, cost.tokens, len(setting.places), strategy.traits().fuses)
            other = replace(setting, places=dict(zip(setting.places, counts, strict=True)))
            yield f"counts by {convention}", other.gmacs()


def _flags(recount: Recount, claims: Sequence[Claim]) -> Iterator[str]:
    """Yield doubts about a claim, including contradictions with other rows for the same settings."""
    claim, speedup, ratio = recount.claim, recount.claim.claimed_speedup, recount.macs_ratio
    if speedup is not None and ratio is not None and speedup > ratio * (1 + TOLERANCE):
        yield f"speed-up {speedup:.2f} above dense / MACs {ratio:.2f}"
    if recount.verdict == "cannot be":
        yield "MACs do not follow from the stated settings"
    for other in claims:
        equal = (claim.method, claim.model, claim.canvas, claim.plugin, claim.weights) == (
            other.method,
            other.model,
            other.canvas,
            other.plugin,
            other.weights,
        )
        if other is claim or not equal or not claim.plugin or claim.gmacs is None or other.gmacs is None:
            continue
        if not (_fits(claim.gmacs, float(other.gmacs)) or _fits(other.gmacs, float(claim.gmacs))):
            yield f"row {other.id} has {other.gmacs} G for the same settings"


COLUMNS = (
    Column("row", "row", "text", "its name in the ledger"),
    Column("claimed", "claimed G", "text", "10^9 that the source says an image costs, as it is written there"),
    Column("recounted", "recounted G", "text", "10^9 MACs that the settings come to here"),
    Column("verdict", "verdict", "text", "agrees, other convention, cannot be, nothing claimed, not recounted"),
    Column("flags", "flags", "text", "what to ask about"),
    Column("speedup", "speed-up", "text", "images/s over those of the dense network, both as claimed"),
    Column("macs_ratio", "dense / MACs", "text", "dense MACs over its own; as claimed where both are, else recounted"),
    Column("why", "why", "text", "the convention, or the reason of the verdict"),
    Column("method", "method", "text", "as the source calls it"),
    Column("model", "model", "text", "to be typed after --model; @ and the side of the images where it is not its own"),
    Column("plugin", "plugin", "text", "to be typed after --plugin"),
    Column("top1", "top-1 %", "text", "accuracy on ImageNet-1k as claimed"),
    Column("weights", "weights", "text", "whether the network was trained with the method"),
    Column("hardware", "hardware", "text", "of the speed"),
    Column("source", "source", "text", "where the numbers were read"),
    Column("difference", "difference", "ratio", "claimed over recounted, less 1", tables=False),
    Column("images_per_s", "images/s", "text", "as claimed", tables=False),
    Column("paper", "paper", "text", "of the method, or of the comparison", tables=False),
    Column("note", "note", "text", "what to know of the settings", tables=False),
)
LEGEND = (
    f"Agrees: within {TOLERANCE:.0%}, or as the source rounds it.",
    "G: 10^9, which most sources call FLOPs and count as MACs.",
    "Cannot be: no way of counting that is known here gives the number from the settings as read.",
)


def render(recounts: Sequence[Recount], form: str, choice: Choice = ALL) -> str:
    """Return the table in one of `tables.FORMATS`, with the number of rows of each verdict, and the flagged rows.

    Raises:
        UserError: an unknown format or column.
    """
    table = Table([_row(recount) for recount in recounts], COLUMNS, legend=LEGEND)
    verdicts = Counter(recount.verdict for recount in recounts)
    words = ", ".join(f"{word} {n}" for word, n in sorted(verdicts.items()))
    lines = [f"{len(recounts)} rows: {words}" if recounts else "no rows"]
    for recount in recounts:
        if recount.flags:
            reason = f" ({recount.why})" if recount.verdict == "cannot be" else ""
            lines.append(f"{recount.claim.id}: {'; '.join(recount.flags)}{reason}")
    return tables.render(Report([table], table, lines), form, choice)


def _row(recount: Recount) -> dict[str, Any]:
    claim = recount.claim
    return {
        **claim.model_dump(include={"method", "plugin", "weights", "hardware", "source", "paper", "note"}),
        "row": claim.id,
        "claimed": str(claim.gmacs or ""),
        "recounted": _decimal(recount.gmacs, 3),
        "verdict": recount.verdict,
        "flags": "; ".join(recount.flags),
        "speedup": _decimal(claim.claimed_speedup, 2),
        "macs_ratio": _decimal(recount.macs_ratio, 2),
        "why": recount.why,
        "top1": str(claim.top1 or ""),
        "model": claim.model + (f" @{claim.canvas}" if claim.canvas else ""),
        "difference": recount.difference,
        "images_per_s": claim.speed and str(claim.speed),
    }


def _decimal(number: float | None, digits: int) -> str:
    return "" if number is None else f"{number:.{digits}f}"


PUBLISHED = Column(
    "published", "published", "percent", "top-1 on ImageNet-1k that a source states for these settings, untrained"
)


def add_published(report: Report, rankings: Sequence[Ranking]) -> Report:
    """Return the tables with a column of published accuracies, if the ledger has rows with the same settings.

    The settings are the architecture, the side of the images, the strategy with its parameters, and the budget. The
    test must predict all classes of ImageNet-1k, and the weights must not be trained with the strategy.
    """
    parts = [_add_numbers(table, ranking) for table, ranking in zip(report.tables, rankings, strict=False)]
    columns = next((table.columns for table in parts if PUBLISHED in table.columns), report.data.columns)
    data = Table([row for table in parts for row in table.rows], columns)
    return report._replace(tables=parts or report.tables, data=data)


def _add_numbers(table: Table, ranking: Ranking) -> Table:
    task, model = ranking.comparison.params
    registry = Registry()
    numbers: dict[tuple[str, str], float] = {}
    whole = task.get("labels") == "imagenet" and task.get("among", "head") == "head"
    for claim in load() if whole else ():
        fits = claim.model == f"timm:{model.get('arch')}" and claim.canvas in (0, task.get("canvas"))
        if fits and claim.top1 and claim.plugin and claim.weights == "off the shelf":
            with suppress(UserError):  # the strategy is not available
                strategy, budget = settings_of(claim.plugin, registry)[0]
                name = label(strategy.name, strategy.model_dump(mode="json", exclude_defaults=True))
                numbers.setdefault((name, budget.label if budget else ""), float(claim.top1) / 100)
    keys = [(row["strategy"], "" if row["strategy"] == "dense" else row["budget"]) for row in table.rows]
    if not numbers.keys() & set(keys):
        return table
    rows = [{**row, PUBLISHED.key: numbers.get(key)} for row, key in zip(table.rows, keys, strict=True)]
    return table._replace(rows=rows, columns=(*table.columns, PUBLISHED))
