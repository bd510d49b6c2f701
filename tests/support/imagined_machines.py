"""Small machines and networks for tests of forecasts: round numbers, so that expectations can be worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence

from evener.oracle.cost.model import CostModel, TrainingJob
from evener.oracle.schedule import ScheduleChoice
from evener.oracle.zoo.sketch import Sketch
from evener.records.graph import ModelGraph
from evener.records.profile import ClusterProfile, DeviceProfile, Fabric, Throughput

TERA, GIGA = 1e12, 1e9
MANY = 1 << 40


def device(
    node: str = "ada", number: int = 0, speed: float = 1.0, memory: int = MANY, leaf: str = "", spread: float = 0.0
) -> DeviceProfile:
    """A device of `speed` TFLOP/s and `speed` * 100 GB/s that starts passes at once."""
    return DeviceProfile(
        node=node,
        device=f"cuda:{number}",
        model="imagined",
        cores=1,
        memory_bytes=memory,
        usable_memory_bytes=memory,
        bandwidth=speed * 100 * GIGA,
        throughputs=(Throughput(precision="fp32", matmul_flops=speed * TERA, conv_flops=speed * TERA),),
        leaf=leaf,
        spread=spread,
    )


def cluster(
    speeds: Sequence[float], per_node: int = 1, alpha: float = 1e-5, beta: float = 1e-9, memory: int = MANY
) -> ClusterProfile:
    """Devices of `speeds`, `per_node` a node; nodes joined by `alpha` and `beta`, a tenth of which holds inside."""
    return ClusterProfile(
        devices=tuple(device(f"node-{i // per_node}", i % per_node, s, memory) for i, s in enumerate(speeds)),
        fabrics=(
            Fabric(name="inside", within="node", alpha=alpha / 10, beta=beta / 10),
            Fabric(name="outside", within="leaf", alpha=alpha, beta=beta),
        ),
    )


def convolutions(depth: int = 4, width: int = 16, rows: int = 16, norm: bool = False, classes: int = 10) -> ModelGraph:
    """`depth` 3x3 convolutions of `width` filters with their ReLUs, an average and a linear layer."""
    net = Sketch("convolutions")
    x = net.input(3, rows, rows)
    for i in range(depth):
        x = net.conv(x, f"conv{i}", width, 3, 1, 1, bias=False)
        x = net.norm(x, f"norm{i}") if norm else x
        x = net.relu(x, f"relu{i}")
    net.linear(net.flatten(net.average(x, "average")), "head", classes)
    return net.graph()


def model(
    speeds: Sequence[float] = (1.0,),
    graph: ModelGraph | None = None,
    batch_size: int = 64,
    per_node: int = 1,
    alpha: float = 1e-5,
    beta: float = 1e-9,
    memory: int = MANY,
    overlap: bool = True,
    schedule: ScheduleChoice = "auto",
) -> CostModel:
    """A job on a cluster; without a graph, one of four convolutions."""
    job = TrainingJob(
        graph=graph or convolutions(), batch_size=batch_size, optimizer="sgd", overlap=overlap, schedule=schedule
    )
    return CostModel(job, cluster(speeds, per_node, alpha, beta, memory))
