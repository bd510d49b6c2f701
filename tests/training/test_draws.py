"""Inside of SameDraws the parts of a batch are given the random numbers that the whole is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from evener.training.draws import Interval, SameDraws

OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout of channels": lambda x: F.dropout2d(x, 0.5),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.5, True),
    "random slopes": lambda x: F.rrelu(x, training=True),
    "noise": lambda x: x + torch.randn_like(x),
    "noise of a normal distribution": lambda x: torch.normal(x, 1.0),
    "samples dropped": lambda x: x * torch.bernoulli(torch.full((len(x), 3), 0.5)).sum(1).view(-1, 1, 1, 1),
    "a size": lambda x: x * torch.rand(len(x), 6, 1, 1),
    "into another tensor": lambda x: x * torch.rand(len(x), 6, 1, 1, out=torch.empty(0)),
    "gumbel": F.gumbel_softmax,
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.3),
    "attention with a mask of samples": lambda x: F.scaled_dot_product_attention(x, x, x, x[:, :1, :1] > 0),
    "attention with a mask of all": lambda x: F.scaled_dot_product_attention(x, x, x, torch.eye(4) > 0),
    "attention with a mask and dropout": lambda x: F.scaled_dot_product_attention(x, x, x, x[:, :1, :1] > 0, 0.3),
    "fractional pooling": lambda x: F.fractional_max_pool2d(x, 2, output_size=2),
    "whole numbers": lambda x: x + torch.randint(0, 9, (len(x), 6, 4, 4)),
}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("cut", [1, 3])
def test_parts_draw_the_same_numbers_as_the_whole_batch(name: str, cut: int) -> None:
    x = torch.randn(5, 6, 4, 4, requires_grad=True)
    whole, parts = drawn(name, x), [drawn(name, part) for part in (x[:cut], x[cut:])]
    torch.testing.assert_close(whole, torch.cat(parts))
    gradients = [torch.autograd.grad(made.sum(), x)[0] for made in (whole, torch.cat(parts))]
    torch.testing.assert_close(*gradients)


def drawn(name: str, x: Tensor, first: int = 0, parts: Sequence[Interval] = ()) -> Tensor:
    draws: Any = SameDraws((first, len(x)), parts) if parts else SameDraws()
    with draws:
        return OPERATIONS[name](x)


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("cut", [1, 3])
def test_samples_draw_different_numbers_equal_in_every_part(name: str, cut: int) -> None:
    x = torch.randn(1, 6, 4, 4).expand(7, 6, 4, 4).clone()
    intervals = ((0, 7), (0, cut), (cut, 7 - cut))
    whole, *parts = [drawn(name, x[first : first + count], first, intervals) for first, count in intervals]
    torch.testing.assert_close(whole, torch.cat(parts))
    if name not in ("attention with a mask of samples", "attention with a mask of all", "fractional pooling"):
        assert not all(torch.equal(one, whole[0]) for one in whole)


@pytest.mark.parametrize("shape", [(7, 5), (7, 5, 3), (5, 7, 3), (7, 4, 3), (4, 7, 3)], ids=str)
def test_draws_follow_their_samples_in_any_dimension(shape: tuple[int, ...]) -> None:
    dim, intervals = shape.index(7), ((0, 7), (0, 4), (4, 3))
    made = []
    for own in intervals:
        draws: Any = SameDraws(own, intervals)
        with draws:
            made.append(torch.rand([own[1] if i == dim else size for i, size in enumerate(shape)]))
    torch.testing.assert_close(made[0], torch.cat(made[1:], dim))


@pytest.mark.parametrize("rows", [2, 3, 4, 5, 7, 12])
def test_draws_without_samples_are_equal_in_every_part(rows: int) -> None:
    intervals = ((0, 7), (0, 4), (4, 3))
    made = []
    for own in intervals:
        draws: Any = SameDraws(own, intervals)
        with draws:
            made.append((torch.rand(rows, 6), torch.rand(1), torch.rand(())))
    assert all(torch.equal(a, b) for one in made[1:] for a, b in zip(one, made[0], strict=True))


def test_another_round_draws_other_numbers_and_shapes_are_noted() -> None:
    draws: Any = SameDraws((0, 4), ((0, 7), (0, 4), (4, 3)))
    with draws:
        first = torch.rand(1)
        torch.rand(5, 6), torch.rand(4, 6), torch.rand(5, 9)
        draws.round = 1
        assert not torch.equal(torch.rand(1), first)
    assert draws.shapes == {(1,), (5, 6), (4, 6), (5, 9)}


def test_time_first_recurrent_network_has_the_same_masks() -> None:
    network, x = nn.LSTM(8, 4, 2, dropout=0.5), torch.randn(7, 5, 8)
    made = []
    for part in (x, x[:, :2], x[:, 2:]):
        with SameDraws():
            made.append(network(part)[0])
    torch.testing.assert_close(made[0], torch.cat(made[1:], 1))


def test_draws_differ_within_a_sample() -> None:
    dropped = drawn("dropout", torch.ones(2, 6, 4, 4)) == 0
    assert 0 < int(dropped[0].sum()) < dropped[0].numel()


def test_attention_mask_is_not_mistaken_for_samples() -> None:
    x, mask = torch.randn(4, 2, 4, 8), torch.ones(4, 4, dtype=torch.bool).tril()
    with SameDraws():
        found = F.scaled_dot_product_attention(x, x, x, mask)
    torch.testing.assert_close(found, F.scaled_dot_product_attention(x, x, x, mask))


def test_loop_that_waits_for_another_number_ends() -> None:
    with SameDraws():
        first = torch.rand(())
        while torch.equal(torch.rand(()), first):
            pass


def test_beta_distribution_stays_between_zero_and_one() -> None:
    draws: Any = SameDraws((0, 4), ((0, 6), (0, 4), (4, 2)))
    with draws:
        share = torch.distributions.Beta(1.0, 1.0).sample()
        torch.multinomial(torch.ones(6), 2)
    assert 0 < float(share) < 1
    assert draws.shapes == {()}
