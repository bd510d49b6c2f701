"""What a node looks at when the doctor asks: its machine as it uses it, and a task. Needs no PyTorch."""

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
    """Where runs and nodes write, by what lies there; a node writes no runs."""
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
    """What a node says of its machine, and of a task whose files lie in `code`; its own data come first.

    Args:
        config: of the node.
        question: the task, if one was asked for.
        code: folder of its files; None for a built-in task.
    """
    look = None
    if question is not None:
        data = config.data if config.data or not question.data_dir else Path(question.data_dir)
        task = question.task if code is None else str(code / question.task)
        look = look_at_task(task, data, question.options, thin=config.thin)
    facts = examine(
        folders(cache=config.cache),
        towards=reachable_host(config.address),
        task_problem=None if look is None else look.problem,
    )
    return facts, None if look is None else look.data


def reachable_host(address: str) -> str | None:
    """The host of the first of some masters' addresses, if the way to it is one to other machines."""
    host = Address.parse(address.partition(",")[0]).host
    return None if not host or host == "localhost" or is_loopback(host) else host
