"""Agreements as values: each is a choice of these few settings, as published.

| name | local steps | staleness | contribution | outer optimizer |
|---|---|---|---|---|
| sync | 1 | 0 | gradient | any |
| async | 1 | unbounded | gradient | any |
| bounded | 1 | s | gradient | any |
| average | k or an epoch | 0 | delta | SGD with learning rate 1: the weighted mean of the weights |
| federated | an epoch of fixed parts, of a fraction of the workers | 0 | delta | SGD with learning rate 1 |
| diloco | k | 0 | delta | SGD with Nesterov momentum |

Not published: all but `sync` and `federated` shorten contributions that are unusually long (`robust`).

`AgreementSettings` holds the settings of an agreement; the messages on the wire are in `ps/protocol/`.
docs/agreement.md has the algorithm as pseudo-code and describes every option.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Literal

from evener.records.errors import require
from evener.records.schema import MAX_AMOUNT, Amount, Finite, Name, Part, Whole

Compression = Literal["none", "bf16", "int8", "top-k"]
Robust = Literal["mean", "clip", "trimmed", "median", "krum"]
"""Rule by which contributions are merged; see `robust`."""
Merge = Literal["cores", "threads", "device"]
"""Where contributions are merged: all cores in one pass over memory, six threads array by array (means only), or the
master's device.
"""
Rate = Finite | tuple[Finite, ...]
"""A learning rate, or one for every version of the weights, from 0; the last one applies to all later versions."""


def rate_at(rate: Rate, version: int) -> float:
    """Return the learning rate of the update that turns weights `version` into `version` + 1."""
    return rate[min(version, len(rate) - 1)] if isinstance(rate, tuple) else rate


class Sgd(Part, frozen=True, kw_only=True, tag="sgd"):
    """Stochastic gradient descent on the server, as in PyTorch.

    Attributes:
        learning_rate: see `Rate`.
        momentum: fraction of the last step that is kept.
        is_nesterov: whether to look ahead by the momentum.
        weight_decay: factor of the weights that is added to the gradient.
    """

    learning_rate: Rate
    momentum: Finite = 0.0
    is_nesterov: bool = False
    weight_decay: Finite = 0.0

    def __post_init__(self) -> None:
        _require_rates(self.learning_rate, self.weight_decay)
        require(0 <= self.momentum < 1, "momentum", self.momentum, "from 0 to below 1")
        require(self.momentum > 0 or not self.is_nesterov, "momentum", self.momentum, "positive with is_nesterov")


class Adam(Part, frozen=True, kw_only=True, tag="adam"):
    """Adam on the server, as in PyTorch.

    Attributes:
        learning_rate: see `Rate`.
        betas: decay of the running mean and of the running mean square.
        eps: added to the root of the latter.
        weight_decay: factor of the weights that is added to the gradient or, if decoupled, subtracted from the weights
            (AdamW).
        is_decoupled: see `weight_decay`.
    """

    learning_rate: Rate
    betas: tuple[Finite, Finite] = (0.9, 0.999)
    eps: Finite = 1e-8
    weight_decay: Finite = 0.0
    is_decoupled: bool = False

    def __post_init__(self) -> None:
        _require_rates(self.learning_rate, self.weight_decay)
        require(all(0 <= beta < 1 for beta in self.betas), "betas", self.betas, "from 0 to below 1")
        require(self.eps > 0, "eps", self.eps, "positive")


class Grouped(Part, frozen=True, kw_only=True, tag="grouped"):
    """An optimizer whose groups of parameters have settings of their own, as PyTorch's `param_groups`.

    Attributes:
        rules: one rule per group, all of one kind.
        group_of: group of every parameter, in the order of the layout.
    """

    rules: tuple[Sgd | Adam, ...]
    group_of: tuple[Whole, ...]

    def __post_init__(self) -> None:
        kinds = {type(rule) for rule in self.rules}
        require(len(kinds) == 1, "rules", [kind.__name__ for kind in kinds], "one or more, all of one kind")
        is_known = all(0 <= group < len(self.rules) for group in self.group_of)
        require(is_known, "group_of", self.group_of, f"numbers of groups, 0 to {len(self.rules) - 1}")


Outer = Sgd | Adam | Grouped


def may_be_sparse(outer: Outer, clip_norm: float | None) -> bool:
    """Return whether gradients can be compressed with `top-k`, so that workers make the server's steps themselves.

    Adam's powers and the norm of a gradient may differ in the last bit between machines.
    """
    return clip_norm is None and isinstance(outer.rules[0] if isinstance(outer, Grouped) else outer, Sgd)


class AgreementSettings(Part, frozen=True, kw_only=True):
    """An agreement: how the server turns the workers' contributions into common weights.

    Attributes:
        batch: samples of a round over all workers, if it has one step and is divided by speed; else of every local step
            of every worker.
        outer: the server's optimizer, to which a contribution is a (pseudo-)gradient.
        contribution: `gradient`, the mean over the samples, or `delta`, how far local steps have gone down.
        local_steps: steps between two exchanges, of the fastest worker; or `epoch`, each worker its share of all
            samples.
        staleness: 0: the server waits for all workers of a round; s: it applies each contribution at once, but no
            worker begins more than s contributions ahead of the slowest; None: without bound.
        division: `speed`: a worker with half the speed gets half the samples or steps; `fixed`: all get the same.
        push: compression of contributions to the server.
        pull: compression of changes of the weights to the workers; `top-k` of merged contributions, see `weights`.
        slow_link: compression of both for a worker whose slow link makes all others wait; none: no change.
        is_overlapped: whether a worker continues with its next steps while its contribution is sent.
        skips_late: whether a round closes without workers that are late; their contributions enter a later round.
        robust: merge rule; the mean, weighted by samples, is equal to a single process.
        merge: where contributions are merged; the result is the same except for rounding.
        fraction: fraction of the workers that is drawn for a round, if each has a fixed part (`Workload.parts`).
        clip_norm: bound on the norm of the merged gradient; None for none, and where workers make the steps.
    """

    batch: Amount
    outer: Outer
    contribution: Literal["gradient", "delta"] = "gradient"
    local_steps: Whole | Literal["epoch"] = 1
    staleness: Whole | None = 0
    division: Literal["speed", "fixed"] = "speed"
    push: Compression = "none"
    pull: Compression = "none"
    slow_link: Compression = "none"
    is_overlapped: bool = False
    skips_late: bool = False
    robust: Robust = "mean"
    merge: Merge = "cores"
    fraction: Finite = 1.0
    clip_norm: Finite | None = None

    def __post_init__(self) -> None:
        require(self.batch > 0, "batch", self.batch, "positive")
        require(self.local_steps == "epoch" or self.local_steps > 0, "local_steps", self.local_steps, "positive")
        require(self.staleness is None or self.staleness >= 0, "staleness", self.staleness, "0 or more, or None")
        is_delta = self.contribution == "delta"
        require(is_delta or self.local_steps == 1, "contribution", self.contribution, "delta after several local steps")
        is_bound = self.clip_norm is not None and self.clip_norm > 0 and not is_delta
        require(self.clip_norm is None or is_bound, "clip_norm", self.clip_norm, "positive, and of gradients")
        require(is_delta or not self.is_overlapped, "contribution", self.contribution, "delta if is_overlapped")
        may_skip = is_delta and self.staleness == 0 and not self.is_overlapped and self.fraction == 1
        require(
            may_skip or not self.skips_late, "skips_late", True, "false unless rounds exchange changes, one at a time"
        )
        require(0 < self.fraction <= 1, "fraction", self.fraction, "above 0 and at most 1")
        is_packed = (self.push, self.pull) != ("none", "none")
        require(
            self.slow_link == "none" or not is_packed,
            "slow_link",
            self.slow_link,
            "none where all is compressed already",
        )
        is_dense = "top-k" not in (self.push, self.pull, self.slow_link)
        is_in_rounds = self.staleness == 0 and self.slow_link != "top-k"
        require(is_dense or is_in_rounds, "compression", "top-k", "another one, unless updates are made in rounds")
        is_possible = is_delta or may_be_sparse(self.outer, self.clip_norm)
        require(
            is_dense or is_possible, "compression", "top-k", "another one, or gradients of an SGD without clip_norm"
        )
        is_mean = self.robust in ("mean", "clip")  # most numbers of sparse contributions are zeros, as is their median
        require(is_dense or is_mean, "robust", self.robust, "mean or clip with top-k")
        require(is_mean or not self.skips_late, "robust", self.robust, "mean or clip with skips_late")
        waits = self.local_steps != "epoch" or self.staleness == 0
        needs_several = self.robust in ("trimmed", "median", "krum")
        require(not needs_several or self.staleness == 0, "robust", self.robust, "mean or clip unless staleness is 0")
        is_mergeable = self.merge != "threads" or not needs_several
        require(is_mergeable, "merge", self.merge, f"cores or device: {self.robust} is no mean")
        require(waits, "staleness", self.staleness, "0 if a worker's local steps are an epoch's")

    @property
    def depth(self) -> int:
        """Contributions that a worker may have in progress without an answer."""
        return 2 if self.is_overlapped else 1

    @property
    def sends_merged(self) -> bool:
        """Whether workers receive merged contributions, and update their copies of the weights themselves."""
        return self.pull == "top-k"

    @property
    def remembers_gradients(self) -> bool:
        """Whether the server adds what compression leaves out of merged gradients to the next ones.

        Changes of weights need no such memory: local steps find again what was left out.
        """
        return self.sends_merged and self.contribution == "gradient"


def _require_rates(rate: Rate, weight_decay: float) -> None:
    rates = rate if isinstance(rate, tuple) else (rate,)
    require(bool(rates) and all(0 < one < inf for one in rates), "learning_rate", rate, "positive, or a list of such")
    require(weight_decay >= 0, "weight_decay", weight_decay, "zero or more")


def synchronous(*, batch: int, outer: Outer) -> AgreementSettings:
    """Make every update from all workers' gradients, like one process with the whole batch."""
    return AgreementSettings(batch=batch, outer=outer)


