"""Write tests/golden/fingerprints.json: the choices of each shipped strategy and of each shared helper.

python .ci/fingerprints.py                # refuses if a choice changed without a higher revision
python .ci/fingerprints.py --unreleased   # writes the file anyway: no result of the changed strategies is published

A run of a strategy is [tokens, MACs, choice, numbers]: the number of tokens of all images at the end; the MACs of the
strategy's own products; a digest of positions, groups and masks; and the norms of the logits, of the scores, and of the
deviations of the weights of merged tokens from their mean. A run in training also has the learning rate factor of the
network's own weights, the ramp and the loss. The file is valid on every processor: digests are of integers, and other
numbers are compared with a tolerance. The images of a row come from a draw without close choices: the row stays the
same if every weight and pixel changes by 1e-5 of its value.
"""

import contextlib
import hashlib
import importlib
import json
import math
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import sparsebench_plugins
import torch
from sparsebench_theory.models import Shallow
from sparsebench_theory.shallow.task import Theory
from torch import Tensor

from sparsebench import seeds
from sparsebench.errors import UnsupportedError
from sparsebench.models.actor import Pass
from sparsebench.strategy import plans, selection, tokens
from sparsebench.strategy.base import Strategy
from sparsebench.strategy.budget import Budget
from sparsebench.strategy.plans import Keep, Mask, Merge, Mix, Place, Rest
from sparsebench.strategy.view import TokenView
from sparsebench.testing.networks import Case, images_for, tiny
from sparsebench.testing.trial import actor_on

PATH = Path(__file__).resolve().parents[1] / "tests" / "golden" / "fingerprints.json"
BUDGETS = {"macs 0.7": Budget(macs=0.7), "keep 0.7": Budget(keep_rate=0.7), "keep 0.4": Budget(keep_rate=0.4)}
NETWORKS: dict[str, Callable[[], Case]] = {
    "deep": lambda: images_for("deep", tiny(img_size=48, depth=12), 3),
    "no class token": lambda: images_for(
        "no class token", tiny(img_size=(40, 56), depth=5, class_token=False, global_pool="avg"), 3
    ),
    "shallow": lambda: _shallow(),
}
CLOSE = 1e-5
"""Relative change of each weight and pixel that must not change a row: many times the rounding of processors."""
SHAKES = 8
"""Number of such changes that are tried before a row is written."""
TOLERANCE = 3e-4
LEAST = 1e-6
"""Relative and absolute tolerance of numbers in the file."""
WRITE = "python .ci/fingerprints.py"
Rows = dict[str, dict[str, Any]]


def _shallow() -> Case:
    task = Theory(tokens=20, d=16, relevant=0.4, confusion=0.1, test=2)
    data = task.draw(4, 0, {})
    network = Shallow(m=16).build(data, 0)
    split = data.train
    assert split.relevance is not None
    inputs, labels, relevance = (
        torch.from_numpy(np.ascontiguousarray(x)) for x in (split.inputs, split.labels, split.relevance)
    )
    return Case("shallow", network, inputs, labels, relevance, task.recipe())


def shipped() -> dict[str, type[Strategy]]:
    """Return the shipped strategies by name."""
    names = [module.name for module in pkgutil.iter_modules(sparsebench_plugins.__path__)]
    return {name: importlib.import_module(f"sparsebench_plugins.{name}").sparsebench_strategies()[0] for name in names}


@cache
def case_of(network: str, draw: int, shake: int) -> Case:
    """Return a network with images, weights and a mask from named seeds, slightly changed if `shake` is not 0."""
    case = NETWORKS[network]()
    inputs, rng = case.inputs, seeds.generator("fingerprints", network, draw)
    for name, weight in sorted(case.network.module.named_parameters()):
        mean = 1.0 if weight.ndim == 1 and name.endswith("weight") else 0.0  # 1 for the weights of norm layers
        weight.data = torch.from_numpy(np.asarray(rng.normal(mean, 0.2, size=weight.shape))).to(weight.dtype)
    if network == "shallow":
        inputs = inputs + torch.from_numpy(rng.normal(0, 0.1, size=inputs.shape)).to(inputs.dtype)
    else:  # patches of different contrast
        contrast = rng.uniform(0.2, 1, (len(inputs), 1, *case.network.grid)).repeat(8, axis=2).repeat(8, axis=3)
        inputs = torch.from_numpy(0.5 + contrast * rng.uniform(-0.5, 0.5, size=inputs.shape)).float()
    relevance = torch.from_numpy(rng.uniform(size=case.relevance.shape)).float()
    shaken([inputs, relevance, *case.network.module.parameters()], network, draw, shake)
    return Case(network, case.network, inputs, case.labels, relevance, case.recipe)


