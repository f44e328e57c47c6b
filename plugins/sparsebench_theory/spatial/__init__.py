"""Jelassi, Sander and Li, spatial structure learned by positional attention, NeurIPS 2022."""

from sparsebench_theory.hooks import hooks_of
from sparsebench_theory.models import Positional
from sparsebench_theory.spatial.task import Spatial

sparsebench_tasks, sparsebench_models, sparsebench_suites, sparsebench_papers = hooks_of(
    __name__, Spatial, Positional, "figures"
)
