"""A rank's place in a job of Slurm's: what srun left, in the variables that torchrun would have set.

Only a step counts, which srun starts: in the script of a batch job the variables of the job are set, too, and say of
that one process that it is the first of many. A step of one task is no rank: whatever it starts is its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping

from evener.launch.rank_variables import number_of

_FIRST_PORT, _PORTS = 10_000, 20_000
"""Of the store, below those that the system gives to whoever asks for any."""


def adopt_slurm(variables: MutableMapping[str, str]) -> None:
    """Say in `variables`, those of a process, that it is a rank, if srun started it as one and nobody else has.

    Where $MASTER_ADDR or $MASTER_PORT are set, they are kept.
    """
    found = slurm_variables(variables)
    if "RANK" not in variables:
        variables.update({name: value for name, value in found.items() if name not in variables})


def slurm_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Of a task of one of Slurm's steps, what torchrun would have set; nothing for another process.

    Raises:
        InvalidValue: a step says its tasks, or this one's number, by something that is no number.
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
    """The first of a list as Slurm writes it: `gpu[03-05,9],login` begins with gpu03, `r[1-2]n[7,8]` with r1n7."""
    first = re.split(r",(?![^[]*])", hosts)[0]
    return re.sub(r"\[([^]]*)]", lambda found: re.split("[,-]", found[1])[0], first)


def tasks_per_node(text: str) -> list[int]:
    """Of every machine, in order: `2(x3),1` is 2, 2, 2 and 1."""
    parts = [re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part) for part in text.split(",")]
    return [int(part[1]) for part in parts if part for _ in range(int(part[2] or 1))]
