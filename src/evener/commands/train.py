"""`evener train`, `benchmark` and `trace`: from options to printed and written results."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
from msgspec.structs import replace

from evener.benchmark.device import environment, profile_device
from evener.benchmark.links import measure_links
from evener.benchmark.processor_time import ProcessorWatch
from evener.comm.joining import leave_group
from evener.commands.dashboard import page_beside
from evener.config.options import BenchmarkConfig, NodesConfig, TraceConfig
from evener.config.run_config import RunConfig
from evener.data.loader import collect, split_batch
from evener.data.tasks.load import load_task
from evener.launch.nodes import NodeSpec, local_nodes, options_of, parse_local_nodes, parse_memory
from evener.launch.rank_environment import RankEnvironment, RankFunction, run_inprocess, run_rank
from evener.launch.ranks import Without, run_local
from evener.launch.torchrun import say_where_the_run_is_shown, torchrun_environment
from evener.records.decoding import decode_json
from evener.records.errors import InvalidInput, InvalidValue, TrainingFailed
from evener.records.events import Phase, RunEvent
from evener.records.plan import Plan
from evener.records.profile import ClusterProfile, DeviceProfile
from evener.records.record import Event, Step, TrainRecord
from evener.records.schema import write_noun
from evener.report.planning_tables import layers_table, links_table, profile_table, timing_table
from evener.report.tables import summary
from evener.system import accelerators
from evener.system.process_exit import end_after_threads, exit_now
from evener.system.sign_of_life import sign_of_life
from evener.system.signals import STOP_SIGNALS
from evener.tracer.model_graph import trace_model_graph
from evener.training.callbacks import Callback
from evener.training.checkpoint import Checkpoints
from evener.training.console import RunView, open_console, output_file, print_line, run_folder
from evener.training.context import join_world, make_context
from evener.training.costs import tell_busy, time_here
from evener.training.partial_record import RunRequest, request_of
from evener.training.rank import train_rank


def train(config: RunConfig, program: RankFunction, *, as_json: bool) -> None:
    """`evener train` with `program`: as a rank if torchrun started this process, else on nodes of this machine."""
    if is_torchrun(config):
        _train_as_rank(config, program, as_json)
        return
    record = perform(config, to_stderr=as_json, program=program)
    if as_json:
        print_line(json.dumps(summary(record)))


def perform(
    config: RunConfig,
    nodes: Sequence[NodeSpec] | None = None,
    *,
    to_stderr: bool = False,
    quiet: bool = False,
    program: RankFunction = train_rank,
    watch: Callback | None = None,
    request: RunRequest | None = None,
) -> TrainRecord:
    """Train on nodes of this machine, show events, and return the record.

    Args:
        config: of the run.
        nodes: one a rank; None for those of `config`.
        to_stderr: keep stdout free.
        quiet: print nothing.
        program: of a rank.
        watch: called with every event; may end the run.
        request: for the record; the default is that of `config`.
    """
    folder = folder_of(config)
    with page_beside(folder, config.dashboard), view_of(config, folder, to_stderr=to_stderr, request=request) as view:
        view.console.quiet = quiet or config.quiet

        def show(event: RunEvent) -> object:
            view(event)
            return None if watch is None or isinstance(event, Phase) else watch(event)

        # A callback may take longer than the patience, and meanwhile this process receives no heartbeats.
        is_elastic = config.is_elastic if watch is None else bool(config.elastic)
        spare = SpareNodes(view if watch is None else show)
        run_on_nodes(
            program, config, spare.show, nodes, is_elastic=is_elastic, without=spare.take if is_elastic else None
        )
    if view.record is None:
        raise TrainingFailed("the run ended without a record")
    return view.record


def folder_of(config: RunConfig) -> Path:
    """Create the folders of the run and its checkpoints; return the first. Raise InvalidInput if not writable."""
    if config.checkpoint is not None:
        run_folder(config.checkpoint)
    return run_folder(config.folder)


def view_of(
    config: RunConfig, folder: Path, *, to_stderr: bool, is_leader: bool = True, request: RunRequest | None = None
) -> RunView:
    """Return the view of a run that writes into `folder`. Raise FolderInUse if another run does."""
    request, checkpoints = request or request_of(config), config.checkpoint
    return RunView(folder, to_stderr=to_stderr, request=request, checkpoints=checkpoints, is_leader=is_leader)


def run_on_nodes(
    program: RankFunction,
    config: NodesConfig,
    show: Callable[[RunEvent], object],
    nodes: Sequence[NodeSpec] | None = None,
    *,
    is_elastic: bool = False,
    without: Without | None = None,
) -> None:
    """Run `program` on `nodes`, or on those of `config`; a single one may run in this process.

    With `is_elastic`, the program can continue without lost nodes; where it cannot, `without` may restart it on the
    others.
    """
    chosen = choose_nodes(config) if nodes is None else nodes
    show(Phase(what="starting", detail="the nodes"))
    patience = config.patience
    if len(chosen) == 1 and nodes is None and config.local_nodes is None:
        run_inprocess(program, chosen[0], config, patience=patience, on_event=show)
    else:
        several = is_elastic and len(chosen) > 1
        run_local(program, chosen, config, patience=patience, on_event=show, is_elastic=several, without=without)


def is_torchrun(config: NodesConfig) -> bool:
    """Return whether torchrun started this process. Raise InvalidInput if the options name nodes, too."""
    if "WORLD_SIZE" not in os.environ or "RANK" not in os.environ:
        return False
    if (config.local_nodes, config.devices, config.memory) != (None, "all", None):
        raise InvalidInput("--local-nodes, --devices and --memory are for runs that Evener starts, not torchrun")
    return True


def torchrun_env(patience: float, show: Callable[[RunEvent], None], *, is_quiet: bool = False) -> RankEnvironment:
    """Return this process's rank under torchrun, in a run that shows events with `show`."""
    env = torchrun_environment(os.environ, patience, show)
    assert env is not None
    if env.rank == 0:
        show(Phase(what="starting", detail="the nodes"))
    if is_quiet:
        env.tell = lambda _: None
    else:
        say_where_the_run_is_shown(env)
    return env


