"""Well-known networks as ModelGraphs, drawn without PyTorch: what `evener plan resnet152` plans for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from evener.errors import InvalidValue
from evener.graph import ModelGraph
from evener.zoo.amoebanet import amoebanet_d
from evener.zoo.networks import alexnet, cosmoflow, resnet50, resnet152, transformer, unet, vgg16, yolov8n

__all__ = [
    "ZOO",
    "alexnet",
    "amoebanet_d",
    "cosmoflow",
    "draw",
    "resnet50",
    "resnet152",
    "transformer",
    "unet",
    "vgg16",
    "yolov8n",
]

ZOO: Mapping[str, Callable[..., ModelGraph]] = {
    "alexnet": alexnet,
    "vgg16": vgg16,
    "resnet50": resnet50,
    "resnet152": resnet152,
    "amoebanet-d": amoebanet_d,
    "transformer": transformer,
    "unet": unet,
    "cosmoflow": cosmoflow,
    "yolov8n": yolov8n,
}


def draw(name: str, options: Mapping[str, str] | None = None) -> ModelGraph:
    """The network `name` of the zoo.

    Args:
        name: a key of `ZOO`.
        options: of its function, as text: `{"image": "3x64x64", "classes": "200"}`.

    Raises:
        InvalidValue: there is no such network or option, or a value is not whole numbers joined by x.
    """
    if name not in ZOO:
        raise InvalidValue("the network", name, f"one of {', '.join(ZOO)}")
    network, known = ZOO[name], ZOO[name].__annotations__
    values: dict[str, object] = {}
    for key, text in (options or {}).items():
        if key not in known or key == "return":
            raise InvalidValue("--option", key, f"an option of {name}: {', '.join(k for k in known if k != 'return')}")
        values[key] = _value(key, text, is_shape="tuple" in known[key])
    return network(**values)


def _value(key: str, text: str, *, is_shape: bool) -> int | tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in text.split("x"))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 0 or (len(sizes) > 1) != is_shape:
        raise InvalidValue(f"--option {key}", text, "sizes such as 3x224x224" if is_shape else "a whole number")
    return sizes if is_shape else sizes[0]
