"""Jiang et al., benign and harmful overfitting of a two-layer Vision Transformer, NeurIPS 2024."""

from sparsebench_theory.hooks import hooks_of
from sparsebench_theory.models import TwoLayer
from sparsebench_theory.overfitting.task import Overfitting

sparsebench_tasks, sparsebench_models, sparsebench_suites, sparsebench_papers = hooks_of(
    __name__, Overfitting, TwoLayer, "figures"
)
