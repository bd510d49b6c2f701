"""The options of `evener tune`, field by field."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, get_args

from msgspec import Meta, field

from evener.config.options import (
    Dashboard,
    DataFolder,
    Home,
    MasterAddress,
    MasterToken,
    NodesConfig,
    TaskOptions,
    TokenFile,
    TrustedOnly,
    refuse_two_tokens,
)
from evener.config.run_config import YOLO_SUFFIXES
from evener.records.errors import InvalidInput, require, require_one_of
from evener.records.profile import PRECISIONS, Precision
from evener.search.halving import Pruning
from evener.search.space import parse_varied, suggest_varied

Metric = Literal["accuracy", "loss"]
Sampler = Literal["tpe", "random"]
Agreement = Literal["sync", "average"]
DEFAULT_AHEAD = 8


class TuneConfig(NodesConfig, frozen=True, kw_only=True):
    """The configuration of a search. A field without a description is not an option.

    Attributes:
        usual: default options from the user's file and the name of that file; empty if there are none.
        started: time of the start, in seconds since 1970.

    Raises:
        InvalidInput: a value is not allowed, or an option is varied twice.
    """

    task: Annotated[
        str, Meta(description="digits, mnist, nfnn, synthetic, path/to/my_task.py, or a model such as yolov8n.pt.")
    ]
    trials: Annotated[int, Meta(description="Number of trials.")] = 50
    vary: Annotated[
        tuple[str, ...],
        Meta(
            description="lr=1e-4..1e-1:log or width=64,128; repeat. Default: space(trial) of the task's file; of YOLO, "
            "what Ultralytics varies."
        ),
    ] = ()
    metric: Annotated[
        Metric | None, Meta(description="accuracy (largest) or loss (smallest). Default: accuracy if available.")
    ] = None
    prune: Annotated[Pruning, Meta(description="asha, hyperband, or none: run every trial to its end.")] = "asha"
    sampler: Annotated[Sampler, Meta(description="tpe learns from earlier trials, random does not.")] = "tpe"
    ahead: Annotated[int, Meta(description="Trials drawn before earlier results are used.")] = DEFAULT_AHEAD
    join: Annotated[bool, Meta(description="Idle nodes join the slowest trial.")] = True
    thin: Annotated[bool, Meta(description="Compute without PyTorch, even if it is installed.")] = False
    hours: Annotated[float | None, Meta(description="Start no trial after this time.")] = None
    data: DataFolder = None
    option: TaskOptions = {}
    agreement: Annotated[
        Agreement | None,
        Meta(description="Search on a master's nodes: they share a trial by sync; by average, each trains alone."),
    ] = None
    ship_data: Annotated[bool, Meta(description="Send --data to the nodes of the master.")] = False
    home: Home = None
    master: MasterAddress = None
    token: MasterToken = None
    token_file: TokenFile = None
    batch_size: Annotated[int | None, Meta(description="Samples of one step over all nodes of a trial.")] = None
    epochs: Annotated[int | None, Meta(description="Passes over the data in a trial that is not pruned.")] = None
    precision: Annotated[Precision, Meta(description="fp32, bf16, fp16 or fp64.")] = "fp32"
    seed: Annotated[int, Meta(description="Seed of the draws, and of every trial's weights and samples.")] = 0
    output: Annotated[Path | None, Meta(description="Folder of the study; runs/tune-TASK-TIME by default.")] = None
    resume: Annotated[bool, Meta(description="Resume the study in --output.")] = False
    dashboard: Dashboard = None
    trusted_only: TrustedOnly = False
    usual: str = ""
    started: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, word, choices in self._choices():
            require_one_of(name, word, choices)
        for name in ("trials", "ahead", "batch_size", "epochs", "hours"):
            value = getattr(self, name)
            require(value is None or value > 0, "--" + name.replace("_", "-"), value, "positive")
        require(self.seed >= 0, "--seed", self.seed, "zero or more")
        require(not self.resume or self.output is not None, "--output", self.output, "the study's folder with --resume")
        refuse_two_tokens(self.token, self.token_file)
        if self.is_on_master and (self.local_nodes is not None or self.devices != "all"):
            raise InvalidInput("--master and --agreement use a master's nodes: remove --local-nodes and --devices")
        if self.is_on_master and self.memory is not None:
            raise InvalidInput("--memory is for nodes of this machine: on a master's nodes, limit it there")
        if self.master is None and (self.token is not None or self.token_file is not None):
            raise InvalidInput("--token and --token-file are for a master that --master names: add its address")
        if self.ship_data and not (self.is_on_master and self.data):
            raise InvalidInput("--ship-data sends --data to a master's nodes: add --data, and --master or --agreement")
        if self.trusted_only and not self.is_yolo:
            raise InvalidInput(
                "--trusted-only belongs to a model of Ultralytics: the file of any other task is a program"
            )
        suggest_varied([parse_varied(text) for text in self.vary])

    def _choices(self) -> list[tuple[str, str, Sequence[str]]]:
        return [
            ("--metric", self.metric or "loss", get_args(Metric)),
            ("--prune", self.prune, get_args(Pruning)),
            ("--sampler", self.sampler, get_args(Sampler)),
            ("--precision", self.precision, PRECISIONS),
            ("--agreement", self.agreement or "sync", get_args(Agreement)),
        ]

    @property
    def is_on_master(self) -> bool:
        """Whether trials run on nodes that have joined a master."""
        return self.agreement is not None or self.master is not None or self.home is not None

    @property
    def is_yolo(self) -> bool:
        """Whether trials train a model of Ultralytics."""
        return Path(self.task).suffix in YOLO_SUFFIXES

    @property
    def divides(self) -> bool:
        """Whether several nodes can share a trial with the same result as one node."""
        return self.agreement in (None, "sync") if self.is_on_master else not self.thin

    @property
    def folder(self) -> Path:
        """The folder of the study: `--output`, or `runs/tune-TASK-TIME`."""
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(self.started))
        return self.output or Path("runs") / f"tune-{Path(self.task).stem}-{stamp}"
