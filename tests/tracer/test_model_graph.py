"""trace: what a model is, per layer and sample, without running it on values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from evener.records.errors import TrainingFailed
from evener.records.graph import Layer, ModelGraph, Window
from evener.tracer.model_graph import trace_model_graph
from support.refusals import refused

IMAGE = torch.zeros(1, 3, 16, 16)


def layer(graph: ModelGraph, name: str) -> Layer:
    return next(one for one in graph.layers if one.name == name)


def inputs(graph: ModelGraph) -> dict[str, tuple[str, ...]]:
    return {one.name: one.inputs for one in graph.layers}


class Residual(nn.Module):
    """ResNet's basic block: the sum is read by one layer, the second call of `relu`."""

    def __init__(self, channels: int, filters: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, filters, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(filters)
        self.conv2 = nn.Conv2d(filters, filters, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(filters)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = None
        if stride != 1 or channels != filters:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, filters, 1, stride, bias=False), nn.BatchNorm2d(filters))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x if self.shortcut is None else self.shortcut(x)
        return self.relu(out)  # type: ignore[no-any-return]


def resnet18() -> nn.Sequential:
    widths = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1), (256, 512, 2)]
    return nn.Sequential(
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
        *(Residual(*width) for width in (*widths, (512, 512, 1))),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(512, 1000),
    )


class PreNorm(nn.Module):
    """A transformer block whose sums are read twice; attention is functional, inside of a container."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.feed = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.feed(self.norm2(x))  # type: ignore[no-any-return]


# --- costs


def test_convolution_cost_equals_the_closed_form() -> None:
    graph = trace_model_graph(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1)), IMAGE, name="one convolution")
    assert graph.name == "one convolution"
    assert graph.layers == (
        Layer(
            name="0",
            kind="Conv2d",
            output_shape=(8, 16, 16),
            parameters=8 * 3 * 3 * 3 + 8,
            forward_flops=2 * (8 * 16 * 16) * (3 * 3 * 3),
            activation_bytes=4 * 3 * 16 * 16,
            splits=("sample", "channel", "filter", "row", "column"),
            input_shape=(3, 16, 16),
            window=Window(kernel=(3, 3), stride=(1, 1), padding=(1, 1), dilation=(1, 1)),
        ),
    )


def test_grouped_convolution_costs_the_share_of_a_group() -> None:
    one = trace_model_graph(nn.Conv2d(4, 8, 3, stride=2, groups=2), torch.zeros(1, 4, 9, 9)).layers[0]
    assert one.output_shape == (8, 4, 4)
    assert one.forward_flops == 2 * (8 * 4 * 4) * (2 * 3 * 3)
    assert one.parameters == 8 * 2 * 9 + 8


def test_linear_layer_cost_equals_the_closed_form() -> None:
    graph = trace_model_graph(nn.Linear(12, 5), torch.zeros(7, 12))
    assert graph.name == "Linear"
    assert graph.layers == (
        Layer(
            name="Linear",
            kind="Linear",
            output_shape=(5,),
            parameters=65,
            forward_flops=2 * 12 * 5,
            activation_bytes=48,
            splits=("sample", "channel", "filter"),
            input_shape=(12,),
        ),
    )


def test_attention_in_a_container_is_one_layer_with_its_name() -> None:
    tokens, width = 6, 8
    one = layer(trace_model_graph(PreNorm(), torch.zeros(1, tokens, width)), "attention")
    projections = 4 * 2 * tokens * width * width
    scores = 2 * 2 * tokens * tokens * width
    assert one.kind == "MultiheadAttention"
    assert one.forward_flops == projections + scores
    assert one.parameters == 4 * width * width + 4 * width


def kept_by_autograd(model: nn.Module, batch: Tensor) -> int:
    """Bytes that a real forward pass keeps for backward, parameters and buffers excluded."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}
    alive = []

    def keep(tensor: Tensor) -> Tensor:
        alive.append(tensor)
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        alive.append(model(batch))
    return sum(num_bytes for pointer, num_bytes in kept.items() if pointer not in own)


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2)), (3, 8, 8)),
        (nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Dropout(0.5), nn.Linear(9, 2), nn.Sigmoid()), (6,)),
        (nn.Sequential(Residual(3, 5, 2), nn.AvgPool2d(2), nn.Flatten()), (3, 8, 8)),
        (nn.Sequential(nn.Linear(6, 300), nn.BatchNorm1d(300)), (6,)),
        (nn.Sequential(nn.Linear(61, 61), nn.Tanh(), nn.Linear(61, 61)), (61,)),
    ],
    ids=["convolution", "perceptron", "residual", "statistics of the batch", "size of the traced batch"],
)
def test_activation_bytes_equal_those_saved_by_a_real_step(model: nn.Module, shape: tuple[int, ...]) -> None:
    few, many = (kept_by_autograd(model, torch.randn(count, *shape)) for count in (3, 8))
    assert (many - few) % 5 == 0
    assert trace_model_graph(model, torch.zeros(1, *shape)).activation_bytes == (many - few) // 5 > 0


