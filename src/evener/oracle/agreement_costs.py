"""Prices agreements at a master, by the time that each takes to a goal.

    sync            the nodes divide a batch by their speeds; a round is one step and an exchange
    local steps     (`average`, `diloco`) every node makes steps of whole batches, a slow one fewer; a round is H steps
                    of the fastest node and an exchange, and at most an epoch

In an exchange the nodes receive the weights and then send their contributions, all of them through the one line of the
master. Computing and exchanges follow each other:

    seconds of a round = seconds of the slowest node + 2 (latency + bytes / rate of the star) + encoding and decoding

Nodes encode at the same time; the master decodes one contribution after the other, and encodes the merged one.

How many samples a model needs to a goal cannot be predicted. It is assumed, and `AgreementCost.break_even` says how
wrong the assumption may be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from evener.oracle.apportion import apportion, local_steps
from evener.oracle.cost.model import CostEstimate, CostModel
from evener.records.errors import DoesNotFit

SYNC, LOCAL = "sync", "local steps"
SAMPLES_NEEDED = {
    SYNC: {"none": 1.0, "bf16": 1.25, "int8": 1.25, "top-k": 1.25},
    LOCAL: {"none": 1.25, "bf16": 1.25, "int8": 1.25, "top-k": 2.0},
}
"""Samples until a goal, relative to those of `sync`, by agreement and compression: measured with the network of task
`mnist` until 97 %; of `sync`, bf16 and int8 count like top-k."""
_CODING_SECONDS = {"none": (0.0, 0.0), "bf16": (2.0e-9, 0.4e-9), "int8": (1.8e-9, 0.4e-9), "top-k": (10.7e-9, 0.7e-9)}
"""Seconds to encode and to decode a number, by compression: measured on one core of an EPYC."""
LOCAL_STEPS = (2, 5, 10, 20, 50, 100, 200, 500)
MIN_COMPUTING = 0.9
"""Local steps are the fewest for which nodes compute this share of the time: more would need more samples."""
_EQUAL_RATIO = 1.02
"""Times to the goal whose ratio is below this count as equal; the one with the fewest local steps is then taken."""


@dataclass(frozen=True, kw_only=True)
class AgreementCost:
    """The cost of one agreement with one compression.

    Attributes:
        agreement: `sync`, or `local steps`, which take `average` and `diloco` equally long; or ranks without a master.
        compression: compression of weights and contributions.
        devices: number of devices that take part, each of them a node of the master.
        local_steps: steps of the fastest device in a round.
        samples: samples of a round, of all devices.
        compute_seconds: seconds until the slowest device has made its steps.
        exchange_seconds: seconds of an exchange, with encoding and decoding.
        sent_bytes: bytes of a contribution.
        needed: samples until the goal, relative to those of `sync`.
    """

    agreement: str
    compression: str = "none"
    devices: int
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
        """Share of the time in which the slowest device computes."""
        return self.compute_seconds / self.seconds

    @property
    def goal_seconds(self) -> float:
        """Seconds until the goal, for each sample that `sync` needs."""
        return self.needed * self.seconds / self.samples

    def break_even(self, other: AgreementCost) -> float:
        """Return the samples, relative to those of `sync`, with which it takes as long to the goal as `other`."""
        return self.needed * other.goal_seconds / self.goal_seconds


@dataclass(frozen=True, kw_only=True)
class AgreementComparison:
    """Agreements of a master's nodes, compared.

    Attributes:
        master: node of the master.
        costs: costs of each agreement and compression, the fastest to the goal first.
        ranks: cost of the best ranks without a master.
        exact: the fastest of those that train what one process trains.
        chosen: the fastest of all, with the fewest local steps of those that are within 2 % of it.
    """

    master: str
    costs: tuple[AgreementCost, ...]
    ranks: AgreementCost
    exact: AgreementCost
    chosen: AgreementCost

    @property
    def advice(self) -> str:
        """Advice in one or two sentences: the options to type, and how much they depend on the assumed samples."""
        chosen, exact = self.chosen, self.exact
        if chosen is self.ranks:
            return f"Leave --agreement out: {chosen.agreement} is the fastest to a goal."
        what = SYNC if chosen.agreement == SYNC else f"diloco --local-steps {chosen.local_steps}"
        code = "" if chosen.compression == "none" else f" --compress {chosen.compression}"
        use = f"Use --agreement {what}{code} with the master on {self.master}"
        if chosen is exact:
            return f"{use}: it is the fastest to a goal."
        return (
            f"{use} if the result may differ from that of one process: {exact.goal_seconds / chosen.goal_seconds:.3g} "
            f"times as fast to a goal as {exact.agreement}, if {chosen.needed:g} times the samples are needed. "
            f"With {chosen.break_even(exact):.3g} times, both take equally long."
        )


def compare_agreements(
    model: CostModel,
    ranks: CostEstimate,
    bytes_of: Mapping[str, int],
    *,
    num_samples: int | None = None,
    may_be_sparse: bool = True,
) -> AgreementComparison:
    """Compare the agreements of nodes whose master is where the lines are fastest, and the best ranks.

    Args:
        model: job and machines.
        ranks: the best ranks without a master.
        bytes_of: bytes of a contribution by compression; `none` has those of the weights.
        num_samples: samples of an epoch, which bound a round; None if they are not known.
        may_be_sparse: whether `sync` can compress gradients with top-k.

    Raises:
        DoesNotFit: no agreement fits the memory of the devices.
    """
    hub = best_hub(model)
    costs = price_agreements(model, hub, bytes_of, num_samples=num_samples, may_be_sparse=may_be_sparse)
    cost_of_ranks = _cost_of_ranks(ranks, model.job.batch_size)
    like_one_process = [cost_of_ranks, *(one for one in costs if (one.agreement, one.compression) == (SYNC, "none"))]
    exact = min(like_one_process, key=lambda one: one.goal_seconds)
    bound = min(exact.goal_seconds, _EQUAL_RATIO * costs[0].goal_seconds)
    fastest = [one for one in costs if one.goal_seconds < bound]
    chosen = min(fastest, key=lambda one: one.local_steps, default=exact)
    master = model.topology.nodes[hub]
    return AgreementComparison(master=master, costs=costs, ranks=cost_of_ranks, exact=exact, chosen=chosen)


def best_hub(model: CostModel) -> int:
    """Return the device at which a master has the fastest lines to all others; of equal ones the first."""
    devices, nodes = range(model.size), model.topology.nodes
    first = [device for device in devices if nodes.index(nodes[device]) == device]
    return min(first, key=lambda hub: model.topology.star(hub, devices).seconds(model.parameter_bytes))


def price_agreements(
    model: CostModel,
    hub: int,
    bytes_of: Mapping[str, int],
    *,
    devices: Sequence[int] | None = None,
    num_samples: int | None = None,
    may_be_sparse: bool = True,
) -> tuple[AgreementCost, ...]:
    """Return the cost of each agreement and compression, the fastest to the goal first.

    Models with BatchNorm have no `sync`, which would normalise by the samples of each node.

    Args:
        model: job and machines. The batch of the job is that of `sync`, and of every local step.
        hub: device at whose machine the master is.
        bytes_of: as in `compare_agreements`.
        devices: devices that train; by default all.
        num_samples: as in `compare_agreements`.
        may_be_sparse: as in `compare_agreements`.

    Raises:
        DoesNotFit: no agreement fits the memory of the devices.
    """
    batch, devices = model.job.batch_size, range(model.size) if devices is None else devices
    able = [device for device in devices if model.workers[device].capacity >= batch]
    priced: list[AgreementCost] = []
    if not model.statistics_bytes:
        codes = [code for code in bytes_of if may_be_sparse or code != "top-k"]
        priced += [_sync(model, hub, devices, code, bytes_of[code]) for code in codes]
    if able:
        longest = [_local(model, hub, able, code, sent) for code, sent in bytes_of.items()]
        priced += [one if num_samples is None else _within(one, num_samples) for one in longest]
    if not priced:
        raise DoesNotFit(f"no device holds a batch of {batch} samples, and BatchNorm does not let devices divide it")
    return tuple(sorted(priced, key=lambda one: one.goal_seconds))


def price_local_steps(
    model: CostModel, hub: int, devices: Sequence[int], compression: str, sent_bytes: int, most_steps: int
) -> AgreementCost:
    """Return the cost of rounds in which the fastest of `devices` makes `most_steps` local steps."""
    batch = model.job.batch_size
    seconds = [model.workers[device].seconds(batch) for device in devices]
    steps = local_steps(most_steps, seconds)
    return AgreementCost(
        agreement=LOCAL,
        compression=compression,
        devices=len(devices),
        local_steps=most_steps,
        samples=batch * sum(steps),
        compute_seconds=max(count * each for count, each in zip(steps, seconds, strict=True)),
        exchange_seconds=_exchange_seconds(model, hub, devices, compression, sent_bytes),
        sent_bytes=sent_bytes,
        needed=SAMPLES_NEEDED[LOCAL][compression],
    )


def _sync(model: CostModel, hub: int, devices: Sequence[int], compression: str, sent_bytes: int) -> AgreementCost:
    """Return the cost of `sync`. Raises DoesNotFit: the devices together cannot hold a batch."""
    workers = [model.workers[device] for device in devices]
    shares = apportion(model.job.batch_size, workers)
    working = [device for device, share in zip(devices, shares, strict=True) if share]
    return AgreementCost(
        agreement=SYNC,
        compression=compression,
        devices=len(working),
        samples=model.job.batch_size,
        compute_seconds=max(worker.seconds(n) for worker, n in zip(workers, shares, strict=True) if n),
        exchange_seconds=_exchange_seconds(model, hub, working, compression, sent_bytes),
        sent_bytes=sent_bytes,
        needed=SAMPLES_NEEDED[SYNC][compression],
    )


def _local(model: CostModel, hub: int, devices: Sequence[int], compression: str, sent_bytes: int) -> AgreementCost:
    """Return the cost of rounds with the fewest local steps that let nodes compute for long enough."""
    for most in LOCAL_STEPS:
        cost = price_local_steps(model, hub, devices, compression, sent_bytes, most)
        if cost.computing >= MIN_COMPUTING:
            break
    return cost


def _within(cost: AgreementCost, num_samples: int) -> AgreementCost:
    """Return `cost` for rounds of at most an epoch of `num_samples`, after which all nodes exchange."""
    part = num_samples / cost.samples
    if part >= 1:
        return cost
    steps = max(1, round(cost.local_steps * part))
    return replace(cost, samples=num_samples, local_steps=steps, compute_seconds=cost.compute_seconds * part)


def _cost_of_ranks(estimate: CostEstimate, batch_size: int) -> AgreementCost:
    """Return the cost of ranks that work together on a batch, without a master; a step is a round."""
    return AgreementCost(
        agreement=f"ranks, {estimate.strategy}" if len(estimate.devices) > 1 else "one node",
        devices=len(estimate.devices),
        samples=batch_size,
        compute_seconds=estimate.compute_seconds,
        exchange_seconds=max(0.0, estimate.step_seconds - estimate.compute_seconds),
        sent_bytes=estimate.sent_bytes,
    )


def _exchange_seconds(model: CostModel, hub: int, devices: Sequence[int], compression: str, nbytes: int) -> float:
    """Return the seconds in which weights come and contributions of `nbytes` go."""
    encode, decode = _CODING_SECONDS[compression]
    coding = model.job.graph.parameters * (2 * encode + (len(devices) + 1) * decode)
    return 2 * model.topology.star(hub, devices).seconds(nbytes) + coding
