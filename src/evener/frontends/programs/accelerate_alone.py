"""Accelerate, and Hugging Face's Trainer, under torchrun: make each process look like the only one.

Accelerate reads torchrun's variables, divides batches equally and multiplies schedules. Evener divides them by speed.
Therefore Evener removes these variables when a program that has imported Accelerate joins the run. `evener run` does
not set them.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

import torch.distributed as dist

from evener.records.errors import InvalidInput

_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID")
"""Variables of the environment by which libraries detect that torchrun started them."""


def leave_others_group() -> None:
    """Destroy a process group that exists before the program joins, as `TrainingArguments` create one.

    Raises:
        InvalidInput: it is the program's own, or an Accelerator's that exists.
    """
    if not dist.is_initialized():
        return
    state = _accelerate()
    if state is None or state.PartialState._shared_state == {}:
        raise InvalidInput("the program has a process group already: call evener.join() in place of init_process_group")
    if state.is_initialized():
        raise InvalidInput("the program has an Accelerator already: call evener.join() before it is made")
    state.PartialState().destroy_process_group()
    state.AcceleratorState._reset_state(reset_partial_state=True)


def hide_torchrun() -> None:
    """Remove torchrun's variables if the program has imported Accelerate."""
    if _accelerate() is not None:
        for name in _VARIABLES:
            os.environ.pop(name, None)


def refuse_accelerate() -> None:
    """Raise InvalidInput if Accelerate also divides the batches of this run."""
    state = _accelerate()
    if state is not None and state.is_initialized() and state.AcceleratorState().num_processes > 1:
        raise InvalidInput(
            "Accelerate takes the nodes for processes of its own, so that batches would be divided twice: let the "
            "program import accelerate before it calls evener.join()"
        )


def _accelerate() -> Any:
    """Return the module of Accelerate's state; None if the program has not imported it."""
    return import_module("accelerate.state") if "accelerate" in sys.modules else None
