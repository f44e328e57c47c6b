"""Every shipped strategy keeps every rule; see conftest.py for when this file is collected."""

import pytest
from samples import SAMPLES

from sparsebench.plugin.registry import Registry
from sparsebench.testing import parametrize_with_strategies

SHIPPED = sorted(name for name, e in Registry().entries.items() if e.value.startswith("sparsebench_plugins."))
STRATEGIES = [
    *SHIPPED, "attn_topk:attention=received", "attn_topk:disposal=fuse", "value_norm:disposal=merge",
    "feature_norm:disposal=squeeze", str(SAMPLES / "good.py"),
]  # fmt: skip
pytestmark = pytest.mark.slow


@parametrize_with_strategies(STRATEGIES)
def test_shipped_strategies_conform(strategy, check):
    check(strategy)


@parametrize_with_strategies(["attn_topk", "noise", "oracle"], groups=("informative",))
def test_shipped_strategies_are_measured(strategy, check):
    check(strategy)
