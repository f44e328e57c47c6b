"""What tests of records share: small cells, and what is read of a record."""

from collections.abc import Callable

from sparsebench.records.record import Record

COMPOSITE = "composite:epochs=1,test=40,pretrain_epochs=0"
VIT = "vit:dim=16,depth=3,heads=2"

Measure = Callable[..., Record]


def value(record: Record, metric: str) -> float:
    found = record.metrics[metric].value
    assert found is not None, metric
    return found


def reason(record: Record) -> str:
    assert record.failure is not None
    return record.failure.reason
