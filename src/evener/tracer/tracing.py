"""Tracing of a model on the meta device; modules that cannot be traced inside become one operation."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from evener.records.errors import file_line, first_line, user_frame
from evener.tracer.effects import PythonState, difference, reads_of
from evener.tracer.hooks import drop_backward, has_backward_hooks
from evener.tracer.ir import TracedModel, record
from evener.tracer.meta_model import on_meta, storage_of
from evener.tracer.operation import NotAnOperation, is_computed_twice
from evener.tracer.tracer import Tracer

CPU = torch.device("cpu")


class NotTraceable(Exception):
    """Raised if a model cannot be traced; the cause is the original error.

    Args:
        reason: The reason, with the line of the user's code.
        module: Path of the module that ran; empty for the model itself.
    """

    def __init__(self, reason: str, module: str) -> None:
        super().__init__(reason)
        self.module = module


def is_childless(module: nn.Module) -> bool:
    """Return whether `module` has no submodules."""
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
    """Trace `model` on tensors shaped like `inputs`: a tensor, or positional or named arguments.

    Args:
        model: The model, on any device. It is neither run nor changed; a copy on the meta device runs.
        inputs: Inputs, of which only shapes and dtypes matter.
        device: Device on which the model will run, which its code may query.
        training: Mode of the model; the trace sets it as `model.train` does.
        is_leaf: Selects modules that are one operation each. A module with children that cannot be traced (because it
            applies the user's autograd function, say) becomes one operation too, and so does a module with backward
            hooks. A module that fails as one operation is traced inside.
        executable: Whether the graph has to compute what the model computes. If not, a tensor may come from something
            other than an operation of torch.
        is_part: Whether other replicas have more of the batch, so that a BatchNorm also trains on a single sample.

    Raises:
        NotTraceable: The model cannot be traced; the error names the line.
    """
    attempts = _Attempts(model, inputs, device, training, is_leaf, executable, is_part)
    traced: TracedModel | None = None
    while traced is None:
        traced = attempts.attempt()
    return _with_inputs_kept(traced)


class _Attempts:
    """Attempts to trace a model; after each failure, another module becomes one operation, or is traced inside."""

    def __init__(
        self,
        model: nn.Module,
        inputs: Any,
        device: torch.device,
        training: bool,
        is_leaf: Callable[[nn.Module], bool],
        executable: bool,
        is_part: bool,
    ) -> None:
        self._model, self._inputs, self._device, self._training = model, inputs, device, training
        self._is_leaf, self._executable, self._is_part = is_leaf, executable, is_part
        self._whole: dict[str, str] = {}
        if executable:
            _refuse_backward_hooks(model)
        self._opened: set[str] = set()

    def attempt(self) -> TracedModel | None:
        """Return the traced model; None if another attempt is to follow.

        Raises NotTraceable if there is no other attempt.
        """
        copied = on_meta(self._model)
        copied.train(self._training)
        leaves = self._leaves(copied)
        tracers: list[Tracer] = []

        def run() -> tuple[TracedModel, PythonState]:
            tracers.append(Tracer(copied, self._device, leaves, self._executable))
            return tracers[-1].run(self._inputs, self._whole), tracers[-1].python

        try:
            traced, python = run()
            return _settled(traced, python, run) if self._executable else traced
        except Exception as error:
            self._take_otherwise(error, tracers[-1], copied, leaves)
        return None

    def _leaves(self, copied: nn.Module) -> set[str]:
        """Return the modules of `copied` that are one operation each, after preparing them."""
        inner = [(path, module) for path, module in copied.named_modules() if path]
        leaves = {path for path, module in inner if self._is_leaf(module)} - self._opened | self._whole.keys()
        leaves |= {path for path, module in inner if has_backward_hooks(module)}
        for path in leaves:
            drop_backward(copied.get_submodule(path))
            if self._is_part:
                _take_a_single_sample(copied.get_submodule(path))
        return leaves

    def _take_otherwise(self, error: Exception, tracer: Tracer, copied: nn.Module, leaves: Set[str]) -> None:
        """Change, because of `error`, whether a module is one operation.

        Raises NotTraceable if that is not possible.
        """
        path = _called(copied, error.module) if isinstance(error, DependsOnHistory) else tracer.innermost
        module = copied.get_submodule(path)
        reason = f"{_place(error, module)}: {first_line(error)}"
        is_over = not path or path in self._whole or path in self._opened
        if not tracer.is_in_operation or isinstance(error, NotAnOperation):
            is_over |= not self._executable
            self._whole[path] = reason
        else:
            is_over |= path not in leaves or is_childless(module)
            self._opened.add(path)
        if is_over:
            raise NotTraceable(reason, path) from error


class DependsOnHistory(NotAnOperation):
    """Raised if a model depends on earlier calls: on Python attributes, or numbers that Python draws."""

    def __init__(self, reason: str, module: str) -> None:
        super().__init__(reason)
        self.module = module


def _settled(
    traced: TracedModel, python: PythonState, run: Callable[[], tuple[TracedModel, PythonState]]
) -> TracedModel:
    """Return `traced` if its effects on the Python state do not change later passes.

    A cache that the first pass fills changes the second pass, but not the third. Raises DependsOnHistory otherwise.
    """
    last, node, drew = traced, None, python.drew
    for _ in range(2):
        changed = python.changed
        if not changed and not drew:
            return traced
        again, python = run()
        for read in reads_of(again, changed):
            raise DependsOnHistory(f"{read.target} is kept from call to call", record(read).module)
        node, drew, last = difference(last, again), drew and python.drew, again
        if node is None and not drew:
            return traced
    if node is None:
        raise DependsOnHistory("Python or NumPy draws random numbers, which may decide what the model does", "")
    raise DependsOnHistory("the model differs from call to call, because of attributes that change", _module_of(node))


def _module_of(node: fx.Node) -> str:
    """Return the path of the module that runs `node`."""
    if node.op == "call_module":
        return str(node.target).rpartition(".")[0]
    return "" if node.op == "output" else record(node).module


def _called(model: nn.Module, path: str) -> str:
    """Return the innermost module at or around `path` that can be called."""
    while path and isinstance(model.get_submodule(path), nn.ModuleList | nn.ModuleDict):
        path = path.rpartition(".")[0]
    return path


def _refuse_backward_hooks(model: nn.Module) -> None:
    """Raise NotTraceable if the model itself has backward hooks, which see all its gradients."""
    if has_backward_hooks(model):
        code = type(model).forward.__code__
        reason = "the model itself has backward hooks; register them on a submodule instead"
        raise NotTraceable(f"{file_line(code.co_filename, code.co_firstlineno)}: {reason}", "")


def _take_a_single_sample(module: nn.Module) -> None:
    """Let a training BatchNorm accept a single value per channel."""
    if type(module).forward in (_BatchNorm.forward, nn.SyncBatchNorm.forward) and "forward" not in vars(module):
        norm: Any = module

        def normalise(x: Tensor) -> Tensor:
            if norm.training and norm.running_mean is not None and is_computed_twice():
                raise NotAnOperation(
                    "a BatchNorm is recomputed (torch.utils.checkpoint), and would move its statistics twice"
                )
            return torch.batch_norm(x, norm.weight, norm.bias, None, None, True, 0.0, norm.eps, False)

        norm.forward = normalise


def _with_inputs_kept(traced: TracedModel) -> TracedModel:
    """Copy inputs that the model changes in place, so that the user's inputs do not change."""
    for node in [node for node in traced.graph.nodes if node.op == "placeholder"]:
        if storage_of(record(node).value) in traced.changed:
            with traced.graph.inserting_after(node):
                clone = traced.graph.call_method("clone", (node,))
            clone.meta.update(node.meta)
            node.replace_all_uses_with(clone, delete_user_cb=lambda user, clone=clone: user is not clone)
    return traced


def _place(error: Exception, module: nn.Module) -> str:
    """Return the user's line that raised `error`, or the start of the code of `module`."""
    frame = user_frame(error)
    if frame is not None:
        return file_line(frame.filename, frame.lineno, frame.line or "")
    code = type(module).forward.__code__
    return file_line(code.co_filename, code.co_firstlineno, f"{type(module).__name__}.forward")
