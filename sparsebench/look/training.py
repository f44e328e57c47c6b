"""Networks that are trained to be looked at: which cells of a request those are, and how they are had with weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors.torch import load_file

from sparsebench.cells.prepare import Context, Prepared, prepare
from sparsebench.engine import devices
from sparsebench.engine import run as runs
from sparsebench.engine.limits import Limits
from sparsebench.engine.slots import first_of
from sparsebench.errors import UserError
from sparsebench.planning import planner
from sparsebench.planning.contenders import Request
from sparsebench.planning.job import Job
from sparsebench.planning.networks import Networks
from sparsebench.planning.planner import Files, Plan
from sparsebench.plugin.registry import Registry
from sparsebench.records import store
from sparsebench.records.cell import canonical
from sparsebench.records.record import Record


@dataclass(frozen=True)
class Trainer:
    """Trains what a request lacks, and keeps its weights.

    Attributes:
        files: where its pictures and first weights come from.
        out: the run's folder.
        device, jobs, rerun, checkpoint, timeout, memory_limit: as for a run.
        on_plan: called with the plan and the number of workers before the first cell starts.
        on_record: called with each record.
        on_stop: called at the first Ctrl-C.
    """

    files: Files
    out: Path
    device: str
    jobs: int | None
    rerun: planner.Rerun
    checkpoint: float
    on_plan: Callable[[Plan, int], None]
    on_record: Callable[[Record], None]
    timeout: str | None = None
    memory_limit: str | None = None
    on_stop: Callable[[], None] | None = None

    def plan(self, request: Request, registry: Registry) -> Plan:
        """Return what is to be looked at and what of it is still to be trained, see `narrowed`; nothing is written."""
        return narrowed(planner.plan(request, self.files, registry, self.out, self.rerun), self.files, self.out)

    def train(self, plan: Plan, registry: Registry) -> Context:
        """Train what is to do, and return where its weights are.

        Raises:
            UserError: the device is not there, or the folder cannot be written.
        """
        device = devices.resolve_device(self.device)
        workers = devices.workers_for(plan, device, self.jobs)
        limits = Limits.given(self.timeout, self.memory_limit, workers)
        store.check_writable(self.out)
        self.on_plan(plan, workers)
        runs.execute(plan, registry, self.out, device, workers, self.on_record, self.checkpoint, limits, self.on_stop)
        return Context(self.out, first_of(device), plan.locations)


def narrowed(plan: Plan, files: Files, out: Path) -> Plan:
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
            next_step="name their parameters with --task and --model",
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
    places = files.places(jobs, plan.locations) | networks.places({job.weights for job in jobs})
    return replace(plan, jobs=jobs, todo=todo, locations=places)


def trained(job: Job, registry: Registry, context: Context) -> Prepared:
    """Return the cell with its trained weights, whatever it started from."""
    bare = job.model_copy(update={"cell": job.cell.model_copy(update={"init": None}), "network": ""})
    prepared = prepare(bare, registry, context)
    prepared.network.module.load_state_dict(load_file(context.weights(job.weights)))
    prepared.network.module.eval()
    return prepared
