"""Which collectives the ranks of a run have."""

from __future__ import annotations

import pytest
import torch

from evener.launch.nodes import NodeSpec
from evener.launch.rank_environment import RankEnvironment


@pytest.mark.parametrize(
    ("devices", "backend"),
    [
        (("cpu", "cpu"), "gloo"),
        (("cuda:0", "cpu"), "staged"),
        (("cuda:0", "cuda:1"), "nccl"),
        (("cuda:0", "cuda:1", "cuda:0"), "staged"),  # NCCL refuses two ranks on one GPU
    ],
)
def test_nccl_is_used_if_every_rank_has_its_gpu(devices: tuple[str, ...], backend: str) -> None:
    nodes = [NodeSpec(name=f"node-{rank}", device=device) for rank, device in enumerate(devices)]
    env = RankEnvironment(rank=0, nodes=nodes, device=torch.device("cpu"), patience=1.0, notify=print)
    assert env.backend == backend


def test_equal_gpu_names_on_two_machines_are_two_gpus() -> None:
    nodes = [NodeSpec(name=host, host=host, device="cuda:0") for host in ("ada", "bob")]
    env = RankEnvironment(rank=0, nodes=nodes, device=torch.device("cpu"), patience=1.0, notify=print)
    assert env.backend == "nccl"
