"""Defects that the divided model once had, or could have: each planted into today's code, for the self-check to find.

Those of `model` change the model that is divided, on every rank alike: as if dividing it had lost something. The whole
model, which the self-check holds it against, stays as the user wrote it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

from evener.parallel import gradient_buckets, gradient_sums, local_ops, op_graph, optimizer, rank_program, sharded
from evener.parallel.pipeline import pipeline
from evener.parallel.shared_statistics import SharedStatistics
from evener.tracer.ir import TorchModes
from evener.training import joined_model, training, trial
from exact.kinds import gradients
from exact.recipe import tensors_of

Patch = tuple[Any, str, Callable[[Any], Any]]
"""Whose attribute, its name, and what makes the new value of the old one."""


@dataclass(frozen=True)
class Plant:
    """A defect, and a recipe and way in which it makes a difference."""

    recipe: str
    way: str
    patches: tuple[Patch, ...]


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Inside, this process has the defect of that name, if it is one."""
    with ExitStack() as stack:
        for owner, attribute, make in PLANTS[name].patches if name else ():
            stack.enter_context(mock.patch.object(owner, attribute, make(getattr(owner, attribute))))
        yield


def _model(change: Callable[[Any], None]) -> tuple[Patch, ...]:
    """The model that is divided is changed before."""

    def make(join: Any) -> Any:
        def changed(context: Any, *others: Any, **named: Any) -> Any:
            model = copy.deepcopy(context.model)
            change(model)
            return join(replace(context, model=model), *others, **named)

        return changed

    return ((training, "join_model", make), (trial, "join_model", make))


def _passes(change: Callable[[Any], None]) -> tuple[Patch, ...]:
    """The model as the training loop sees it is changed."""

    def make(join: Any) -> Any:
        def changed(*args: Any, **named: Any) -> Any:
            model, plan = join(*args, **named)
            change(model)
            return model, plan

        return changed

    return ((training, "join_model", make), (trial, "join_model", make))


def _each(change: Callable[[Any], None]) -> tuple[Patch, ...]:
    """Every module of the model that is divided is changed before."""

    def change_all(model: nn.Module) -> None:
        for module in list(model.modules()):
            change(module)

    return _model(change_all)


def _instead(owner: Any, attribute: str, new: Any) -> tuple[Patch, ...]:
    return ((owner, attribute, lambda _: new),)


def _inside(*patch: Any) -> tuple[Patch, ...]:
    """The divided model's forward pass runs with another attribute somewhere."""

    def change(model: Any) -> None:
        forward = model.forward

        def patched(*args: Any) -> Any:
            with mock.patch.object(*patch):
                return forward(*args)

        model.forward = patched

    return _model(change)


def _own_gradient_stays(finish: Any) -> Any:
    """The first weight of a bucket keeps what this rank has computed."""

    def finish_without(self: Any) -> None:
        own = self.weights[0].grad
        finish(self)
        self.weights[0].grad = own

    return finish_without


def _own_norm(clip: Any) -> Any:
    """Gradients are clipped by the norm of those that this rank has."""
    return lambda counted, grads, largest, device, gather: clip(
        grads, grads, largest, device, lambda norm: (gather(norm), norm.unsqueeze(0))[1]
    )


def _mask_of_own_part(_: Any) -> Any:
    return lambda ctx, layer: lambda inputs: F.dropout(inputs[0], layer.p, training=ctx.model.training)


def _keeps_training(module: Any) -> None:
    module.train = lambda mode=True: nn.Module.train(module, True)


def _has_no_train_of_its_own(module: Any) -> None:
    module.train = lambda mode=True: nn.Module.train(module, mode)


def _loses_hooks(module: Any) -> None:
    module._forward_hooks.clear()
    module._forward_pre_hooks.clear()


def _loses_backward_hooks(module: Any) -> None:
    module._backward_hooks.clear()
    module._backward_pre_hooks.clear()


def _iterates_more(module: Any) -> None:
    if hasattr(module, "n_power_iterations"):
        module.n_power_iterations += 1


def _has_no_bound(module: Any) -> None:
    if isinstance(module, nn.Embedding):
        module.max_norm = None


def _is_untied(module: Any) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        setattr(module, name, nn.Parameter(parameter.detach().clone()))


def _pads_with_zeros(module: Any) -> None:
    if isinstance(module, nn.Conv2d):
        module.padding_mode = "zeros"


def _forgets_buffers(model: Any) -> None:
    """What a pass changes is not kept."""
    kept: list[Any] = []
    model.register_forward_pre_hook(lambda *_: kept.extend((b, b.clone()) for b in model.buffers()))

    def restore(*_: Any) -> None:
        while kept:
            buffer, before = kept.pop()
            buffer.data = before

    model.register_forward_hook(restore)


