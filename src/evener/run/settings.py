"""What a user may set about a run, besides the task; travels to every rank."""

from __future__ import annotations

from typing import Literal, get_args

from evener.errors import require
from evener.schema import Part

Precision = Literal["fp32", "bf16", "fp16", "fp64"]


class Settings(Part, frozen=True, kw_only=True):
    """Settings of one run.

    Attributes:
        batch_size: samples of one optimiser step over all ranks.
        epochs: passes over the training data.
        seed: of weights, order of samples and random transforms.
        precision: of computing; fp16 scales the loss, fp64 is for proofs.
        accumulate: micro-batches of one step, one after the other.
        compile: whether the model is compiled.
        workers: processes per rank that load data ahead.
        checkpoint: folder of checkpoints.
        checkpoint_every: steps between checkpoints; an epoch's end makes one in any case.
        resume: whether to go on from the last checkpoint.
        balance: whether shares follow the measured speeds while running.
        stationary: whether every rank keeps to a class-balanced part of the data of its own.
        patience: seconds after which a silent rank is given up.
    """

    batch_size: int
    epochs: int
    seed: int = 0
    precision: Precision = "fp32"
    accumulate: int = 1
    compile: bool = False
    workers: int = 0
    checkpoint: str
    checkpoint_every: int | None = None
    resume: bool = False
    balance: bool = True
    stationary: bool = False
    patience: float = 15.0

    def __post_init__(self) -> None:
        require(self.batch_size > 0, "--batch-size", self.batch_size, "positive")
        allowed = ", ".join(get_args(Precision))
        require(self.precision in get_args(Precision), "--precision", self.precision, f"one of {allowed}")
        require(self.epochs > 0, "--epochs", self.epochs, "positive")
        require(self.seed >= 0, "--seed", self.seed, "zero or more")
        require(0 < self.accumulate <= self.batch_size, "--accumulate", self.accumulate, f"1 to {self.batch_size}")
        require(self.workers >= 0, "--workers", self.workers, "zero or more")
        every = self.checkpoint_every
        require(every is None or every > 0, "--checkpoint-every", every, "positive")
        require(self.patience > 0, "--patience", self.patience, "positive seconds")
