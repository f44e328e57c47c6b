"""Barnfield, Cui and Lu, a signal in few tokens and attention with one query, ICLR 2026."""

from sparsebench_theory.hooks import hooks_of
from sparsebench_theory.models import OneQuery
from sparsebench_theory.sparse_tokens.task import SparseTokens

sparsebench_tasks, sparsebench_models, sparsebench_suites, sparsebench_papers = hooks_of(
    __name__, SparseTokens, OneQuery, "figures"
)
