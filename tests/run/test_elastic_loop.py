"""What a rank tells of a generation that it has entered."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import torch

from evener.comm.group import Group
from evener.comm.step_timing import StepTimer
from evener.elastic.generation import Generation, Participant
from evener.history import History
from evener.record import Event
from evener.run.elastic_loop import ElasticLoop


def test_one_whose_givers_of_the_state_are_gone_before_they_said_what_it_cost_tells_so_itself() -> None:
    told: list[Event] = []
    device = torch.device("cpu")
    loop: Any = object.__new__(ElasticLoop)
    loop._is_late, loop._mark, loop._costs = True, time.perf_counter(), {"a": None, "b": None}
    loop._ranks = SimpleNamespace(known_at=time.perf_counter())
    loop._training = SimpleNamespace(group=Group(rank=0, size=1, device=device, nodes=["b"], timer=StepTimer(device)))
    loop._loop = SimpleNamespace(last=4, monitor=SimpleNamespace(history=History(), emit=told.append))
    present = (Participant(process=2, node="b", since=2),)
    loop._note(Generation(number=3, participants=present, reason="a ended", is_urgent=True, lost=("a",)))
    assert told[0].message.startswith("a ended; 1 node of 2 go on with step 5, 0.0")
