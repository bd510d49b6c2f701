"""Conflicts between options of a run, as tables, with their messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

from msgspec.structs import fields

from evener.agreements.settings import AGREEMENT_SETTINGS
from evener.records.agreement import AGREEMENT_FACTS
from evener.records.errors import InvalidInput
from evener.records.plan import WHOLE_MODEL, is_of_teams, is_pipeline


def option_name(name: str) -> str:
    """Return the option of the field `name` of a RunConfig, as the user types it."""
    return f"--{name.replace('_', '-')}"


class Conflict(NamedTuple):
    """Options that conflict with others.

    Attributes:
        options: fields that are rejected if the user set them.
        beside: whether the other options, and the strategy, conflict with them.
        sentence: message, with the `{option}` that was set.
    """

    options: tuple[str, ...]
    beside: Callable[[Any, str], bool]
    sentence: str


_COLLECTIVE = (
    "strategy", "replicas", "columns", "members", "micro_batches", "schedule", "rematerialise", "plan", "devices",
    "memory", "accumulate", "compile", "workers", "checkpoint", "checkpoint_every", "resume", "elastic",
)  # fmt: skip
AGREEMENT_OPTIONS = (
    "agreement", "staleness", "fraction", "local_steps", "outer_lr", "outer_momentum", "compress", "robust", "merge",
    "overlap", "skip_late", "system",
)  # fmt: skip
"""Options of `RunConfig` that only runs of an agreement have."""
MASTER_OPTIONS = ("home", "master", "token", "token_file", "ship_data")
"""Options that all runs on the nodes of a master have."""
THIS_MACHINE = ("devices", "memory", "plan", "checkpoint", "resume", "stationary", "compile", "elastic")
"""Options that runs on the nodes of a master do not have."""
_PLANNED = ("strategy", "shares", "replicas", "columns", "members", "micro_batches", "accumulate", "stationary")
_AGREEMENTS = ", ".join(AGREEMENT_SETTINGS)
_IN_ROUNDS = [name for name, facts in AGREEMENT_FACTS.items() if facts.in_rounds]

_CONFLICTS = (
    Conflict(("staleness",), lambda c, _: c.agreement != "bounded", "{option} belongs to --agreement bounded"),
    Conflict(
        ("local_steps", "overlap", "skip_late"),
        lambda c, _: c.agreement is None or not AGREEMENT_FACTS[c.agreement].takes_local_steps,
        "{option} belongs to --agreement average or diloco",
    ),
    Conflict(("fraction",), lambda c, _: c.agreement != "federated", "{option} belongs to --agreement federated"),
    Conflict(
        ("stationary",),
        lambda c, _: c.agreement not in (None, "average", "federated"),
        "{option} goes with --agreement average or federated, where each node trains on its own data for an epoch",
    ),
    Conflict(
        ("shares",),
        lambda c, _: c.agreement is not None and not c.keeps_data,
        "{option} goes with --agreement where data stay: with --stationary, or --agreement federated",
    ),
    Conflict(
        ("local_steps", "overlap", "skip_late"),
        lambda c, _: c.keeps_data,
        "{option} does not go with data that stay: each node goes over its own once between two exchanges",
    ),
    Conflict(
        ("skip_late",),
        lambda c, _: c.overlap,
        "{option} does not go with --overlap, where a node has two rounds in progress",
    ),
    Conflict(
        ("outer_lr", "outer_momentum"),
        lambda c, _: c.agreement != "diloco",
        "{option} belongs to --agreement diloco",
    ),
    Conflict(
        ("compress", "robust", "merge"),
        lambda c, _: c.agreement is None,
        f"{{option}} belongs to --agreement {_AGREEMENTS}",
    ),
    Conflict(
        ("compress",),
        lambda c, _: c.compress == "top-k" and c.agreement not in _IN_ROUNDS,
        f"{{option}} top-k goes with agreements whose updates are made in rounds: {', '.join(_IN_ROUNDS)}",
    ),
    Conflict(
        ("robust",),
        lambda c, _: c.robust in ("trimmed", "median", "krum") and (c.compress == "top-k" or c.skip_late),
        "{option} trimmed, median and krum need all numbers of all nodes of a round: leave --compress top-k and "
        "--skip-late out",
    ),
    Conflict(("system",), lambda c, _: c.agreement is None, "{option} belongs to --agreement"),
    Conflict(
        MASTER_OPTIONS,
        lambda c, _: c.agreement is None and not c.has_ranks_on_master,
        "{option} belongs to --agreement, or to ranks on the nodes of a master: name that with --master or --home",
    ),
    Conflict(
        THIS_MACHINE,
        lambda c, _: c.has_ranks_on_master,
        "{option} does not go with the nodes of a master: leave it out",
    ),
    Conflict(
        _COLLECTIVE,
        lambda c, _: c.agreement is not None,
        "{option} does not go with --agreement: omit one of them",
    ),
    Conflict(
        ("precision",),
        lambda c, _: c.agreement is not None and c.precision == "fp16",
        "{option} must be fp32, bf16 or fp64 with --agreement, got 'fp16'",
    ),
    Conflict(
        ("local_steps",),
        lambda c, _: c.agreement == "diloco" and c.local_steps == "epoch",
        "{option} must be a number with --agreement diloco, got 'epoch'",
    ),
    Conflict(
        ("merge",),
        lambda c, _: c.merge == "threads" and c.robust in ("trimmed", "median", "krum"),
        "{option} threads computes means, and --robust trimmed, median and krum are none: take --merge cores or device",
    ),
    Conflict(
        ("columns",),
        lambda c, _: bool(c.elastic),
        "{option} does not go with --elastic: a grid of nodes does not go on without one of them",
    ),
    Conflict(
        ("elastic",),
        lambda c, _: is_of_teams(c.strategy),
        "{option} does not go with --strategy pipeline+...: a stage does not go on without one of its nodes",
    ),
    Conflict(
        ("system",), lambda c, _: c.local_nodes is not None, "{option} describes machines: leave --local-nodes out"
    ),
    Conflict(
        ("master", "token", "token_file"),
        lambda c, _: c.local_nodes is not None,
        "--local-nodes have a master of their own: leave --master and --token out",
    ),
    Conflict(
        ("ship_data",),
        lambda c, _: c.local_nodes is not None,
        "{option}: local nodes read the data where they are: leave it out",
    ),
    Conflict(("ship_data",), lambda c, _: c.data is None, "{option} needs --data DIR: what is to be sent"),
    Conflict(
        ("trusted_only",),
        lambda c, _: not c.is_yolo,
        "{option} belongs to a model of Ultralytics, such as yolov8n.pt: the file of any other task is a program",
    ),
    Conflict(_PLANNED, lambda c, _: c.plan is not None, "{option} does not go with --plan, which says it already"),
)
"""Conflicts of options that do not depend on the strategy; the first one is reported."""

_STRATEGY_CONFLICTS = (
    Conflict(("columns",), lambda _, s: s not in ("spatial", "data+spatial"), "spatial and data+spatial"),
    Conflict(("replicas",), lambda _, s: not s.startswith("data+"), "data+..."),
    Conflict(("members",), lambda _, s: not is_of_teams(s), "pipeline+..."),
    Conflict(("micro_batches",), lambda _, s: not is_pipeline(s), "pipelines; others have --accumulate"),
    Conflict(("accumulate",), lambda _, s: is_pipeline(s), "others; pipelines have --micro-batches"),
    Conflict(("schedule",), lambda _, s: not is_pipeline(s), "pipelines"),
    Conflict(
        ("schedule",),
        lambda c, s: c.schedule == "zero-bubble" and is_of_teams(s),
        "pipelines with one node a stage if it is zero-bubble",
    ),
    Conflict(("shares",), lambda _, s: s == "pipeline", "others: stages follow the layers"),
    Conflict(("rematerialise",), lambda _, s: s in WHOLE_MODEL, "models that are divided"),
    Conflict(
        ("rematerialise",),
        lambda c, s: c.rematerialise == "except_last" and not is_pipeline(s),
        "pipelines if it is except_last; others have never and always",
    ),
    Conflict(
        ("stationary",),
        lambda _, s: s not in WHOLE_MODEL,
        "data parallelism: nodes that share a model share its samples",
    ),
    Conflict(("compile",), lambda _, s: is_pipeline(s), "others than pipelines"),
    Conflict(
        ("precision",),
        lambda c, s: c.precision == "fp16" and s not in WHOLE_MODEL,
        "data parallelism if it is fp16; take bf16",
    ),
)
"""Options that conflict with a strategy, and the strategies that each is for."""


def conflict(config: Any) -> str | None:
    """Describe the first conflict in `config` that does not depend on the strategy; None without a conflict."""
    for options, beside, sentence in _CONFLICTS:
        for name in options:
            if _is_set(config, name) and beside(config, config.strategy):
                return sentence.format(option=option_name(name))
    return None


def strategy_conflict(config: Any, strategy: str) -> str | None:
    """Describe the first conflict of `strategy` with the rest of `config`; None without a conflict."""
    for options, beside, whom in _STRATEGY_CONFLICTS:
        for name in options:
            if _is_set(config, name) and beside(config, strategy):
                return f"{option_name(name)} does not go with --strategy {strategy}: it is for {whom}"
    return None


def refuse_options(config: Any, names: Sequence[str], beside: str, advice: str) -> None:
    """Raise InvalidInput for the first of the options `names` that the user set; all conflict with `beside`."""
    for name in names:
        if _is_set(config, name):
            raise InvalidInput(f"{option_name(name)} does not go with {beside}: {advice}")


def _is_set(config: Any, name: str) -> bool:
    """Return whether the option differs from its default."""
    configs: type = type(config)
    return bool(getattr(config, name) != _defaults(configs)[name])


@cache
def _defaults(configs: type) -> dict[str, Any]:
    """Return the defaults of all options. The result is cached, since reading annotations takes milliseconds."""
    return {one.name: one.default for one in fields(configs)}
