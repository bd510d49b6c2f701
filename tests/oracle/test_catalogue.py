"""Forecasts for common GPUs against published measurements of complete networks."""

from __future__ import annotations

from pathlib import Path

import pytest

from evener.oracle.catalogue import CARDS
from evener.oracle.cost.layers import columns
from evener.oracle.cost.roofline import FORWARD, device_of, layer_seconds
from evener.oracle.hypothetical_cluster import NETWORKS, hypothetical_profile
from evener.oracle.zoo.networks import draw
from evener.records.graph import ModelGraph

_BYTES = {"fp32": 4, "fp16": 2}
TRAINED = [
    ("v100", "fp32", "resnet50", 64, 367),
    ("v100", "fp16", "resnet50", 256, 1200),
    ("a100-80", "fp32", "resnet50", 256, 938),
    ("a100-80", "fp16", "resnet50", 256, 2470),
    ("rtx3090", "fp16", "resnet50", 512, 1218),
    ("rtx3090", "fp16", "resnet152", 192, 501),
    ("rtx3090", "fp16", "vgg16", 384, 546),
]
"""(card, precision, network, samples of a batch, published samples per second): NVIDIA's examples, timm's results."""
FORWARD_ONLY = [
    ("rtx4090", "fp16", "resnet50", 512, 5088),
    ("rtx4090", "fp16", "resnet152", 512, 2348),
    ("rtx4090", "fp16", "vgg16", 512, 2905),
    ("rtx5090", "fp16", "resnet50", 1024, 6356),
    ("rtx5090", "fp16", "resnet152", 1024, 2946),
    ("rtx5090", "fp16", "vgg16", 1024, 3418),
]


@pytest.fixture(scope="module")
def networks() -> dict[str, ModelGraph]:
    return {name: draw(name) for name in ("resnet50", "resnet152", "vgg16")}


@pytest.mark.parametrize(("card", "precision", "network", "samples", "published"), TRAINED)
def test_published_trainings_are_forecast_within_a_tenth(
    networks: dict[str, ModelGraph], card: str, precision: str, network: str, samples: int, published: float
) -> None:
    layers = columns(networks[network], _BYTES[precision])
    seconds = layer_seconds(layers, [device_of(CARDS[card].profile(), "", precision)]).sum(samples)
    assert samples / seconds == pytest.approx(published, rel=0.1)


@pytest.mark.parametrize(("card", "precision", "network", "samples", "published"), FORWARD_ONLY)
def test_published_forward_passes_are_forecast_within_a_quarter(
    networks: dict[str, ModelGraph], card: str, precision: str, network: str, samples: int, published: float
) -> None:
    layers = columns(networks[network], _BYTES[precision])
    seconds = layer_seconds(layers, [device_of(CARDS[card].profile(), "", precision)]).of(samples)[FORWARD].sum()
    assert samples / seconds == pytest.approx(published, rel=0.25)


def test_machine_page_lists_every_card_correctly() -> None:
    page = (Path(__file__).parents[2] / "docs" / "machines.md").read_text()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.count("|") == 8]
    rows = {row[0].strip("`"): row[1:] for row in cells[2:]}
    assert rows == {
        name: [
            card.model,
            *(f"{value:g}" for value in (card.gib, card.bandwidth, card.fp32)),
            f"{card.tf32:g}" if card.tf32 else "-",
            f"{card.half:g}",
        ]
        for name, card in CARDS.items()
    }


HALF_BY_GENERATION = {"gtx10": 1 / 64, "gtx16": 2, "rtx20": 4, "rtx30": 2, "rtx40": 2}
"""fp16 operations per fp32 operation, both accumulated in fp32, by the architecture's white paper."""


@pytest.mark.parametrize("name", [name for name in CARDS if name[:5] in HALF_BY_GENERATION])
def test_geforce_peaks_match_those_of_their_generation(name: str) -> None:
    card, generation = CARDS[name], name[:5]
    assert card.half / card.fp32 == pytest.approx(HALF_BY_GENERATION[generation], rel=0.1)
    assert card.tf32 == (card.fp32 if generation in ("rtx30", "rtx40") else 0.0)
    assert card.fp32 / card.fp64 == pytest.approx(64 if generation in ("rtx30", "rtx40") else 32, rel=0.15)


def test_common_cards_and_networks_are_in_the_catalogue() -> None:
    owned = ["gtx1060", "gtx1660", "rtx2080", "rtx3050", "rtx3060ti", "rtx3070ti", "rtx3080ti"]
    owned += ["rtx4060ti", "rtx4070ti", "rtx3060-laptop", "rtx4060-laptop"]
    profile = hypothetical_profile(",".join(owned), "wifi6")
    assert len(profile.devices) == len(owned)
    speeds = [1 / NETWORKS[name].beta for name in ("wifi5", "wifi6", "100mbit", "1gbe", "2.5gbe", "5gbe", "10gbe")]
    assert speeds[2] < speeds[0] < speeds[1] < speeds[3]
    assert speeds[3:] == sorted(speeds[3:])


def test_no_card_is_faster_than_its_data_sheet() -> None:
    for card in CARDS.values():
        device = card.profile()
        half, single = device.throughput("fp16"), device.throughput("fp32")
        assert half is not None
        assert half.conv_flops is not None
        assert half.matmul_flops is not None
        assert single is not None
        assert single.conv_flops is not None
        assert max(half.conv_flops, half.matmul_flops) < card.half * 1e12
        assert single.conv_flops < max(card.fp32, card.tf32) * 1e12
        assert device.bandwidth is not None
        assert device.bandwidth < card.bandwidth * 1e9
