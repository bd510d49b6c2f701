"""Runs a rank's program in this very process: what every rank does, and all that a run of one rank takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from evener.errors import (
    DoesNotFit,
    EvenerError,
    NodeLost,
    NonFiniteLoss,
    TrainingFailed,
    user_frame,
)
from evener.events import RunEvent
from evener.launch.nodes import LocalNode
from evener.launch.rank_environment import RankEnvironment
from evener.signals import first_request

_BROKEN = ("gloo/transport", "connection closed by peer", "connection reset by peer", "nccl error", "ncclsystemerror")

Program = Callable[[RankEnvironment, Any], None]


def run_inprocess(
    program: Program, node: LocalNode, config: Any, *, patience: float, on_event: Callable[[RunEvent], None]
) -> None:
    """Run `program` on `node` here. Ctrl-C asks it to stop after its step, a second one stops it at once."""
    env = RankEnvironment(rank=0, nodes=[node], device=torch.device(node.device), patience=patience, notify=on_event)
    with first_request(env.request_stop):
        run_rank(env, program, config)


def run_rank(env: RankEnvironment, program: Program, config: Any) -> None:
    """Run `program` as the rank of `env`, with heartbeats; errors come out as the one error that explains them.

    Raises:
        NodeLost: the connection to another rank broke; the others' heartbeats name the culprit.
        EvenerError: whatever else the program raises on purpose.
    """
    if env.heartbeat is not None:
        env.heartbeat.start()
    try:
        program(env, config)
    except Exception as error:
        meaning = _meaning(error, env)
        if env.heartbeat is not None and _is_of_this_rank_alone(meaning):
            env.heartbeat.report_failure(f"node {env.node.name} (rank {env.rank}) failed: {meaning}")
        if meaning is error:
            raise
        raise meaning from error
    finally:
        if env.heartbeat is not None:
            env.heartbeat.stop()


def _meaning(error: Exception, env: RankEnvironment) -> Exception:
    """The error that tells the user what happened; `error` itself where there is nothing to add."""
    if isinstance(error, EvenerError):
        return error
    if isinstance(error, torch.OutOfMemoryError):
        return DoesNotFit(
            f"node {env.node.name} ran out of memory ({error}); use a smaller --batch-size, or --accumulate"
        )
    if env.heartbeat is not None and isinstance(error, RuntimeError) and _is_broken_connection(error):
        return NodeLost(f"node {env.node.name} (rank {env.rank}) lost its connection at step {env.heartbeat.step}")
    place = user_frame(error)
    if place is not None:
        return TrainingFailed(
            f"{type(error).__name__}: {error} (in {place.name}, {place.filename}, line {place.lineno})"
        )
    return error


def _is_of_this_rank_alone(error: Exception) -> bool:
    """Whether the others do not see the same error themselves, and have to be told."""
    if isinstance(error, EvenerError):
        return isinstance(error, TrainingFailed | DoesNotFit) and not isinstance(error, NonFiniteLoss)
    return True


def _is_broken_connection(error: RuntimeError) -> bool:
    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(word in text for word in _BROKEN)
