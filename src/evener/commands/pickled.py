"""Objects that were made in Python, pickled with the function that uses them, for the processes of ranks."""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any

from evener.config.run_config import RunConfig
from evener.data.tasks.load import needing_extras
from evener.launch.rank_environment import RankEnvironment, RankFunction
from evener.records.errors import InvalidInput, first_line


def pickled(value: Any, name: str, advice: str) -> bytes:
    """Return `value` pickled, together with the code of classes and functions of the user's script or notebook.

    Args:
        value: for the processes of this machine's ranks.
        name: what an error calls it, such as "the task".
        advice: what an error tells the user to do.

    Raises:
        MissingExtra: cloudpickle is not installed.
        InvalidInput: it holds something that belongs to this process.
    """
    with needing_extras():
        import cloudpickle
    try:
        return bytes(cloudpickle.dumps(value))
    except (TypeError, pickle.PicklingError, AttributeError, ValueError) as error:
        raise InvalidInput(f"{name} cannot be sent to the nodes' processes ({first_line(error)}): {advice}") from error


def with_pickled_task(program: Any, task: Any) -> RankFunction:
    """Return `program` with `task` pickled, so that a process can be started with it. Raises like `pickled`."""
    advice = "let its functions make what they need, or put it into a file and give the file's name"
    return partial(_perform, program, pickled(task, "the task", advice))


def _perform(program: Any, packed: bytes, env: RankEnvironment, config: RunConfig) -> None:
    program(env, config, pickle.loads(packed))