def run_torchrun_rank(
    program: RankFunction, config: NodesConfig, view: Callable[[RunEvent], None], *, is_quiet: bool = False
) -> None:
    """Run `program` as the rank that torchrun started; a signal stops it after a step.

    Args:
        program: of a rank.
        config: of the run.
        view: shows events; if it is a `RunView`, it also keeps the record of a rank that ends by an error.
        is_quiet: print nothing.
    """
    env = torchrun_env(config.patience, view, is_quiet=is_quiet)
    if isinstance(view, RunView):
        env.end = view.end_process
    env.stop_on(*STOP_SIGNALS)
    run_rank(env, program, config)


def end_torchrun_rank() -> None:
    """End a process that torchrun started, in a run of several nodes; a thread of Gloo may crash an ordinary exit.

    Threads that the program has started end first, as in any Python program.
    """
    if int(os.environ["WORLD_SIZE"]) > 1:
        end_after_threads(partial(exit_now, 0))


def _train_as_rank(config: RunConfig, program: RankFunction, as_json: bool) -> None:
    """Train as a rank of torchrun; the leader shows the run."""
    folder = folder_of(config)
    is_first = os.environ["RANK"] == "0"
    shown = view_of(config, folder, to_stderr=as_json, is_leader=is_first)
    with page_beside(folder, config.dashboard if is_first else None), shown as view:
        view.console.quiet = config.quiet
        run_torchrun_rank(program, config, view, is_quiet=config.quiet)
    if as_json and view.record is not None:
        print_line(json.dumps(summary(view.record)))
    end_torchrun_rank()


def benchmark(config: BenchmarkConfig, *, as_json: bool) -> None:
    """`evener benchmark`: measure every device and link, show the profile, write it to a file."""
    console, output = open_console(as_json), output_file(config.output)

    def show(event: RunEvent) -> None:
        if isinstance(event, ClusterProfile):
            write_noun(event, output)
            for table in (profile_table(event), links_table(event), timing_table(event)):
                if table.row_count:
                    console.print(table)
            console.print(f"wrote {output}")
            if as_json:
                print_line(msgspec.json.encode(event).decode())
        elif isinstance(event, Phase):
            console.print(f"{event.what}: {event.detail}")
        elif isinstance(event, Event):
            console.print(f"{event.kind}: {event.message}")

    with sign_of_life(console.print, "measuring"):
        if is_torchrun(config):
            run_rank(torchrun_env(config.patience, show), benchmark_rank, config)
        else:
            run_on_nodes(benchmark_rank, config, show)


