"""What is worth knowing of a strategy: answers by name. Each takes a strategy and returns in words what it found."""

from __future__ import annotations

from typing import Any, cast

import torch

from sparsebench.deploy.apply import RANDOM, apply
from sparsebench.deploy.export import first_cause, never_exported
from sparsebench.strategy.base import Strategy
from sparsebench.strategy.budget import Budget
from sparsebench.strategy.plans import Plan
from sparsebench.strategy.view import TokenView
from sparsebench.testing.networks import cached, tiny
from sparsebench.testing.trial import Runner, actor_on, fresh, tensors
from sparsebench.training.fit import StandIn


class _Compiled(StandIn):
    """Makes the first choice of a strategy by way of torch.compile, too."""

    answer = ""

    def plan(self, view: TokenView, keep: int) -> Plan | None:
        import torch._dynamo  # takes longer than all other checks together

        if not self.answer:
            torch._dynamo.reset()
            try:
                torch.compile(lambda: tensors(self.strategy.plan(view, keep)), backend="eager", fullgraph=True)()
                self.answer = "yes"
            except Exception as error:
                self.answer = f"no: {str(error).strip().partition(chr(10))[0][:200]}"
        return self.strategy.plan(view, keep)


def compiles_a_choice(strategy: Strategy) -> str:
    """Whether torch.compile takes a choice without a graph break."""
    runner = Runner(fresh(strategy), cached("class token"))
    compiled: Any = _Compiled(runner.strategy)
    runner.actor = actor_on(compiled, runner.case, Budget(keep_rate=runner.rate))
    runner()
    return str(compiled.answer)


def exports(strategy: Strategy) -> str:
    """Whether torch.export takes a whole network on which it acts, as `sparsebench export` writes it."""
    if reason := never_exported(type(strategy)):
        return f"no: {reason}"
    budget: dict[str, Any] = {"keep_rate": 0.7} if strategy.budgeted else {}
    model, cudnn = tiny(depth=2), cast(Any, torch.backends.cudnn)
    before = "tf32" in (cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision)
    try:
        cudnn.allow_tf32 = False  # torch.export refuses to look at parts that differ
        learned = RANDOM if strategy.trained or strategy.fits() else None
        with apply(model, fresh(strategy), learned=learned, **budget) as sparse:
            torch.export.export(sparse.eval(), (torch.zeros(1, 3, 32, 32),), strict=False)
    except Exception as error:  # torch has many of its own for what it cannot follow
        return f"no: {first_cause(error)[:200]}"
    finally:
        cudnn.allow_tf32 = before
    return "yes"


CHECKS = (compiles_a_choice, exports)
