"""Tables of the names that `evener plan` knows: models, machines, cards, networks."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table

from evener.oracle.catalogue import Card
from evener.oracle.hypothetical_cluster import NodeKind
from evener.records.graph import ModelGraph
from evener.records.profile import Fabric
from evener.report.text import human_count, table_of


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
