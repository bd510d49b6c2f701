"""`evener plan`: ranked predictions for a model and machines, without a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from evener.agreements.compression import CODECS
from evener.config.options import PROFILE, PlanConfig
from evener.data.tasks.load import BUILT_IN_TASKS, is_path, load_task, require_task
from evener.oracle.advice import advice, plan_of
from evener.oracle.advice import scale as curves_of
from evener.oracle.agreement_costs import AgreementComparison, compare_agreements
from evener.oracle.break_even import break_evens
from evener.oracle.calibration import PastRun, calibrate, why_unfit
from evener.oracle.catalogue import CARDS, Card
from evener.oracle.cost.model import CostModel, TrainingJob
from evener.oracle.hypothetical_cluster import MAX_DEVICES, NETWORKS, NODES, NodeKind, hypothetical_profile
from evener.oracle.money_and_energy import Expenses, compare_expenses, rates_of
from evener.oracle.search import ALL_STRATEGIES, Ranking, search
from evener.oracle.uncertainty import FORMULAS
from evener.oracle.zoo.networks import ZOO, default_options, draw
from evener.records.errors import DoesNotFit, InvalidInput, InvalidValue, MissingFile, nearest, require
from evener.records.graph import ModelGraph
from evener.records.profile import ClusterProfile, Fabric
from evener.records.record import TrainRecord
from evener.records.schema import read_noun, write_noun
from evener.report.canvas import save_figure
from evener.report.planning_tables import (
    agreements_figure,
    agreements_table,
    changes_table,
    expenses_table,
    parts_table,
    ranking_table,
    scale_figure,
    scale_table,
    time_table,
)
from evener.report.text import human_count, table_of
from evener.training.console import open_console, output_file, print_line

PICTURES = (".png", ".svg", ".pdf")
"""Formats of `--save` with `--scale` or `--agreements`."""


def plan(config: PlanConfig, *, as_json: bool) -> None:
    """`evener plan`: print ranked strategies, the share of every node, and advice.

    Raises:
        InvalidValue: a machine or network is not known.
        MissingFile: there is no profile.
    """
    if config.save is not None:
        output_file(config.save)
        is_allowed = (config.scale is None and not config.agreements) or config.save.suffix in PICTURES
        endings = " or ".join(PICTURES)
        require(is_allowed, "--save", str(config.save), f"a file that ends in {endings} with --scale or --agreements")
    _require_model(config.model)
    training = _training(config)
    profile = _profile(config, training)
    job = TrainingJob(
        graph=training.graph,
        batch_size=config.batch_size or training.batch_size or 32 * len(profile.devices),
        optimizer=config.optimizer,
        precision=config.precision,
        task=training.task,
    )
    strategies = config.strategy or ALL_STRATEGIES
    console = open_console(as_json)
    if config.scale is not None:
        curves = curves_of(job, profile, _sizes(config.scale), strategies)
        console.print(scale_table(curves))
        if config.save is not None:
            save_figure(scale_figure(curves), config.save)
            console.print(f"wrote {config.save}")
        return
    ranking = search(CostModel(job, profile), strategies)
    uncertainty = FORMULAS if config.machines is None else None
    chosen = plan_of(ranking, spread=uncertainty.spread if uncertainty else 0.0)
    console.print(ranking_table(ranking, uncertainty))
    console.print(parts_table(chosen))
    changes = break_evens(ranking.model, strategies) if config.why else ()
    if config.why:
        console.print(time_table(ranking))
        console.print(changes_table(changes, ranking.model.job.batch_size))
    expenses = _compare_expenses(config, ranking)
    if expenses:
        console.print(expenses_table(expenses))
    comparison = _compare_agreements(ranking, training, console) if config.agreements else None
    if config.save is not None:
        if comparison is not None:
            save_figure(agreements_figure(comparison), config.save)
        elif not config.agreements:
            write_noun(chosen, config.save)
        if comparison is not None or not config.agreements:
            console.print(f"wrote {config.save}")
    if as_json:
        extras: dict[str, object] = {"times": _times(ranking), "changes": changes} if config.why else {}
        extras |= {"expenses": expenses} if expenses else {}
        extras |= {"agreements": comparison} if config.agreements else {}
        print_line(msgspec.json.encode({"plan": chosen, **extras} if extras else chosen).decode())
    else:
        print_line(comparison.advice if comparison else advice(ranking))


def _times(ranking: Ranking) -> list[dict[str, object]]:
    """Return the seconds of a step by kind, of each strategy's best plan."""
    return [
        {"strategy": one.strategy, "devices": len(one.devices), "seconds": one.parts.by_kind()}
        for one in ranking.ranked
    ]