def benchmark_rank(env: RankEnvironment, config: BenchmarkConfig) -> None:
    """Measure this rank's device, the links to the others and, if requested, a task; the leader emits the profile."""
    world = join_world(env, preflight=config.preflight)
    if world.is_leader:
        what = f"{world.size} devices and what joins them" if world.size > 1 else "this device"
        env.notify(Phase(what="measuring", detail=what))
    speed, watch = env.node.speed_at(0), ProcessorWatch(env.node.name, env.node.cores)
    profile = profile_device(env.node.name, env.device, speed=speed, memory_limit=env.node.memory_bytes)
    if not env.address.startswith("127."):
        profile = msgspec.structs.replace(profile, address=env.address)
    links = measure_links(world)
    if config.task is not None:
        context = make_context(env, world, RunConfig(task=config.task, data=config.data))
        profile = msgspec.structs.replace(profile, timings=(time_here(context, context.batch_size),))
    tell_busy(env, world, watch)
    rows = world.all_gather_bytes(msgspec.json.encode(profile))
    devices = tuple(decode_json(row, DeviceProfile) for row in rows)
    if world.is_leader:
        env.notify(ClusterProfile(devices=devices, links=links, environment=environment()))
    world.barrier()
    leave_group()


def trace(config: TraceConfig) -> None:
    """`evener trace`: print the layers of a task's model as a table, and write them as a ModelGraph."""
    output, console = output_file(config.output), open_console(to_stderr=False)
    console.print("tracing")
    with sign_of_life(console.print, "tracing"):
        task = load_task(config.task, config.data, config.option)
        inputs, _ = split_batch(collect(task.train_data(), np.zeros(1, dtype=np.int64), seed=0, epoch=0))
        graph = trace_model_graph(task.model(), inputs, task.name)
    write_noun(graph, output)
    console.print(layers_table(graph))
    print_line(f"wrote {output}")


def choose_nodes(config: NodesConfig) -> list[NodeSpec]:
    """Return the local nodes of a command. Raise InvalidValue if a speed, a device or a size is wrong."""
    sizes = parse_memory(config.memory) if config.memory else []
    names = _devices(config.devices)
    count = config.num_local_nodes or len(names)
    granted = sizes * count if len(sizes) == 1 else sizes
    return local_nodes(names, granted) if config.local_nodes is None else parse_local_nodes(config.local_nodes, granted)


def _devices(text: str) -> Sequence[str]:
    """Return names of devices. Raise InvalidValue for one that this machine does not have."""
    here = accelerators.names()
    if text == "all":
        return here or ["cpu"]
    names = [name.strip() for name in text.split(",") if name.strip()]
    known = ["cpu", *here]
    for name in names or [text]:
        if name not in known:
            raise InvalidValue("--devices", name, f"all, or some of {', '.join(known)}")
    return names


class SpareNodes:
    """The nodes of one local run, for restarts.

    Args:
        show: shows what happens.
    """

    def __init__(self, show: Callable[[RunEvent], object]) -> None:
        self._show = show
        self._plan: Plan | None = None
        self._lost: tuple[Event, ...] = ()
        self._has_trained = False

    def show(self, event: RunEvent) -> object:
        """Show `event`; add the nodes that were lost before the last restart to the record."""
        if isinstance(event, Plan):
            self._plan = event
        elif isinstance(event, Step):
            self._has_trained = True
        elif isinstance(event, TrainRecord):
            event = replace(event, events=(*self._lost, *event.events))
        return self._show(event)

    def take(self, config: RunConfig, positions: Sequence[int], lost: Event) -> RunConfig | None:
        """Return the config for the nodes at `positions`, without the lost ones; None if the run ends.

        The result is the same as that of all nodes.
        """
        if not self._has_trained and config.strategy in ("auto", "data") and config.plan is None:
            instead = _among(config, positions)
        elif self._plan is None or len(self._plan.assignments) > 1 or config.shares not in ("measured", "equal"):
            instead = None
        else:
            instead = replace(config, resume=not Checkpoints(config.checkpoint_folder).is_empty)
        if instead is not None:
            self._lost = (*self._lost, lost)
        return instead


def _among(config: RunConfig, positions: Sequence[int]) -> RunConfig | None:
    """Return `config` for the nodes at `positions`; None if the user gave them no samples."""
    options = options_of(positions, shares=config.shares, local_nodes=config.local_nodes, memory=config.memory)
    return None if options is None else replace(config, **options)
