"""The gradient checker notices wrong rules; that it accepts right ones the tests of all operations show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from evener import autodiff as ad
from evener.autodiff import functional as F
from evener.autodiff.errors import InvalidOperation, WrongGradient
from evener.autodiff.graph import Rule
from evener.autodiff.rules import RULES
from support.refusals import refused


def inputs(*shapes: tuple[int, ...]) -> list[ad.Tensor]:
    return [ad.randn(shape, dtype=np.float64, requires_grad=True) for shape in shapes]


WRONG: dict[str, tuple[int, Callable[..., Any], Callable[..., ad.Tensor], list[tuple[int, ...]]]] = {
    "exp": (0, lambda be, g, y, _: be.multiply(g, be.multiply(y, 1.0001)), ad.Tensor.exp, [(3,)]),
    "tanh": (0, lambda be, g, y, _: be.multiply(g, y), F.tanh, [(3,)]),
    "subtract": (1, lambda be, g, *_: g, lambda a, b: a - b, [(2,), (2,)]),
    "matmul": (1, lambda be, g, s, _: be.zeros(s[1].shape, g.dtype), lambda a, b: a @ b, [(2, 3), (3, 2)]),
    "relu": (0, lambda be, g, *_: g, F.relu, [(40,)]),
}


@pytest.mark.parametrize("name", WRONG)
def test_checker_detects_a_wrong_rule(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    which, wrong, function, shapes = WRONG[name]
    ad.gradcheck(function, inputs(*shapes))
    vjps = list(RULES[name].vjps)
    vjps[which] = wrong
    monkeypatch.setitem(RULES, name, Rule(RULES[name].forward, tuple(vjps), RULES[name].prepare))
    with pytest.raises(WrongGradient, match=rf"gradient of input {which} at \(\d.* by its rule and .* by central diff"):
        ad.gradcheck(function, inputs(*shapes))


def test_checker_rejects_a_nan_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = RULES["exp"]
    monkeypatch.setitem(RULES, "exp", Rule(rule.forward, (lambda be, g, y, _: be.multiply(g, float("nan")),)))
    with refused(WrongGradient):
        ad.gradcheck(ad.Tensor.exp, inputs((2,)))


def test_checker_rejects_a_missing_gradient() -> None:
    with refused(WrongGradient):
        ad.gradcheck(lambda a, b: a + 2 * ad.tensor(b.detach().numpy()), inputs((), ()))


def test_checker_skips_inputs_without_gradients() -> None:
    ad.gradcheck(lambda table, index: F.embedding(index, table), [*inputs((3, 2)), ad.tensor([0, 2, 2])])


def test_checker_refuses_single_precision() -> None:
    with refused(InvalidOperation):
        ad.gradcheck(ad.Tensor.exp, [ad.ones(2, requires_grad=True)])
