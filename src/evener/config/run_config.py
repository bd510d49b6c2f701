"""RunConfig: the options of `evener train`, field by field, and their conflicts.

Option names, help and defaults come from the fields (see `cli/fields.py`). Values that are not allowed, and options
that conflict, are rejected when a RunConfig is made.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

import msgspec
from msgspec import Meta, field

from evener.agreements.settings import Compression, Merge, Robust
from evener.config.conflicts import conflict, option_name, strategy_conflict
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
from evener.launch.nodes import relative_shares
from evener.oracle.division.rules import DivisionName
from evener.oracle.schedule import Rematerialise, ScheduleChoice
from evener.records.agreement import AgreementName
from evener.records.decoding import json_decoder
from evener.records.errors import InvalidInput, require, require_one_of
from evener.records.plan import Plan
from evener.records.profile import PRECISIONS, Precision
from evener.records.task import BatchTask, Task, ThinTask

LAYER_STRATEGIES: tuple[DivisionName, ...] = get_args(DivisionName)
"""Strategies that divide every layer among the ranks of a replica."""
STRATEGIES = (
    *("auto", "data", *LAYER_STRATEGIES, "pipeline"),
    *(f"data+{inside}" for inside in (*LAYER_STRATEGIES, "pipeline")),
    *(f"pipeline+{inside}" for inside in ("filter", "channel", "hybrid")),
)


class RunConfig(NodesConfig, frozen=True, kw_only=True):
    """Options of a run; they are sent to every rank. A field without a description is no option.

    Attributes:
        usual: options that were not typed, and the file that they came from; empty if there are none.
        started: start time in seconds since 1970.
        keeps_checkpoints: whether checkpoints stay where they are written; on the nodes of a master they go to the
            master.

    Raises:
        InvalidValue: a value is not allowed.
        InvalidInput: options conflict; says what to type.
    """

    task: Annotated[
        str, Meta(description="digits, mnist, tiny-imagenet, synthetic, path/to/my_task.py, or yolov8n.pt.")
    ]
    data: DataFolder = None
    option: TaskOptions = {}
    strategy: Annotated[
        str,
        Meta(
            description="auto, data, filter, channel, hybrid, sharded, spatial, pipeline, data+... or pipeline+... .",
            extra={"choices": STRATEGIES},
        ),
    ] = "auto"
    replicas: Annotated[
        str | None, Meta(description="(data+X) Replica sizes, for example 3,2. Default: two halves.")
    ] = None
    columns: Annotated[
        int, Meta(description="(spatial) Nodes side by side that also divide columns of images (rows of volumes).")
    ] = 1
    members: Annotated[int, Meta(description="(pipeline+X) Nodes that divide the layers of one stage.")] = 2
    micro_batches: Annotated[
        int | None, Meta(description="(pipeline) Consecutive parts of a batch. Default: 4 per stage.")
    ] = None
    schedule: Annotated[
        ScheduleChoice,
        Meta(description="(pipeline) auto, 1f1b, gpipe or zero-bubble; auto takes the fastest that fits."),
    ] = "auto"
    rematerialise: Annotated[
        Rematerialise,
        Meta(description="(model parallelism) Compute activations twice to save memory: auto, never, always ..."),
    ] = "auto"
    plan: Annotated[Path | None, Meta(description="Use this plan, as `evener plan --save` wrote it.")] = None
    shares: Annotated[str, Meta(description="measured, equal, or relative shares such as 7,2,1.")] = "measured"
    batch_size: Annotated[int | None, Meta(description="Samples of one step over all nodes.")] = None
    epochs: Annotated[int | None, Meta(description="Passes over the training data.")] = None
    precision: Annotated[Precision, Meta(description="fp32, bf16, fp16 or fp64.")] = "fp32"
    compile: Annotated[bool, Meta(description="Compile the model.")] = False
    elastic: Annotated[
        bool | None,
        Meta(
            description="Continue when local nodes are lost, and replace them. "
            "Default for data parallelism; off for model parallelism."
        ),
    ] = None
    check: Annotated[
        bool, Meta(description="Before the first step, compare a small step of the nodes with a single process.")
    ] = True
    seed: Annotated[int, Meta(description="Seed of weights, order of samples and random transforms.")] = 0
    accumulate: Annotated[int, Meta(description="Micro-batches of one step.")] = 1
    workers: Annotated[int, Meta(description="Processes per node that load data ahead.")] = 0
    stationary: Annotated[bool, Meta(description="Every node uses its own class-balanced part of the data.")] = False
    checkpoint: Annotated[Path | None, Meta(description="Folder of checkpoints; OUTPUT/checkpoints by default.")] = None
    checkpoint_every: Annotated[
        str | None, Meta(description="Steps, or seconds such as 30s, between checkpoints besides every epoch's.")
    ] = None
    resume: Annotated[bool, Meta(description="Continue from the last checkpoint.")] = False
    output: Annotated[
        Path | None, Meta(description="Folder of record, report and weights; runs/TASK-TIME by default.")
    ] = None
    dashboard: Dashboard = None
    quiet: Annotated[bool, Meta(description="Print only errors.")] = False
    agreement: Annotated[
        AgreementName | None,
        Meta(description="Train on a master's nodes: sync, async, bounded, average, federated or diloco."),
    ] = None
    staleness: Annotated[int | None, Meta(description="(bounded) Updates that a node may be ahead.")] = None
    local_steps: Annotated[str | None, Meta(description="(average, diloco) Steps between exchanges, or epoch.")] = None
    fraction: Annotated[
        float | None, Meta(description="(federated) Fraction of the nodes that is drawn for each round. Default: all.")
    ] = None
    outer_lr: Annotated[float | None, Meta(description="(diloco) Learning rate of the common weights.")] = None
    outer_momentum: Annotated[float | None, Meta(description="(diloco) Nesterov momentum of the common weights.")] = (
        None
    )
    compress: Annotated[Compression | None, Meta(description="With --agreement: none, bf16, int8 or top-k.")] = None
    robust: Annotated[
        Robust | None,
        Meta(description="With --agreement: merge rule: mean, clip, trimmed, median or krum."),
    ] = None
    merge: Annotated[
        Merge | None,
        Meta(description="With --agreement: where to merge: cores, threads or the master's device."),
    ] = None
    overlap: Annotated[bool, Meta(description="(average, diloco) Continue to work during an exchange.")] = False
    skip_late: Annotated[
        bool, Meta(description="(average, diloco) Merge without late nodes, whose updates count in a later round.")
    ] = False
    ship_data: Annotated[bool, Meta(description="With a master: send --data to its nodes.")] = False
    system: Annotated[
        Path | None,
        Meta(description="With --agreement: wait for the nodes of this file; fixed parts of data follow its speeds."),
    ] = None
    home: Home = None
    master: MasterAddress = None
    token: MasterToken = None
    token_file: TokenFile = None
    trusted_only: TrustedOnly = False
    usual: str = ""
    started: float = field(default_factory=time.time)
    keeps_checkpoints: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, choices in _CHOICES.items():
            if (word := getattr(self, name)) is not None:
                require_one_of(option_name(name), word, choices)
        for name, is_allowed, allowed in _VALUES:
            value = getattr(self, name)
            require(value is None or is_allowed(value), option_name(name), value, allowed)
        relative_shares(self.shares, self.num_local_nodes)
        refuse_two_tokens(self.token, self.token_file)
        planned = self.plan is not None  # its strategy is known when it has been read
        if (sentence := conflict(self) or (None if planned else strategy_conflict(self, self.strategy))) is not None:
            raise InvalidInput(sentence)

    @property
    def folder(self) -> Path:
        """Folder of the run: the user's, or `runs/TASK-TIME`."""
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(self.started))
        return self.output or Path("runs") / f"{Path(self.task).stem}-{stamp}"

    @property
    def dividing_options(self) -> dict[str, str]:
        """Options that decide how work is divided, with their values; empty where they are not set."""
        values = {
            "--shares": self.shares,
            "--workers": self.workers,
            "--batch-size": self.batch_size or "",
            "--agreement": self.agreement or "",
            "--local-steps": self.local_steps or "",
            "--stationary": "yes" if self.stationary else "",
        }
        return {name: str(value) for name, value in values.items()}

    @property
    def is_elastic(self) -> bool:
        """Whether the run continues without lost nodes, if it can: the user's choice, or else the default."""
        if self.elastic is not None:
            return self.elastic
        return self.strategy in ("auto", "data") and not self.stationary and not self.compile

    @property
    def is_yolo(self) -> bool:
        """Whether the task is a model of Ultralytics."""
        return Path(self.task).suffix in YOLO_SUFFIXES

    @property
    def has_ranks_on_master(self) -> bool:
        """Whether ranks that work together run on the nodes of a master."""
        named = self.master is not None or self.home is not None
        return named and self.agreement is None and self.local_nodes is None

    @property
    def keeps_data(self) -> bool:
        """Whether every node of a master has a fixed part of the data."""
        return self.agreement == "federated" or (self.agreement is not None and self.stationary)

    @property
    def checkpoint_folder(self) -> Path:
        """Folder of checkpoints: the user's, or one in the folder of the run."""
        return self.checkpoint or self.folder / "checkpoints"

    @property
    def checkpoint_steps(self) -> int | None:
        """Steps between checkpoints; None if there is no such interval."""
        return int(self.checkpoint_every) if self.checkpoint_every and self.checkpoint_every.isdecimal() else None

    @property
    def checkpoint_seconds(self) -> int | None:
        """Seconds between checkpoints; None if there is no such interval."""
        return None if self.checkpoint_every is None or self.checkpoint_steps else int(self.checkpoint_every[:-1])

    def sizes_of(self, task: Task | BatchTask | ThinTask, plan: Plan | None = None) -> tuple[int, int]:
        """Return (samples per step, epochs) of a run of `task`, perhaps with a `plan`. Raises InvalidValue."""
        batch_size = plan.batch_size if plan else self.batch_size or task.batch_size
        require(self.accumulate <= batch_size, "--accumulate", self.accumulate, f"1 to {batch_size}")
        return batch_size, self.epochs or task.epochs


