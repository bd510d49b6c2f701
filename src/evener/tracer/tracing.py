"""Follows a model: runs it on tensors without memory, and takes what cannot be looked into as one operation."""

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
from evener.tracer.operation import NotFollowed, is_computed_twice
from evener.tracer.tracer import Tracer

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
    following = _Following(model, inputs, device, training, is_leaf, executable, is_part)
    found: TracedModel | None = None
    while found is None:
        found = following.attempt()
    return _with_inputs_kept(found)


class _Following:
    """Attempts to follow a model; after each that fails, another module is one operation, or one less."""

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
        """What the model does; None if the next attempt will be another. Raises NotTraceable if there is no other."""
        copied = on_meta(self._model)
        copied.train(self._training)
        leaves = self._leaves(copied)
        tracers: list[Tracer] = []

        def run() -> tuple[TracedModel, PythonState]:
            tracers.append(Tracer(copied, self._device, leaves, self._executable))
            return tracers[-1].run(self._inputs, self._whole), tracers[-1].python

        try:
            found, python = run()
            return _settled(found, python, run) if self._executable else found
        except Exception as error:
            self._take_otherwise(error, tracers[-1], copied, leaves)
        return None

    def _leaves(self, copied: nn.Module) -> set[str]:
        """The modules of `copied` that are one operation each; made ready for it."""
        inner = [(path, module) for path, module in copied.named_modules() if path]
        leaves = {path for path, module in inner if self._is_leaf(module)} - self._opened | self._whole.keys()
        leaves |= {path for path, module in inner if has_backward_hooks(module)}
        for path in leaves:
            drop_backward(copied.get_submodule(path))
            if self._is_part:
                _take_a_single_sample(copied.get_submodule(path))
        return leaves

    def _take_otherwise(self, error: Exception, tracer: Tracer, copied: nn.Module, leaves: Set[str]) -> None:
        """Take another module as one operation, or one less, because of `error`. Raises NotTraceable."""
        path = _called(copied, error.module) if isinstance(error, Remembers) else tracer.innermost
        module = copied.get_submodule(path)
        reason = f"{_place(error, module)}: {first_line(error)}"
        is_over = not path or path in self._whole or path in self._opened
        if not tracer.is_in_operation or isinstance(error, NotFollowed):
            is_over |= not self._executable
            self._whole[path] = reason
        else:
            is_over |= path not in leaves or is_childless(module)
            self._opened.add(path)
        if is_over:
            raise NotTraceable(reason, path) from error


class Remembers(NotFollowed):
    """What the model does depends on what it did before: on attributes of Python, or numbers that Python draws."""

    def __init__(self, reason: str, module: str) -> None:
        super().__init__(reason)
        self.module = module


def _settled(
    found: TracedModel, python: PythonState, run: Callable[[], tuple[TracedModel, PythonState]]
) -> TracedModel:
    """`found`, if what the pass left behind in Python changes nothing in later ones. Raises Remembers.

    What is computed at the first pass and kept (a cache) makes the second pass another, but not the third.
    """
    last, node, drew = found, None, python.drew
    for _ in range(2):
        changed = python.changed
        if not changed and not drew:
            return found
        again, python = run()
        for kept in reads_of(again, changed):
            raise Remembers(f"{kept.target} is kept from call to call", record(kept).module)
        node, drew, last = difference(last, again), drew and python.drew, again
        if node is None and not drew:
            return found
    if node is None:
        raise Remembers("Python or NumPy draws random numbers, which may decide what the model does", "")
    raise Remembers("what the model does differs from call to call: attributes that change decide it", _module_of(node))


def _module_of(node: fx.Node) -> str:
    """Path of the module whose doing `node` is."""
    if node.op == "call_module":
        return str(node.target).rpartition(".")[0]
    return "" if node.op == "output" else record(node).module


def _called(model: nn.Module, path: str) -> str:
    """The innermost module around `path`, or this itself, that is called."""
    while path and isinstance(model.get_submodule(path), nn.ModuleList | nn.ModuleDict):
        path = path.rpartition(".")[0]
    return path


def _refuse_backward_hooks(model: nn.Module) -> None:
    """Raises NotTraceable if the model itself has hooks, which see the gradients of all that it does."""
    if has_backward_hooks(model):
        code = type(model).forward.__code__
        reason = "the model itself has backward hooks; give them to a module in it"
        raise NotTraceable(f"{file_line(code.co_filename, code.co_firstlineno)}: {reason}", "")


def _take_a_single_sample(module: nn.Module) -> None:
    """Let a BatchNorm that trains normalise without asking how many values there are."""
    if type(module).forward in (_BatchNorm.forward, nn.SyncBatchNorm.forward) and "forward" not in vars(module):
        norm: Any = module

        def normalise(x: Tensor) -> Tensor:
            if norm.training and norm.running_mean is not None and is_computed_twice():
                raise NotFollowed("a BatchNorm is computed twice (torch.utils.checkpoint), and would move twice")
            return torch.batch_norm(x, norm.weight, norm.bias, None, None, True, 0.0, norm.eps, False)

        norm.forward = normalise


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
        return file_line(frame.filename, frame.lineno, frame.line or "")
    code = type(module).forward.__code__
    return file_line(code.co_filename, code.co_firstlineno, f"{type(module).__name__}.forward")