def test_shared_storages_count_once_at_the_first_layer() -> None:
    graph = trace_model_graph(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), torch.zeros(1, 4))
    assert [one.activation_bytes for one in graph.layers] == [16, 16, 0]


def test_resnet18_has_its_published_parameters_and_flops() -> None:
    model = resnet18()
    graph = trace_model_graph(model, torch.zeros(1, 3, 224, 224))
    assert graph.parameters == sum(p.numel() for p in model.parameters()) == 11_689_512
    assert graph.forward_flops == 3_628_146_688
    assert graph.buffer_bytes == sum(b.numel() * b.element_size() for b in model.buffers()) == 38_560
    assert len(graph.layers) == 4 + 8 * 6 + 3 * 2 + 3


def test_graph_is_independent_of_the_batch_size() -> None:
    model = nn.Sequential(Residual(3, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    assert trace_model_graph(model, IMAGE) == trace_model_graph(model, IMAGE.expand(9, 3, 16, 16))


def test_graph_is_independent_of_no_grad_in_the_caller() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with torch.no_grad():
        graph = trace_model_graph(model, torch.zeros(1, 4))
    assert graph == trace_model_graph(model, torch.zeros(1, 4))


def test_bytes_follow_the_type_of_the_parameters() -> None:
    graph = trace_model_graph(nn.Linear(4, 2).half(), torch.zeros(1, 4).half())
    assert graph.element_bytes == 2
    assert graph.parameter_bytes == 20
    assert graph.activation_bytes == 8


# --- names, shapes and edges


def test_module_called_twice_is_two_layers_with_parameters_once() -> None:
    linear = nn.Linear(4, 4)
    graph = trace_model_graph(nn.Sequential(linear, nn.ReLU(), linear), torch.zeros(1, 4))
    assert inputs(graph) == {"0": (), "1": ("0",), "0#2": ("1",)}
    assert [one.parameters for one in graph.layers] == [20, 0, 0]


def test_weights_shared_by_two_modules_count_at_the_first_to_run() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decode = nn.Linear(3, 7, bias=False)
            self.embed = nn.Embedding(7, 3)
            self.decode.weight = self.embed.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.decode(self.embed(x))  # type: ignore[no-any-return]

    graph = trace_model_graph(Tied(), torch.zeros(1, 5, dtype=torch.long))
    assert [(one.name, one.parameters) for one in graph.layers] == [("embed", 21), ("decode", 0)]
    assert [one.output_shape for one in graph.layers] == [(5, 3), (5, 7)]


def test_residual_sum_read_once_gives_its_reader_both_branches() -> None:
    graph = trace_model_graph(nn.Sequential(nn.Conv2d(3, 4, 1), Residual(4, 4, 1), Residual(4, 6, 2)), IMAGE)
    edges = inputs(graph)
    assert edges["1.conv1"] == ("0",)
    assert edges["1.relu"] == ("1.bn1",)
    assert edges["1.relu#2"] == ("0", "1.bn2")
    assert edges["2.shortcut.0"] == ("1.relu#2",)
    assert edges["2.relu#2"] == ("2.bn2", "2.shortcut.1")


def test_residual_sum_read_twice_or_returned_is_a_layer() -> None:
    graph = trace_model_graph(nn.Sequential(nn.Linear(8, 8), PreNorm(), nn.ReLU()), torch.zeros(1, 6, 8))
    assert inputs(graph) == {
        "0": (),
        "1.norm1": ("0",),
        "1.attention": ("1.norm1",),
        "1": ("0", "1.attention"),
        "1.norm2": ("1",),
        "1.feed": ("1.norm2",),
        "2": ("1", "1.feed"),
    }
    last = trace_model_graph(nn.Sequential(PreNorm(), PreNorm()), torch.zeros(1, 6, 8)).layers[-1]
    assert (last.name, last.kind, last.output_shape, last.inputs) == ("1#2", "PreNorm", (6, 8), ("1", "1.feed"))


def test_edges_follow_views_dictionaries_concatenation_and_slices() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 3)
            self.c, self.d = nn.Linear(6, 2), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> dict[str, Any]:
            parts = {"a": self.a(x), "b": [self.b(x)]}
            joined = torch.cat([parts["a"].reshape(-1, 3), *parts["b"]], dim=1)
            written = torch.zeros(x.shape[0], 6)
            written[:, :3] = parts["a"][:, :3]
            return {"c": self.c(joined), "d": self.d(written)}

    edges = inputs(trace_model_graph(Odd(), torch.zeros(1, 4)))
    assert edges == {"a": (), "b": (), "c": ("a", "b"), "d": ("a",)}


def test_container_parameter_is_a_layer_where_it_is_read() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(3, 4)
            self.position = nn.Parameter(torch.zeros(5, 4))

        def forward(self, x: Tensor) -> Tensor:
            return self.embed(x) + self.position  # type: ignore[no-any-return]

    graph = trace_model_graph(Positions(), torch.zeros(2, 5, 3))
    assert inputs(graph) == {"embed": (), "Positions": ("embed",)}
    assert layer(graph, "Positions").parameters == 20
    assert layer(graph, "Positions").output_shape == (5, 4)


def test_unreached_parameters_are_counted() -> None:
    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = nn.Linear(2, 2), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)  # type: ignore[no-any-return]

    graph = trace_model_graph(Spare(), torch.zeros(1, 2))
    assert [(one.name, one.parameters) for one in graph.layers] == [("used", 6), ("spare", 12)]
    assert layer(graph, "spare").forward_flops == 0


