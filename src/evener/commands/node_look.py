"""A node's answer to the doctor: facts of its machine and of a task. Loads PyTorch only if the task needs it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from evener.commands.task_look import look_at_task
from evener.config.options import JoinConfig
from evener.doctor.examine import examine
from evener.doctor.facts import MachineFacts, is_loopback
from evener.doctor.machine_checks import SHARED
from evener.doctor.peers import DataFacts
from evener.ps.protocol.config import default_cache
from evener.ps.protocol.examination_messages import TaskQuestion
from evener.wire.identity import Address

_SHARED_MEMORY = Path("/dev/shm")


def folders(output: Path | None = None, cache: Path | None = None) -> dict[str, Path]:
    """Return the folders that runs and nodes write to, by content; a node writes no runs."""
    shared = {SHARED: _SHARED_MEMORY} if _SHARED_MEMORY.is_dir() else {}
    runs = {} if output is None else {"runs": output}
    return {
        **runs,
        "cache": cache or default_cache(os.environ),
        "temporary files": Path(tempfile.gettempdir()),
        **shared,
    }


def look_here(
    config: JoinConfig, question: TaskQuestion | None, code: Path | None
) -> tuple[MachineFacts, DataFacts | None]:
    """Return facts of this machine, and of the data of a task with files in `code`; the node's data come first.

    Args:
        config: of the node.
        question: the task to load, if any.
        code: folder of its files; None for a built-in task.
    """
    look = None
    if question is not None:
        data = config.data if config.data or not question.data_dir else Path(question.data_dir)
        task = question.task if code is None else str(code / question.task)
        look = look_at_task(task, data, question.options, thin=config.thin)
    facts = examine(
        folders(cache=config.cache),
        towards=reachable_host(str(config.address)),
        task_problem=None if look is None else look.problem,
    )
    return facts, None if look is None else look.data


def reachable_host(address: str) -> str | None:
    """Return the host of the first master's address, unless it is this machine."""
    host = Address.parse(address.partition(",")[0]).host
    return None if not host or host == "localhost" or is_loopback(host) else host
