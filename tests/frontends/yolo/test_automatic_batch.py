"""Batches of a YOLO that follow the memory of the nodes' devices."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from evener.frontends.yolo.overrides import YoloConfig, read_master_overrides, read_overrides
from evener.frontends.yolo.trainer_rank import TrainerRank
from evener.launch.nodes import NodeSpec
from evener.records.errors import InvalidInput


@pytest.mark.parametrize("batch", ["-1", "0.8", "0.05"])
def test_batch_may_follow_the_memory_of_whole_devices(batch: str) -> None:
    words = ("train", "model=a.pt", f"batch={batch}")
    assert read_overrides(words)["batch"] == batch
    assert read_master_overrides(words, is_agreed=False)["batch"] == batch
    with pytest.raises(InvalidInput, match="--agreement"):
        read_master_overrides(words, is_agreed=True)
    with pytest.raises(InvalidInput, match="--memory"):
        YoloConfig(overrides=words, local_nodes="1,1", memory="1GB")


@pytest.mark.parametrize(
    ("devices", "held", "batch"),
    [
        (["cuda:0", "cuda:1"], [40, 7], 47),
        (["cuda:0", "cpu"], [40, 16], 40),
        (["cpu", "cpu", "cpu"], [16, 16, 16], 16),
        (["cpu"], [16], 16),
    ],
)
def test_batch_is_what_all_accelerators_hold(devices: list[str], held: list[int], batch: int) -> None:
    nodes = [NodeSpec(name=f"n{rank}", device=device) for rank, device in enumerate(devices)]
    group = SimpleNamespace(all_gather_bytes=lambda _: [msgspec.msgpack.encode(one) for one in held])
    rank: Any = SimpleNamespace(work=SimpleNamespace(plan=None), env=SimpleNamespace(nodes=nodes), group=group)
    assert TrainerRank.batch_of_all(rank, held[0]) == batch


def test_node_that_joins_takes_the_batch_of_the_run() -> None:
    rank: Any = SimpleNamespace(work=SimpleNamespace(plan=SimpleNamespace(batch_size=47)))
    assert TrainerRank.batch_of_all(rank, 16) == 47
