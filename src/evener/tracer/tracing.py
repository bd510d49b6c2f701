"""Follows a model: runs it on tensors without memory, and takes what cannot be looked into as one operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from evener.errors import first_line, user_frame
from evener.tracer.hooks import drop_backward, has_backward_hooks
from evener.tracer.ir import TracedModel, record
from evener.tracer.meta_model import on_meta, storage_of
from evener.tracer.tracer import NotFollowed, Tracer

CPU = torch.device("cpu")


class NotTraceable(Exception):
    """A model cannot be followed; the cause is what happened.

    Args:
        reason: with the line of the user's code.
        module: path of the module that ran; empty for the model itself.
    """

    def __init__(self, reason: str, module: str) -> None:
        super().__init__(reason)
        self.module = module


def is_childless(module: nn.Module) -> bool:
    """Whether `module` has no modules inside."""
    return next(module.children(), None) is None


def trace(
    model: nn.Module,
    inputs: Any,
    device: torch.device = CPU,
    training: bool = True,
    is_leaf: Callable[[nn.Module], bool] = is_childless,
    executable: bool = True,
    is_part: bool = False,
) -> TracedModel:
    """Follow `model` on tensors shaped like `inputs`: a tensor, or positional or named arguments.

    Args:
        model: on any device; neither run nor changed, a copy without memory is.
        inputs: only shapes and dtypes matter.
        device: where the model will run, which its code may ask for.
        training: mode of the model, which is set as the model sets it.
        is_leaf: modules that are one operation each. A module with children that cannot be followed (as it applies an
            autograd function of the user's, say) becomes another, and so does one with backward hooks; one that fails
            as one operation is looked into.
        executable: whether the graph has to compute what the model computes; if not, a tensor may come from something
            that is not an operation of torch.
        is_part: whether others have more of the batch, so that a BatchNorm trains on a single sample, too.

    Raises:
        NotTraceable: names the line of the model that cannot be followed.
    """
    whole: dict[str, str] = {}
    opened: set[str] = set()
    while True:
        copied = on_meta(model)
        copied.train(training)
        leaves = {path for path, module in copied.named_modules() if path and is_leaf(module)} - opened | whole.keys()
        leaves |= {path for path, module in copied.named_modules() if path and has_backward_hooks(module)}
        for path in leaves:
            drop_backward(copied.get_submodule(path))
        for path in leaves if is_part else ():
            _take_a_single_sample(copied.get_submodule(path))
        tracer = Tracer(copied, device, leaves, executable)
        try:
            return _with_inputs_kept(tracer.run(inputs, whole))
        except Exception as error:
            path = tracer.innermost
            module = copied.get_submodule(path)
            reason = f"{_place(error, module)}: {first_line(error)}"
            is_over = not path or path in whole or path in opened
            if not tracer.is_in_operation or isinstance(error, NotFollowed):
                is_over |= not executable
                whole[path] = reason
            else:
                is_over |= path not in leaves or is_childless(module)
                opened.add(path)
            if is_over:
                raise NotTraceable(reason, path) from error


def _take_a_single_sample(module: nn.Module) -> None:
    """Let a BatchNorm that trains normalise without asking how many values there are."""
    if type(module).forward in (_BatchNorm.forward, nn.SyncBatchNorm.forward) and "forward" not in vars(module):
        norm: Any = module
        norm.forward = lambda x: torch.batch_norm(x, norm.weight, norm.bias, None, None, True, 0.0, norm.eps, False)


def _with_inputs_kept(traced: TracedModel) -> TracedModel:
    """Copies inputs that the model changes in place: the user's stay as they are, and may be computed with again."""
    for node in [node for node in traced.graph.nodes if node.op == "placeholder"]:
        if storage_of(record(node).value) in traced.changed:
            with traced.graph.inserting_after(node):
                clone = traced.graph.call_method("clone", (node,))
            clone.meta.update(node.meta)
            node.replace_all_uses_with(clone, delete_user_cb=lambda user, clone=clone: user is not clone)
    return traced


def _place(error: Exception, module: nn.Module) -> str:
    """The user's own line that raised `error`, or else where the code of `module` begins."""
    frame = user_frame(error)
    if frame is not None:
        return f"{frame.filename}, line {frame.lineno} (`{frame.line}`)"
    code = type(module).forward.__code__
    return f"{code.co_filename}, line {code.co_firstlineno} (`{type(module).__name__}.forward`)"