def _compare_expenses(config: PlanConfig, ranking: Ranking) -> tuple[Expenses, ...]:
    """Return what plans cost; empty if the user states neither prices nor watts. Raises InvalidValue."""
    nodes = dict.fromkeys(ranking.model.topology.nodes)
    prices, watts = rates_of(config.prices, "--prices", nodes), rates_of(config.watts, "--watts", nodes)
    return compare_expenses(ranking, prices, watts) if prices or watts else ()


def _compare_agreements(ranking: Ranking, training: _Training, console: Console) -> AgreementComparison | None:
    """Print which agreement of a master's nodes is the fastest to a goal; return None if none fits."""
    job = ranking.model.job
    try:
        comparison = compare_agreements(
            ranking.model,
            ranking.best,
            bytes_of_contributions(job.graph),
            num_samples=training.num_samples,
            may_be_sparse=job.optimizer != "adam" if training.may_be_sparse is None else training.may_be_sparse,
        )
    except DoesNotFit as error:
        console.print(f"no agreement of a master's nodes fits: {error}")
        return None
    console.print(agreements_table(comparison))
    return comparison


def bytes_of_contributions(graph: ModelGraph) -> dict[str, int]:
    """Return the bytes of a contribution by compression."""
    compressed = {name: codec.num_bytes(graph.parameters) for name, codec in CODECS.items()}
    return {name: size + graph.buffer_bytes for name, size in {"none": graph.parameter_bytes, **compressed}.items()}


def catalogue() -> None:
    """`evener catalogue`: print the models, machines, cards and networks that `evener plan` knows by name."""
    console = open_console(to_stderr=False)
    console.print(models_table({name: draw(name) for name in ZOO}, {name: default_options(name) for name in ZOO}))
    console.print(machines_table(NODES))
    console.print(cards_table(CARDS))
    console.print(networks_table(NETWORKS))


def _profile(config: PlanConfig, training: _Training) -> ClusterProfile:
    path = config.profile or (PROFILE if config.machines is None else None)
    largest = max(_sizes(config.scale)) if config.scale is not None else 0
    if path is None:
        profile = hypothetical_profile(config.machines or "", config.network, at_least=largest)
    elif config.profile is None and not path.exists():
        raise MissingFile(
            f"there is no {path} here, which `evener benchmark` writes: name it with --profile, "
            "or plan for hypothetical machines with --machines 4xv100-node"
        )
    else:
        profile = read_noun(path, ClusterProfile)
    if config.learn:
        profile = _learned(config, training, profile)
        if path is not None:
            write_noun(profile, path)
    return _only(profile, [name for name in config.devices.split(",") if name]) if config.devices else profile


def _learned(config: PlanConfig, training: _Training, profile: ClusterProfile) -> ClusterProfile:
    """Return the profile as past runs of the task correct it, and print how much that helps.

    Raises:
        InvalidInput: nothing can be learned from any of them.
    """
    console = open_console(to_stderr=True)
    runs, reasons = [], []
    for file in _records(config.learn):
        run = PastRun(training.graph, read_noun(file, TrainRecord), config.optimizer)
        is_other = run.record.task != training.graph.name
        reason = f"it is a run of {run.record.task}" if is_other else why_unfit(profile, run)
        if reason:
            reasons.append(f"{file}: {reason}")
        else:
            runs.append(run)
    for reason in reasons:
        console.print(f"nothing was learned from {reason}")
    if not runs:
        raise InvalidInput(f"there is no complete run of {training.graph.name} on devices of the profile to learn from")
    calibration = calibrate(profile, runs)
    console.print(calibration.summary)
    return calibration.profile


def _records(paths: Sequence[Path]) -> list[Path]:
    """Return the records at `paths`: files, or all below folders."""
    files = []
    for path in paths:
        files += sorted(path.rglob("record.json")) if path.is_dir() else [path]
    return files


def _only(profile: ClusterProfile, nodes: Sequence[str]) -> ClusterProfile:
    """Return `profile` with only the devices of `nodes`, and the links between them."""
    known = {device.node for device in profile.devices}
    for node in nodes:
        if node not in known:
            raise InvalidValue("--devices", node, f"nodes of the profile: {', '.join(sorted(known))}")
    chosen = [index for index, device in enumerate(profile.devices) if device.node in nodes]
    place = {index: i for i, index in enumerate(chosen)}
    links = (
        msgspec.structs.replace(link, source=place[link.source], target=place[link.target])
        for link in profile.links
        if link.source in place and link.target in place
    )
    return msgspec.structs.replace(profile, devices=tuple(profile.devices[i] for i in chosen), links=tuple(links))


class _Training(NamedTuple):
    """A model to plan for, from the zoo, from a file, or of a task.

    Attributes:
        graph: its model.
        task: name of the task; empty if it is none.
        batch_size: samples of a batch; None if they are not known.
        num_samples: samples of an epoch; None if they are not known.
        may_be_sparse: whether its gradients can be compressed with top-k; None if its optimizer is not known.
    """

    graph: ModelGraph
    task: str = ""
    batch_size: int | None = None
    num_samples: int | None = None
    may_be_sparse: bool | None = None