def asynchronous(*, batch: int, outer: Outer) -> AgreementSettings:
    """Apply each gradient as soon as it arrives, whatever the age of its weights."""
    return AgreementSettings(batch=batch, outer=outer, staleness=None, robust="clip")


def bounded(*, batch: int, outer: Outer, staleness: int = 4) -> AgreementSettings:
    """Like `asynchronous`, but no worker begins over `staleness` updates ahead of the slowest (Ho et al., 2013)."""
    return AgreementSettings(batch=batch, outer=outer, staleness=staleness, robust="clip")


def average(*, batch: int, local_steps: int | Literal["epoch"] = "epoch") -> AgreementSettings:
    """Train each worker by itself, then continue from the mean of their weights, weighted by samples."""
    outer = Sgd(learning_rate=1.0)
    return AgreementSettings(batch=batch, outer=outer, contribution="delta", local_steps=local_steps, robust="clip")


def federated(*, batch: int, fraction: float = 1.0) -> AgreementSettings:
    """Average after an epoch over fixed parts, of a fraction of the workers per round (McMahan et al., 2017)."""
    outer = Sgd(learning_rate=1.0)
    return AgreementSettings(batch=batch, outer=outer, contribution="delta", local_steps="epoch", fraction=fraction)


def diloco(
    *, batch: int, local_steps: int = 500, learning_rate: float = 0.7, momentum: float = 0.9
) -> AgreementSettings:
    """Average with Nesterov momentum on the server; few exchanges (values of Douillard et al., 2023)."""
    outer = Sgd(learning_rate=learning_rate, momentum=momentum, is_nesterov=momentum > 0)
    return AgreementSettings(batch=batch, outer=outer, contribution="delta", local_steps=local_steps, robust="clip")


