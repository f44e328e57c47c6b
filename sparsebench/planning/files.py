"""Where the pictures and trained weights of a request lie, and the names that cells have for them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from sparsebench import sources
from sparsebench.errors import UserError
from sparsebench.planning import weights
from sparsebench.planning.expand import ImageUse
from sparsebench.planning.job import Job
from sparsebench.planning.request import Files
from sparsebench.plugin.registry import Registry
from sparsebench.sources.known import OFFICIAL
from sparsebench.spec import fill
from sparsebench.tasks import folder
from sparsebench.text import plain

log = logging.getLogger(__name__)

LOCATED = {
    "images": sources.locate_images,
    "backgrounds": sources.locate_backgrounds,
    "pretrain_images": sources.locate_images,
}
"""The parameters of tasks that name pictures, and what finds those."""


def locate(files: Files, uses: Sequence[ImageUse] = ("images",)) -> tuple[dict[str, Any], dict[str, Path]]:
    """Return the names for the cells by field of the request, and the places by name.

    Files are read the first time only. A folder that is only tested on needs no part to train on, and that part
    is not in its name: so the images of a request have two names if tasks of both kinds are in it.

    Raises:
        UserError: there are no such pictures or weights, or they are damaged.
    """
    specs: dict[str, str | None] = dict.fromkeys(uses, files.images)
    specs |= {"backgrounds": files.backgrounds, "pretrain_images": files.pretrain_images}
    places = {use: _once(files, use, spec) for use, spec in specs.items() if spec is not None}
    if files.weights_key and not files.weights:
        raise UserError("--weights-key is of a file of weights", next_step="give --weights, or leave it out")
    if files.weights and not files.networks_located:
        files.networks_located.update(weights.locate_all(files.weights, files.weights_key or ""))
    names: dict[str, Any] = {parameter: name for parameter, (name, _) in places.items()}
    if files.weights:
        names |= {"weights": tuple(files.networks_located), "weights_key": files.weights_key or ""}
    return names, {name: place for name, place in places.values() if place is not None} | files.networks_located


def _once(files: Files, use: str, spec: str) -> tuple[str, Path | None]:
    """Return name and place of pictures, looked at the first time only."""
    if use not in files.located:
        bad = sources.Bad(skip=files.skip_bad, look=not files.dry)
        if use == "tested_images":
            files.located[use] = folder.locate(spec, bad)
        else:
            files.located[use] = LOCATED[use](spec, files.data_root, files.download and not files.dry, bad)
    return files.located[use]


def strays_of(files: Files) -> dict[str, str]:
    """Return what is left out of the folders of pictures, in one line by the name of the pictures; warn of it."""
    said = {}
    for use, (name, place) in files.located.items():
        if place is None:
            continue
        line = folder.strays_of(name, place) if use == "tested_images" else sources.strays_of(name, place)
        if line:
            log.warning("%s: left out: %s", plain(place, None), line)
            said[name] = line
    return said


def places_of(files: Files, jobs: Sequence[Job], named: Mapping[str, Path]) -> dict[str, Path]:
    """Return where all files of the jobs lie: those that the user named, and official sets that suites name.

    Raises:
        UserError: an official set is not there.
    """
    places = dict(named)
    named_in = ((key, job.cell.task.params.get(key)) for job in jobs for key in LOCATED)
    for parameter, name in sorted({(key, name) for key, name in named_in if isinstance(name, str)}):
        if name in OFFICIAL and name not in places:
            place = LOCATED[parameter](name, files.data_root, files.download and not files.dry)[1]
            assert place is not None
            places[name] = place
    return places


def pictures_of(jobs: Sequence[Job], registry: Registry, places: Mapping[str, Path]) -> list[sources.Pixels]:
    """Return what jobs need of users' pictures and is not decoded yet.

    Of a cell whose data cannot be drawn there is nothing: its record will say why not.
    """
    cells = {job.cell.draw: job.cell for job in jobs} if places else {}
    wanted: dict[str, sources.Pixels] = {}
    for cell in cells.values():
        with suppress(UserError):
            task = fill(registry.task(cell.task.name), cell.task.params, f"task '{cell.task.name}'")
            wanted |= {one.name: one for one in task.pictures(cell.n_train, cell.repetition, places)}
    return [one for one in wanted.values() if one.kept() is None]


def decode(jobs: Sequence[Job], registry: Registry, places: Mapping[str, Path]) -> None:
    """Decode what jobs need of users' pictures, so that no cell has to, nor has to look through folders again.

    Raises:
        BadPicturesError: all that cannot be read.
        UserError: there is no room for what they become, or a picture is not what it was.
    """
    for name in places if jobs else ():
        sources.keep_contents(name)
    if wanted := pictures_of(jobs, registry, places):
        sources.decode(wanted)
