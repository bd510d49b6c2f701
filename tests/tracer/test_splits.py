"""What a traced layer reads: its window, its input, its groups."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from evener.records.errors import InvalidValue
from evener.records.graph import Window
from evener.tracer.model_graph import trace_model_graph

MODULES: list[tuple[nn.Module, tuple[int, ...], Window | None]] = [
    (
        nn.Conv2d(4, 6, (3, 5), (2, 1), (1, 2), (1, 2)),
        (4, 17, 19),
        Window(kernel=(3, 5), stride=(2, 1), padding=(1, 2), dilation=(1, 2)),
    ),
    (
        nn.Conv2d(4, 6, 4, padding="same", dilation=2),
        (4, 9, 9),
        Window(kernel=(4, 4), stride=(1, 1), padding=(3, 3), dilation=(2, 2)),
    ),
    (
        nn.Conv2d(4, 6, 3, padding="valid"),
        (4, 9, 9),
        Window(kernel=(3, 3), stride=(1, 1), padding=(0, 0), dilation=(1, 1)),
    ),
    (nn.Conv1d(4, 6, 3), (4, 9), Window(kernel=(3,), stride=(1,), padding=(0,), dilation=(1,))),
    (
        nn.Conv3d(4, 6, 3, 2, 1),
        (4, 9, 9, 9),
        Window(kernel=(3, 3, 3), stride=(2, 2, 2), padding=(1, 1, 1), dilation=(1, 1, 1)),
    ),
    (
        nn.ConvTranspose2d(4, 6, 3, 2, 1),
        (4, 9, 9),
        Window(kernel=(3, 3), stride=(2, 2), padding=(1, 1), dilation=(1, 1), transposed=True),
    ),
    (nn.MaxPool2d(3, 2, 1), (4, 9, 9), Window(kernel=(3, 3), stride=(2, 2), padding=(1, 1), dilation=(1, 1))),
    (nn.AvgPool2d(2), (4, 9, 9), Window(kernel=(2, 2), stride=(2, 2), padding=(0, 0), dilation=(1, 1))),
    (nn.AdaptiveAvgPool2d(2), (4, 9, 9), None),
    (nn.Linear(9, 3), (4, 9), None),
]


@pytest.mark.parametrize(("module", "shape", "window"), MODULES, ids=[str(module) for module, *_ in MODULES])
def test_layer_records_its_input_shape_and_window(
    module: nn.Module, shape: tuple[int, ...], window: Window | None
) -> None:
    layer = trace_model_graph(module, torch.zeros(1, *shape)).layers[0]
    assert layer.input_shape == shape
    assert layer.window == window
    if window is not None and module.padding != "same":
        assert window.resize(shape[1:]) == layer.output_shape[1:]


def test_channels_filters_and_bias_follow_from_shapes() -> None:
    conv = trace_model_graph(nn.Conv2d(4, 6, 3, groups=2), torch.zeros(1, 4, 9, 9)).layers[0]
    assert (conv.groups, conv.channels, conv.filters, conv.has_weights) == (2, 4, 6, False)
    tokens = trace_model_graph(nn.Linear(9, 3), torch.zeros(1, 4, 9)).layers[0]
    assert (tokens.channels, tokens.filters, tokens.bias, tokens.input_size, tokens.output_size) == (9, 3, 3, 36, 12)
    assert trace_model_graph(nn.Conv2d(4, 6, 3, bias=False), torch.zeros(1, 4, 9, 9)).layers[0].bias == 0
    assert trace_model_graph(nn.ReLU(), torch.zeros(1, 4)).layers[0].bias == 0


@pytest.mark.parametrize(
    ("field", "value"), [("kernel", (0, 3)), ("stride", (1,)), ("padding", (-1, 0)), ("dilation", (1, 0))]
)
def test_window_with_invalid_sizes_is_refused(field: str, value: tuple[int, ...]) -> None:
    sizes = {"kernel": (3, 3), "stride": (1, 1), "padding": (1, 1), "dilation": (1, 1)} | {field: value}
    with pytest.raises(InvalidValue, match=f"^{field} must be a size of at least [01] for each extent dim, got "):
        Window(**sizes)  # type: ignore[arg-type]


def test_volume_layers_can_be_divided_by_rows() -> None:
    graph = trace_model_graph(nn.Sequential(nn.Conv3d(2, 4, 3, 1, 1), nn.MaxPool3d(2)), torch.zeros(1, 2, 8, 8, 8))
    assert all("row" in layer.splits for layer in graph.layers)
    window = graph.layers[0].window
    assert window is not None
    assert window.halo == (1, 1)