def shaken(values: Iterable[Tensor], *dimensions: object) -> None:
    """Change each number by about `CLOSE` of its value, unless the last dimension, the shake, is 0."""
    if dimensions[-1]:
        rng = seeds.generator("fingerprints", "shake", *dimensions)
        for value in values:
            factor = 1 + CLOSE * torch.from_numpy(rng.normal(size=value.numel())).view(value.shape)
            value.data = (value.data * factor).to(value.dtype)


def fingerprint(
    cls: type[Strategy], draw: int, shake: int = 0, budgets: Iterable[str] = BUDGETS
) -> dict[str, list[Any]]:
    """Return the runs of a strategy by name: with its defaults, with each named parameter value, and in training."""
    smallest = BUDGETS["keep 0.4"]
    on = partial(run, draw=draw, shake=shake)
    runs = {
        f"{network} {name}": on(cls(), network, BUDGETS[name])
        for network in ("deep", "no class token")
        for name in budgets
    }
    runs["shallow keep 0.4"] = on(cls(), "shallow", smallest)
    others = {f"{name}={value}": cls(**{name: value}) for name, value in words(cls)}
    runs |= {name: on(strategy, "deep", smallest) for name, strategy in others.items()}
    if cls.trains_only or cls.trained or cls().ramps:
        training = {"in training": cls()} | {f"{name} in training": strategy for name, strategy in others.items()}
        runs |= {name: on(strategy, "deep", BUDGETS["keep 0.7"], done=0.25) for name, strategy in training.items()}
    return runs


def words(cls: type[Strategy]) -> Iterator[tuple[str, Any]]:
    """Yield each non-default value of each parameter that is a literal or a boolean."""
    for name, field in cls.model_fields.items():
        kinds = get_args(field.annotation)
        values = [False, True] if field.annotation is bool else [*kinds, *(v for kind in kinds for v in get_args(kind))]
        for value in cls.allowed_disposals() if name == "disposal" else values:
            if isinstance(value, str | int) and value != field.default:
                yield name, value


@torch.no_grad()
def run(
    strategy: Strategy, network: str, budget: Budget, *, draw: int, shake: int, done: float | None = None
) -> list[Any]:
    """Return the run of a strategy (see above): in a test, or in training after the share `done` of the steps."""
    case, training = case_of(network, draw, shake), done is not None
    try:
        actor = actor_on(strategy, case, budget)
        if not strategy.fits():
            train(actor.learned, shake)
        items = torch.arange(len(case.inputs))
        relevance = case.relevance if strategy.kind == "oracle" else None
        acting = actor.begin(items, 0, relevance, training=training, done=1.0 if done is None else done)
        if training and strategy.distils:
            acting.teacher = case.network.tell(case.inputs)
        logits = case.network(case.inputs, acting)
    except UnsupportedError:
        return ["unsupported"]
    images, last = np.ones(len(items)), acting.steps[-1]
    left, macs = last.tokens_out * images, sum(step.own * images for step in acting.steps)
    numbers = [length(logits), length(*parts(acting, "scores"))]
    numbers += [length(*(part - part.mean() for part in parts(acting, "weight", "fuse")))]
    if done is not None:
        numbers += [strategy.network_rate(0.6 * done), strategy.network_rate(done)]
        numbers += [strategy.ramp(done), length(acting.loss()) if acting.learns else 0.0]
    return [round(left.sum()), round(macs.sum()), digest(choices(acting)), *map(rounded, numbers)]


def train(learned: Mapping[int, torch.nn.Module], shake: int) -> None:
    """Change the weights that a strategy learns from their initial values, as if they had been trained."""
    weights = [weight for module in learned.values() for weight in module.parameters()]
    rng = seeds.generator("fingerprints", "learned")
    for weight in weights:
        factor, more = torch.from_numpy(rng.normal(size=(2, weight.numel()))).float()
        weight.data = weight.data * (1 + 0.3 * factor).view(weight.shape) + 0.05 * more.view(weight.shape)
    shaken(weights, "learned", shake)


