"""Li, Wang, Liu and Chen, A theoretical understanding of shallow Vision Transformers, ICLR 2023."""

from sparsebench_theory.hooks import hooks_of
from sparsebench_theory.models import Shallow
from sparsebench_theory.shallow.task import Theory

sparsebench_tasks, sparsebench_models, sparsebench_suites, sparsebench_papers = hooks_of(
    __name__, Theory, Shallow, "paper", "images"
)
