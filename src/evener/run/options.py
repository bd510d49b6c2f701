"""What other commands than `evener train` are asked, field by field; their options are made of these."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, get_args

from msgspec import Meta

from evener.errors import InvalidInput, require
from evener.plan import Strategy
from evener.profile import PRECISIONS, Precision
from evener.schema import Part
from evener.wire.frame import Limits

PATIENCE = Limits().patience
"""Seconds, where the user says nothing."""
PORT = 7117
"""Of a master, likewise."""
PROFILE = Path("cluster.json")
"""What `evener benchmark` writes and `evener plan` reads, likewise."""


class NodesConfig(Part, frozen=True, kw_only=True):
    """On which nodes of this machine a command computes: options that several commands have."""

    local_nodes: Annotated[
        str | None,
        Meta(description="Local nodes of these speeds, such as 1.0,0.5,0.25 (1.0@40=0.33: from step 40 on)."),
    ] = None
    devices: Annotated[str, Meta(description="all, cpu, or devices such as cuda:0,cuda:1.")] = "all"
    memory: Annotated[str | None, Meta(description="Memory of every node, such as 4GB or 4GB,512MB.")] = None
    patience: Annotated[float, Meta(description="Seconds of silence after which a node is given up.")] = PATIENCE

    def __post_init__(self) -> None:
        require(self.patience > 0, "--patience", self.patience, "positive seconds")


class BenchmarkConfig(NodesConfig, frozen=True, kw_only=True):
    """What `evener benchmark` measures; travels to every rank."""

    task: Annotated[str | None, Meta(description="Also time this task's model by batch size.")] = None
    data: Annotated[Path | None, Meta(description="Folder of the task's data.")] = None
    output: Annotated[Path, Meta(description="File of the profile.")] = PROFILE


class PlanConfig(Part, frozen=True, kw_only=True):
    """What `evener plan` is asked.

    Raises:
        InvalidInput: a precision or strategy is not known, or machines are both measured and imagined.
    """

    model: Annotated[str, Meta(description="resnet152, vgg16 ... (see docs/oracle.md), graph.json, or a task.")]
    option: Annotated[dict[str, str], Meta(description="key=value for the network or task; may be repeated.")] = {}
    profile: Annotated[Path | None, Meta(description=f"A ClusterProfile; {PROFILE} by default.")] = None
    machines: Annotated[str | None, Meta(description="Machines to imagine instead, such as 4xv100-node,h200.")] = None
    network: Annotated[str, Meta(description="That joins them: 1gbe, 10gbe, 100gbe or infiniband.")] = "10gbe"
    devices: Annotated[str, Meta(description="Nodes of the profile to take, such as ada,bob; all by default.")] = ""
    batch_size: Annotated[int | None, Meta(description="Samples of one step; the task's, or 32 a device.")] = None
    optimizer: Annotated[str, Meta(description="sgd, momentum or adam.")] = "momentum"
    precision: Annotated[Precision, Meta(description="fp32, bf16, fp16 or fp64.")] = "fp32"
    strategy: Annotated[tuple[Strategy, ...], Meta(description="Look at this one only; may be repeated.")] = ()
    learn: Annotated[tuple[Path, ...], Meta(description="record.json of a past run to correct the profile by.")] = ()
    scale: Annotated[str | None, Meta(description="Curves over numbers of devices, such as 1..1024.")] = None
    save: Annotated[Path | None, Meta(description="Write the plan (or, with --scale, the picture) there.")] = None

    def __post_init__(self) -> None:
        require(self.precision in PRECISIONS, "--precision", self.precision, f"one of {', '.join(PRECISIONS)}")
        for strategy in self.strategy:
            require(strategy in get_args(Strategy), "--strategy", strategy, f"one of {', '.join(get_args(Strategy))}")
        if self.profile is not None and self.machines is not None:
            raise InvalidInput("--profile and --machines exclude each other: machines are measured, or imagined")