def parts(acting: Pass, *names: str) -> Iterator[Tensor]:
    """Yield the tensors of these names in the plans, where present."""
    yield from (part for d in acting.decisions for name in names if (part := getattr(d.plan, name, None)) is not None)


def choices(acting: Pass) -> Iterator[Tensor | str]:
    """Yield the place, the kind and the integers of each plan."""
    for decision in acting.decisions:
        plan = decision.plan
        yield f"{decision.block} {type(plan).__mro__[-2].__name__}"
        if isinstance(plan, Keep) and plan.add is not None:
            # These stand by their scores. The order of close scores changes with the rounding, but not the outputs.
            yield from (x.sort(dim=1).values for x in (decision.before, decision.after))
            continue
        yield from (decision.before, decision.after)
        if isinstance(plan, Keep):
            yield plan.index
        elif isinstance(plan, Merge):
            yield plan.target
        elif isinstance(plan, Mask):
            yield plan.keep > 0.5
        elif isinstance(plan, Mix):
            yield plan.weight > 1e-6


def digest(values: Iterable[Tensor | str]) -> str:
    """Return eight hexadecimal digits that depend on each integer and its position."""
    text = "\n".join(value if isinstance(value, str) else str(value.long().tolist()) for value in values)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def rounded(number: float) -> float:
    """Return a number rounded to five digits."""
    return float(f"{number:.5g}")


def length(*values: Tensor) -> float:
    """Return the weighted root mean square of numbers. Weights depend on positions, so that the order matters."""
    squares = torch.cat([torch.zeros(1), *(value.detach().double().nan_to_num(0, 0, 0).flatten() for value in values)])
    weights = torch.linspace(0.5, 1.5, len(squares), dtype=torch.float64)
    return float((weights * squares.square()).mean().sqrt())


# Helpers that strategies share, on integers with exact ties.

B, N = 3, 24
RNG = partial(seeds.generator, "fingerprints", "helpers")


def integers(most: int, *shape: int, name: str = "") -> Tensor:
    """Return integers from 0 to `most` - 1."""
    return torch.from_numpy(RNG(name, most, *shape).integers(0, most, shape))


def vectors() -> Tensor:
    """Return (B, N, 4) vectors whose cosines are exactly -1, -0.5, 0, 0.5 or 1, with many ties."""
    signs = 1 - 2 * integers(2, B, N, 4, name="signs")
    halves = integers(2, B, N, 1, name="halves").bool()
    return torch.where(halves, 0.5 * signs, torch.eye(4)[integers(4, B, N)] * signs)


def view() -> TokenView:
    """Return a view of tokens with many equal similarities."""
    return TokenView(
        {"tokens": vectors},
        index=torch.arange(N).expand(B, N),
        sizes=1.0 + integers(3, B, N, name="sizes"),
        weights=torch.ones(B, N),
        place=Place(1, 4, N, N, 4, 1, 4, 1, N, 0.0),
        training=False,
        grid=None,
        random=lambda draw, width: torch.zeros(B, N),
    )


def changes() -> list[Keep | Merge | Mix]:
    """Return plans with integers that leave 8 tokens."""
    index, targets = Keep.top(integers(9, B, N, name="scores").float(), 8).index, integers(8, B, N, name="groups")
    groups = targets.scatter(1, index, torch.arange(8).expand(B, 8))
    return [
        Keep(index),
        Keep(index[:, 1:], fuse=integers(5, B, N, name="fuse").float()),
        Merge(groups.where(integers(4, B, N, name="drop").scatter(1, index, 1) > 0, -1), sizes=torch.ones(B, N)),
        Merge(groups, weight=integers(5, B, N, name="weight").float()),
        Mix(integers(3, B, 8, N).float()),
    ]


def symmetric(most: int) -> Tensor:
    """Return (B, N, N) symmetric distances."""
    upper = integers(most, B, N, N).float().triu(1)
    return upper + upper.mT


def blocks() -> Tensor:
    """Return a (B, N, N) kernel of four groups: 4 on the diagonal, 2 between tokens of a group, otherwise 0."""
    group = integers(4, B, N)
    return 2.0 * (group[:, :, None] == group[:, None]) + 2 * torch.eye(N)


