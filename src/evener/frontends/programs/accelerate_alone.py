"""Accelerate, and Hugging Face's Trainer with it, under torchrun: it is to take each process for one alone.

Accelerate finds what torchrun tells its processes and divides batches by itself, equally, and multiplies schedules; so
does this run, by what nodes are worth. Under `evener run` there is nothing to be found; so it is under torchrun, as
soon as a program has joined that has imported Accelerate.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

import torch.distributed as dist

from evener.records.errors import InvalidInput

_TOLD = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID")
"""Variables of the environment by which libraries tell that torchrun started them."""


def leave_others_group() -> None:
    """Undo a process group that a program has before it joins, as `TrainingArguments` make one.

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
    """If the program has imported Accelerate, let that take this process for one alone from now on."""
    if _accelerate() is not None:
        for name in _TOLD:
            os.environ.pop(name, None)


def refuse_accelerate() -> None:
    """Raises InvalidInput: Accelerate divides the batches of this run, too."""
    state = _accelerate()
    if state is not None and state.is_initialized() and state.AcceleratorState().num_processes > 1:
        raise InvalidInput(
            "Accelerate takes the nodes for processes of its own, so that batches would be divided twice: let the "
            "program import accelerate before it calls evener.join()"
        )


def _accelerate() -> Any:
    """Its module of states; None if the program has not imported it."""
    return import_module("accelerate.state") if "accelerate" in sys.modules else None