def _training(config: PlanConfig) -> _Training:
    if config.model in ZOO:
        return _Training(draw(config.model, config.option))
    if config.model.endswith(".json"):
        return _Training(read_noun(Path(config.model), ModelGraph))
    import torch  # which a plan for a known model does not need

    from evener.data.loader import collect, split_batch
    from evener.ps.node.torch_backend import optimizer_of
    from evener.tracer.model_graph import trace_model_graph

    task = load_task(config.model, None, config.option)
    data, model = task.train_data(), task.model()
    inputs, _ = split_batch(collect(data, np.zeros(1, dtype=np.int64), seed=0, epoch=0))
    graph = trace_model_graph(model, inputs, task.name)
    may_be_sparse = task.clip_norm is None and isinstance(optimizer_of(task, model.parameters()), torch.optim.SGD)
    return _Training(graph, task.name, task.batch_size, len(data), may_be_sparse)  # type: ignore[arg-type]  # `Sized`, too


def _require_model(model: str) -> None:
    """Raise InvalidInput or MissingFile unless there is such a network, task or file."""
    known = (*ZOO, *BUILT_IN_TASKS)
    if is_path(model):
        require_task(model)
    elif model not in known and not model.endswith(".json"):
        raise InvalidInput(
            f"there is no task {model!r}, nor a network of that name{nearest(model, known)}; "
            f"known are {', '.join(known)}"
        )


def _sizes(scale: str) -> list[int]:
    """Return 1, 2, 4 ... 1024 for `1..1024`; 1, 3, 8 for `1,3,8`."""
    first, dots, last = scale.partition("..")
    numbers = [int(part) if part.strip().isdecimal() else 0 for part in ((first, last) if dots else scale.split(","))]
    is_allowed = all(0 < number <= MAX_DEVICES for number in numbers)
    require(is_allowed, "--scale", scale, f"numbers of devices such as 1..1024 or 1,2,8, from 1 to {MAX_DEVICES}")
    if not dots:
        return numbers
    sizes = [1 << k for k in range(numbers[1].bit_length()) if numbers[0] <= 1 << k <= numbers[1]]
    require(bool(sizes), "--scale", scale, "a range that holds a power of two, the smaller number first")
    return sizes


def models_table(graphs: Mapping[str, ModelGraph], options: Mapping[str, Mapping[str, str]]) -> Table:
    """Return a table of the networks that `evener plan` knows, with the options of each and their defaults."""
    return table_of(
        "Models, for `evener plan MODEL`",
        {
            "name": lambda item: item[0],
            ">million parameters": lambda item: human_count(item[1].parameters / 1e6),
            ">GFLOP a sample": lambda item: human_count(item[1].forward_flops / 1e9),
            "--option": lambda item: " ".join(f"{key}={value}" for key, value in options[item[0]].items()),
        },
        graphs.items(),
        caption="FLOPs of a forward pass.",
    )


def machines_table(nodes: Mapping[str, NodeKind]) -> Table:
    """Return a table of the machines whose cards have links of their own."""
    return table_of(
        "Machines, for `--machines`: `a100-node`, `4xa100-node`",
        {
            "name": lambda item: item[0],
            ">cards": lambda item: str(item[1].devices),
            "card": lambda item: item[1].card.model,
            "joined by": lambda item: item[1].inside.name,
        },
        nodes.items(),
    )


def cards_table(cards: Mapping[str, Card]) -> Table:
    """Return a table of cards with the TFLOP/s of dense operands from their makers' data sheets."""
    return table_of(
        "Cards, for `--machines`: `rtx3090`, `rtx3090:2` for two in one machine, `4xrtx3090:2`",
        {
            "name": lambda item: item[0],
            "card": lambda item: item[1].model,
            ">GiB": lambda item: str(item[1].gib),
            ">GB/s?": lambda item: f"{item[1].bandwidth:g}",
            ">fp32": lambda item: f"{item[1].fp32:g}",
            ">TF32?": lambda item: f"{item[1].tf32:g}" if item[1].tf32 else "-",
            ">fp16": lambda item: f"{item[1].half:g}",
        },
        cards.items(),
        caption="TFLOP/s of the data sheets; docs/machines.md says how much of them training reaches.",
    )


def networks_table(networks: Mapping[str, Fabric]) -> Table:
    """Return a table of the networks between machines."""
    return table_of(
        "Networks, for `--network`",
        {
            "name": lambda item: item[0],
            "network": lambda item: item[1].name,
            ">GB/s": lambda item: human_count(1 / item[1].beta / 1e9),
            ">latency µs": lambda item: f"{item[1].alpha * 1e6:g}",
        },
        networks.items(),
    )
