"""Profiles of machines that one does not have, which nobody measured.

    what is stated     where it comes from
    FLOP/s             85 % of the data sheet for fp32 without tensor units, 50 to 80 % with them
    bandwidth          90 % of the data sheet, as large copies reach
    NVLink             80 % of the data sheet, all links of a device together, as rings over a whole node use them
    Ethernet           94 % of the line rate, which frames, IP and TCP leave; latency of a message through two kernels
    InfiniBand         92 % of the line rate; latency of a message between GPUs of two nodes

These are starting points: `evener benchmark` measures the real ones.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from evener.errors import InvalidValue, require_one_of
from evener.profile import ClusterProfile, DeviceProfile, Fabric, Precision, Throughput, WidthEfficiency

_GIB = 1 << 30
_ITEM = re.compile(r"(?:(\d+)\s*x\s*)?([\w-]+)")
NARROW = (WidthEfficiency(filters=1, efficiency=1 / 32), WidthEfficiency(filters=32, efficiency=1.0))
"""Matrix kernels work on tiles of at least 32 columns: of fewer filters, the rest of a tile is wasted."""
SPREAD = 0.013
"""GPUs of one kind differ by 8 % from the slowest to the fastest (Sinha et al., SC 2022): some six deviations."""
PASS_SECONDS = 34e-6
"""Start and end of a pass of a layer under PyTorch, as two networks of unequal depth on a V100 give it (abci.py)."""


@dataclass(frozen=True, kw_only=True)
class NodeKind:
    """A kind of machine.

    Attributes:
        devices: in one.
        device: what each of them is; the names are filled in.
        inside: between its devices.
    """

    devices: int
    device: DeviceProfile
    inside: Fabric


def _gpu(model: str, cores: int, gigabytes: int, bandwidth: float, flops: Mapping[Precision, float]) -> DeviceProfile:
    """A GPU that reaches `flops` in all large operations; a sixteenth of its memory is the driver's."""
    return DeviceProfile(
        node="node",
        device="cuda:0",
        model=model,
        cores=cores,
        memory_bytes=gigabytes * _GIB,
        usable_memory_bytes=gigabytes * _GIB * 15 // 16,
        bandwidth=bandwidth,
        throughputs=tuple(Throughput(precision=p, matmul_flops=f, conv_flops=f) for p, f in flops.items()),
        pass_seconds=PASS_SECONDS,
        widths=NARROW,
        spread=SPREAD,
    )


def _network(name: str, alpha: float, bandwidth: float) -> Fabric:
    """Nodes on one switch, each with one port of `bandwidth`."""
    return Fabric(name=name, within="leaf", alpha=alpha, beta=1 / bandwidth, shared_bandwidth=bandwidth)


V100 = _gpu("Tesla V100-SXM2-16GB", 80, 16, 0.9 * 900e9, {"fp64": 6.6e12, "fp32": 13.3e12, "fp16": 65e12})
H200 = _gpu("H200-SXM", 132, 140, 0.9 * 4.8e12, {"fp64": 45e12, "fp32": 50e12, "fp16": 600e12, "bf16": 600e12})
_NVLINK_2 = Fabric(name="NVLink 2", within="node", alpha=3e-6, beta=1 / (0.8 * 150e9))
_NVLINK_4 = Fabric(name="NVLink 4", within="node", alpha=3e-6, beta=1 / (0.8 * 450e9))
NODES: Mapping[str, NodeKind] = {
    "v100": NodeKind(devices=1, device=V100, inside=_NVLINK_2),
    "v100-node": NodeKind(devices=4, device=V100, inside=_NVLINK_2),
    "h200": NodeKind(devices=1, device=H200, inside=_NVLINK_4),
    "h200-node": NodeKind(devices=8, device=H200, inside=_NVLINK_4),
}
NETWORKS: Mapping[str, Fabric] = {
    "1gbe": _network("1 Gbit/s Ethernet", 50e-6, 0.94 * 0.125e9),
    "10gbe": _network("10 Gbit/s Ethernet", 30e-6, 0.94 * 1.25e9),
    "100gbe": _network("100 Gbit/s Ethernet", 15e-6, 0.94 * 12.5e9),
    "infiniband": _network("InfiniBand EDR", 7e-6, 0.92 * 12.5e9),
}


def imagine(machines: str, network: str = "10gbe", at_least: int = 0) -> ClusterProfile:
    """The profile of machines that are named, not measured.

    Args:
        machines: such as `4xv100-node,h200-node`.
        network: that joins them, a key of `NETWORKS`.
        at_least: devices; if the machines have fewer, there are more of the last kind.

    Raises:
        InvalidValue: a machine or the network is not known.
    """
    kinds = [kind for item in machines.split(",") for kind in _nodes(item.strip())]
    missing = at_least - sum(kind.devices for kind in kinds)
    kinds += max(0, -(-missing // kinds[-1].devices)) * [kinds[-1]]
    require_one_of("--network", network, NETWORKS)
    inside = max((kind.inside for kind in kinds), key=lambda fabric: fabric.beta)
    return ClusterProfile(
        devices=tuple(
            msgspec.structs.replace(kind.device, node=f"node-{index}", device=f"cuda:{device}")
            for index, kind in enumerate(kinds)
            for device in range(kind.devices)
        ),
        fabrics=(inside, NETWORKS[network]),
        environment={"source": f"imagined: {machines} on {network}"},
    )


def _nodes(item: str) -> list[NodeKind]:
    match = _ITEM.fullmatch(item)
    if match is None or match[2] not in NODES or match[1] == "0":
        raise InvalidValue("--machines", item, f"such as 4xv100-node; known are {', '.join(NODES)}")
    return int(match[1] or 1) * [NODES[match[2]]]
