"""The zoo's networks equal the networks that they are named after."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torchvision_operators  # noqa: F401  before torchvision
from evener.experiments.models.amoebanet import AmoebaNetD
from evener.oracle.zoo.amoebanet import amoebanet_d
from evener.oracle.zoo.networks import cosmoflow, draw, transformer, unet, vgg16, yolov8n
from evener.oracle.zoo.sketch import Sketch
from evener.records.errors import InvalidValue
from evener.records.graph import Layer, ModelGraph
from evener.tracer.model_graph import trace_model_graph


@pytest.mark.parametrize("name", ["alexnet", "vgg16", "resnet50", "resnet152"])
def test_networks_equal_the_torchvision_traces_layer_by_layer(name: str) -> None:
    models = pytest.importorskip("torchvision.models")
    with torch.device("meta"):
        model = getattr(models, name)()
    assert draw(name) == trace_model_graph(model, torch.zeros(1, 3, 224, 224), name)


@pytest.mark.parametrize(("layers", "filters", "published"), [(18, 208, 82), (18, 416, 318), (18, 544, 542)])
def test_amoebanet_has_the_parameters_of_the_paper(layers: int, filters: int, published: int) -> None:
    assert amoebanet_d(layers, filters).parameters / 1e6 == pytest.approx(published, rel=0.007)


def test_amoebanet_cells_read_the_same_inputs_as_the_module() -> None:
    with torch.device("meta"):
        module = AmoebaNetD(3, 16)
    traced, drawn = trace_model_graph(module, torch.zeros(1, 3, 64, 64)), amoebanet_d(3, 16, (3, 64, 64))
    for name in ("parameters", "forward_flops", "buffer_bytes"):
        assert getattr(drawn, name) == getattr(traced, name), name
    assert "cells.2.adapt_last.2" in traced.by_name["cells.2#2"].inputs
    assert "cell3.fit0.norm" in drawn.by_name["cell3"].inputs


@pytest.mark.parametrize(
    ("graph", "parameters"),
    [(yolov8n(), 3_157_184), (unet(), 31_037_698), (vgg16((3, 226, 226), ceil=True), 169_814_824)],
    ids=["yolov8n", "unet", "vgg16 of Chainer"],
)
def test_networks_have_the_published_numbers_of_parameters(graph: ModelGraph, parameters: int) -> None:
    assert graph.parameters == parameters


def test_vgg_first_linear_layer_has_eight_rows_after_rounding_up() -> None:
    assert vgg16((3, 226, 226), ceil=True).by_name["features.30"].output_shape == (512, 8, 8)


def test_transformer_parameters_and_flops_equal_the_torch_encoder() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    traced = trace_model_graph(encoder, torch.zeros(1, 10, 32))
    drawn = transformer(layers=3, width=32, heads=4, feed=64, tokens=10, words=7)
    tables = 7 * 32 + (32 * 7 + 7) + 2 * 32
    assert drawn.parameters - tables == traced.parameters
    assert drawn.forward_flops - 2 * 10 * 32 * 7 == traced.forward_flops


def test_cosmoflow_activations_outweigh_its_parameters() -> None:
    graph = cosmoflow()
    assert graph.parameters == 8_907_556
    assert graph.activation_bytes > 20 * graph.parameter_bytes
    assert graph.by_name["conv1"].splits == ("sample", "channel", "filter", "row", "column")
    window = graph.by_name["conv1"].window
    assert window is not None
    assert window.halo == (1, 1)


def test_sketch_unit_equals_the_trace_of_the_same_modules() -> None:
    model = nn.Sequential(
        nn.Conv3d(2, 4, 3, 2, 1), nn.LeakyReLU(), nn.MaxPool3d(2), nn.ConvTranspose3d(4, 2, 2, 2), nn.SiLU()
    )
    net = Sketch("Sequential")
    x = net.smooth(net.conv(net.input(2, 12, 12, 12), "0", 4, 3, 2, 1), "1", "LeakyReLU")
    net.smooth(net.conv(net.pool(x, "2", 2, 2), "3", 2, 2, 2, transposed=True), "4")
    traced = trace_model_graph(model, torch.zeros(1, 2, 12, 12, 12))

    def facts(graph: ModelGraph) -> list[Layer]:
        return [layer for layer in graph.layers if layer.name != "3"]

    assert facts(net.graph()) == facts(traced)


def test_image_and_class_options_set_network_sizes() -> None:
    graph = draw("resnet50", {"image": "3x64x64", "classes": "200"})
    assert graph.layers[0].input_shape == (3, 64, 64)
    assert graph.layers[-1].output_shape == (200,)


@pytest.mark.parametrize(
    ("name", "options", "field", "value"),
    [
        ("resnet9", {}, "the network", "resnet9"),
        ("resnet50", {"size": "3"}, "--option", "size"),
        ("resnet50", {"image": "3"}, "--option image", "3"),
        ("resnet50", {"classes": "ten"}, "--option classes", "ten"),
        ("unet", {"image": "3x100x100"}, "image", (3, 100, 100)),
        ("amoebanet-d", {"layers": "4"}, "layers", 4),
        ("amoebanet-d", {"filters": "100"}, "filters", 100),
        ("transformer", {"heads": "7"}, "heads", 7),
    ],
)
def test_invalid_networks_and_options_are_refused(
    name: str, options: dict[str, str], field: str, value: object
) -> None:
    with pytest.raises(InvalidValue) as caught:
        draw(name, options)
    assert (caught.value.field, caught.value.value) == (field, value)
