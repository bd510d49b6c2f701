"""TrainRecord: the record of a run, step by step and node by node; made by `train`, read by `report`."""

from __future__ import annotations

from math import isfinite
from typing import Any

from evener.records.errors import NonFiniteLoss, require
from evener.records.plan import Plan
from evener.records.schema import (
    MIN_SECONDS,
    Amount,
    Finite,
    Loss,
    Noun,
    Part,
    Quantity,
    Seconds,
    Whole,
    require_measured,
)

RECORD, WEIGHTS = "record.json", "model.safetensors"
"""Names of the results in a run's folder."""
_OF_VALIDATION = " in the validation: validation data, or outputs for them, are not finite"


class NodeStep(Part, frozen=True, kw_only=True):
    """One node's part of one step (or of several, summed), by phase.

    Attributes:
        samples: samples computed here.
        io_seconds: IO, loading the batch.
        compute_seconds: FB, forward and backward, without waiting.
        wait_seconds: GE, exchanging gradients and statistics, as far as it was not hidden behind computing.
        update_seconds: WU, the optimizer's step.
        sent_bytes: bytes handed to collectives by this node (payload of a ring all-reduce: 2 (p-1)/p of the buffer).
        cpu_seconds: CPU time of its process, over all cores; 0 where that is not known.
        memory_bytes: peak memory of the device (GPU), or peak resident size of the process (CPU); 0 where that is not
            known.
    """

    samples: Quantity
    io_seconds: Seconds
    compute_seconds: Seconds
    wait_seconds: Seconds
    update_seconds: Seconds
    sent_bytes: Quantity
    cpu_seconds: Seconds = 0.0
    memory_bytes: Quantity = 0

    def __post_init__(self) -> None:
        times = self.io_seconds, self.compute_seconds, self.wait_seconds, self.update_seconds, self.cpu_seconds
        for value in times:  # a record has hundreds of thousands of these
            if value != 0 and not value >= MIN_SECONDS:
                require_measured(self, "io_seconds", "compute_seconds", "wait_seconds", "update_seconds", "cpu_seconds")


class Step(Part, frozen=True, kw_only=True):
    """One optimizer step; after `TrainRecord.every` grew, the sum over that many steps, with the mean loss.

    Attributes:
        step: number of the last step in this entry, from 1.
        epoch: epoch, from 0.
        samples: samples over all nodes.
        loss: mean over the samples; None where a program does not report it.
        seconds: seconds by the leader's clock.
        nodes: one per rank; with a parameter server, one for every node that ever took part in the run.
        staleness: with a parameter server, versions between the weights that a contribution was computed from and those
            that it changed; mean over the contributions.
    """

    step: Quantity
    epoch: Quantity
    samples: Quantity
    loss: Loss | None
    seconds: Seconds
    nodes: tuple[NodeStep, ...]
    staleness: Loss = 0.0

    def __post_init__(self) -> None:
        require_measured(self, "seconds")


class Validation(Part, frozen=True, kw_only=True):
    """One pass over the validation data.

    Attributes:
        step: step after which it was made.
        epoch: epoch, from 0.
        loss: mean over the samples.
        accuracy: accuracy in [0, 1]; None where the task has no such measure.
        seconds: seconds of the pass.
        metrics: other metrics, by name.
    """

    step: Amount
    epoch: Amount
    loss: Finite
    accuracy: Finite | None
    seconds: Finite
    metrics: dict[str, Finite] = {}


def finite_validation(node: str, **fields: Any) -> Validation:
    """Return the Validation of these fields, without the metrics that are not finite; such an accuracy is None.

    Raises:
        NonFiniteLoss: the loss is not finite.
    """
    loss, accuracy, metrics = fields["loss"], fields["accuracy"], fields.get("metrics", {})
    if not isfinite(loss):
        raise NonFiniteLoss(node, fields["step"], loss, _OF_VALIDATION)
    fields["accuracy"] = accuracy if accuracy is not None and isfinite(accuracy) else None
    return Validation(**{**fields, "metrics": {name: value for name, value in metrics.items() if isfinite(value)}})


class Epoch(Part, frozen=True, kw_only=True):
    """The end of a pass over the training data, at which a viewer may end the run.

    Attributes:
        step: number of the last step.
        epoch: epoch, from 0.
        loss: mean over the training samples; None where a program does not report it.
        validation: validation that followed; None if there was none.
    """

    step: Amount
    epoch: Amount
    loss: Finite | None
    validation: Validation | None = None


