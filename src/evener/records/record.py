"""TrainRecord: what happened in a run, step by step and node by node; made by `train`, read by `report`."""

from __future__ import annotations

from evener.records.errors import require
from evener.records.plan import Plan
from evener.records.schema import Amount, Finite, Noun, Part, Whole


class NodeStep(Part, frozen=True, kw_only=True):
    """One node's part of one step (or of several, summed); by phase.

    Attributes:
        samples: computed here.
        io_seconds: IO, loading the batch.
        compute_seconds: FB, forward and backward, without waiting.
        wait_seconds: GE, the part of exchanging gradients and statistics that was not hidden behind computing.
        update_seconds: WU, the optimiser's step.
        sent_bytes: handed to collectives by this node (payload of a ring all-reduce: 2 (p-1)/p of the buffer).
        cpu_seconds: CPU time of its process, over all cores; 0 where that is not known.
        memory_bytes: of the device (GPU), or resident size of the process (CPU), at its peak until then; likewise.
    """

    samples: Amount
    io_seconds: Finite
    compute_seconds: Finite
    wait_seconds: Finite
    update_seconds: Finite
    sent_bytes: Amount
    cpu_seconds: Finite = 0.0
    memory_bytes: Amount = 0


class Step(Part, frozen=True, kw_only=True):
    """One optimiser step; after `TrainRecord.every` grew, the sum over that many steps, with the mean loss.

    Attributes:
        step: the last one in this entry, from 1.
        epoch: from 0.
        samples: over all nodes.
        loss: mean over the samples; None where a program does not tell it.
        seconds: by the leader's clock.
        nodes: one a rank; on the parameter-server plane one for every node that ever had a part in the run.
        staleness: on the parameter-server plane, versions between the weights that a contribution was computed from and
            those that it changed; mean over the contributions.
    """

    step: Amount
    epoch: Amount
    samples: Amount
    loss: Finite | None
    seconds: Finite
    nodes: tuple[NodeStep, ...]
    staleness: Finite = 0.0


class Validation(Part, frozen=True, kw_only=True):
    """One pass over the validation data.

    Attributes:
        step: after which it was made.
        epoch: from 0.
        loss: mean over the samples.
        accuracy: in [0, 1]; None where the task has no such measure.
        seconds: it took.
        metrics: others, by name.
    """

    step: Amount
    epoch: Amount
    loss: Finite
    accuracy: Finite | None
    seconds: Finite
    metrics: dict[str, Finite] = {}


class Epoch(Part, frozen=True, kw_only=True):
    """The end of a pass over the training data; whoever is shown it may end the run there.

    Attributes:
        step: the last one.
        epoch: from 0.
        loss: mean over the samples of the training; None where a program does not tell it.
        validation: that followed; None if there was none.
    """

    step: Amount
    epoch: Amount
    loss: Finite | None
    validation: Validation | None = None


class Event(Part, frozen=True, kw_only=True):
    """Something that happened: `rebalanced`, `checkpoint`, `left out`, `node lost`, `interrupted`, `resumed` ...

    On the parameter-server plane: `joined`, `away`, `excluded`, `back`, `passed over`, `replaced`, `left`, `refused`,
    `expelled`, `master restarted`.

    Attributes:
        step: at which.
        kind: one of the words above.
        message: one sentence.
        nodes: that it is about, by name; empty where it is about none, or all.
    """

    step: Amount
    kind: str
    message: str
    nodes: tuple[str, ...] = ()


class NodeSummary(Part, frozen=True, kw_only=True):
    """One node over the whole run: the keys that `--json` prints.

    Attributes:
        name: of the node.
        device: as PyTorch names it.
        share: fraction of all samples that it computed.
        seconds_computing: IO, FB and WU.
        seconds_waiting: for the others.
        bytes_sent: payload handed to collectives; on the parameter-server plane, of its contributions.
        bytes_received: likewise; on the parameter-server plane, of the weights that it was sent.
        peak_memory_bytes: of the device (GPU), or resident size of the process (CPU).
        contributions: on the parameter-server plane, that went into the weights.
        refused: that could not be used: not finite, or of a wrong size.
        late: that came when others had been given the work.
        staleness: of its contributions, mean, in versions of the weights.
        most_stale: of one of them.
        clipped: that were much longer than is usual, and shortened.
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
        """The part of its time in steps that the node waited for others, in [0, 1]."""
        seconds = self.seconds_waiting + self.seconds_computing
        return self.seconds_waiting / seconds if seconds else 0.0


class TrainRecord(Noun, frozen=True, kw_only=True):
    """One run.

    Attributes:
        task: name of the task.
        plan: it was started with.
        seed: of the run.
        epochs: asked for.
        precision: `fp32`, `bf16` ...
        seconds: of the training loop, validation and checkpoints included, start-up and measuring excluded.
        samples_per_second: trained samples by the seconds of the steps (validation and checkpoints excluded).
        final_loss: mean training loss of the last epoch's steps; None if the run was complete when it was resumed.
        validation_accuracy: of the last validation; None where there is none.
        startup_seconds: from the command to the first step.
        every: steps summed in one entry of `steps`.
        steps: in order.
        validations: in order.
        events: in order.
        nodes: one a rank.
        environment: versions of what ran it.
        agreement: how the nodes agreed, on the parameter-server plane; empty where they met in collectives.
        bytes_saved: by compression, there.
        goodput: share of `seconds` that was not lost to nodes that were lost or came.
        of_ideal: samples per second, as a fraction of what the nodes do together when none waits; see
            `evener.records.history.fraction_of_ideal`. None of a single node, and where it is not known.
        ending: how it ended before it was complete, a sentence; empty of a complete run. One that was interrupted or
            failed sums unequal numbers of steps in an entry: `step` tells how many.
        usual: options that came from `evener.toml`, and that file; empty if none did.
        options: that decide how work is divided, by name, such as `--shares`; those alone that the command knows.
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
