"""Every way of agreeing, over the task of `linear_engine`; and how far results are apart."""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec.structs import replace

from evener.agreements import settings
from evener.agreements.settings import AgreementSettings, Sgd
from support.linear_engine import BATCH, RATE

SYNC = settings.synchronous(batch=BATCH, outer=Sgd(learning_rate=RATE))


WAYS: dict[str, AgreementSettings] = {
    "sync": SYNC,
    "async": settings.asynchronous(batch=BATCH, outer=Sgd(learning_rate=RATE)),
    "bounded": settings.bounded(batch=BATCH, outer=Sgd(learning_rate=RATE), staleness=1),
    "average": settings.average(batch=BATCH),
    "average of 2": settings.average(batch=BATCH, local_steps=2),
    "diloco": settings.diloco(batch=BATCH, local_steps=2),
    "overlapped": replace(settings.average(batch=BATCH, local_steps=2), is_overlapped=True),
    "int8": replace(settings.average(batch=BATCH, local_steps=2), push="int8", pull="int8"),
    "sync, top-k": replace(SYNC, push="top-k", pull="top-k"),
    "top-k": replace(settings.diloco(batch=BATCH, local_steps=2), push="top-k", pull="top-k"),
}


def distance(found: dict[str, Any], wanted: dict[str, Any]) -> float:
    assert found.keys() == wanted.keys()
    return max(float(np.abs(found[name] - wanted[name]).max()) for name in wanted)
