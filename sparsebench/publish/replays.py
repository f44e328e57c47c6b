"""Kept replays: which cells of a submission somebody has run again, where, and with which results.

FOLDER/replays/<date>-<hash>.json is a replay of the submission in FOLDER. It counts if it fits the submission, which
its content alone says: it is of these records, its cells are those that its seed draws, its results follow from their
outcomes, and they agree by the same rules as in a live replay. It does not count if an author of the submission is said
to have made it. A file cannot prove who made it and that the cells were run: reviewers of a pull request see to that.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError, field_validator

from sparsebench import __version__, files
from sparsebench.errors import UserError, few, plain, reason_of
from sparsebench.publish.about import key_of, text_of
from sparsebench.publish.agreement import compare, draw
from sparsebench.publish.submission import Manifest, Verdict, differences, read_records
from sparsebench.records import manifests
from sparsebench.records.record import Record, Value, canonical, digest

FOLDER = "replays"
MOST_FILES, MOST_BYTES = 100, 100_000_000
COPIED = "is the reported result itself: both started at the same time"


class Replay(Value):
    """A replay of a submission.

    Attributes:
        by: who replayed.
        date: day of the replay, UTC.
        sparsebench: the version that replayed.
        records: SHA-256 of the submission's records.
        seed, number: the draw, see `agreement.draw`.
        machines: machines with libraries, by hash.
        cells: the records of the drawn cells, in the order of the draw.
    """

    schema_version: Literal[1] = 1
    by: str = Field(min_length=1)
    date: str = Field(pattern=r"^\d{4}-\d{2}-\d{2}$")
    sparsebench: str = Field(pattern=r"^[0-9A-Za-z.+-]{1,40}$")
    records: str
    seed: int
    number: int | None
    machines: dict[str, dict[str, str]]
    cells: tuple[Record, ...] = Field(min_length=1)

    @field_validator("by")
    @classmethod
    def _by(cls, name: str) -> str:
        return _name_of(name)

    @classmethod
    def of(
        cls,
        cells: Sequence[Record],
        *,
        by: str,
        records: str,
        seed: int,
        number: int | None,
        machines: Mapping[str, Mapping[str, str]],
    ) -> Replay:
        """Return the replay of cells that were run today by this version."""
        used = {record.environment for record in cells}
        return cls(
            by=by,
            date=datetime.datetime.now(datetime.UTC).date().isoformat(),
            sparsebench=__version__,
            records=records,
            seed=seed,
            number=number,
            machines={name: dict(machine) for name, machine in machines.items() if name in used},
            cells=tuple(cells),
        )


def write(folder: Path, replay: Replay) -> Path:
    """Write a replay beside a submission, and return its file."""
    content = replay.model_dump(mode="json")
    path = folder / FOLDER / f"{replay.date}-{digest(content)}.json"
    files.write_whole(path, (canonical(content) + "\n").encode())
    return path


def check_name(name: str, manifest: Manifest) -> str:
    """Return the name of who replays. Raise UserError if it is not plain text, or an author of the submission."""
    try:
        name = _name_of(name)
    except UserError as error:
        raise UserError(f"--by: {error}") from error
    if _is_author(name, manifest):
        raise UserError(
            "an author's own replay is not kept", got=f"--by '{name}'", next_step="leave --by out, or let others replay"
        )
    return name


def _name_of(text: str) -> str:
    """Return a name without space around it. Raise UserError if it is not plain text, or has no letter."""
    name = text_of("authors", text)
    if not key_of(name):
        raise UserError("name", got="a name without letters", allowed="the name of a person or group")
    return name


def _is_author(name: str, manifest: Manifest) -> bool:
    return key_of(name) in map(key_of, manifest.about.authors)


def settle(folder: Path, manifest: Manifest, verdict: Verdict) -> None:
    """Give the badge `replayed` to a complete and consistent submission that has replays, if all of them fit."""
    paths = sorted((folder / FOLDER).glob("*")) if (folder / FOLDER).exists() else []
    if not paths:
        return
    if len(paths) > MOST_FILES:
        verdict.unfit = [f"{FOLDER} has {len(paths)} files, and at most {MOST_FILES} are read"]
    else:
        reported = [record for record in read_records(folder) if record.status == "ok"]
        descriptions = manifests.strategies(folder)
        adaptive = {name for (name, _), strategy in descriptions.items() if strategy.adaptive}
        for path in paths:
            place = f"{FOLDER}/{plain(path.name, 60)}"
            try:
                replay = _read(path)
                wrong = list(_misfits(replay, manifest, reported, adaptive))
            except (OSError, ValueError, ArithmeticError, UserError, ValidationError) as error:
                wrong = [reason_of(error)]
            if wrong:
                verdict.unfit.append(f"{place}: {few(wrong, 1)}")
                continue
            verdict.replays.append(f"{replay.by}, {replay.date}")
            count = len(replay.cells)
            drawn = "all cells" if replay.number is None else f"{count} cell{'s' if count > 1 else ''}"
            verdict.notes.append(
                f"replayed by {replay.by} on {replay.date}: {drawn}, with --replay-seed {replay.seed}, "
                f"sparsebench {replay.sparsebench}"
            )
    verdict.settle(verdict.unfit, "replayed")


def _read(path: Path) -> Replay:
    """Return the replay in a file."""
    if path.suffix != ".json":
        raise UserError("it is no file NAME.json")
    return Replay.model_validate_json(files.own_content(path, MOST_BYTES))


def _misfits(replay: Replay, manifest: Manifest, reported: Sequence[Record], adaptive: set[str]) -> Iterator[str]:
    """Yield why a replay does not fit a submission."""
    if replay.records != manifest.records:
        yield "it is of other records"
        return
    if _is_author(replay.by, manifest):
        yield "an author of the submission has made it"
    if replay.date < manifest.date:
        yield "it is older than the submission"
    drawn = draw(reported, manifest.strategy, replay.number, replay.seed)
    if [record.cell_id for record in drawn] != [record.cell_id for record in replay.cells]:
        yield "its cells are not those that its seed draws"
        return
    if any(digest(machine) != name for name, machine in replay.machines.items()):
        yield "a machine does not have the hash of its description"
    pairs = list(zip(drawn, replay.cells, strict=True))
    for before, after in pairs:
        known = after.environment in replay.machines
        yield from (f"cell {after.cell_id} {text}" for text in _misfits_of_cell(before, after, known))
    yield from compare(pairs, adaptive)[0]


def _misfits_of_cell(before: Record, after: Record, known: bool) -> Iterator[str]:
    """Yield why a replayed cell does not fit the reported one; `known` is whether its machine is described."""
    if before.cell != after.cell or before.cell.id != after.cell_id:
        yield "is another cell"
    if before.origin.identity != after.origin.identity:
        yield "is of another revision of the strategy"
    if not known:
        yield "has an unknown machine"
    if after.started <= before.started:
        yield COPIED if after.started == before.started else "started before the reported one"
    yield from differences(after)
