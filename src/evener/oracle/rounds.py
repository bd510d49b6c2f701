"""Prices agreements at a master, by the time that each takes to a goal.

    sync            the nodes divide a batch by their speeds; a round is one step and an exchange
    local steps     (`average`, `diloco`) every node makes steps of whole batches, a slow one fewer; a round is H steps
                    of the fastest node and an exchange

In an exchange the nodes receive the weights and then send their contributions, all of them through the one line of the
master. Computing and exchanges follow each other:

    seconds of a round = seconds of the slowest node + 2 (latency + bytes / rate of the star) + encoding and decoding

Nodes encode at the same time; the master decodes one contribution after the other, and encodes the merged one.

How many samples a model needs to a goal cannot be predicted. It is assumed, and `Rounds.margin` says how wrong the
assumption may be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from evener.oracle.apportion import apportion, local_steps
from evener.oracle.cost.model import CostEstimate, CostModel

SAMPLES_NEEDED = {"none": 1.25, "bf16": 1.25, "int8": 1.25, "top-k": 2.0}
"""Samples until a goal with local steps, by compression, relative to those of `sync`: measured with `mnist` to 97 %,
with 5 and 20 local steps."""
SPARSE_SYNC_NEEDED = 1.25
"""The same of `sync` with top-k, which SGD alone can have."""
_CODING = {"none": (0.0, 0.0), "bf16": (2.0e-9, 0.4e-9), "int8": (1.8e-9, 0.4e-9), "top-k": (10.7e-9, 0.7e-9)}
"""Seconds to encode and to decode a number, by compression: measured on one core of an EPYC."""
LOCAL_STEPS = (2, 5, 10, 20, 50, 100, 200, 500)
COMPUTING = 0.9
"""Local steps are the fewest for which nodes compute this share of the time: more would need more samples."""
_ALIKE = 1.02
"""Times to the goal whose ratio is below this count as equal; the one with the fewest local steps is then taken."""


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """The rounds of one agreement.

    Attributes:
        agreement: `sync`, or `local steps`, which take `average` and `diloco` equally long; or ranks without a master.
        compression: compression of weights and contributions.
        nodes: nodes that take part.
        local_steps: steps of the fastest node in a round.
        samples: samples of a round, of all nodes.
        compute_seconds: seconds until the slowest node has made its steps.
        exchange_seconds: seconds of an exchange, with encoding and decoding.
        sent_bytes: bytes of a contribution.
        needed: samples until the goal, relative to those of `sync`.
    """

    agreement: str
    compression: str = "none"
    nodes: int
    local_steps: int = 1
    samples: int
    compute_seconds: float
    exchange_seconds: float
    sent_bytes: int
    needed: float = 1.0

    @property
    def seconds(self) -> float:
        """Seconds of a round."""
        return self.compute_seconds + self.exchange_seconds

    @property
    def computing(self) -> float:
        """Share of the time in which the slowest node computes."""
        return self.compute_seconds / self.seconds

    @property
    def goal_seconds(self) -> float:
        """Seconds until the goal, for each sample that `sync` needs."""
        return self.needed * self.seconds / self.samples

    def margin(self, other: Rounds) -> float:
        """Return how many times the samples of `other` it may need and still reach the goal as soon."""
        return other.seconds / other.samples / (self.seconds / self.samples) * other.needed


def best_hub(model: CostModel) -> int:
    """Return the device at which a master has the fastest lines to all others; of equal ones the first."""
    devices = range(model.size)
    return min(devices, key=lambda hub: model.topology.star(hub, devices).seconds(model.parameter_bytes))


def price_rounds(
    model: CostModel, hub: int, bytes_of: Mapping[str, int], devices: Sequence[int] | None = None
) -> tuple[Rounds, ...]:
    """Return the rounds of each agreement and compression, the soonest at the goal first.

    Args:
        model: what is trained, and the machines. Its batch is that of `sync`, and of every local step.
        hub: device at whose machine the master is.
        bytes_of: bytes of a contribution by compression; `none` has those of the weights.
        devices: devices that train; by default all.

    Raises:
        DoesNotFit: the devices together cannot hold one batch.
    """
    batch, devices = model.job.batch_size, range(model.size) if devices is None else devices
    workers = [model.workers[device] for device in devices]
    shares = apportion(batch, workers)
    working = [device for device, share in zip(devices, shares, strict=True) if share]
    needed_of = {"none": 1.0} if model.job.optimizer == "adam" else {"none": 1.0, "top-k": SPARSE_SYNC_NEEDED}
    found = [
        Rounds(
            agreement="sync",
            compression=compression,
            nodes=len(working),
            samples=batch,
            compute_seconds=max(worker.seconds(n) for worker, n in zip(workers, shares, strict=True) if n),
            exchange_seconds=_exchange(model, hub, working, compression, bytes_of[compression]),
            sent_bytes=bytes_of[compression],
            needed=needed,
        )
        for compression, needed in needed_of.items()
    ]
    able = [device for device, worker in zip(devices, workers, strict=True) if worker.capacity >= batch]
    if able:
        found += [_local(model, hub, able, compression, sent) for compression, sent in bytes_of.items()]
    return tuple(sorted(found, key=lambda one: one.goal_seconds))


def rounds_of_ranks(estimate: CostEstimate, batch_size: int) -> Rounds:
    """Return the steps of ranks that work together on a batch, without a master, as rounds."""
    return Rounds(
        agreement=f"ranks, {estimate.strategy}" if len(estimate.devices) > 1 else "one node",
        nodes=len(estimate.devices),
        samples=batch_size,
        compute_seconds=estimate.compute_seconds,
        exchange_seconds=max(0.0, estimate.step_seconds - estimate.compute_seconds),
        sent_bytes=estimate.sent_bytes,
    )


def chosen_rounds(rounds: Sequence[Rounds]) -> Rounds:
    """Return the soonest rounds at the goal; of several that are alike, those with the fewest local steps."""
    bound = _ALIKE * min(one.goal_seconds for one in rounds)
    return min((one for one in rounds if one.goal_seconds < bound), key=lambda one: one.local_steps)


def exact_rounds(rounds: Sequence[Rounds], ranks: Rounds) -> Rounds:
    """Return the soonest rounds that train what one process trains: those of `sync`, or of ranks."""
    exact = [one for one in rounds if one.agreement == "sync" and one.compression == "none"]
    return min((*exact, ranks), key=lambda one: one.goal_seconds)


def rounds_advice(rounds: Sequence[Rounds], ranks: Rounds, master: str) -> str:
    """Return what reaches the goal soonest, and how much that depends on the assumption."""
    best, exact = chosen_rounds(rounds), exact_rounds(rounds, ranks)
    if best.goal_seconds >= exact.goal_seconds:
        what = f"--agreement sync with the master on {master}" if exact is best else exact.agreement
        return f"Use {what}: local steps would not be sooner."
    code = "" if best.compression == "none" else f" --compress {best.compression}"
    what = "sync" if best.agreement == "sync" else f"diloco --local-steps {best.local_steps}"
    return (
        f"Use --agreement {what}{code} with the master on {master} if the result may "
        f"differ from that of one process: {exact.goal_seconds / best.goal_seconds:.3g}x as soon as {exact.agreement} "
        f"if it needs {best.needed:g} times as many samples, and as soon if it needs {best.margin(exact):.3g} times."
    )


def _local(model: CostModel, hub: int, devices: Sequence[int], compression: str, sent_bytes: int) -> Rounds:
    """Return the rounds with the fewest local steps that let nodes compute for long enough."""
    batch = model.job.batch_size
    exchange = _exchange(model, hub, devices, compression, sent_bytes)
    seconds = [model.workers[device].seconds(batch) for device in devices]
    for most in LOCAL_STEPS:
        steps = local_steps(most, seconds)
        computing = max(count * each for count, each in zip(steps, seconds, strict=True))
        if computing >= COMPUTING * (computing + exchange):
            break
    return Rounds(
        agreement="local steps",
        compression=compression,
        nodes=len(devices),
        local_steps=most,
        samples=batch * sum(steps),
        compute_seconds=computing,
        exchange_seconds=exchange,
        sent_bytes=sent_bytes,
        needed=SAMPLES_NEEDED[compression],
    )


def _exchange(model: CostModel, hub: int, devices: Sequence[int], compression: str, nbytes: int) -> float:
    encode, decode = _CODING[compression]
    coding = model.job.graph.parameters * (2 * encode + (len(devices) + 1) * decode)
    return 2 * model.topology.star(hub, devices).seconds(nbytes) + coding