def test_frozen_parameters_are_state_that_is_not_trained() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    graph = trace_model_graph(model, torch.zeros(1, 2))
    assert [one.parameters for one in graph.layers] == [0, 4]
    assert graph.buffer_bytes == 4 * 9


def test_samples_folded_into_another_dim_are_removed_from_shapes() -> None:
    class Windows(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.reshape(x.shape[0] * 4, 2, -1)

    class TimeFirst(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.transpose(0, 1)

    graph = trace_model_graph(nn.Sequential(TimeFirst()), torch.zeros(1, 8, 6))
    assert graph.layers[0].output_shape == (8, 6)
    assert trace_model_graph(nn.Sequential(Windows()), torch.zeros(1, 8, 6)).layers[0].output_shape == (4, 2, 6)


@pytest.mark.parametrize(
    "sample",
    [(torch.zeros(1, 4), torch.zeros(1, 2)), {"right": torch.zeros(1, 2), "left": torch.zeros(1, 4)}],
    ids=["tuple", "dict"],
)
def test_several_inputs_are_positional_or_named_arguments(sample: Any) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 3), nn.Linear(2, 3)

        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            return F.relu(self.first(left)) * self.second(right)  # type: ignore[no-any-return]

    graph = trace_model_graph(Two(), sample)
    assert [one.output_shape for one in graph.layers] == [(3,)] * 4
    assert inputs(graph) == {"first": (), "Two": ("first",), "second": (), "Two#2": ("Two", "second")}


# --- splits and halo


@pytest.mark.parametrize(
    ("module", "splits", "halo"),
    [
        (nn.Conv2d(4, 4, 5, padding=2), "sample channel filter row column", (2, 2)),
        (nn.Conv2d(4, 4, 1), "sample channel filter row column", (0, 0)),
        (nn.Conv2d(4, 4, (3, 1), padding="same", dilation=2), "sample channel filter row column", (2, 2)),
        (nn.Conv2d(4, 4, 3, padding=1, groups=4), "sample row column", (1, 1)),
        (nn.ConvTranspose2d(4, 4, 2, 2), "sample channel filter", (0, 0)),
        (nn.BatchNorm2d(4), "sample channel row column", (0, 0)),
        (nn.ReLU(), "sample channel row column", (0, 0)),
        (nn.MaxPool2d(2), "sample channel row column", (0, 0)),
        (nn.AvgPool2d(3, 2, 1), "sample channel row column", (1, 0)),
        (nn.AdaptiveAvgPool2d(1), "sample channel", (0, 0)),
        (nn.GroupNorm(2, 4), "sample", (0, 0)),
        (nn.Flatten(), "sample", (0, 0)),
        (nn.Softmax(dim=-1), "sample", (0, 0)),
    ],
)
def test_layers_can_be_divided_along_their_own_dims(module: nn.Module, splits: str, halo: tuple[int, int]) -> None:
    one = trace_model_graph(module, torch.zeros(1, 4, 16, 16)).layers[0]
    assert one.splits == tuple(splits.split())
    assert (one.window.halo if one.window else (0, 0)) == halo


def test_graph_without_an_image_has_no_rows_to_divide() -> None:
    graph = trace_model_graph(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU()), torch.zeros(1, 4))
    assert [one.splits for one in graph.layers[1:]] == [("sample", "channel")] * 2


