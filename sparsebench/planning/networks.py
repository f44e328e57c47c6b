"""Trained networks that other cells begin with: which training a suite means, and in which folder its weights lie.

A folder of networks is the folder of a run that kept them: weights by the hash of their cell, and the records that say
how each was trained and what its file's content is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path

from sparsebench.errors import UserError
from sparsebench.planning.suite import SuiteTask, load
from sparsebench.records import files, store
from sparsebench.records.record import Head


def shipped_folder() -> Path:
    """Return the folder of the networks that come with sparsebench."""
    return Path(str(resources.files("sparsebench"))) / "networks"


def training_entry(entry: SuiteTask) -> SuiteTask:
    """Return the task of a suite that says how the networks of another's task are trained.

    Raises:
        UserError: there is none of that name, or it is not one training.
    """
    suite = load(entry.network)
    same = [one for one in suite.task if one.name == entry.name]
    if len(same) != 1:
        raise UserError(
            f"suite '{entry.network}' must say once how networks are trained on task '{entry.name}'",
            got=f"{len(same)} tasks of that name", allowed=[one.name for one in suite.task],
        )  # fmt: skip
    (training,) = same
    if training.network or training.sweep or training.model_sweep or len(training.n_train) > 1:
        raise UserError(
            f"task '{entry.name}' of suite '{entry.network}' is to be one training",
            got="several, or one that begins with other networks",
            next_step="give one value a parameter, and one n_train",
        )
    return training


@dataclass(frozen=True)
class Networks:
    """Where the trained weights of cells lie: in a run's own folder, in one that was given, or with sparsebench.

    Attributes:
        out: the run's folder; `known` what its store has of every cell.
        given: another folder, or None.
    """

    out: Path
    known: Mapping[str, Head]
    given: Path | None = None

    def __post_init__(self) -> None:
        if self.given is not None and not (self.given / "weights").is_dir():
            raise UserError(
                f"--networks: {self.given} holds no trained networks", allowed="the folder of a run that kept them",
                next_step="sparsebench run --suite networks --out DIR makes one",
            )  # fmt: skip

    def check(self, trainings: Collection[str]) -> None:
        """Raise UserError if a folder was given that has none of these networks, such as those of another version."""
        known = {} if self.given is None else self._other_networks[self.given]
        if self.given is None or not trainings or known.keys() & trainings:
            return
        raise UserError(
            f"--networks: {self.given} has none of the networks that the suite begins with",
            got=f"{len(known)} of other trainings", allowed=f"{min(trainings)} and the like",
            next_step="train them with this version and the same pictures, or leave --networks out",
        )  # fmt: skip

    def has(self, cell_id: str) -> bool:
        """Say whether there are weights of a cell.

        Raises:
            UserError: they are in a folder that is not the run's own, and are not what their record says.
        """
        return store.has_weights(self.out, cell_id, self.known) or self.elsewhere(cell_id) is not None

    def elsewhere(self, cell_id: str) -> Path | None:
        """Return the file of a cell's weights that is not in the run's own folder; see `has`."""
        for folder, known in self._other_networks.items():
            path = store.weights_path(folder, cell_id)
            if cell_id not in known or not path.exists():
                continue
            if not store.has_weights(folder, cell_id, known):
                raise UserError(
                    f"{path} is not the network that was trained: its content is another than its record says",
                    got=f"SHA-256 {files.content_hash(path)[:12] or 'of nothing'}...",
                    allowed=f"{known[cell_id].notes.get('weights', 'none')[:12]}...",
                    next_step="fetch the folder anew, or reinstall sparsebench if it is its own",
                )
            return path
        return None

    def places(self, cells: Collection[str]) -> dict[str, Path]:
        """Return by cell the files of weights that are not in the run's own folder."""
        paths = {c: self.elsewhere(c) for c in sorted(cells) if not store.has_weights(self.out, c, self.known)}
        return {c: path for c, path in paths.items() if path is not None}

    @cached_property
    def _other_networks(self) -> dict[Path, Mapping[str, Head]]:
        folders = [
            folder for folder in (self.given, shipped_folder()) if folder is not None and (folder / "weights").is_dir()
        ]
        return {folder: store.heads(folder) for folder in folders}
