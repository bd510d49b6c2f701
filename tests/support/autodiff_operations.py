"""Every differentiable operation beside PyTorch's, with inputs drawn for it: what the gradient tests run through.

Inputs are float64. Where an operation has kinks, elements are distinct and away from them, so that differences exist.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as TF
from hypothesis import strategies as st

from evener import autodiff as ad
from evener.autodiff import functional as F

Array = np.ndarray[Any, Any]
Drawn = tuple[list[Array], dict[str, Any]]


@dataclass(frozen=True)
class Operation:
    """Our function, PyTorch's, the rules that ours uses, and how to draw inputs and keyword arguments for both."""

    rules: set[str]
    ours: Callable[..., ad.Tensor]
    theirs: Callable[..., torch.Tensor]
    draw: Callable[[st.DataObject], Drawn]


def rng(data: st.DataObject) -> np.random.Generator:
    return np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), label="seed"))


def normal(data: st.DataObject, shape: tuple[int, ...]) -> Array:
    return np.asarray(rng(data).standard_normal(shape))


def positive(data: st.DataObject, shape: tuple[int, ...]) -> Array:
    return np.asarray(rng(data).uniform(0.5, 2.0, shape))


def separated(data: st.DataObject, shape: tuple[int, ...]) -> Array:
    """Distinct numbers around 0, none of them within 0.01 of 0 or of each other."""
    count = int(np.prod(shape))
    values = (np.arange(count) - count // 2 + 0.5) * 0.05
    return np.asarray(rng(data).permutation(values).reshape(shape))


def shape(data: st.DataObject, least: int = 0, most: int = 4) -> tuple[int, ...]:
    return tuple(data.draw(st.lists(st.integers(1, 4), min_size=least, max_size=most), label="shape"))


def broadcast_pair(data: st.DataObject) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two shapes that broadcast: sizes replaced by 1 and leading dimensions left out at random."""
    full = shape(data)

    def thinned() -> tuple[int, ...]:
        kept = [1 if data.draw(st.booleans()) else size for size in full]
        return tuple(kept[data.draw(st.integers(0, len(kept))) :])

    return thinned(), thinned()


Maker = Callable[[st.DataObject, tuple[int, ...]], Array]


def one(make: Maker = normal, least: int = 0) -> Callable[[st.DataObject], Drawn]:
    return lambda data: ([make(data, shape(data, least))], {})


def two(first: Maker = normal, second: Maker = normal) -> Callable[[st.DataObject], Drawn]:
    def draw(data: st.DataObject) -> Drawn:
        a, b = broadcast_pair(data)
        return [first(data, a), second(data, b)], {}

    return draw


def separated_pair(data: st.DataObject) -> Drawn:
    a, b = broadcast_pair(data)
    return [separated(data, a), separated(data, b) + 0.013], {}


def along_a_dimension(make: Maker = normal) -> Callable[[st.DataObject], Drawn]:
    def draw(data: st.DataObject) -> Drawn:
        x = make(data, shape(data, least=1))
        return [x], {"dim": data.draw(st.integers(-x.ndim, x.ndim - 1), label="dim")}

    return draw


def reduction(make: Maker = normal) -> Callable[[st.DataObject], Drawn]:
    def draw(data: st.DataObject) -> Drawn:
        x = make(data, shape(data, least=1))
        dims = data.draw(st.sets(st.integers(0, x.ndim - 1), min_size=1), label="dims")
        return [x], {"dim": tuple(sorted(dims)), "keepdim": data.draw(st.booleans(), label="keepdim")}

    return draw


def matrices(data: st.DataObject) -> Drawn:
    n, k, m = (data.draw(st.integers(1, 4)) for _ in range(3))
    a, b = broadcast_pair(data)
    left = (*a, n, k) if data.draw(st.booleans()) else (k,)
    right = (*b, k, m) if data.draw(st.booleans()) else (k,)
    return [normal(data, left), normal(data, right)], {}


def linear_inputs(data: st.DataObject) -> Drawn:
    lead, inputs, outputs = shape(data), data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    return [normal(data, (*lead, inputs)), normal(data, (outputs, inputs)), normal(data, (outputs,))], {}


def image(data: st.DataObject, channels: int) -> tuple[int, ...]:
    return data.draw(st.integers(1, 3)), channels, data.draw(st.integers(5, 8)), data.draw(st.integers(5, 8))


def both(data: st.DataObject, low: int, high: int) -> tuple[int, int]:
    return data.draw(st.integers(low, high)), data.draw(st.integers(low, high))


def convolution(data: st.DataObject) -> Drawn:
    groups = data.draw(st.integers(1, 3), label="groups")
    channels, filters = groups * data.draw(st.integers(1, 2)), groups * data.draw(st.integers(1, 2))
    w = normal(data, (filters, channels // groups, *both(data, 1, 3)))
    options = {"stride": both(data, 1, 3), "padding": both(data, 0, 2), "dilation": both(data, 1, 2), "groups": groups}
    return [normal(data, image(data, channels)), w, normal(data, (filters,))], options


def pooling(make: Maker, dilated: bool) -> Callable[[st.DataObject], Drawn]:
    def draw(data: st.DataObject) -> Drawn:
        kernel = both(data, 1, 3)
        padding = tuple(data.draw(st.integers(0, k // 2)) for k in kernel)
        options: dict[str, Any] = {"kernel_size": kernel, "stride": both(data, 1, 3), "padding": padding}
        if dilated:
            options["dilation"] = both(data, 1, 2)
        return [make(data, image(data, 2))], options

    return draw


def layer_norm_inputs(data: st.DataObject) -> Drawn:
    lead, last = shape(data, most=2), (*shape(data, most=1), data.draw(st.integers(2, 4)))
    x = normal(data, (*lead, *last))
    return [x, normal(data, last), normal(data, last)], {"normalized_shape": last}


def batch_norm_inputs(data: st.DataObject) -> Drawn:
    c = data.draw(st.integers(1, 3))
    x = normal(data, (data.draw(st.integers(2, 4)), c, *shape(data, most=2)))
    statistics = {"running_mean": normal(data, (c,)), "running_var": positive(data, (c,))}
    return [x, normal(data, (c,)), normal(data, (c,))], {**statistics, "training": data.draw(st.booleans())}


def scores_and_classes(data: st.DataObject) -> Drawn:
    n, k, others = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5)), shape(data, most=2)
    classes = rng(data).integers(0, k, (n, *others))
    reduction = data.draw(st.sampled_from(["mean", "sum", "none"]))
    return [normal(data, (n, k, *others))], {"target": classes, "reduction": reduction}


def equal_shapes(data: st.DataObject) -> Drawn:
    a = shape(data)
    return [normal(data, a), normal(data, a)], {"reduction": data.draw(st.sampled_from(["mean", "sum", "none"]))}


def reshaped(data: st.DataObject) -> Drawn:
    x = normal(data, shape(data, least=1))
    sizes = list(data.draw(st.permutations(x.shape)))
    sizes[data.draw(st.integers(0, x.ndim - 1))] = -1
    return [x], {"shape": tuple(sizes)}


def permuted(data: st.DataObject) -> Drawn:
    x = normal(data, shape(data))
    return [x], {"dims": tuple(data.draw(st.permutations(range(x.ndim))))}


def expanded(data: st.DataObject) -> Drawn:
    full = shape(data)
    x = normal(data, tuple(1 if data.draw(st.booleans()) else size for size in full))
    return [x], {"shape": (*shape(data, most=1), *full)}


def joined(data: st.DataObject) -> Drawn:
    sizes = list(shape(data, least=1))
    dim = data.draw(st.integers(0, len(sizes) - 1))
    arrays = []
    for _ in range(data.draw(st.integers(1, 3))):
        sizes[dim] = data.draw(st.integers(1, 3))
        arrays.append(normal(data, tuple(sizes)))
    return arrays, {"dim": dim}


def side_by_side(data: st.DataObject) -> Drawn:
    size = shape(data, most=3)
    arrays = [normal(data, size) for _ in range(data.draw(st.integers(1, 3)))]
    return arrays, {"dim": data.draw(st.integers(-len(size) - 1, len(size)))}


def indexed(data: st.DataObject) -> Drawn:
    """An index of integers, slices, None, Ellipsis, and possibly one array or a mask of one dimension."""
    x = normal(data, shape(data, least=1))
    parts: list[Any] = []
    arrays = data.draw(st.integers(0, 1))
    for size in x.shape[: data.draw(st.integers(0, x.ndim))]:
        kind = data.draw(st.sampled_from(["int", "slice", "array", "mask"] if arrays else ["int", "slice"]))
        if kind == "int":
            parts.append(data.draw(st.integers(-size, size - 1)))
        elif kind == "slice":
            parts.append(slice(data.draw(st.integers(0, size)), None, data.draw(st.integers(1, 2))))
        elif kind == "array":
            parts.append(np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=4))))
            arrays = 0
        else:
            parts.append(rng(data).random(size) < 0.7)
            arrays = 0
    if data.draw(st.booleans()):
        parts.insert(data.draw(st.integers(0, len(parts))), None)
    if data.draw(st.booleans()):
        parts.append(Ellipsis)
    return [x], {"index": tuple(parts)}


def torch_index(index: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(torch.from_numpy(part) if isinstance(part, np.ndarray) else part for part in index)


def gathered(data: st.DataObject) -> Drawn:
    x = normal(data, shape(data, least=1, most=3))
    dim = data.draw(st.integers(0, x.ndim - 1))
    sizes = list(x.shape)
    sizes[dim] = data.draw(st.integers(1, 4))
    return [x], {"dim": dim, "index": rng(data).integers(0, x.shape[dim], sizes)}


def looked_up(data: st.DataObject) -> Drawn:
    table = normal(data, (data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))))
    return [table], {"index": rng(data).integers(0, len(table), shape(data))}


def chosen(data: st.DataObject) -> Drawn:
    (a, b), _ = two()(data)
    mask = np.asarray(rng(data).random(np.broadcast_shapes(a.shape, b.shape)) < 0.5)
    return [a, b], {"condition": mask}


def attended(data: st.DataObject) -> Drawn:
    lead, length, keys, size = shape(data, most=2), *(data.draw(st.integers(1, 3)) for _ in range(3))
    q, k, v = ((*lead, length, size), (*lead, keys, size), (*lead, keys, 2))
    options: dict[str, Any] = {"is_causal": data.draw(st.booleans())}
    if not options["is_causal"] and data.draw(st.booleans()):
        options["attn_mask"] = rng(data).random((length, keys)) < 0.7
        options["attn_mask"][:, 0] = True
    return [normal(data, q), normal(data, k), normal(data, v)], options


def attention_ours(
    q: ad.Tensor, k: ad.Tensor, v: ad.Tensor, attn_mask: Any = None, is_causal: bool = False
) -> ad.Tensor:
    mask = None if attn_mask is None else ad.from_numpy(attn_mask)
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal)


def attention_theirs(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: Any = None, is_causal: bool = False
) -> torch.Tensor:
    mask = None if attn_mask is None else torch.from_numpy(attn_mask)
    return TF.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal)


def batch_norm_ours(x: ad.Tensor, w: ad.Tensor, b: ad.Tensor, **options: Any) -> ad.Tensor:
    mean, variance = (ad.tensor(options[name]) for name in ("running_mean", "running_var"))
    return F.batch_norm(x, mean, variance, w, b, options["training"])


def batch_norm_theirs(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, **options: Any) -> torch.Tensor:
    mean, variance = (torch.tensor(options[name]) for name in ("running_mean", "running_var"))
    return TF.batch_norm(x, mean, variance, w, b, options["training"])


OPERATIONS = {
    "add": Operation({"add"}, lambda a, b: a + b, lambda a, b: a + b, two()),
    "subtract": Operation({"subtract"}, lambda a, b: a - b, lambda a, b: a - b, two()),
    "multiply": Operation({"multiply"}, lambda a, b: a * b, lambda a, b: a * b, two()),
    "divide": Operation({"divide"}, lambda a, b: a / b, lambda a, b: a / b, two(normal, positive)),
    "power": Operation({"power"}, lambda a, b: a**b, lambda a, b: a**b, two(positive, normal)),
    "numbers": Operation(
        {"add", "subtract", "multiply", "divide", "power"},
        lambda x: (2 - x) * 3 / (1 + x) + 1 / x - x**3 + 2**x - x**2.5,
        lambda x: (2 - x) * 3 / (1 + x) + 1 / x - x**3 + 2**x - x**2.5,
        one(positive),
    ),
    "maximum": Operation({"maximum"}, lambda a, b: a.maximum(b), torch.maximum, separated_pair),
    "negative": Operation({"negative"}, lambda x: -x, lambda x: -x, one()),
    "abs": Operation({"absolute"}, abs, torch.abs, one(separated)),
    "exp": Operation({"exp"}, ad.Tensor.exp, torch.exp, one()),
    "log": Operation({"log"}, ad.Tensor.log, torch.log, one(positive)),
    "sqrt": Operation({"sqrt"}, ad.Tensor.sqrt, torch.sqrt, one(positive)),
    "tanh": Operation({"tanh"}, F.tanh, torch.tanh, one()),
    "sigmoid": Operation({"sigmoid"}, F.sigmoid, torch.sigmoid, one()),
    "relu": Operation({"relu"}, F.relu, torch.relu, one(separated)),
    "gelu": Operation({"gelu"}, F.gelu, TF.gelu, one()),
    "gelu_tanh": Operation({"gelu_tanh"}, lambda x: F.gelu(x, "tanh"), lambda x: TF.gelu(x, approximate="tanh"), one()),
    "where": Operation(
        {"select"},
        lambda a, b, condition: ad.where(ad.from_numpy(condition), a, b),
        lambda a, b, condition: torch.where(torch.from_numpy(condition), a, b),
        chosen,
    ),
    "clone": Operation({"convert"}, ad.Tensor.clone, torch.clone, one()),
    "sum": Operation({"sum"}, ad.Tensor.sum, torch.sum, reduction()),
    "sum of all": Operation({"sum"}, ad.Tensor.sum, torch.sum, one()),
    "mean": Operation({"mean"}, ad.Tensor.mean, torch.mean, reduction()),
    "mean of all": Operation({"mean"}, ad.Tensor.mean, torch.mean, one()),
    "amax": Operation({"max"}, ad.Tensor.amax, torch.amax, reduction(separated)),
    "max of all": Operation({"max"}, ad.Tensor.amax, torch.max, one(separated)),
    "max along": Operation(
        {"gather"}, lambda x, dim: x.max(dim).values, lambda x, dim: x.max(dim).values, along_a_dimension(separated)
    ),
    "softmax": Operation({"softmax"}, F.softmax, torch.softmax, along_a_dimension()),
    "log_softmax": Operation({"log_softmax"}, F.log_softmax, torch.log_softmax, along_a_dimension()),
    "reshape": Operation({"reshape"}, lambda x, shape: x.reshape(shape), lambda x, shape: x.reshape(shape), reshaped),
    "permute": Operation({"transpose"}, lambda x, dims: x.permute(dims), torch.permute, permuted),
    "expand": Operation({"expand"}, lambda x, shape: x.expand(shape), lambda x, shape: x.expand(shape), expanded),
    "cat": Operation({"concatenate"}, lambda *xs, dim: ad.cat(xs, dim), lambda *xs, dim: torch.cat(xs, dim), joined),
    "stack": Operation(
        {"concatenate", "reshape"},
        lambda *xs, dim: ad.stack(xs, dim),
        lambda *xs, dim: torch.stack(xs, dim),
        side_by_side,
    ),
    "index": Operation({"index"}, lambda x, index: x[index], lambda x, index: x[torch_index(index)], indexed),
    "gather": Operation(
        {"gather"},
        lambda x, dim, index: x.gather(dim, ad.from_numpy(index)),
        lambda x, dim, index: x.gather(dim, torch.from_numpy(index)),
        gathered,
    ),
    "matmul": Operation({"matmul"}, lambda a, b: a @ b, torch.matmul, matrices),
    "linear": Operation({"linear"}, F.linear, TF.linear, linear_inputs),
    "conv2d": Operation({"conv2d"}, F.conv2d, TF.conv2d, convolution),
    "max_pool2d": Operation({"max_pool2d"}, F.max_pool2d, TF.max_pool2d, pooling(separated, dilated=True)),
    "avg_pool2d": Operation({"avg_pool2d"}, F.avg_pool2d, TF.avg_pool2d, pooling(normal, dilated=False)),
    "embedding": Operation(
        {"embedding"},
        lambda table, index: F.embedding(ad.from_numpy(index), table),
        lambda table, index: TF.embedding(torch.from_numpy(index), table),
        looked_up,
    ),
    "layer_norm": Operation(
        {"normalise"},
        lambda x, w, b, normalized_shape: F.layer_norm(x, normalized_shape, w, b),
        lambda x, w, b, normalized_shape: TF.layer_norm(x, normalized_shape, w, b),
        layer_norm_inputs,
    ),
    "batch_norm": Operation({"normalise"}, batch_norm_ours, batch_norm_theirs, batch_norm_inputs),
    "nll_loss": Operation(
        {"nll"},
        lambda x, target, reduction: F.nll_loss(x, ad.from_numpy(target), reduction),
        lambda x, target, reduction: TF.nll_loss(x, torch.from_numpy(target), reduction=reduction),
        scores_and_classes,
    ),
    "cross_entropy": Operation(
        {"nll", "log_softmax"},
        lambda x, target, reduction: F.cross_entropy(x, ad.from_numpy(target), reduction),
        lambda x, target, reduction: TF.cross_entropy(x, torch.from_numpy(target), reduction=reduction),
        scores_and_classes,
    ),
    "mse_loss": Operation({"mse"}, F.mse_loss, TF.mse_loss, equal_shapes),
    "attention": Operation({"matmul", "softmax", "select", "multiply"}, attention_ours, attention_theirs, attended),
}
