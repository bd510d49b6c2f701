"""A task that was made in Python, pickled with the function that trains it, for the processes of ranks."""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any

from evener.config.run_config import RunConfig
from evener.data.tasks.load import needing_extras
from evener.launch.rank_environment import RankEnvironment, RankFunction
from evener.records.errors import InvalidInput, first_line


def with_pickled_task(program: Any, task: Any) -> RankFunction:
    """Return `program` with `task` pickled, so that a process can be started with it.

    Raises:
        MissingExtra: cloudpickle is not installed.
        InvalidInput: the task holds something that belongs to this process.
    """
    with needing_extras():
        import cloudpickle
    try:
        packed = cloudpickle.dumps(task)
    except (TypeError, pickle.PicklingError, AttributeError, ValueError) as error:
        raise InvalidInput(
            f"the task cannot be sent to the nodes' processes ({first_line(error)}): let its functions make what they "
            "need, or put it into a file and give the file's name"
        ) from error
    return partial(_perform, program, packed)


def _perform(program: Any, packed: bytes, env: RankEnvironment, config: RunConfig) -> None:
    program(env, config, pickle.loads(packed))
