"""What each command does, from the user's words to what is printed and written."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from evener.data.loader import collect, split_batch
from evener.errors import InvalidInput, TrainingFailed
from evener.events import RunEvent
from evener.launch.inprocess import run_inprocess, run_rank
from evener.launch.nodes import LocalNode
from evener.launch.rank_environment import torchrun_environment
from evener.launch.ranks import run_local
from evener.plan import Plan
from evener.profile import ClusterProfile
from evener.record import TrainRecord
from evener.report.profile_tables import layers_table, links_table, profile_table, timing_table
from evener.report.tables import summary
from evener.run.console import RunView, open_console, print_line
from evener.run.examine import Examination, examine
from evener.run.folder import run_folder
from evener.run.given import take_plan
from evener.run.load import load
from evener.run.machines import choose_nodes
from evener.run.order import Order
from evener.run.rank import train_rank
from evener.run.strategy import check_strategy
from evener.schema import read_noun, write_noun
from evener.tasks.load import load_task
from evener.tracer.model_graph import trace_model_graph

__all__ = ["benchmark", "perform", "show_graph", "train"]


def train(
    order: Order,
    *,
    plan: Path | None,
    local_nodes: str | None,
    devices: str,
    memory: str | None,
    as_json: bool,
    environment: Mapping[str, str],
) -> None:
    """`evener train`: as a rank if torchrun started this process, else on nodes of this machine."""
    check_strategy(order)
    if plan is not None:
        order = take_plan(order, read_noun(plan, Plan))
    if "WORLD_SIZE" in environment and "RANK" in environment:
        if local_nodes is not None or memory is not None or devices != "all":
            raise InvalidInput("--local-nodes, --devices and --memory are for runs that Evener starts, not torchrun")
        _train_as_rank(order, environment, as_json)
        return
    load(order)
    nodes = choose_nodes(local_nodes, devices, memory)
    record = perform(order, nodes, to_stderr=as_json, in_process=local_nodes is None)
    if as_json:
        print_line(json.dumps(summary(record)))


def perform(
    order: Order, nodes: Sequence[LocalNode], *, to_stderr: bool = False, in_process: bool = False
) -> TrainRecord:
    """Run `order` on `nodes` of this machine, showing what happens; its record.

    Args:
        order: what to do.
        nodes: one a rank.
        to_stderr: keep stdout free.
        in_process: whether a single node may run in this very process.
    """
    output = run_folder(order.output)
    with RunView(output, to_stderr=to_stderr) as view:
        if len(nodes) == 1 and in_process:
            run_inprocess(train_rank, nodes[0], order, patience=order.patience, on_event=view)
        else:
            run_local(train_rank, nodes, order, patience=order.patience, on_event=view)
    if view.record is None:
        raise TrainingFailed("the run ended without a record")
    return view.record


def _train_as_rank(order: Order, environment: Mapping[str, str], as_json: bool) -> None:
    """One rank of torchrun's; the leader shows the run."""
    with RunView(run_folder(order.output), to_stderr=as_json) as view:
        seat = torchrun_environment(environment, order.patience, view)
        assert seat is not None
        seat.stop_on(signal.SIGTERM, signal.SIGINT)
        run_rank(seat, train_rank, order)
    if as_json and view.record is not None:
        print_line(json.dumps(summary(view.record)))
    sys.stdout.flush()
    sys.stderr.flush()
    if len(seat.nodes) > 1:
        os._exit(0)  # a Gloo thread may crash an ordinary exit of the interpreter


def benchmark(
    *,
    task: str | None,
    data_dir: str | None,
    local_nodes: str | None,
    devices: str,
    memory: str | None,
    output: Path,
    patience: float,
    as_json: bool,
    environment: Mapping[str, str],
) -> None:
    """`evener benchmark`: measure every device and link, show the profile, write it to `output`."""
    order = Examination(task=task, data_dir=data_dir, patience=patience)
    console = open_console(as_json)

    def show(word: RunEvent) -> None:
        if isinstance(word, ClusterProfile):
            write_noun(word, output)
            for table in (profile_table(word), links_table(word), timing_table(word)):
                if table.row_count:
                    console.print(table)
            console.print(f"wrote {output}")
            if as_json:
                print_line(msgspec.json.encode(word).decode())

    if "WORLD_SIZE" in environment and "RANK" in environment:
        seat = torchrun_environment(environment, patience, show)
        assert seat is not None
        run_rank(seat, examine, order)
        return
    nodes = choose_nodes(local_nodes, devices, memory)
    if len(nodes) == 1 and local_nodes is None:
        run_inprocess(examine, nodes[0], order, patience=patience, on_event=show)
    else:
        run_local(examine, nodes, order, patience=patience, on_event=show)


def show_graph(reference: str, data_dir: str | None, options: Mapping[str, str], output: Path) -> None:
    """`evener trace`: the layers of a task's model, as a table and as a ModelGraph in `output`."""
    task = load_task(reference, Path(data_dir) if data_dir else None, options)
    dataset = task.train_data()
    inputs, _ = split_batch(collect(dataset, np.zeros(1, dtype=np.int64), seed=0, epoch=0))
    graph = trace_model_graph(task.model(), inputs, task.name)
    write_noun(graph, output)
    open_console(to_stderr=False).print(layers_table(graph))
    print_line(f"wrote {output}")
