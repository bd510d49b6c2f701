"""PyTorch's engine on leases that nobody would choose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from evener.data.loader import seed_all
from evener.ps.engine import Workshop, enough
from evener.ps.job import Job
from evener.ps.torch_state import layout_of_model
from evener.run.ps_engines import build_torch
from evener.sync import family
from evener.sync.flat import Flat
from evener.sync.messages import Lease
from evener.sync.samples import SampleRange
from evener.sync.workload import Workload
from evener.tasks.load import load_task

TINY = Path(__file__).parents[1] / "support_tasks" / "tiny.py"
ALONE = Lease(number=1, version=0, samples=SampleRange(epoch=0, ranges=((5, 1),)), num_steps=1)


def workshop() -> Workshop:
    """For a network with BatchNorm over single values a channel."""
    task = load_task(str(TINY), None, {})
    seed_all(0)
    train: Any = task.train_data()
    validation: Any = task.validation_data() if task.validation_data else ()
    job = Job(
        run="one",
        task=TINY.name,
        title="tiny",
        protocol="average",
        agreement=family.averaging(batch=8),
        workload=Workload(num_samples=len(train), num_epochs=1, seed=0),
        layout=layout_of_model(task.model()),
        num_validation=len(validation),
    )
    return Workshop(job=job, code=TINY.parent, data=None, device="cpu", speed=1.0, between_steps=lambda: None)


def test_a_lone_sample_is_learned_from_though_batch_norm_refuses_one() -> None:
    engine = build_torch(workshop())
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        torch.nn.BatchNorm1d(3)(torch.zeros(1, 3))
    gradient = Flat(engine.layout)
    assert np.isfinite(engine.gradient(ALONE, gradient))
    assert np.any(gradient.parameters[0] != 0)
    assert np.isfinite(engine.local_steps(ALONE, gradient))


def test_only_a_lone_sample_of_a_network_that_normalises_is_taken_twice() -> None:
    one, two = np.array([7]), np.array([7, 9])
    assert enough(one, normalises=True).tolist() == [7, 7]
    assert enough(one, normalises=False).tolist() == [7]
    assert enough(two, normalises=True).tolist() == [7, 9]