class Event(Part, frozen=True, kw_only=True):
    """An event: `approximate`, `rebalanced`, `checkpoint`, `left out`, `node lost`, `interrupted`, `resumed` ...

    With a parameter server: `joined`, `away`, `excluded`, `back`, `skipped`, `replaced`, `left`, `refused`,
    `expelled`, `master restarted`.

    Attributes:
        step: step at which it happened.
        kind: one of the words above.
        message: one sentence.
        nodes: nodes that it concerns, by name; empty where it concerns none, or all.
    """

    step: Amount
    kind: str
    message: str
    nodes: tuple[str, ...] = ()


class NodeSummary(Part, frozen=True, kw_only=True):
    """One node over the whole run: the keys that `--json` prints.

    Attributes:
        name: name of the node.
        device: device, as PyTorch names it.
        share: fraction of all samples that it computed.
        seconds_computing: IO, FB and WU.
        seconds_waiting: seconds of waiting for the others.
        bytes_sent: payload handed to collectives; with a parameter server, of its contributions.
        bytes_received: payload received from collectives; with a parameter server, of the weights.
        peak_memory_bytes: peak memory of the device (GPU), or peak resident size of the process (CPU).
        contributions: with a parameter server, contributions that went into the weights.
        refused: contributions that could not be used: not finite, or of a wrong size.
        late: contributions that arrived when others had been assigned the work.
        staleness: mean staleness of its contributions, in versions of the weights.
        most_stale: largest staleness of one contribution.
        clipped: contributions that were much longer than usual, and shortened.
    """

    name: str
    device: str
    share: Finite
    seconds_computing: Finite
    seconds_waiting: Finite
    bytes_sent: Amount
    bytes_received: Amount
    peak_memory_bytes: Amount
    contributions: Amount = 0
    refused: Amount = 0
    late: Amount = 0
    staleness: Finite = 0.0
    most_stale: Amount = 0
    clipped: Amount = 0

    @property
    def waiting(self) -> float:
        """Share of its time in steps that the node waited for others, in [0, 1]."""
        seconds = self.seconds_waiting + self.seconds_computing
        return self.seconds_waiting / seconds if seconds else 0.0


class TrainRecord(Noun, frozen=True, kw_only=True):
    """One run.

    Attributes:
        task: name of the task.
        plan: plan that it was started with.
        seed: seed of the run.
        epochs: requested epochs.
        precision: `fp32`, `bf16` ...
        seconds: seconds of the training loop, including validation and checkpoints, without start-up and measuring.
        samples_per_second: trained samples by the seconds of the steps (without validation and checkpoints).
        final_loss: mean training loss of the last epoch's steps; None if the run was complete when it was resumed.
        validation_accuracy: accuracy of the last validation; None where there is none.
        startup_seconds: seconds from the command to the first step.
        every: steps summed in one entry of `steps`.
        steps: steps in order.
        validations: validations in order. Of thousands, earlier ones are sparse; the best and the last are kept.
        events: events in order.
        nodes: one per rank.
        environment: versions of the software.
        agreement: name of the agreement under which nodes of a master train; empty with collectives.
        bytes_saved: bytes that compression saved in such a run.
        goodput: share of `seconds` that was not lost because nodes were lost or joined.
        of_ideal: samples per second, as a fraction of the nodes' speed together if none waits; see
            `evener.records.history.fraction_of_ideal`. None for a single node, and where it is not known.
        ending: sentence that says how it ended before it was complete; empty for a complete run. An interrupted or
            failed run sums unequal numbers of steps in an entry: `step` tells how many.
        usual: options that came from `evener.toml`, and that file; empty if none did.
        options: options that decide how work is divided, by name, such as `--shares`; only those that the command
            knows.
    """

    task: str
    plan: Plan
    seed: Whole
    epochs: Amount
    precision: str
    seconds: Finite
    samples_per_second: Finite
    final_loss: Finite | None
    validation_accuracy: Finite | None
    startup_seconds: Finite
    every: Amount = 1
    steps: tuple[Step, ...] = ()
    validations: tuple[Validation, ...] = ()
    events: tuple[Event, ...] = ()
    nodes: tuple[NodeSummary, ...] = ()
    environment: dict[str, str] = {}
    agreement: str = ""
    bytes_saved: Amount = 0
    goodput: Finite = 1.0
    of_ideal: Finite | None = None
    ending: str = ""
    usual: str = ""
    options: dict[str, str] = {}

    def __post_init__(self) -> None:
        require(self.every >= 1, "every", self.every, "1 or more")
        require(self.seconds >= 0, "seconds", self.seconds, "zero or more")
