"""Locating the pictures, trained networks and weight files of cells, and the names that cells have for them."""

from __future__ import annotations

import glob
import logging
import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import resources
from pathlib import Path

from sparsebench.errors import UserError, as_utf8, few
from sparsebench.files import content_hash
from sparsebench.models.base import TRANSFORMERS
from sparsebench.plan.jobs import Job
from sparsebench.plan.request import Files, Request
from sparsebench.plugin.registry import Registry
from sparsebench.records import store
from sparsebench.records.record import RecordSummary
from sparsebench.tasks import folder
from sparsebench.tasks.base import Task
from sparsebench.tasks.sources import Pixels
from sparsebench.tasks.sources.composites import FOLDER, LOCATED, locate_official
from sparsebench.tasks.sources.files import fingerprint_of
from sparsebench.tasks.sources.known import OFFICIAL
from sparsebench.tasks.sources.labels import FILE as CLASSES

log = logging.getLogger(__name__)

OF_TRANSFORMERS, OF_TEXTS = "hf-", "text-"
"""The beginning of the names of folders of the transformers library and of features of texts, before their hash."""
SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".pth.tar")
CONVERT = (
    "if you trust the file, convert it once: safetensors.torch.save_file(torch.load(FILE, weights_only=True), "
    "'weights.safetensors')"
)

NOT_CHECKED = (
    "names of the transformers library: whether timm's network has the same outputs is not checked; --model hf:FOLDER "
    "checks it"
)
Names = Mapping[str, str]
"""The parameters of a task that name pictures, with the names."""


@dataclass(frozen=True)
class Located:
    """The user's files on this machine, with their names in cells.

    Attributes:
        files: the files as the user gave them.
        pictures: for each task, the names of its pictures: one mapping for each set of images.
        weights: the names of the weight files.
        places: the places of all these files by name. Sets that come with a library have none.
        text_features: the name of the file with features of texts, or "".
    """

    files: Files = field(default_factory=Files)
    pictures: Mapping[str, Sequence[Names]] = field(default_factory=dict)
    weights: tuple[str, ...] = ()
    places: Mapping[str, Path] = field(default_factory=dict)
    text_features: str = ""

    def sets(self, task: type[Task]) -> Sequence[Names]:
        """Return the names of a task's pictures, one mapping for each set of images."""
        return self.pictures.get(task.name, [{}])


def locate(files: Files, tasks: Iterable[type[Task]]) -> Located:
    """Locate the user's files for tasks. Each file is read once only. Files that no task takes are not read.

    Raises:
        UserError: a file is missing or damaged, or there are several sets of pictures although a task trains.
    """
    if files.weights_key and not files.weights:
        raise UserError("--weights-key needs a weight file", next_step="give --weights, or leave --weights-key out")
    pictures: dict[str, Sequence[Names]] = {}
    finder = _PictureFinder(files)
    takes_images = False
    for task in tasks:
        pictures[task.name] = finder.sets_of(task)
        takes_images = takes_images or task.inputs == "images"
    weights: dict[str, Path] = {}
    if files.weights and takes_images:
        weights = locate_weights(files.weights, files.weights_key or "")
    return Located(files, pictures, tuple(weights), finder.places | weights)


def locate_model(request: Request, located: Located) -> tuple[Request, Located]:
    """Return a request for hf:FOLDER with the name that the folder has in cells, and its place among the files.

    So is a file with features of texts. Other requests are returned as they are.

    Raises:
        UserError: there is no such folder, or features of texts are for another model.
    """
    texts = located.files.text_features
    if request.model is None or not request.names_folder:
        if texts is not None:
            raise UserError("--text-features is for models of transformers", next_step="give --model hf:FOLDER")
        return request, located
    from sparsebench.models.transformers_models import fingerprint, folder_of

    folder = folder_of(request.model)
    name = f"{OF_TRANSFORMERS}{fingerprint(folder)}"
    if request.pretrained or located.weights:
        raise UserError(
            f"'{request.model}' has its weights in its folder",
            got="--pretrained" if request.pretrained else "--weights",
            next_step="leave it out",
        )
    places = {**located.places, name: folder}
    text_name = ""
    if texts is not None:
        texts = texts.expanduser()
        if not texts.is_file():
            raise UserError(f"--text-features: there is no file {texts}")
        text_name = f"{OF_TEXTS}{fingerprint_of(texts)}"
        places[text_name] = texts
    request = replace(request, model=f"{TRANSFORMERS}{name}")
    return request, replace(located, places=places, text_features=text_name)


def places_of_transformers(files: Files) -> dict[str, Path]:
    """Return the folders of the transformers library among --weights, and features of texts, by their names in cells.

    A run takes these folders with --model. A replay knows the model of each cell, and gets all weights in one way.
    """
    from sparsebench.models.transformers_models import fingerprint, is_of_transformers

    folders = [path.expanduser() for path in files.weights if is_of_transformers(path.expanduser())]
    places = {f"{OF_TRANSFORMERS}{fingerprint(folder)}": folder for folder in folders}
    if files.text_features is not None:
        texts = files.text_features.expanduser()
        digest = fingerprint_of(texts)
        places |= {f"{OF_TEXTS}{digest}": texts, f"{CLASSES}-{digest}": texts}  # the file names the classes too
    return places


