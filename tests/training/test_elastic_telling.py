"""What a rank tells of a generation that it has entered."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import torch

from evener.comm.group import Group
from evener.comm.step_timing import StepTimer
from evener.membership.generation import Generation, Participant
from evener.records.history import History
from evener.records.record import Event
from evener.training.elastic.loss_events import tell_generation


def test_rank_reports_a_generation_if_its_state_senders_are_lost() -> None:
    told: list[Event] = []
    device = torch.device("cpu")
    group = Group(rank=0, size=1, device=device, nodes=["b"], timer=StepTimer(device))
    monitor: Any = SimpleNamespace(history=History(), emit=told.append)
    ranks: Any = SimpleNamespace(known_at=time.perf_counter())
    present = (Participant(process=2, node="b", since=2),)
    generation = Generation(number=3, participants=present, reason="a ended", is_urgent=True, lost=("a",))
    tell_generation(generation, ranks, monitor, group, time.perf_counter(), 2, 4)
    assert told[0].message.startswith("a ended; 1 node of 2 goes on with step 5, 0.0")
    assert len(told) == 1


def test_node_that_is_lost_and_joins_in_one_generation_is_reported_as_present() -> None:
    told: list[Event] = []
    device = torch.device("cpu")
    group = Group(rank=0, size=1, device=device, nodes=["b"], timer=StepTimer(device))
    monitor: Any = SimpleNamespace(history=History(), emit=told.append)
    ranks: Any = SimpleNamespace(known_at=time.perf_counter())
    present = (Participant(process=2, node="b", since=2), Participant(process=3, node="a", since=3))
    generation = Generation(
        number=3, participants=present, reason="a ended, a joined", is_urgent=True, lost=("a",), joined=("a",)
    )
    tell_generation(generation, ranks, monitor, group, time.perf_counter(), 2, 4)
    assert [(event.kind, event.nodes) for event in told] == [("node lost", ("a",)), ("joined", ("a",))]
