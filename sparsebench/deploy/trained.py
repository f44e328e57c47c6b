"""Networks that are trained to be looked at: which cells of a request those are, and how they are had with weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from safetensors.torch import load_file

from sparsebench.deploy.pictures import check_pictures
from sparsebench.errors import UserError
from sparsebench.models.actor import LEARNED
from sparsebench.plan import plan as planner
from sparsebench.plan.job import Job, Setting
from sparsebench.plan.locate import Networks, places_of
from sparsebench.plan.plan import Plan
from sparsebench.plan.request import Files, How, Request
from sparsebench.plugin.registry import Registry
from sparsebench.records.cell import canonical
from sparsebench.runner import devices
from sparsebench.runner import run as runs
from sparsebench.runner.devices import first_of
from sparsebench.runner.prepare import Context, Prepared, fit_on, prepare, wants_images
from sparsebench.tasks.sources.cache import telling


@dataclass(frozen=True)
class Trainer:
    """Trains what a request lacks, and keeps its weights.

    Attributes:
        files: where its pictures and first weights come from.
        how: how it is trained.
        out: the run's folder.
        callbacks: who is told.
    """

    files: Files
    how: How
    out: Path
    callbacks: runs.Callbacks = runs.SILENT

    def plan(self, request: Request, registry: Registry, pictures: bool = False) -> Plan:
        """Return what is to be looked at and what of it is still to be trained, see `narrow`; nothing is written."""
        plan = narrow(runs.plan_of(request, self.files, self.how, registry, self.out), self.files, self.out)
        if pictures:
            check_pictures(plan, registry)
        return plan

    def train(self, request: Request, registry: Registry, pictures: bool = False) -> tuple[Plan, Context]:
        """Train what is to do; return what is to be looked at, and where its weights are.

        Args:
            request: of one task with one model.
            registry: from which strategies come.
            pictures: whether its task must be one of pictures.

        Raises:
            UserError: anything unknown, out of range, missing or unwritable; before anything is trained.
        """
        with telling(self.callbacks.on_pictures):
            plan = self.plan(request, registry, pictures)
            runs.carry_out(plan, self.how, registry, self.out, self.callbacks)
        # What a cluster has trained is looked at here.
        device = devices.resolve_device("auto" if self.how.dask else self.how.device)
        return plan, Context(Setting(out=self.out, device=first_of(device), locations=dict(plan.locations)))


def narrow(plan: Plan, files: Files, out: Path) -> Plan:
    """Return the plan of the largest number of training samples alone, in which the weights of every cell are kept.

    What has a result but no weights is trained again. Pictures are located for all of it: what is trained is looked at.

    Raises:
        UserError: pictures are not there, or there are several tasks or models.
    """
    wanted = [job for job in plan.jobs if job.asked]
    settings = {canonical([job.cell.task.model_dump(), job.cell.model.model_dump()]) for job in wanted}
    if len(settings) > 1:
        raise UserError(
            "this takes one task with one model", got=f"{len(settings)} of them",
            next_step="name their parameters with --task and --model, and give one file of weights",
        )  # fmt: skip
    largest, known = max(job.cell.n_train for job in wanted), plan.known
    chosen = {job.cell.id: job for job in wanted if job.cell.n_train == largest}
    starts = planner.needed_by(chosen, plan.jobs, lambda _: True)
    jobs = [
        job.model_copy(update={"keep_weights": not job.network, "asked": job.cell.id in chosen})
        for job in plan.jobs
        if job.cell.id in chosen or job.cell.id in starts
    ]
    planned, weights = {job.cell.id for job in plan.todo}, {job.cell.id: job.weights for job in jobs}
    networks = Networks(out, known, files.networks)

    def lacks(cell_id: str) -> bool:
        return cell_id in planned or not networks.has(weights.get(cell_id, cell_id))

    again = {
        cell_id
        for cell_id in chosen
        if cell_id in planned or (cell_id in known and known[cell_id].status == "ok" and lacks(cell_id))
    }
    again |= planner.needed_by(again, jobs, lacks)
    todo = [job for job in jobs if job.cell.id in again]
    places = dict(plan.locations) | places_of(files, jobs) | networks.places({job.weights for job in jobs})
    return replace(plan, jobs=jobs, todo=todo, locations=places, request=None)


def trained_cell(job: Job, registry: Registry, context: Context) -> Prepared:
    """Return the cell with its trained weights, whatever it started from, and with what its strategy learned."""
    bare = job.model_copy(update={"cell": job.cell.model_copy(update={"init": None}), "network": ""})
    prepared = prepare(bare, registry, context)
    state, module, actor = load_file(context.setting.weights(job.weights)), prepared.network.module, prepared.actor
    fits = actor is not None and wants_images(actor) and not any(name.startswith(f"{LEARNED}.") for name in state)
    module.load_state_dict(state, strict=not fits)
    module.eval()
    if fits:
        assert actor is not None
        fit_on(prepared, actor, context.fitted)
    return prepared