def _bipartite() -> Iterator[Tensor]:
    keys = vectors()[:, None].expand(-1, 2, -1, -1)
    for keep, prefix in ((12, 0), (17, 0), (12, 1), (17, 1), (17, 2)):
        yield from selection.bipartite(keys, keep, prefix)


def _squeeze() -> Iterator[Tensor]:
    state = integers(3, B, N, name="squeeze")
    yield plans.squeeze(vectors(), state == 0, state == 1)


HELPERS: dict[str, tuple[Callable[..., Any], Callable[[], Iterable[Any]]]] = {
    "selection.bipartite": (selection.bipartite, _bipartite),
    "selection.farthest": (
        selection.farthest,
        lambda: [selection.farthest(symmetric(5), torch.tensor([0, 7, 23]), keep) for keep in (1, 9)],
    ),
    "selection.largest_volume": (
        selection.largest_volume,
        lambda: [selection.largest_volume(blocks(), keep) for keep in (1, 7)],
    ),
    "plans.Keep.top": (Keep.top, lambda: [Keep.top(integers(5, B, N).float(), 9)]),
    "plans.Merge.into": (
        Merge.into,
        lambda: [Merge.into(torch.arange(N).where(integers(2, B, N) > 0, 0).scatter(1, torch.zeros(B, 1).long(), 0))],
    ),
    "plans.Rest.all_but_top": (Rest.all_but_top, lambda: [Rest.all_but_top(integers(5, B, N).float(), 9)]),
    "disposal.dispose": (
        plans.dispose,
        lambda: [plans.dispose(kind, integers(5, B, N).float(), 9, view()) for kind in plans.DISPOSALS],
    ),
    "disposal.squeeze": (plans.squeeze, _squeeze),
    "tokens.apply": (
        tokens.apply,
        lambda: [tokens.apply(plan, integers(9, B, N + 1, 4).float(), view().sizes, 1) for plan in changes()],
    ),
    "tokens.sizes_after": (tokens.sizes_after, lambda: [tokens.sizes_after(plan, view().sizes) for plan in changes()]),
    "tokens.index_after": (tokens.index_after, lambda: [tokens.index_after(plan, view().index) for plan in changes()]),
    "tokens.Padded.of": (tokens.Padded.of, lambda: [tokens.Padded.of(Mask(integers(2, B, N).bool()))]),
}
"""Each helper, and a function that returns its results for integers: tensors and plans."""


def result_of(helper: str) -> list[Any]:
    """Return a digest of the integers in a helper's results, and the length of the real numbers."""
    results = HELPERS[helper][1]()
    values = [value for x in results for value in ([x] if isinstance(x, Tensor) else vars(x).values())]
    tensors = [value for value in values if isinstance(value, Tensor)]
    real = [value for value in tensors if value.is_floating_point()]
    whole = (str(tuple(value.shape)) if value.is_floating_point() else value for value in tensors)
    return [digest(whole), rounded(length(*real))]


@contextlib.contextmanager
def watched(users: dict[str, set[str]], name: str) -> Iterator[None]:
    """Add the strategy `name` to the users of each helper that is called within this context."""
    names = {getattr(helper, "__code__", None): key for key, (helper, _) in HELPERS.items()}

    def called(frame: Any, event: str, _: object) -> None:
        if event == "call" and frame.f_code in names:
            users[names[frame.f_code]].add(name)

    before = sys.getprofile()
    sys.setprofile(called)
    try:
        yield
    finally:
        sys.setprofile(before)


# The file.


def rows_now(draws: dict[str, int], budgets: Iterable[str] = BUDGETS) -> dict[str, Rows]:
    """Return the current content of the file, with the given draws; draw 0 for new strategies."""
    users: dict[str, set[str]] = {helper: set() for helper in HELPERS}
    strategies: Rows = {}
    for name, cls in shipped().items():
        draw = draws.get(name, 0)
        with watched(users, name):
            strategies[name] = {"revision": cls.revision, "draw": draw, "runs": fingerprint(cls, draw, budgets=budgets)}
    helpers = {helper: {"result": result_of(helper), "used_by": sorted(users[helper])} for helper in HELPERS}
    return {"strategies": strategies, "helpers": helpers}


