"""Forecasts of published measurements of CNN training on up to 1024 V100s (Kahira et al., HPDC 2021).

Three published inputs are used as they are: one iteration end to end on one GPU for two networks, one iteration of
VGG-16 on eight GPUs, and the machines. Four constants follow from these, and nothing else is fitted:

    conv_flops, pass_seconds    the two one-GPU iterations: one network has many small layers, the other few large ones
    bandwidth of a ring         the iteration on eight GPUs, less its computing: the time of the packed all-reduce
    bandwidth out of a node     twice that: two adapters

The published computing time per sample of each layer is not used: layers timed individually take longer than in a
sequence, where the next one starts while the last one ends (ResNet-50: 64 x 3.12 ms exceed the complete iteration).
`docs/oracle.md` gives the reasons in detail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import msgspec

from evener.experiments.results import Row, write_csv
from evener.oracle.catalogue import CARDS
from evener.oracle.cost.mesh import price_mesh
from evener.oracle.cost.model import CostEstimate, CostModel, TrainingJob
from evener.oracle.cost.partition import Mode
from evener.oracle.hypothetical_cluster import NODES
from evener.oracle.zoo.networks import resnet50, vgg16
from evener.records.graph import ModelGraph
from evener.records.profile import ClusterProfile, Fabric, Throughput
from evener.training.console import print_line

_HYBRIDS: tuple[Mode, ...] = ("filter", "spatial")
_DIVISIONS: tuple[Mode, ...] = ("channel", "filter")
_GPUS_OF_A_NODE = 4
_NODES_OF_A_LEAF = 17
_ADAPTERS = 2
_ADAPTER_BANDWIDTH = 12.5e9
_OVERSUBSCRIPTION = 3
_NVLINKS, _NVLINKS_OF_A_PAIR = 6, 2
_TOLERANCE = 1e-10
_CALIBRATION_GPUS, _CALIBRATION_SECONDS = 8, 0.4547


@dataclass(frozen=True, kw_only=True)
class MeasuredNetwork:
    """A network, the samples of one GPU (or of a node that holds one model), and seconds of an iteration on one GPU."""

    graph: ModelGraph
    samples: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class IterationForecast:
    """Predicted seconds of one iteration; the fields are the columns of the CSV file."""

    strategy: str
    model: str
    gpus: int
    compute_seconds: float
    communication_seconds: float
    total_seconds: float


@dataclass(frozen=True)
class Machine:
    """The fitted constants of the machine.

    Attributes:
        conv_flops: FLOP/s of convolutions and matrix products.
        pass_seconds: seconds of starting and ending a pass of a layer.
        ring_bandwidth: bytes per second of one ring that leaves the nodes.
    """

    conv_flops: float
    pass_seconds: float
    ring_bandwidth: float = _ADAPTER_BANDWIDTH

    def profile(self, gpus: int) -> ClusterProfile:
        """Return the profile of `gpus` GPUs; nodes and leaves are filled one after the other."""
        speed = Throughput(precision="fp32", matmul_flops=self.conv_flops, conv_flops=self.conv_flops)
        devices = (
            msgspec.structs.replace(
                CARDS["v100"].profile(f"node-{i // _GPUS_OF_A_NODE}", i % _GPUS_OF_A_NODE),
                throughputs=(speed,),
                pass_seconds=self.pass_seconds,
                leaf=f"leaf-{i // (_GPUS_OF_A_NODE * _NODES_OF_A_LEAF)}",
            )
            for i in range(gpus)
        )
        return ClusterProfile(devices=tuple(devices), fabrics=(_nvlink(gpus), *self._outside()))

    def _outside(self) -> tuple[Fabric, Fabric]:
        up = _NODES_OF_A_LEAF * _ADAPTERS * _ADAPTER_BANDWIDTH / _OVERSUBSCRIPTION
        edr = Fabric(
            name="InfiniBand EDR",
            within="leaf",
            alpha=7e-6,
            beta=1 / self.ring_bandwidth,
            shared_bandwidth=_ADAPTERS * self.ring_bandwidth,
        )
        return edr, msgspec.structs.replace(edr, name="fat tree", within="cluster", shared_bandwidth=up)


def networks() -> dict[str, MeasuredNetwork]:
    """Return the two networks; VGG-16 is pooled with sizes rounded up, so that its first linear layer reads 8 x 8."""
    return {
        "resnet50": MeasuredNetwork(graph=resnet50(), samples=64, seconds=0.1834),
        "vgg16": MeasuredNetwork(graph=vgg16((3, 226, 226), ceil=True), samples=32, seconds=0.2619),
    }


def predictions(machine: Machine) -> Iterator[IterationForecast]:
    """Yield one row per setting."""
    for name, net in networks().items():
        for gpus in _powers(1, 1024):
            yield _row("data", name, net, machine, gpus, "none", 1)
        for mode in _HYBRIDS:
            for gpus in _powers(16, 1024):
                yield _row(f"data+{mode}", name, net, machine, gpus, mode, _GPUS_OF_A_NODE)
        for mode in _DIVISIONS:
            for gpus in _powers(4, 64):
                yield _row(mode, name, net, machine, gpus, mode, gpus)


def run(csv: Path) -> None:
    """Run `evener experiment oracle-abci`: write predictions of the published settings to a CSV file."""
    write_csv([as_row(forecast) for forecast in predictions(calibrate())], csv)
    print_line(f"wrote {csv}")


def as_row(forecast: IterationForecast) -> Row:
    """Return the columns of the CSV file, with seconds to the microsecond."""
    return {name: f"{value:.6f}" if isinstance(value, float) else value for name, value in asdict(forecast).items()}


def calibrate() -> Machine:
    """Return the constants that follow from both networks on one GPU and from the wide one on eight."""
    deep, wide = networks()["resnet50"], networks()["vgg16"]

    def flops(pass_seconds: float) -> float:
        def excess(seconds_per_flop: float) -> float:
            return _alone(wide, Machine(1 / seconds_per_flop, pass_seconds)) - wide.seconds

        return 1 / _root(excess, 1e-14, 1e-12)

    pass_seconds = _root(lambda start: _alone(deep, Machine(flops(start), start)) - deep.seconds, 0.0, 1e-3)
    computing = Machine(flops(pass_seconds), pass_seconds)

    def too_slow(seconds_per_byte: float) -> float:
        machine = replace(computing, ring_bandwidth=1 / seconds_per_byte)
        return _estimate(wide, machine, _CALIBRATION_GPUS, "none", 1).step_seconds - _CALIBRATION_SECONDS

    return replace(computing, ring_bandwidth=1 / _root(too_slow, 1e-12, 1e-8))


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    """Return the zero of a continuous function that is negative at `low` and positive at `high`.

    Uses false position, halving the weight of an end that stays (the Illinois rule, Dowell & Jarratt 1971).
    """
    at_low, at_high, side = function(low), function(high), 0
    for _ in range(60):
        middle = (low * at_high - high * at_low) / (at_high - at_low)
        value = function(middle)
        if abs(value) < _TOLERANCE:
            break
        if value < 0:
            low, at_low, at_high, side = middle, value, at_high / 2 if side < 0 else at_high, -1
        else:
            high, at_high, at_low, side = middle, value, at_low / 2 if side > 0 else at_low, 1
    return middle


def _alone(net: MeasuredNetwork, machine: Machine) -> float:
    return _estimate(net, machine, 1, "none", 1).step_seconds


def _estimate(net: MeasuredNetwork, machine: Machine, gpus: int, mode: Mode, members: int) -> CostEstimate:
    """Return the price of one iteration in which groups of `members` GPUs hold one model each."""
    job = TrainingJob(
        graph=net.graph,
        batch_size=net.samples * gpus // members,
        optimizer="adam",
        overlap=False,
        statistics=False,
        published=True,
    )
    groups = [range(first, first + members) for first in range(0, gpus, members)]
    return price_mesh(CostModel(job, machine.profile(gpus)), groups, mode)


def _row(
    strategy: str, model: str, net: MeasuredNetwork, machine: Machine, gpus: int, mode: Mode, members: int
) -> IterationForecast:
    estimate = _estimate(net, machine, gpus, mode, members)
    communication = estimate.communication_seconds
    return IterationForecast(
        strategy=strategy,
        model=model,
        gpus=gpus,
        compute_seconds=estimate.step_seconds - communication,
        communication_seconds=communication,
        total_seconds=estimate.step_seconds,
    )


def _nvlink(gpus: int) -> Fabric:
    """Return the links inside a node: two GPUs use the links of a pair, four use all of theirs."""
    inside = NODES["v100-node"].inside
    few = 2 <= gpus < _GPUS_OF_A_NODE
    return msgspec.structs.replace(inside, beta=inside.beta * _NVLINKS / _NVLINKS_OF_A_PAIR) if few else inside


def _powers(first: int, last: int) -> Iterator[int]:
    while first <= last:
        yield first
        first *= 2