def _zeros_for_nothing(model: Any) -> None:
    """Parameters without a gradient get zeros, which weight decay moves."""
    add_gradients = model.add_gradients

    def adding(*args: Any, **named: Any) -> Any:
        loss = add_gradients(*args, **named)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        return loss

    model.add_gradients = adding


def _returns_first_only(model: Any) -> None:
    predict = model.predict
    model.predict = lambda inputs: tensors_of(predict(inputs))[:1]


_NOT_SHARED = _instead(
    SharedStatistics, "__torch_function__", lambda _self, func, _, args=(), kwargs=None: func(*args, **(kwargs or {}))
)
PLANTS = {
    # modules that return tuples or other structures
    "gradients not summed": Plant(
        "structures/transformer_encoder",
        "data+sharded",
        ((gradient_buckets.GradientBucket, "finish", _own_gradient_stays),),
    ),
    "outputs lost": Plant("structures/returns_dict", "data 7,2,1", _passes(_returns_first_only)),
    # what tracing bakes in
    "training branch in evaluation": Plant("baked/scales_in_training", "data 7,2,1", _each(_keeps_training)),
    "program of training in evaluation": Plant(
        "baked/scales_in_training", "sharded 7,2,1", ((sharded, "_key", lambda key: lambda x, _: key(x, True)),)
    ),
    "dropout that is switched off": Plant(
        "baked/dropout_switched_off",
        "data 7,2,1",
        _inside(F, "dropout", lambda x, p=0.5, training=True, inplace=False: torch.dropout(x, p, True)),
    ),
    "side effects dropped": Plant("baked/counts_its_calls", "data 7,2,1", _model(_forgets_buffers)),
    "own train() ignored": Plant("baked/trains_only_its_head", "data 7,2,1", _each(_has_no_train_of_its_own)),
    # in-place changes through views
    "views not followed": Plant(
        "views/adds_through_slice", "sharded 7,2,1", _instead(op_graph, "with_new_values", lambda traced, _: traced)
    ),
    # gradients that do not flow, or flow otherwise
    "no_grad ignored": Plant(
        "gradients/part_without_grad", "sharded 7,2,1", _instead(TorchModes, "applied", lambda _: nullcontext())
    ),
    "own backward lost": Plant(
        "gradients/gradient_reversal", "data 7,2,1", _inside(gradients, "_reverse", lambda x: x)
    ),
    # hooks
    "forward hooks lost": Plant("hooks/forward_hook_scales", "data 7,2,1", _each(_loses_hooks)),
    "backward hooks lost": Plant("hooks/backward_pre_hook_scales", "data 7,2,1", _each(_loses_backward_hooks)),
    # parametrisations
    "power iteration of its own": Plant("parametrised/spectral_norm_new", "data 7,2,1", _each(_iterates_more)),
    "bound of an embedding lost": Plant("parametrised/embedding_with_max_norm", "filter 7,2,1", _each(_has_no_bound)),
    "ties lost": Plant("parametrised/tied_layers", "data 7,2,1", _each(_is_untied)),
    # BatchNorm
    "statistics of one rank": Plant(
        "norms/batch_norm",
        "data 7,2,1",
        (*_instead(joined_model, "synchronise_norms", lambda model, *_: model), *_NOT_SHARED),
    ),
    "functional norms of one rank": Plant("norms/functional_batch_norm", "data 7,2,1", _NOT_SHARED),
    "statistics of one replica": Plant(
        "norms/batch_norm", "data+sharded", _instead(sharded.ShardedModule, "_normalise", lambda _: None)
    ),
    "statistics moved twice": Plant(
        "norms/batch_norm", "spatial again", _instead(rank_program, "untracked", lambda _: nullcontext())
    ),
    # optimisers that look at more than one element
    "optimiser steps on parts": Plant(
        "optimisers/lars_of_rows", "filter 7,2,1", _instead(optimizer, "_agreed_scope", lambda *_: "element")
    ),
    "groups by sizes of parts": Plant(
        "optimisers/rate_by_size", "filter 7,2,1", _instead(optimizer, "looking_whole", lambda *_: nullcontext())
    ),
    # clipping, and parameters without gradient
    "norm of one part": Plant("clipping/clipped_mlp", "filter 7,2,1", ((gradient_sums, "clip_gradients", _own_norm),)),
    "norm of one stage": Plant("clipping/clipped_mlp", "pipeline 1,1", ((pipeline, "clip_gradients", _own_norm),)),
    "zeros for no gradient": Plant("clipping/unused_parameter_decays", "filter 7,2,1", _passes(_zeros_for_nothing)),
    # randomness
    "masks of each rank": Plant("randomness/dropout", "spatial 7,2,1", ((local_ops, "dropout", _mask_of_own_part),)),
    # shapes
    "padding of another kind": Plant("shapes/padding_reflect", "data 7,2,1", _each(_pads_with_zeros)),
}
"""By name; each makes no difference that a user would notice, but for the numbers."""