AGREEMENT_SETTINGS: dict[str, Callable[..., AgreementSettings]] = {
    "sync": synchronous,
    "async": asynchronous,
    "bounded": bounded,
    "average": average,
    "federated": federated,
    "diloco": diloco,
}
"""Settings of agreements by name."""


class Workload(Part, frozen=True, kw_only=True):
    """The data of a run, and its end: by epochs, by updates, or by whichever comes first.

    Attributes:
        num_samples: samples in the data, which all workers can read.
        num_epochs: passes over the data; None: as many as the updates take.
        num_updates: updates of the common weights; None: as many as the epochs take.
        seed: seed of the order of the samples.
        parts: (worker, samples) of fixed parts, each for one worker; empty: all workers use all data.
    """

    num_samples: Amount
    num_epochs: Amount | None = None
    num_updates: Amount | None = None
    seed: Whole = 0
    parts: tuple[tuple[Name, Amount], ...] = ()

    def __post_init__(self) -> None:
        ends = (self.num_epochs, self.num_updates)
        require(any(ends), "num_epochs", self.num_epochs, "positive, or else num_updates set")
        require(self.num_samples > 0, "num_samples", self.num_samples, "positive")
        total = self.num_samples * (self.num_epochs or 1)
        require(
            total <= MAX_AMOUNT,
            "num_epochs",
            self.num_epochs,
            f"such that all epochs have at most {MAX_AMOUNT} samples",
        )
        for field, value in (("num_epochs", ends[0]), ("num_updates", ends[1])):
            require(value is None or value > 0, field, value, "positive, or None")
        sizes = [size for _, size in self.parts]
        is_whole = min(sizes, default=1) > 0 and sum(sizes) in (0, self.num_samples)
        require(is_whole, "parts", sizes, f"positive, and {self.num_samples} together")
        names = [name for name, _ in self.parts]
        require(len(set(names)) == len(names), "parts", names, "of different workers")