@pytest.mark.parametrize("kernel", [1, 2, 3, 5])
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("padding", [0, 1, 2])
@pytest.mark.parametrize("dilation", [1, 2])
def test_halo_equals_the_reach_of_rows_into_neighbouring_parts(
    kernel: int, stride: int, padding: int, dilation: int
) -> None:
    conv = nn.Conv2d(1, 1, (kernel, 1), (stride, 1), (padding, 0), (dilation, 1), bias=False, dtype=torch.float64)
    nn.init.ones_(conv.weight)
    rows = torch.zeros(1, 1, 60, 1, dtype=torch.float64, requires_grad=True)
    first, last = 5, 9
    conv(rows)[:, :, first:last].sum().backward()
    assert rows.grad is not None
    read = rows.grad.flatten().nonzero().flatten().tolist()
    above, below = first * stride - min(read), max(read) - (last * stride - 1)
    window = trace_model_graph(conv, torch.zeros(1, 1, 60, 1, dtype=torch.float64)).layers[0].window
    assert window is not None
    assert window.halo == (above, max(0, below))


# --- no memory, no touch, clear errors


def test_model_of_ten_billion_parameters_needs_no_memory() -> None:
    on_meta = nn.Linear(100_000, 100_000, bias=False, device="meta")
    without_memory = nn.Linear(1, 1, bias=False)
    without_memory.weight = nn.Parameter(torch.zeros(1).expand(100_000, 100_000))  # a copy of it would be 40 GB
    for model in (on_meta, without_memory):
        graph = trace_model_graph(model, torch.zeros(1, 100_000))
        assert graph.parameters == 10**10
        assert graph.forward_flops == 2 * 10**10
        assert graph.layers[0].activation_bytes == 400_000


def test_model_and_random_state_are_preserved() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5)).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.random.get_rng_state()
    assert layer(trace_model_graph(model, IMAGE), "2").activation_bytes > 0  # dropout keeps its mask: the copy trains
    assert not any(module.training or module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(state, torch.random.get_rng_state())


def test_plain_tensor_attributes_are_accepted() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = torch.ones(4)
            self.table = [torch.ones(4)]
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x + self.shift + self.table[0] + torch.ones(4))  # type: ignore[no-any-return]

    assert [one.name for one in trace_model_graph(Plain(), torch.zeros(1, 4)).layers] == ["linear"]


def test_data_dependent_model_is_refused_with_place_and_advice() -> None:
    class Gate(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Gate()))
    with refused(TrainingFailed) as caught:
        trace_model_graph(model, torch.zeros(1, 4), name="net")
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_sample_of_the_wrong_shape_is_refused_with_the_shapes() -> None:
    with refused(TrainingFailed):
        trace_model_graph(nn.Linear(3, 3), torch.zeros(1, 4))
