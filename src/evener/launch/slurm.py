"""A rank's variables in a job of Slurm, in the form that torchrun sets.

Only a step of srun counts: the script of a batch job has the job's variables, too, in which it looks like the first of
many tasks. A step of one task is no rank and may start its own ranks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping

from evener.launch.rank_variables import number_of

_FIRST_PORT, _PORTS = 10_000, 20_000
"""Ports of the store, below the ephemeral ports of the system."""


def adopt_slurm(variables: MutableMapping[str, str]) -> None:
    """Set the variables of a rank if srun started this process as one and no launcher has.

    $MASTER_ADDR and $MASTER_PORT keep their values if they are set.
    """
    task = slurm_variables(variables)
    if "RANK" not in variables:
        variables.update({name: value for name, value in task.items() if name not in variables})


def slurm_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return what torchrun would have set for a task of a Slurm step; empty for another process.

    Raises:
        InvalidValue: the number of tasks, or of this one, is not a number.
    """
    names = [f"SLURM_{name}" for name in ("STEP_NUM_TASKS", "PROCID", "LOCALID")]
    if not all(variables.get(name) for name in names):
        return {}
    num_tasks, number, local_number = (number_of(variables, name) for name in names)
    if num_tasks < 2:
        return {}
    size, rank, local = str(num_tasks), str(number), str(local_number)
    hosts = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST") or "localhost"
    job, step = (int(re.sub(r"\D", "", variables.get(f"SLURM_{name}", "")) or 0) for name in ("JOB_ID", "STEP_ID"))
    tasks = tasks_per_node(variables.get("SLURM_STEP_TASKS_PER_NODE", size))
    node_id = variables.get("SLURM_NODEID", "0")
    node = int(node_id) if node_id.isdecimal() else 0
    return {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": local,
        "GROUP_RANK": str(node),
        "LOCAL_WORLD_SIZE": str(tasks[node] if node < len(tasks) else 0),
        "MASTER_ADDR": first_host(hosts),
        "MASTER_PORT": str(_FIRST_PORT + (31 * job + step) % _PORTS),
    }


def first_host(hosts: str) -> str:
    """Return the first host of a Slurm list: gpu03 of `gpu[03-05,9],login`, r1n7 of `r[1-2]n[7,8]`."""
    first = re.split(r",(?![^[]*])", hosts)[0]
    return re.sub(r"\[([^]]*)]", lambda match: re.split("[,-]", match[1])[0], first)


def tasks_per_node(text: str) -> list[int]:
    """Return the number of tasks of every machine, in order: 2, 2, 2 and 1 of `2(x3),1`."""
    parts = [re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part) for part in text.split(",")]
    return [int(part[1]) for part in parts if part for _ in range(int(part[2] or 1))]
