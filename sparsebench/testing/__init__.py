"""Conformance checks for strategies, for the command line, pytest and Python. Imports torch only when a check runs.

from sparsebench.testing import parametrize_with_strategies

@parametrize_with_strategies(["mine.py"])
def test_it_conforms(strategy, check):
    check(strategy)
"""

from sparsebench.records.reports import Outcome, Report
from sparsebench.testing.process import parametrize_with_strategies

__all__ = ["Outcome", "Report", "parametrize_with_strategies"]
