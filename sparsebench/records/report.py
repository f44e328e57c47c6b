"""What the conformance checks found out about a strategy, as a value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict

from sparsebench.records.origin import Origin
from sparsebench.spec import label

SCHEMA = 1
Group = Literal["required", "recommended", "informative"]
GROUPS: tuple[Group, ...] = get_args(Group)
Status = Literal["passed", "failed", "expected", "unsupported", "timeout", "crashed", "not run"]
HARMLESS = frozenset({"passed", "expected", "unsupported"})


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Outcome(_Value):
    """What one check found.

    Attributes:
        check: its name.
        says: what holds where it passed.
        status: "expected" where the strategy declares that it fails, "unsupported" where there is nothing to check,
            "timeout" and "crashed" where the process had to be ended or ended itself.
        message: why, or what was measured.
    """

    check: str
    group: Group
    says: str
    status: Status = "not run"
    message: str = ""
    seconds: float = 0.0

    def after(self, status: Status, message: str = "", seconds: float = 0.0) -> Outcome:
        """Return what the check found."""
        return self.model_copy(update={"status": status, "message": message, "seconds": round(seconds, 3)})


class Report(_Value):
    """What all checks found about a strategy with its parameters.

    Attributes:
        origin: where the strategy came from, with its revision.
        versions: of sparsebench, torch and timm.
    """

    schema_version: int = SCHEMA
    strategy: str
    params: dict[str, Any] = {}
    kind: str = ""
    site: str = ""
    origin: Origin
    versions: Mapping[str, str] = {}
    outcomes: tuple[Outcome, ...]

    @property
    def conforms(self) -> bool:
        """Whether no required check failed but for those that the strategy declares."""
        return all(o.status in HARMLESS for o in self.outcomes if o.group == "required")

    @property
    def label(self) -> str:
        """What tables call it: see `sparsebench.spec.label`."""
        return label(self.strategy, self.params)

    @property
    def title(self) -> str:
        """The strategy's name with its parameters."""
        params = ",".join(f"{key}={value}" for key, value in self.params.items())
        return f"{self.strategy}:{params}" if params else self.strategy

    def summary(self) -> str:
        """Return the verdict and the number of checks of each group that passed, in a line."""
        parts = []
        for group in GROUPS:
            statuses = [o.status for o in self.outcomes if o.group == group]
            other = [f"{statuses.count(s)} {s}" for s in get_args(Status)[1:] if s in statuses]
            parts.append(f"{group}: " + ", ".join([f"{statuses.count('passed')} passed", *other]))
        return f"{'conforms' if self.conforms else 'does not conform'} ({'; '.join(parts)})"

    def with_outcome(self, outcome: Outcome) -> Report:
        """Return the report with that outcome in its place."""
        new = tuple(outcome if old.check == outcome.check else old for old in self.outcomes)
        return self.model_copy(update={"outcomes": new})
