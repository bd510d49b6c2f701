"""The environment of a rank, and the execution of its program."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from evener.comm.signed_store import SignedStore
from evener.comm.staged_gloo import BACKEND
from evener.data.loading_process import loading_death
from evener.launch.nodes import NodeSpec
from evener.launch.parent import Parent
from evener.launch.rank_heartbeat import RankHeartbeat
from evener.membership.control_channel import ControlChannel
from evener.records.error_kind import restated
from evener.records.errors import (
    DeviceLost,
    DoesNotFit,
    EvenerError,
    Interrupted,
    InvalidInput,
    NodeLost,
    NonFiniteLoss,
    OutOfStep,
    TrainingFailed,
    end_process,
    ended_by_itself,
    explain,
    is_noted,
    place_of,
    text_of,
    words_of,
)
from evener.records.events import RunEvent, encode_events
from evener.records.record import Epoch
from evener.records.single_sample_error import is_of_lone_sample, lone_sample_sentence
from evener.system import accelerators
from evener.system.cores import keep_to_quota
from evener.system.device_failures import device_lost, explained_failure
from evener.system.device_watch import DeviceWatch
from evener.system.malloc import keep_freed_memory
from evener.system.signals import first_request, set_handler

_BROKEN = ("gloo/transport", "connection closed by peer", "connection reset by peer", "nccl error", "ncclsystemerror")
"""Parts of the messages of Gloo and NCCL, whose errors have no classes in PyTorch."""
_SMALLER_BATCH = "use a smaller --batch-size, or --accumulate"


@dataclass
class RankEnvironment:
    """One rank's environment in a run.

    Attributes:
        rank: of this process.
        nodes: one a rank, in order.
        device: that this rank computes on.
        patience: seconds of silence after which a rank is lost.
        notify: shows an event to the user; effective on every rank, used by the leader.
        store: rendezvous of the ranks; None for a single rank.
        heartbeat: detects lost ranks; None for a single rank.
        address: of this machine, at which the other ranks reach it.
        end: ends this process by an error, at once and from any thread, as the main one may block in a collective.
        answer: returns the answer to the notified end of an epoch; None if `notify` returns it.
        control: control channel to the coordinator of an elastic run; None in others.
        tell: writes a sentence on the terminal of a rank that a launcher started; None in other ranks.
        has_own_paths: whether files have other places here than at the first rank, in a config that is else the same.
        watch: of the accelerator of this rank, while its program runs; None for none.
        step: that this rank works on; 0 before the first.
        stop_requested: whether a signal asked this process to stop.
        leaving: nodes that were about to leave the run when this rank was started.
    """

    rank: int
    nodes: list[NodeSpec]
    device: torch.device
    patience: float
    notify: Callable[[Any], object]
    store: SignedStore | None = None
    heartbeat: RankHeartbeat | None = None
    address: str = "127.0.0.1"
    end: Callable[[EvenerError], None] = end_process
    answer: Callable[[Epoch], bool] | None = None
    control: ControlChannel | None = None
    tell: Callable[[str], None] | None = None
    has_own_paths: bool = False
    watch: DeviceWatch | None = None
    step: int = 0
    stop_requested: bool = field(default=False)
    leaving: tuple[str, ...] = ()

    @property
    def node(self) -> NodeSpec:
        """This rank's node."""
        return self.nodes[self.rank]

    @property
    def rank_clause(self) -> str:
        """The number of this rank, to follow the name of its node in a sentence."""
        return f" (rank {self.rank})"

    @property
    def step_clause(self) -> str:
        """The step of this rank, to follow what happened in a sentence; empty before the first."""
        return f" at step {self.step}" if self.step else ""

    @property
    def names(self) -> list[str]:
        """The names of all nodes, in order of ranks."""
        return [node.name for node in self.nodes]

    @property
    def backend(self) -> str:
        """The backend for tensors: that of the devices if each rank has its own, as NCCL requires; else Gloo."""
        places = {(node.host, node.device) for node in self.nodes}
        direct = accelerators.common_backend([node.device for node in self.nodes])
        if direct is not None and len(places) == len(self.nodes):
            return direct
        return BACKEND if any(accelerators.is_accelerator(node.device) for node in self.nodes) else "gloo"

    def request_stop(self) -> None:
        """Stop after the current step."""
        self.stop_requested = True

    def stop_on(self, *signals: signal.Signals) -> None:
        """Let `signals` stop this rank after its current step."""
        for number in signals:
            set_handler(number, lambda *_: self.request_stop())

    def is_over(self, epoch: Epoch) -> bool:
        """Notify of the end of `epoch`; return whether the run ends there."""
        said = self.notify(epoch)
        return bool(said) if self.answer is None else self.answer(epoch)

    def start_watching(self) -> None:
        """Begin to send heartbeats, and to watch this rank's accelerator.

        A device that itself runs the collectives is not watched: waiting for another rank, it looks as if it hung.
        """
        if self.heartbeat is not None:
            self.heartbeat.start()
        if accelerators.is_accelerator(self.device) and (len(self.nodes) == 1 or self.backend == BACKEND):
            self.watch = DeviceWatch(self.device, self.patience, self._end_hanging)
            self.watch.start()

    def _end_hanging(self, why: str) -> None:
        self.end(device_lost(str(self.device), why, node=self.node.name, rank=self.rank_clause, at=self.step_clause))

    def stop_watching(self, error: BaseException | None = None) -> None:
        """End what `start_watching` began; `error` is that of this rank, None if it has done its work."""
        if self.watch is not None:
            self.watch.stop()
        if self.heartbeat is not None:
            self.heartbeat.stop(error)

    def report_failure(self, error: BaseException, *, is_shared: bool = False) -> None:
        """Publish the `error` of this rank, unless it arose elsewhere, so that the other ranks name its cause.

        Args:
            error: error that explains the failure to the user.
            is_shared: whether the others are likely to raise the same error.
        """
        if self.heartbeat is None:
            return
        if not isinstance(error, NodeLost):
            sentence = f"node {self.node.name}{self.rank_clause} failed: {explain(error)[0]}"
            self.heartbeat.report_failure(sentence, is_shared=is_shared)
        elif isinstance(error, DeviceLost) and self.heartbeat.is_beating:  # else the coordinator tells the others
            self.heartbeat.report_failure(str(error))

    def stop_heartbeat(self) -> None:
        """End the heartbeats: from the first generation on, the coordinator alone detects silence."""
        if self.heartbeat is not None:
            self.heartbeat.stop()

    def at_step(self, step: int) -> None:
        """Record the current step of this rank."""
        self.step = step
        if self.heartbeat is not None:
            self.heartbeat.step = step
        if self.watch is not None:
            self.watch.at_step()