def require_samples(batch_size: int, num_samples: int) -> None:
    """Raise InvalidValue unless there are enough samples for a step."""
    require(num_samples > 0, "training samples", num_samples, "at least one")
    require(batch_size <= num_samples, "--batch-size", batch_size, f"at most the {num_samples} training samples")


YOLO_SUFFIXES = (".pt", ".yaml", ".yml")
"""Suffixes of files that `evener train` treats as models of Ultralytics."""
MAX_COUNT = 10**9
"""Limit of epochs, and of updates."""
MAX_WORKERS = 1024
_CHOICES: dict[str, Sequence[str]] = {
    "agreement": get_args(AgreementName),
    "compress": get_args(Compression),
    "robust": get_args(Robust),
    "merge": get_args(Merge),
    "strategy": STRATEGIES,
    "schedule": get_args(ScheduleChoice),
    "rematerialise": get_args(Rematerialise),
    "precision": PRECISIONS,
}
"""Allowed words, by field."""
_VALUES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("micro_batches", lambda value: value > 0, "positive"),
    ("batch_size", lambda value: value > 0, "positive"),
    ("columns", lambda value: value > 0, "positive"),
    ("members", lambda value: value > 0, "positive"),
    ("dashboard", lambda value: 0 <= value < 65536, "a port, 1 to 65535, or 0 for the next free one"),
    ("epochs", lambda value: 0 < value <= MAX_COUNT, f"positive, and at most {MAX_COUNT}"),
    ("seed", lambda value: value >= 0, "zero or more"),
    ("accumulate", lambda value: value > 0, "positive"),
    ("workers", lambda value: 0 <= value <= MAX_WORKERS, f"from 0 to {MAX_WORKERS} processes"),
    (
        "checkpoint_every",
        lambda value: re.fullmatch("0*[1-9][0-9]{0,8}s?", value) is not None,
        "a positive number of steps, or of seconds such as 30s, of at most 9 digits",
    ),
    ("staleness", lambda value: 0 < value <= MAX_COUNT, f"positive, and at most {MAX_COUNT}"),
    (
        "local_steps",
        lambda value: value == "epoch" or re.fullmatch("0*[1-9][0-9]{0,8}", value) is not None,
        "a positive number of at most 9 digits, or epoch",
    ),
    ("fraction", lambda value: 0 < value <= 1, "above 0 and at most 1"),
    ("outer_lr", lambda value: value > 0, "positive"),
    ("outer_momentum", lambda value: 0 < value < 1, "between 0 and 1"),
)
"""Other fields: name, whether a value is allowed, and a description of the allowed values."""


def encode_config(config: RunConfig) -> bytes:
    """Encode a config as JSON for another machine."""
    return msgspec.json.encode(config, enc_hook=str)


def decode_config(data: bytes) -> RunConfig:
    """Decode the result of `encode_config`. Raises msgspec.DecodeError."""
    config: RunConfig = json_decoder(RunConfig, _path).decode(data)
    return config


def _path(_: type[Any], text: Any) -> Path:
    return Path(text)