class _PictureFinder:
    """Finds the user's pictures, each once only.

    Attributes:
        places: the places of the pictures by their names in cells.
    """

    def __init__(self, files: Files):
        self.files = files
        self.places: dict[str, Path] = {}
        self._names: dict[tuple[str, str, bool], str] = {}

    def sets_of(self, task: type[Task]) -> list[Names]:
        """Return the names of a task's pictures; see `Located.sets`."""
        takes = [key for key in LOCATED if key in task.model_fields]
        sets = self.files.images if "images" in takes else ()
        if len(sets) > 1 and task.trains:
            raise UserError(
                "--images: tasks that train take one set of pictures",
                got=f"{len(sets)} sets",
                next_step="run each set separately, or choose a task that only tests with --task",
            )
        others: dict[str, str] = {}
        for key in takes:
            spec = getattr(self.files, key)
            if key != "images" and spec is not None:
                others[key] = self._name(key, spec, only_tested=False)
        images = dict.fromkeys(self._name("images", spec, only_tested=not task.trains) for spec in sets)
        return [{"images": name, **others} for name in images] or [others]

    def _name(self, parameter: str, spec: str, only_tested: bool) -> str:
        """Return the name of pictures in cells.

        A folder for a task that only tests needs no training pictures, and its name does not depend on them.
        """
        key = parameter, spec, only_tested
        if key not in self._names:
            files = self.files
            place: Path | None
            if only_tested:
                name, place = folder.locate(spec, files.skip_bad)
            else:
                name, place = LOCATED[parameter](spec, files.data_root, files.download, files.skip_bad)
            self._names[key] = name
            if place is not None:
                self.places[name] = place
        return self._names[key]


def official_places(files: Files, jobs: Sequence[Job], places: Mapping[str, Path]) -> dict[str, Path]:
    """Return the places of the official sets that jobs need and that are not among `places`.

    Raises:
        UserError: an official set is missing.
    """
    names = {job.cell.task.params.get(key) for job in jobs for key in LOCATED}
    official: dict[str, Path] = {}
    for name in sorted((OFFICIAL & names) - places.keys()):
        _, place = locate_official(name, files.data_root, files.download)
        if place is not None:
            official[name] = place
    return official


def pictures_of(jobs: Sequence[Job], registry: Registry, places: Mapping[str, Path]) -> list[Pixels]:
    """Return the user's pictures that jobs need and that are not decoded yet.

    Cells whose pictures cannot be determined are left out: their records will have the error.
    """
    if not places:  # the user gives no files
        return []
    cells = {job.cell.draw: job.cell for job in jobs}  # one of the cells that draw the same data
    pictures: dict[str, Pixels] = {}
    for cell in cells.values():
        with suppress(UserError):
            task = registry.resolve(cell).task
            pictures |= {pixels.name: pixels for pixels in task.pictures(cell.n_train, cell.repetition, places)}
    return [pixels for pixels in pictures.values() if pixels.read() is None]


@dataclass(frozen=True)
class Networks:
    """The places of trained weights: the run's folder, the folder of --networks, and the package.

    Attributes:
        out: the run's folder.
        summaries: the summaries of its records by cell id.
        folder: the folder of --networks, or None.
    """

    out: Path
    summaries: Mapping[str, RecordSummary]
    folder: Path | None = None

    def check(self, trainings: Collection[str]) -> None:
        """Raise UserError if --networks is given but has none of these trainings, e.g. if they have another version."""
        if self.folder is None or not trainings or self._other_networks[self.folder].keys() & trainings:
            return
        raise UserError(
            f"--networks: {self.folder} has none of the networks of the suite, such as {min(trainings)}",
            got=f"{len(self._other_networks[self.folder])} other cells",
            next_step="train them there with this version and the same pictures, or leave --networks out",
        )

    def has(self, cell_id: str) -> bool:
        """Return whether the weights of a cell exist.

        Raises:
            UserError: they are not in the run's folder, and differ from the hash in their record.
        """
        return _has_weights(self.out, cell_id, self.summaries) or self.elsewhere(cell_id) is not None

    def elsewhere(self, cell_id: str) -> Path | None:
        """Return the file of a cell's weights outside the run's folder, or None; see `has`."""
        for root, summaries in self._other_networks.items():
            path = store.weights_path(root, cell_id)
            if cell_id not in summaries or not path.exists():
                continue
            if not _has_weights(root, cell_id, summaries):
                raise UserError(
                    f"{path} is not the trained network: its content differs from the hash in its record",
                    next_step="fetch the folder again, or reinstall sparsebench if the folder is part of it",
                )
            return path
        return None

    def places(self, cells: Collection[str]) -> dict[str, Path]:
        """Return the weight files outside the run's folder, by cell id. Cells with weights in it are left out."""
        paths = {c: self.elsewhere(c) for c in sorted(cells) if not _has_weights(self.out, c, self.summaries)}
        return {c: path for c, path in paths.items() if path is not None}

    @cached_property
    def _other_networks(self) -> dict[Path, Mapping[str, RecordSummary]]:
        suites = Path(str(resources.files(__package__))) / "suites"
        folders = sorted(path for path in suites.iterdir() if path.is_dir())
        if self.folder is not None:
            folders.insert(0, self.folder)
        return {folder: store.summaries(folder) for folder in folders}


