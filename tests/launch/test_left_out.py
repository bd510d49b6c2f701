"""A rank of a launcher's that the plan leaves out says why, stays until the run is over, and ends as the run ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from evener.launch.nodes import NodeSpec
from evener.launch.rank_environment import RankEnvironment
from evener.launch.rank_heartbeat import RankHeartbeat
from evener.launch.unused_rank import stay
from evener.records.errors import EvenerError, Interrupted, InvalidInput, NodeLost
from evener.records.plan import Assignment, Plan, Rejected
from support.stores import memory_store
from support.two_machines import on_two_machines

NODES = [NodeSpec(name="a"), NodeSpec(name="b"), NodeSpec(name="c")]
PLAN = Plan(
    strategy="data",
    batch_size=2,
    assignments=(
        Assignment(rank=0, node="b", device="cpu", samples=1),
        Assignment(rank=1, node="c", device="cpu", samples=1),
    ),
    rejected=(Rejected(what="a", reason="it is slow"), Rejected(what="channel", reason="it takes too long")),
)


class Ranks:
    """Three ranks, of which the plan leaves the first out."""

    def __init__(self) -> None:
        self.store, self.told, self.asked = memory_store(), list[str](), threading.Event()
        self.beats = [
            RankHeartbeat(
                self.store, rank=rank, nodes=["a", "b", "c"], patience=2.0, on_lost=print, on_stop=self.asked.set
            )
            for rank in range(3)
        ]
        self.env = RankEnvironment(0, NODES, torch.device("cpu"), 2.0, print, self.store, self.beats[0])
        self.env.tell = self.told.append

    def stays(self) -> tuple[threading.Thread, list[Exception]]:
        """The thread in which the first rank stays, and the error with which it ends."""
        errors: list[Exception] = []

        def run() -> None:
            try:
                stay(self.env, PLAN)
            except EvenerError as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        return thread, errors


def test_left_out_rank_gives_its_reason_and_stays_until_all_end() -> None:
    ranks = Ranks()
    thread, errors = ranks.stays()
    ranks.beats[1].stop()
    thread.join(0.6)
    assert thread.is_alive()
    ranks.beats[2].stop()
    thread.join(10)
    assert not thread.is_alive()
    assert errors == []
    [sentence] = ranks.told
    assert "a (rank 0)" in sentence
    assert "it is slow" in sentence
    assert "takes too long" not in sentence


def _of_one(ranks: Ranks) -> None:
    ranks.beats[2].report_failure("node c failed: x.pt")
    ranks.beats[2].stop(InvalidInput("x.pt"))
    ranks.beats[1].stop(NodeLost("node b lost its connection"))


def _of_all(ranks: Ranks) -> None:
    for beat in ranks.beats[1:]:
        beat.stop(InvalidInput("no such task"))


def _stopped(ranks: Ranks) -> None:
    ranks.beats[1].stop(NodeLost("node b lost its connection"))
    ranks.beats[2].stop(Interrupted("stopped after step 3"))


@pytest.mark.parametrize(
    ("end", "kind", "sentence"),
    [
        (_of_one, NodeLost, "node c failed: x.pt"),
        (_of_all, InvalidInput, "no such task"),
        (_stopped, Interrupted, "stopped after step 3"),
    ],
)
def test_left_out_rank_raises_the_error_of_the_run(
    end: Callable[[Ranks], None], kind: type[EvenerError], sentence: str
) -> None:
    ranks = Ranks()
    end(ranks)
    thread, errors = ranks.stays()
    thread.join(10)
    assert [(type(error), str(error)) for error in errors] == [(kind, sentence)]


def test_left_out_rank_passes_on_a_stop_request() -> None:
    ranks = Ranks()
    ranks.beats[1].start()
    ranks.env.request_stop()
    thread, _ = ranks.stays()
    try:
        assert ranks.asked.wait(10)
    finally:
        for beat in ranks.beats[1:]:
            beat.stop(Interrupted("stopped"))
        thread.join(10)


def test_left_out_rank_started_by_evener_ends_at_once() -> None:
    ranks = Ranks()
    ranks.env.tell = None
    began = time.monotonic()
    stay(ranks.env, PLAN)
    assert time.monotonic() - began < 0.5


TASK = """\
import os, time
import torch
from torch import nn
from torch.utils.data import TensorDataset
from evener import Task

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.steps = nn.Linear(4, 1), 0

    def forward(self, inputs):
        time.sleep(0.002 * len(inputs) if os.environ["RANK"] == "1" else 2 + 0.2 * len(inputs))
        self.steps += self.training
        if os.environ["RANK"] == "1" and FAILS and os.path.exists("run/plan.json"):
            open("x.pt")
        return self.layer(inputs)

inputs = torch.randn(100, 4, generator=torch.Generator().manual_seed(0))
task = Task(
    model=Model, loss=nn.functional.mse_loss, batch_size=10, epochs=10,
    train_data=lambda: TensorDataset(inputs, inputs.sum(1, keepdim=True)),
)
"""


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(("fails", "code"), [(False, 0), (True, NodeLost.exit_code)])
def test_slow_first_rank_ends_like_the_run(fails: bool, code: int, tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(TASK.replace("FAILS", str(fails)))
    words = ("-m", "evener", "train", "../task.py", "--output", "run", "--no-check")
    (first, errors), (second, _) = on_two_machines(words, tmp_path)
    assert first == code, errors
    assert bool(second) == fails
    assert "is left out" in errors
    assert ("'x.pt'" in errors) == fails
