"""Models that no library has: their published sizes, their shapes, and that they learn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evener.experiments.models.amoebanet import AmoebaNetD
from evener.experiments.models.resnet import resnet152
from evener.experiments.models.transformer import FeedForward, Transformer, tokens_in, translation_loss
from evener.experiments.models.unet import UNet
from evener.records.errors import InvalidValue


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("layers", "filters", "millions"), [(18, 208, 81.5), (18, 256, 122.5), (18, 416, 319.0), (18, 544, 542.7)]
)
def test_amoebanet_has_the_parameters_of_gpipes_table_1(layers: int, filters: int, millions: float) -> None:
    with torch.device("meta"):
        assert size(AmoebaNetD(layers, filters)) / 1e6 == pytest.approx(millions, abs=0.05)


@pytest.mark.parametrize(("layers", "billions"), [((36, 544), 1.056), ((72, 512), 1.845)])
def test_largest_amoebanets_have_over_a_billion_parameters(layers: tuple[int, int], billions: float) -> None:
    with torch.device("meta"):
        assert size(AmoebaNetD(*layers)) / 1e9 == pytest.approx(billions, abs=0.001)


def test_resnet152_has_the_published_parameters_in_eight_segments() -> None:
    with torch.device("meta"):
        model = resnet152()
    assert size(model) == 60_192_808
    assert [name for name, _ in model.named_children()] == [
        "stem", "layer1", "layer2", "layer3_first", "layer3_second", "layer4", "pool", "fc",
    ]  # fmt: skip
    assert len(model.layer3_first) == len(model.layer3_second) == 18  # type: ignore[arg-type]


@pytest.mark.parametrize("pixels", [64, 75])
@pytest.mark.parametrize("model", [AmoebaNetD(3, 16, 7), resnet152(7, width=4, depths=(1, 1, 2, 1))])
def test_classifiers_accept_images_of_any_size(model: nn.Module, pixels: int) -> None:
    assert model(torch.randn(2, 3, pixels, pixels)).shape == (2, 7)


def test_unet_classifies_every_pixel() -> None:
    assert UNet(1, 4, width=4, depth=3)(torch.randn(2, 1, 16, 24)).shape == (2, 4, 16, 24)
    with torch.device("meta"):
        assert size(UNet(1, 2)) == pytest.approx(31.04e6, rel=0.002)  # that of Ronneberger et al., with BatchNorm


def tokens(samples: int, length: int) -> Tensor:
    return torch.randint(1, 30, (samples, length), generator=torch.Generator().manual_seed(length))


def small(**options: Any) -> Transformer:
    torch.manual_seed(0)
    return Transformer(**{"vocabulary": 30, "layers": 2, "dim": 16, "heads": 2, "hidden": 32, **options}).eval()


def test_target_token_attends_to_the_source_and_earlier_targets_only() -> None:
    model, source, target = small(), tokens(2, 6), tokens(2, 5)
    logits = model(source, target)
    assert logits.shape == (2, 5, 30)
    changed = target.clone()
    changed[:, 3] = changed[:, 3] % 29 + 1
    torch.testing.assert_close(model(source, changed)[:, :3], logits[:, :3])
    assert not torch.allclose(model(source, changed)[:, 3:], logits[:, 3:])
    assert not torch.allclose(model(source.flip(1), target)[:, 0], logits[:, 0])


def test_source_padding_is_masked() -> None:
    model, source, target = small(), tokens(2, 6), tokens(2, 5)
    padded = torch.cat((source, torch.zeros(2, 3, dtype=torch.long)), dim=1)
    torch.testing.assert_close(model(padded, target), model(source, target))


def test_logits_are_clipped_and_feed_forward_init_shrinks_with_depth() -> None:
    model = small()
    with torch.no_grad():
        model.classify.weight.mul_(1e4)
    assert float(model(tokens(2, 6), tokens(2, 5)).detach().abs().max()) == 30.0
    deviations = []
    for layers in (1, 8):
        torch.manual_seed(0)
        feed = Transformer(30, layers, 16, 2, 64).encoder[0].feed
        assert isinstance(feed, FeedForward)
        deviations.append(float(feed.inner.weight.detach().std()))
    assert deviations[0] / deviations[1] == pytest.approx(8.0)


def test_tied_models_share_embedding_and_classifier_weights() -> None:
    model = small()
    assert model.classify.weight is model.embedding.weight
    assert size(small(tied=False)) - size(model) == 30 * 16


def test_loss_is_a_mean_over_non_padding_tokens() -> None:
    logits, successors = torch.randn(2, 4, 30), tokens(2, 4)
    successors[0, 2:] = 0
    assert int(tokens_in(successors)) == 6
    expected = F.cross_entropy(logits.flatten(0, 1), successors.flatten(), ignore_index=0, label_smoothing=0.1)
    torch.testing.assert_close(translation_loss(logits, successors), expected)
    assert float(translation_loss(logits, torch.zeros_like(successors))) == 0.0


def test_transformer_learns_to_reverse_a_sequence() -> None:
    torch.manual_seed(0)
    model = Transformer(12, layers=1, dim=32, heads=2, hidden=64, dropout=0.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(150):
        source = torch.randint(2, 12, (32, 5))
        whole = torch.cat((torch.ones(32, 1, dtype=torch.long), source.flip(1)), dim=1)
        loss = translation_loss(model(source, whole[:, :-1]), whole[:, 1:], smoothing=0.0)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert float(loss.detach()) < 0.7  # guessing would be log 10 = 2.3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AmoebaNetD(4, 16), "layers must be a positive multiple of 3, got 4"),
        (lambda: AmoebaNetD(3, 20), "filters must be a positive multiple of 16, got 20"),
        (lambda: resnet152(depths=(1, 1, 1, 1)), "depths must be positive, with two blocks in the third layer"),
        (lambda: UNet(depth=0), "depth must be positive, got 0"),
        (lambda: Transformer(dim=30, heads=4), "dim must be an even multiple of heads"),
    ],
)
def test_invalid_sizes_are_refused(make: type, message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        make()