def read() -> dict[str, Rows]:
    """Return the file's content, or no rows if there is no file."""
    if not PATH.exists():
        return {"strategies": {}, "helpers": {}}
    content: dict[str, Rows] = json.loads(PATH.read_text(encoding="utf-8"))
    return content


def text_of(rows: dict[str, Rows]) -> str:
    """Return the file's text, with one line per row."""
    parts = [
        f'"{part}": {{\n'
        + ",\n".join(f'"{name}": {json.dumps(row)}' for name, row in sorted(rows[part].items()))
        + "\n}"
        for part in ("strategies", "helpers")
    ]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def same(old: list[Any], new: list[Any]) -> bool:
    """Return whether two runs or results are equal, real numbers within the tolerance."""
    return len(old) == len(new) and all(
        math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=LEAST)
        if isinstance(a, float) and isinstance(b, float)
        else a == b
        for a, b in zip(old, new, strict=True)
    )


def changed_runs(kept: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the names of the runs that differ between two rows, among those that both rows have."""
    return [name for name, new in now["runs"].items() if name in kept["runs"] and not same(kept["runs"][name], new)]


def unraised(kept: dict[str, Rows], now: dict[str, Rows]) -> dict[str, str]:
    """Return a message for each row whose choices changed without a higher revision."""
    before, rows, wrong = kept["strategies"], now["strategies"], {}
    stays = {name for name in before.keys() & rows.keys() if rows[name]["revision"] <= before[name]["revision"]}
    for name in sorted(stays):
        if changed := changed_runs(before[name], rows[name]):
            wrong[name] = (
                f"'{name}' behaves differently, but its revision is still {rows[name]['revision']}: if intended, "
                f"increase `revision` in sparsebench_plugins/{name}.py, then {WRITE} (changed: {'; '.join(changed)})"
            )
    for helper, row in now["helpers"].items():
        users = [name for name in row["used_by"] if name in stays]
        if helper in kept["helpers"] and not same(kept["helpers"][helper]["result"], row["result"]) and users:
            wrong[helper] = (
                f"sparsebench.{helper} gives other results, and is used by {', '.join(users)}: if intended, "
                f"increase the `revision` of each, then {WRITE}"
            )
    return wrong


def stale(kept: dict[str, Rows], now: dict[str, Rows]) -> dict[str, str]:
    """Return a message for each row of the file that is out of date."""
    wrong = {}
    for part, rows in now.items():
        for name in sorted(kept[part].keys() | rows.keys()):
            old, new = kept[part].get(name), rows.get(name)
            if old is None or new is None or not alike(old, new):
                wrong[name] = f"the row of {name} is out of date: {WRITE}"
    return wrong


def alike(old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Return whether two rows are equal, real numbers within the tolerance."""
    if "runs" not in new:
        return bool(same(old["result"], new["result"]) and old["used_by"] == new["used_by"])
    return bool(
        old["revision"] == new["revision"] and old["runs"].keys() == new["runs"].keys() and not changed_runs(old, new)
    )


def row_of(cls: type[Strategy], draw: int) -> dict[str, Any]:
    """Return the row of a strategy, with the first draw from `draw` on that has no close choices."""
    for candidate in range(draw, draw + 20):
        row = {"revision": cls.revision, "draw": candidate, "runs": fingerprint(cls, candidate)}
        if not any(changed_runs(row, {"runs": fingerprint(cls, candidate, shake)}) for shake in range(1, SHAKES + 1)):
            return row
    raise SystemExit(f"'{cls.name}' has close choices in each of 20 draws: they change if weights change by {CLOSE:g}")


def main(unreleased: bool) -> None:
    """Write the file."""
    kept = read()
    now = rows_now({name: row["draw"] for name, row in kept["strategies"].items()})
    if (wrong := unraised(kept, now)) and not unreleased:
        sys.exit("\n".join([*wrong.values(), "nothing was written; if no such result is published: --unreleased"]))
    classes, outdated = shipped(), stale(kept, now)
    for part, rows in now.items():
        for name, row in rows.items():
            if name not in outdated:
                rows[name] = kept[part][name]  # keeps the digits that differ within the tolerance
            elif part == "strategies":
                rows[name] = row_of(classes[name], row["draw"])
    PATH.write_text(text_of(now), encoding="utf-8")
    print("\n".join(outdated) or "nothing changed")


if __name__ == "__main__":
    main(unreleased="--unreleased" in sys.argv[1:])