def hosted_environment(
    parent: Parent,
    open_store: Callable[[], SignedStore],
    *,
    rank: int,
    nodes: Sequence[NodeSpec],
    patience: float,
    process: int | None,
    is_late: bool = False,
    receive: Callable[[], bytes] | None = None,
    absence: float = 0.0,
) -> RankEnvironment:
    """Return the environment of a rank in its process.

    Args:
        parent: the process that started it.
        open_store: opens a connection to the rendezvous store of the ranks.
        rank: of this process.
        nodes: one a rank, in order.
        patience: seconds of silence after which a rank is lost.
        process: number of this process in an elastic run; None in others.
        is_late: whether the elastic run is already under way.
        receive: waits for the next message of the coordinator; None if `parent` is the coordinator.
        absence: seconds that the coordinator and the store may be gone.
    """
    env = RankEnvironment(
        rank=rank,
        nodes=list(nodes),
        device=torch.device(nodes[rank].device),
        patience=patience,
        notify=lambda event: parent.send(encode_events([event])),
        store=open_store(),
        end=parent.end,
    )
    parent.on_stop(env.request_stop)
    if process is not None:
        env.control = ControlChannel(
            process=process,
            node=env.node.name,
            is_late=is_late,
            send=parent.say,
            receive=receive or parent.hear,
            open_store=open_store,
            end=parent.end,
            patience=patience,
            absence=absence,
        )
    is_heard = receive is None or len(nodes) > 1  # a master hears a lone rank by its node
    if is_heard and not is_late:
        env.heartbeat = RankHeartbeat(
            open_store(),
            rank=rank,
            nodes=env.names,
            patience=patience,
            on_lost=env.end,
            store_patience=absence or None,
        )
    return env


