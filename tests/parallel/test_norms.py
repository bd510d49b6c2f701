"""BatchNorm over micro-batches: normalised alone, remembered together."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from evener.parallel.norm_statistics import Statistics, combine
from evener.parallel.norms import DeferredBatchNorm, defer_statistics


def whole(norm: nn.Module, x: Tensor) -> dict[str, Tensor]:
    norm(x)
    return dict(norm.state_dict())


@pytest.mark.parametrize("momentum", [0.1, 0.7, None])
@pytest.mark.parametrize("shape", [(9, 3), (9, 3, 5), (9, 3, 2, 2)])
def test_running_statistics_are_those_of_the_whole_batch(shape: tuple[int, ...], momentum: float | None) -> None:
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(shape)]
    norm = kind(3, momentum=momentum).double()
    deferred = DeferredBatchNorm(copy.deepcopy(norm))
    for seed in range(3):
        x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 3 + 100
        expected = whole(norm, x)
        for part in torch.split(x, [4, 2, 3]):
            deferred.begin(counting=True)
            torch.testing.assert_close(deferred(part), copy.deepcopy(norm)(part))
        for seen in deferred.collected():
            deferred.move(seen)
        torch.testing.assert_close(dict(deferred.state_dict()), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(deferred.eval()(x), norm.eval()(x))


def test_a_norm_used_twice_moves_twice_in_order() -> None:
    norm, x = nn.BatchNorm1d(3, momentum=0.3).double(), torch.randn(9, 3, dtype=torch.float64)
    deferred = DeferredBatchNorm(copy.deepcopy(norm))
    for part in torch.split(x, [4, 5]):
        deferred.begin(counting=True)
        deferred(deferred(part * 2) + part)
    first, second = deferred.collected()
    torch.testing.assert_close(first[0], (x * 2).mean(0))
    for seen in (first, second):
        deferred.move(seen)
    assert deferred.state_dict()["num_batches_tracked"].item() == 2
    assert [Statistics(*seen)[2].tolist() for seen in deferred.collected()] == [[0, 0, 0], [0, 0, 0]]


def test_micro_batches_that_do_not_count_leave_no_trace() -> None:
    deferred = DeferredBatchNorm(nn.BatchNorm1d(2))
    deferred.begin(counting=False)
    deferred(torch.randn(4, 2))
    before = {name: value.clone() for name, value in deferred.state_dict().items()}
    assert not deferred.collected()
    torch.testing.assert_close(dict(deferred.state_dict()), before, rtol=0, atol=0)


def test_without_running_statistics_each_micro_batch_is_on_its_own_also_in_evaluation() -> None:
    norm = nn.BatchNorm1d(2, track_running_stats=False)
    deferred, x = DeferredBatchNorm(norm), torch.randn(4, 2)
    for mode in (True, False):
        torch.testing.assert_close(deferred.train(mode)(x), norm.train(mode)(x))
    assert not deferred.tracks


def test_parts_are_combined_without_losing_digits() -> None:
    x = torch.randn(6, 2, dtype=torch.float64) * 1e-3 + 1e6
    rows = [(part.mean(0), part.var(0, correction=0), torch.full((2,), len(part))) for part in torch.split(x, [1, 5])]
    parts = torch.stack([torch.stack(row) for row in rows])
    mean, var, count = combine(Statistics(*parts.unbind(1)))
    torch.testing.assert_close(mean, x.mean(0), rtol=1e-15, atol=0)
    torch.testing.assert_close(var, x.var(0, correction=0), rtol=1e-3, atol=0)
    assert count.tolist() == [6, 6]


def test_all_norms_inside_of_a_module_are_replaced_with_their_own_tensors() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2)), nn.BatchNorm1d(2, affine=False))
    names, tensors = list(model.state_dict()), {id(p) for p in (*model.parameters(), *model.buffers())}
    replaced = defer_statistics(model)
    assert sum(isinstance(module, DeferredBatchNorm) for module in replaced.modules()) == 2
    assert list(replaced.state_dict()) == names
    assert {id(p) for p in (*replaced.parameters(), *replaced.buffers())} == tensors


def test_a_single_value_per_channel_is_refused_as_in_pytorch() -> None:
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        DeferredBatchNorm(nn.BatchNorm1d(3))(torch.zeros(1, 3))