def _has_weights(out: Path, cell_id: str, summaries: Mapping[str, RecordSummary]) -> bool:
    """Return whether a folder has a cell's weights with the hash in the cell's record."""
    expected = summaries[cell_id].notes.get("weights") if cell_id in summaries else None
    return expected is not None and expected == content_hash(store.weights_path(out, cell_id))


def locate_weights(specs: Sequence[Path], key: str = "") -> dict[str, Path]:
    """Return the user's weight files by their names in cells; see `files_of`.

    Files with the same weights are one network, with the name of the first. Conversions and choices are logged.

    Args:
        specs: files, folders and patterns.
        key: the key of the state dict in each file, see `timm_models.read_weights`.

    Raises:
        UserError: a file is missing or damaged, or has no weights.
    """
    from sparsebench.models.timm_models import read_weights
    from sparsebench.models.transformers_models import has_names_of_transformers
    from sparsebench.training.fit import state_digest

    located: dict[str, Path] = {}
    firsts: dict[str, Path] = {}
    notes: defaultdict[str, list[Path]] = defaultdict(list)
    paths = files_of(specs)
    for path in paths:
        if not path.name.lower().endswith(SUFFIXES):
            raise UserError(
                "--weights reads safetensors files, and torch.save checkpoints that contain only weights",
                got=str(path),
                allowed=", ".join(SUFFIXES),
                next_step=CONVERT,
            )
        weights = read_weights(path, key)
        name = f"weights-{fingerprint_of(path)}"
        # Files with the same weights may differ in format. A digest takes time, and a single file equals no other.
        digest = state_digest(weights.plain()) if len(paths) > 1 else name
        if digest in firsts:
            notes[f"the same weights as {firsts[digest]}: they are one network"].append(path)
            continue
        located[name] = path
        firsts[digest] = path
        if weights.others and not key:
            others = ", ".join(weights.others)
            notes[f"'{weights.key}' is used, and not {others}; --weights-key chooses another"].append(path)
        for kind in sorted({str(value.dtype) for value in weights.state.values() if value.is_floating_point()}):
            if kind != "torch.float32":
                notes[f"{kind.removeprefix('torch.')} becomes float32"].append(path)
        if has_names_of_transformers(weights.state):
            notes[NOT_CHECKED].append(path)
    for line, noted in notes.items():
        log.warning("--weights %s: %s", few([str(path) for path in noted]), line)
    return located


def files_of(specs: Sequence[Path]) -> list[Path]:
    """Return the given files, the weight files in given folders, and the weight files that patterns match.

    Other files in a folder or matched by a pattern are left out, which is logged.

    Raises:
        UserError: a folder cannot be read, or a folder or pattern has no weight file.
    """
    files = []
    for path in (spec.expanduser() for spec in specs):
        try:
            is_folder = path.is_dir()
            is_pattern = glob.has_magic(str(path)) and not os.path.lexists(path)  # names of files may have brackets
            if is_folder:
                paths = sorted(path.iterdir())
            elif is_pattern:
                paths = sorted(map(Path, glob.glob(str(path), recursive=True)))
            else:  # a file; if it is missing, reading it raises the error
                files.append(path)
                continue
            chosen = [file for file in paths if file.name.lower().endswith(SUFFIXES) and file.is_file()]
        except OSError as error:
            raise UserError(f"--weights: {path} cannot be read: {error.strerror or error}") from error
        others = [file.name for file in paths if file not in chosen and not file.name.startswith(".")]
        if not chosen:
            raise UserError(
                f"--weights: {path} {'holds' if is_folder else 'matches'} no weight file",
                got=few(others) or "nothing",
                allowed=", ".join(SUFFIXES),
            )
        if others:
            log.warning("--weights %s: %d files are used; left out: %s", path, len(chosen), few(others))
        files += chosen
    return files


def file_names(located: Located) -> dict[str, str]:
    """Return readable names of weight files and of folders of pictures with classes, by their names in cells.

    If weight files have equal names, the names of all are extended by as many parent folders as make them different.
    """
    parts = {name: located.places[name].absolute().parts for name in located.weights}
    longest = max(map(len, parts.values()), default=0)

    def are_different(length: int) -> bool:
        """Return whether the last parts of the paths differ, `length` parts of each."""
        return len({part[-length:] for part in parts.values()}) == len(parts)

    length = 1
    while length < longest and not are_different(length):
        length += 1
    names = {name: "/".join(part[-length:]) for name, part in parts.items()}
    for name, path in located.places.items():
        if name.partition("-")[0] == FOLDER:
            path = path.absolute()
            names[name] = path.parent.name if path.name in folder.SPLITS else path.name
        elif name.startswith(OF_TRANSFORMERS):
            names[name] = path.absolute().name
    return {name: as_utf8(text) for name, text in names.items()}