RankFunction = Callable[[RankEnvironment, Any], None]


def run_inprocess(
    program: RankFunction, node: NodeSpec, config: Any, *, patience: float, on_event: Callable[[RunEvent], object]
) -> None:
    """Run `program` on `node` in this process. Ctrl-C stops it after its step, a second one at once.

    Raises:
        KeyboardInterrupt: Ctrl-C before the first step, or the program has no steps.
    """
    keep_to_quota()
    env = RankEnvironment(rank=0, nodes=[node], device=torch.device(node.device), patience=patience, notify=on_event)

    def stop() -> None:
        if not env.step:
            raise KeyboardInterrupt
        env.request_stop()

    with first_request(stop):
        run_rank(env, program, config)


def run_rank(env: RankEnvironment, program: RankFunction, config: Any) -> None:
    """Run `program` as the rank of `env`, with heartbeats; raise the one error that explains a failure.

    Raises:
        NodeLost: the connection to another rank broke; the others' heartbeats name the culprit.
        DeviceLost: this rank's accelerator is lost.
        EvenerError: another error of the program.
    """
    if env.device.type == "cpu":
        keep_freed_memory()
    env.start_watching()
    ending: BaseException | None = None
    try:
        program(env, config)
    except SystemExit as error:
        ending = ended_by_itself(error)
        raise ending from error
    except Exception as error:
        ending = meaning = explained(error, env)
        if not isinstance(meaning, Interrupted):
            env.report_failure(meaning, is_shared=not _is_of_this_rank_alone(meaning))
        if meaning is error:
            raise
        raise meaning from error
    finally:
        env.stop_watching(ending)


def explained(error: Exception, env: RankEnvironment) -> Exception:
    """Return the error that explains the failure to the user; `error` itself if it does.

    A lost connection is explained by the failure of the rank at its other end, if that has published one.
    """
    meaning = _meaning(error, env)
    if not isinstance(meaning, NodeLost) or isinstance(meaning, DeviceLost) or env.heartbeat is None:
        return meaning
    ended = None if meaning is error else env.heartbeat.first_ended()  # at once, before others end for the same reason
    if cause := env.heartbeat.cause():
        return restated(meaning, cause)
    if ended is None:
        return meaning
    name, own, step = env.names[ended], env.node.name, f" at step {env.heartbeat.step}" if env.heartbeat.step else ""
    sentence = f"node {name} (rank {ended}) ended: node {own} (rank {env.rank}) lost its connection to it{step}"
    return NodeLost(sentence, (name,))


def _meaning(error: Exception, env: RankEnvironment) -> Exception:
    failure = explained_failure(
        error, str(env.device), node=env.node.name, rank=env.rank_clause, at=env.step_clause, advice=_SMALLER_BATCH
    )
    if failure is not None:
        return failure
    if isinstance(error, EvenerError) and not is_noted(error):
        return error
    if (death := loading_death(error)) is not None:
        return death
    if len(env.nodes) > 1 and isinstance(error, RuntimeError) and is_broken_connection(error):
        step = "" if env.heartbeat is None else f" at step {env.heartbeat.step}"
        return NodeLost(f"node {env.node.name} (rank {env.rank}) lost its connection{step}")
    place, at = place_of(error), env.step_clause
    if is_of_lone_sample(text_of(error)):
        return InvalidInput(lone_sample_sentence(f"{place}{at}"))
    return TrainingFailed(f"{words_of(error)}{place}{at}") if place else error


def _is_of_this_rank_alone(error: Exception) -> bool:
    """Whether the others do not see the same error themselves, and need its report."""
    if isinstance(error, EvenerError):
        return isinstance(error, TrainingFailed | DoesNotFit | OutOfStep) and not isinstance(error, NonFiniteLoss)
    return True


def is_broken_connection(error: RuntimeError) -> bool:
    """Whether the error of a collective means that another rank is lost."""
    text = text_of(error).lower()
    return isinstance(error, dist.DistError) or any(word in text for word in _BROKEN)
