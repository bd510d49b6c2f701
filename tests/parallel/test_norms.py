"""BatchNorm over micro-batches: normalised alone, remembered together."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from evener.parallel.deferred_statistics import DeferredStatistics, defer_statistics, deferred_in
from evener.parallel.norm_statistics import Statistics, combine
from evener.records.errors import InvalidInput
from support.refusals import refused


def whole(norm: nn.Module, x: Tensor) -> dict[str, Tensor]:
    norm(x)
    return dict(norm.state_dict())


@pytest.mark.parametrize("momentum", [0.1, 0.7, None])
@pytest.mark.parametrize("shape", [(9, 3), (9, 3, 5), (9, 3, 2, 2)])
def test_running_statistics_equal_those_of_the_whole_batch(shape: tuple[int, ...], momentum: float | None) -> None:
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(shape)]
    norm = kind(3, momentum=momentum).double()
    ours = copy.deepcopy(norm)
    deferred = DeferredStatistics(ours)
    for seed in range(3):
        x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 3 + 100
        expected = whole(norm, x)
        for part in torch.split(x, [4, 2, 3]):
            deferred.begin(counting=True)
            torch.testing.assert_close(ours(part), copy.deepcopy(norm)(part))
        for seen in deferred.collected():
            deferred.move(seen)
        torch.testing.assert_close(dict(ours.state_dict()), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours.eval()(x), norm.eval()(x))


def test_norm_used_twice_moves_twice_in_order() -> None:
    norm, x = nn.BatchNorm1d(3, momentum=0.3).double(), torch.randn(9, 3, dtype=torch.float64)
    deferred = DeferredStatistics(norm)
    for part in torch.split(x, [4, 5]):
        deferred.begin(counting=True)
        norm(norm(part * 2) + part)
    first, second = deferred.collected()
    torch.testing.assert_close(first[0], (x * 2).mean(0))
    for seen in (first, second):
        deferred.move(seen)
    assert norm.state_dict()["num_batches_tracked"].item() == 2
    assert [Statistics(*seen)[2].tolist() for seen in deferred.collected()] == [[0, 0, 0], [0, 0, 0]]


def test_uncounted_micro_batches_change_nothing() -> None:
    norm = nn.BatchNorm1d(2)
    before = {name: value.clone() for name, value in norm.state_dict().items()}
    deferred = DeferredStatistics(norm)
    deferred.begin(counting=False)
    norm(torch.randn(4, 2))
    assert not deferred.collected()
    torch.testing.assert_close(dict(norm.state_dict()), before, rtol=0, atol=0)


def test_norm_without_running_statistics_normalises_each_micro_batch() -> None:
    norm = nn.BatchNorm1d(2, track_running_stats=False)
    ours, x = copy.deepcopy(norm), torch.randn(4, 2)
    deferred = DeferredStatistics(ours)
    for mode in (True, False):
        torch.testing.assert_close(ours.train(mode)(x), norm.train(mode)(x))
    assert not deferred.tracks


def test_statistics_of_parts_combine_without_losing_precision() -> None:
    x = torch.randn(6, 2, dtype=torch.float64) * 1e-3 + 1e6
    rows = [(part.mean(0), part.var(0, correction=0), torch.full((2,), len(part))) for part in torch.split(x, [1, 5])]
    parts = torch.stack([torch.stack(row) for row in rows])
    mean, var, count = combine(Statistics(*parts.unbind(1)))
    torch.testing.assert_close(mean, x.mean(0), rtol=1e-15, atol=0)
    torch.testing.assert_close(var, x.var(0, correction=0), rtol=1e-3, atol=0)
    assert count.tolist() == [6, 6]


def test_all_norms_of_a_module_defer_and_keep_their_tensors() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2)), nn.BatchNorm1d(2, affine=False))
    names, tensors = list(model.state_dict()), {id(p) for p in (*model.parameters(), *model.buffers())}
    assert list(deferred_in(defer_statistics(model))) == ["1.0", "2"]
    assert list(model.state_dict()) == names
    assert {id(p) for p in (*model.parameters(), *model.buffers())} == tensors


def test_single_value_per_channel_is_refused_as_in_pytorch() -> None:
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        defer_statistics(nn.BatchNorm1d(3))(torch.zeros(1, 3))


class Scaled(nn.BatchNorm1d):
    """A BatchNorm of a user's own."""

    def forward(self, input: Tensor) -> Tensor:
        """Twice what its base class returns."""
        return 2 * super().forward(input)


class ByHand(nn.BatchNorm1d):
    """A BatchNorm that moves its statistics itself."""

    def forward(self, input: Tensor) -> Tensor:
        """As PyTorch's, but for the bias of the variance."""
        mean, var = input.mean(0), input.var(0, correction=0)
        with torch.no_grad():
            for running, seen in ((self.running_mean, mean), (self.running_var, var)):
                assert running is not None
                running.lerp_(seen, 0.1)
        return (input - mean) / (var + self.eps).sqrt()


@pytest.mark.parametrize(
    "norm",
    [Scaled(3), nn.SyncBatchNorm(3), nn.InstanceNorm1d(3, track_running_stats=True), nn.LazyBatchNorm1d()],
    ids=lambda norm: type(norm).__name__,
)
def test_norms_of_every_class_move_once_for_all_micro_batches(norm: nn.Module) -> None:
    x = torch.randn(9, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3 + 1
    norm.double()(x)  # gives lazy ones their shape
    ours = copy.deepcopy(norm)
    expected = whole(norm, x)
    deferred = DeferredStatistics(ours)
    for part in torch.split(x, [4, 2, 3]):
        deferred.begin(counting=True)
        ours(part)
    (seen,) = deferred.collected()
    deferred.move(seen)
    torch.testing.assert_close(dict(ours.state_dict()), expected, rtol=1e-12, atol=1e-12)


def test_norm_that_updates_itself_is_refused_after_one_micro_batch() -> None:
    norm = ByHand(3)
    deferred = DeferredStatistics(norm)
    for _ in range(2):  # one micro-batch a step
        deferred.begin(counting=True)
        norm(torch.randn(4, 3))
        deferred.collected()
    deferred.begin(counting=True)
    norm(torch.randn(4, 3))
    deferred.begin(counting=True)
    with refused(InvalidInput):
        norm(torch.randn(4, 3))
