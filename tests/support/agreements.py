"""Every way of agreeing, over the task of `linear_engine`; and how far results are apart."""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec.structs import replace

from evener.sync import protocol
from evener.sync.protocol import Sgd, SyncProtocol
from support.linear_engine import BATCH, RATE

SYNC = protocol.synchronous(batch=BATCH, outer=Sgd(learning_rate=RATE))


WAYS: dict[str, SyncProtocol] = {
    "sync": SYNC,
    "async": protocol.asynchronous(batch=BATCH, outer=Sgd(learning_rate=RATE)),
    "bounded": protocol.bounded(batch=BATCH, outer=Sgd(learning_rate=RATE), staleness=1),
    "average": protocol.averaging(batch=BATCH),
    "average of 2": protocol.averaging(batch=BATCH, local_steps=2),
    "diloco": protocol.diloco(batch=BATCH, local_steps=2),
    "overlapped": replace(protocol.averaging(batch=BATCH, local_steps=2), is_overlapped=True),
    "int8": replace(protocol.averaging(batch=BATCH, local_steps=2), push="int8", pull="int8"),
}


def distance(found: dict[str, Any], wanted: dict[str, Any]) -> float:
    assert found.keys() == wanted.keys()
    return max(float(np.abs(found[name] - wanted[name]).max()) for name in wanted)
