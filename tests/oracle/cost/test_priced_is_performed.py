"""Forecast bytes are those of the exact table, which is held against the counters of `comm`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from evener.oracle.cost.mesh import price_mesh
from evener.oracle.cost.model import CostModel, TrainingJob
from evener.oracle.cost.partition import Mode
from evener.oracle.division.layout import Replica
from evener.oracle.division.plan import Arrangement, plan_replicas
from evener.oracle.division.rules import Division
from evener.oracle.division.traffic import step_traffic
from evener.oracle.profiles import imagine
from evener.parallel.op_graph import op_graph
from evener.tracer.model_graph import trace_model_graph

SAMPLES = 6


def network() -> nn.Module:
    """Narrowing, widening and equal convolutions, normalisation, pooling, and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 4, 1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 16, 3, padding=1, bias=False),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 16, 3, padding=1, bias=False),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 8 * 8, 8),
    )


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("mode", "division"), [("filter", "filter"), ("channel", "channel"), ("hybrid", "hybrid"), ("sharded", "sharded")]
)
def test_equal_shares_send_the_bytes_of_the_table(mode: Mode, division: Division, size: int) -> None:
    images = torch.zeros(SAMPLES, 3, 16, 16)
    arrangement = Arrangement(division=division, replicas=(Replica(shares=(1.0,) * size),))
    plans = plan_replicas(op_graph(network(), [images]).network, arrangement)
    exact = max(sum(sent for sent, _ in kinds.values()) for kinds in step_traffic(plans, arrangement, 4))
    model = CostModel(TrainingJob(graph=trace_model_graph(network(), images), batch_size=SAMPLES), imagine("v100-node"))
    assert price_mesh(model, [range(size)], mode).sent_bytes == pytest.approx(exact, rel=0.01)
