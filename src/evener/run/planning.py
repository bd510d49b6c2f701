"""What `evener plan` does: from the user's words to forecasts, without a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import msgspec
import numpy as np

from evener.errors import InvalidInput, InvalidValue, require
from evener.graph import ModelGraph
from evener.oracle.advice import advice, plan_of
from evener.oracle.advice import scale as curves_of
from evener.oracle.cost.model import CostModel, TrainingJob
from evener.oracle.profiles import fit_profile, imagine
from evener.oracle.search import EVERY_STRATEGY, search
from evener.plan import Strategy
from evener.profile import PRECISIONS, ClusterProfile, Precision
from evener.record import TrainRecord
from evener.report.forecast import parts_table, ranking_table, scale_figure, scale_table
from evener.run.console import open_console, print_line
from evener.schema import read_noun, write_noun
from evener.zoo.registry import ZOO, draw


@dataclass(frozen=True, kw_only=True)
class Question:
    """What the user wants to know.

    Attributes:
        model: a name of the zoo, a graph.json, or a task.
        options: of the zoo's network or of the task.
        profile: file of a ClusterProfile; None for `machines`.
        machines, network: machines to imagine, where there is no profile.
        devices: names of nodes to take; empty for all.
        batch_size: None for the task's, else 32 a device.
        optimizer, precision: of the job.
        strategies: to look at; empty for all.
        learn: records to correct the profile by.
    """

    model: str
    options: Mapping[str, str]
    profile: Path | None
    machines: str | None
    network: str
    devices: Sequence[str]
    batch_size: int | None
    optimizer: str
    precision: Precision
    strategies: Sequence[Strategy]
    learn: Sequence[Path]


def plan(question: Question, *, save: Path | None, scale: str | None, as_json: bool) -> None:
    """`evener plan`: ranked ways to train, who does how much, and advice.

    Raises:
        InvalidValue: a precision, strategy, machine or network is not known.
        MissingFile: there is no profile.
    """
    require(question.precision in PRECISIONS, "--precision", question.precision, f"one of {', '.join(PRECISIONS)}")
    for strategy in question.strategies:
        require(strategy in get_args(Strategy), "--strategy", strategy, f"one of {', '.join(get_args(Strategy))}")
    profile = _profile(question)
    graph, task, batch_size = _model(question)
    job = TrainingJob(
        graph=graph,
        batch_size=question.batch_size or batch_size or 32 * len(profile.devices),
        optimizer=question.optimizer,
        precision=question.precision,
        task=task,
    )
    strategies = question.strategies or EVERY_STRATEGY
    console = open_console(as_json)
    if scale is not None:
        curves = curves_of(job, profile, _sizes(scale), strategies)
        console.print(scale_table(curves))
        if save is not None:
            scale_figure(curves).savefig(save)
            console.print(f"wrote {save}")
        return
    ranking = search(CostModel(job, profile), strategies)
    chosen = plan_of(ranking)
    console.print(ranking_table(ranking))
    console.print(parts_table(chosen))
    if save is not None:
        write_noun(chosen, save)
        console.print(f"wrote {save}")
    if as_json:
        print_line(msgspec.json.encode(chosen).decode())
    else:
        print_line(advice(ranking))


def _profile(question: Question) -> ClusterProfile:
    if question.profile is not None and question.machines is not None:
        raise InvalidInput("--profile and --machines exclude each other: machines are measured, or imagined")
    path = question.profile or (Path("cluster.json") if question.machines is None else None)
    profile = imagine(question.machines or "", question.network) if path is None else read_noun(path, ClusterProfile)
    for record in question.learn:
        profile = fit_profile(profile, read_noun(record, TrainRecord))
    if question.learn and path is not None:
        write_noun(profile, path)
    return _only(profile, question.devices) if question.devices else profile


def _only(profile: ClusterProfile, nodes: Sequence[str]) -> ClusterProfile:
    """`profile` with the devices of `nodes`, and the links between them."""
    known = {device.node for device in profile.devices}
    for node in nodes:
        if node not in known:
            raise InvalidValue("--devices", node, f"nodes of the profile: {', '.join(sorted(known))}")
    kept = [index for index, device in enumerate(profile.devices) if device.node in nodes]
    place = {index: i for i, index in enumerate(kept)}
    links = (
        msgspec.structs.replace(link, source=place[link.source], target=place[link.target])
        for link in profile.links
        if link.source in place and link.target in place
    )
    return msgspec.structs.replace(profile, devices=tuple(profile.devices[i] for i in kept), links=tuple(links))


def _model(question: Question) -> tuple[ModelGraph, str, int | None]:
    """(graph, name of the task, its batch size): from the zoo, from a file, or traced."""
    if question.model in ZOO:
        return draw(question.model, question.options), "", None
    if question.model.endswith(".json"):
        return read_noun(Path(question.model), ModelGraph), "", None
    from evener.data.loader import collect, split_batch
    from evener.tasks.load import load_task
    from evener.tracer.model_graph import trace_model_graph

    task = load_task(question.model, None, question.options)
    inputs, _ = split_batch(collect(task.train_data(), np.zeros(1, dtype=np.int64), seed=0, epoch=0))
    return trace_model_graph(task.model(), inputs, task.name), task.name, task.batch_size


def _sizes(scale: str) -> list[int]:
    """`1..1024` as 1, 2, 4 ... 1024; `1,3,8` as it is."""
    try:
        first, dots, last = scale.partition("..")
        if dots:
            return [1 << k for k in range(int(last).bit_length()) if int(first) <= 1 << k <= int(last)]
        return [int(size) for size in scale.split(",")]
    except ValueError:
        raise InvalidValue("--scale", scale, "such as 1..1024 or 1,2,8") from None
