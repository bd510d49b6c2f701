"""nn.Module -> ModelGraph, by one forward pass on the meta device: nothing is computed and no memory is taken.

A layer is a call of a leaf module (one without children), or the functional work of a container between two such calls:

    leaf module called                    -> a layer of its name; called again: `name#2`
    container multiplies, keeps tensors   -> a layer of the container's name (attention, a positional embedding)
     for backward, or reads a parameter
    container joins outputs of layers     -> likewise if several layers read the result (the residual stream of a
     (a residual sum, a concatenation)       transformer); if one does, that one reads the joined outputs (ResNet)
    container only reshapes ...           -> no layer; what reads the result reads the layer that it came from
    parameters that nothing reached       -> counted at the nearest container that is a layer, else a layer at the end

Python alone knows which tensor came from where, so a TorchFunctionMode follows the origins of tensors, by identity.
Costs are counted where they are exact: FLOPs by FlopCounterMode, kept bytes by the saved-tensor hooks of autograd.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from evener.errors import TrainingFailed
from evener.graph import ModelGraph
from evener.tracer.layers import (
    layer_of,
    names_of,
    parameters_by_layer,
    unreached,
    untrained_bytes,
    without_single_reader_joins,
)
from evener.tracer.meta import batch_on_meta, map_tensors, on_meta
from evener.tracer.tracer import Tracer

__all__ = ["trace"]


def trace(model: nn.Module, sample: Any, name: str = "") -> ModelGraph:
    """The layers of `model` in order of execution, with what each costs per sample of a training step.

    The model itself is not touched: a copy of it on the meta device, in training mode, runs once.

    Args:
        model: on any device.
        sample: a batch of inputs, with the sample dim first: a tensor, or a tuple or a dict of tensors that the
            model takes as positional or named arguments. Only shapes and dtypes count, not the number of samples.
        name: of the graph; the model's class by default.

    Returns:
        Layers whose FLOPs and bytes are per sample. `activation_bytes` holds every storage that autograd keeps for
        backward once, at the layer that keeps it first, without parameters, buffers and what does not grow with the
        batch. `halo` is for equal rows of input and output: rows [a*stride, b*stride) in, rows [a, b) out.

    Raises:
        TrainingFailed: the model cannot be run without values; says where and why.
    """
    name = name or type(model).__name__
    tracer = Tracer()
    try:
        clone = on_meta(model).train()
        tracer.run(clone, map_tensors(sample, batch_on_meta))
    except Exception as error:
        where = f" in layer {tracer.innermost}" if tracer.innermost else ""
        raise TrainingFailed(
            f"cannot trace {name}{where}: {type(error).__name__}: {_first_line(error)}; if the sample has the shape of "
            "a real batch, let forward neither read values of tensors (.item(), if) nor fix the batch size or a device"
        ) from error
    costs = without_single_reader_joins(tracer.costs)
    names = names_of(costs)
    parameters = parameters_by_layer(clone, costs, names)
    layers = [layer_of(cost, names, index, parameters.pop(names[index], 0)) for index, cost in costs.items()]
    layers += [unreached(path, clone.get_submodule(path), count) for path, count in parameters.items()]
    return ModelGraph(
        name=name,
        layers=tuple(layers),
        element_bytes=next((p.element_size() for p in clone.parameters()), 4),
        buffer_bytes=untrained_bytes(clone),
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or "no message"
