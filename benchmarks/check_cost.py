"""Measure how much of a run of 200 steps the comparison of a program with one process and its repetitions take.

    python benchmarks/check_cost.py [--steps 200] [--batch 448] [--rounds 3] [--nodes 1,1] [--json]

Two ranks train the network of `own_program_script.py` with shares 3:1, in turn with the comparison and without it.
Seconds are those of all steps, by the leader's clock, from before the first batch until the last comparison is over.
"""

from __future__ import annotations

import time
from functools import partial
from importlib import import_module
from statistics import median
from typing import Any

import torch
from own_program import SCRIPT, sgd
from own_program_script import make_data, make_model
from results import open_results, parser_of
from torch import nn
from torch.utils.data import DataLoader

from evener.comm.group import Group
from evener.experiments.local_ranks import measure_ranks
from evener.frontends.programs.options import ScriptConfig
from evener.frontends.programs.run import Run
from evener.launch.nodes import parse_local_nodes
from evener.launch.rank_environment import RankEnvironment

STEPS_PER_EPOCH = 25


def run_seconds(env: RankEnvironment, group: Group, words: dict[str, Any], *, is_compared: bool) -> float:
    """Seconds of a whole program."""
    run = Run(env, group, ScriptConfig(script=SCRIPT, shares="3,1"))
    run.equivalence_check.is_wanted = is_compared
    model = make_model()
    optimizer = sgd(model)
    loader = DataLoader(make_data(words["batch"] * STEPS_PER_EPOCH), words["batch"], shuffle=True)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    group.barrier()
    begin = time.perf_counter()
    for _ in run.epochs(words["steps"] // STEPS_PER_EPOCH):
        for x, y in loader:
            optimizer.zero_grad()
            torch.autograd.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
    run.equivalence_check.collect()
    group.barrier()
    return time.perf_counter() - begin


def seconds_by_way(words: dict[str, Any], env: RankEnvironment, group: Group) -> dict[str, list[float]]:
    """One rank: seconds of runs with the comparison and without it, in turn."""
    found: dict[str, list[float]] = {"compared": [], "plain": []}
    for number in range(2 * words["rounds"] + 1):
        is_compared = number % 2 == 1
        seconds = run_seconds(env, group, words, is_compared=is_compared)
        if number:  # the first one loads what all need
            found["compared" if is_compared else "plain"].append(seconds)
    return found


def main() -> None:
    """Both ways, in turn."""
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=448)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--nodes", default="1,1")
    words = parser.parse_args()
    with open_results(words) as results:
        nodes = parse_local_nodes(words.nodes)
        found = measure_ranks(nodes, partial(seconds_by_way, vars(words)), dict[str, list[float]])
        compared, plain = median(found["compared"]), median(found["plain"])
        results.add(
            "{steps} steps: {compared:.2f} s compared, {plain:.2f} s not; {cost:+.1%}",
            steps=words.steps,
            compared=compared,
            plain=plain,
            cost=compared / plain - 1,
            all_compared=found["compared"],
            all_plain=found["plain"],
        )


if __name__ == "__main__":
    import_module("check_cost").main()  # ranks import what is defined here
