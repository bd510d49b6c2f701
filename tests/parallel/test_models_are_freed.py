"""A rank's part of a divided model is gone as soon as nobody refers to it, without Python's collector.

The collector counts objects, not bytes: it seldom comes by for a few models of a gigabyte each. Where a node is lost, a
divided model is made anew, beside what is left of the one before.
"""

from __future__ import annotations

import weakref
from typing import Any

import pytest

from evener.comm.group import Group
from evener.oracle.division.layout import Replica
from evener.oracle.division.plan import Arrangement
from evener.oracle.division.rules import DivisionName
from evener.parallel.process_mesh import form_process_mesh
from evener.parallel.sharded import ShardedModule
from support.compare_divided import forward_backward, serial
from support.thread_ranks import together

WAYS = {"two": (Replica(shares=(2, 1)),), "data+two": (Replica(shares=(2, 1)), Replica(shares=(1,)))}


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("division", ["filter", "channel", "sharded", "spatial"])
def test_divided_model_is_freed_without_garbage_collection(division: DivisionName, way: str) -> None:
    arrangement, inputs = Arrangement(division=division, replicas=WAYS[way]), serial("residual").inputs[0][:2]

    def weights_after_a_step(group: Group) -> list[weakref.ref[Any]]:
        place = form_process_mesh(group, arrangement)
        model = ShardedModule(serial("residual").model, place, [inputs])
        forward_backward(model, inputs.clone(), None)
        return [weakref.ref(weight) for weight in model.part.parameters()]

    left = [ref for refs in together(arrangement.size, weights_after_a_step) for ref in refs]
    assert left
    assert not [one.shape for ref in left if (one := ref()) is not None]
