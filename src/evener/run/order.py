"""What the user asked for, as it travels to every rank; no PyTorch here, which those who ask a star may lack."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from evener.plan import Plan
from evener.run.settings import Settings
from evener.schema import Part
from evener.task import Task, ThinTask


class Order(Part, frozen=True, kw_only=True):
    """What the user asked for; travels to every rank.

    Attributes:
        task: built-in name or path of a file.
        data_dir: folder of the data, or None.
        options: of the task, `key=value`.
        output: folder for the record and the weights.
        strategy: how the work is divided; `auto` to choose.
        replicas: sizes of the groups of nodes that hold one model together, such as `3,2`; None for two halves.
        micro_batches: of a pipeline's step; None for four a stage.
        schedule: of a pipeline: `1f1b` or `gpipe`.
        rematerialise: which activations are computed a second time to save memory.
        plan: to perform, instead of deciding.
        shares: `measured`, `equal`, or relative shares such as `7,2,1`.
        batch_size: None for the task's.
        epochs: None for the task's.
        seed, precision, accumulate, compile, workers, checkpoint, checkpoint_every, resume, stationary, patience: as in
            `Settings`.
        started: the clock when the command began, in seconds since the epoch.
    """

    task: str
    data_dir: str | None = None
    options: dict[str, str] = {}
    output: str
    strategy: str = "auto"
    replicas: str | None = None
    micro_batches: int | None = None
    schedule: str = "1f1b"
    rematerialise: str = "auto"
    plan: Plan | None = None
    shares: str = "measured"
    batch_size: int | None = None
    epochs: int | None = None
    seed: int = 0
    precision: Any = "fp32"
    accumulate: int = 1
    compile: bool = False
    workers: int = 0
    checkpoint: str | None = None
    checkpoint_every: int | None = None
    resume: bool = False
    stationary: bool = False
    patience: float = 15.0
    started: float

    def settings(self, task: Task | ThinTask) -> Settings:
        """The settings of a run of `task`. Raises InvalidValue."""
        return Settings(
            batch_size=task.batch_size if self.batch_size is None else self.batch_size,
            epochs=task.epochs if self.epochs is None else self.epochs,
            seed=self.seed,
            precision=self.precision,
            accumulate=self.accumulate,
            compile=self.compile,
            workers=self.workers,
            checkpoint=self.checkpoint or str(Path(self.output) / "checkpoints"),
            checkpoint_every=self.checkpoint_every,
            resume=self.resume,
            balance=self.shares == "measured" and not self.stationary and self.strategy in ("auto", "data"),
            stationary=self.stationary,
            patience=self.patience,
        )
