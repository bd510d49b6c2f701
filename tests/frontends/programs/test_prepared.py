"""Norms of a prepared model are what they were: their class, attributes, hooks, copies and state dicts."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from evener.comm.group import Group
from evener.frontends.programs.batch_parts import BatchPart, part_of
from evener.frontends.programs.prepared import PreparedModel
from evener.records.errors import InvalidInput
from support.refusals import refused
from support.thread_ranks import together


class Scaled(nn.BatchNorm1d):
    """A norm of a user's own, with an attribute and a buffer more."""

    def __init__(self, features: int) -> None:
        super().__init__(features)
        self.factor = 2.0
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, input: Tensor) -> Tensor:
        """Scaled."""
        return self.factor * super().forward(input)


class OwnSynchronised(nn.SyncBatchNorm):
    """A norm that would exchange statistics itself."""

    def forward(self, input: Tensor) -> Tensor:
        """Scaled."""
        return 2 * super().forward(input)


def _lazy() -> nn.Module:
    norm = nn.LazyBatchNorm1d()
    norm(torch.randn(4, 3))
    return norm


NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1d": (lambda: nn.BatchNorm1d(3), (6, 3)),
    "2d": (lambda: nn.BatchNorm2d(3, momentum=None), (6, 3, 2, 2)),
    "3d": (lambda: nn.BatchNorm3d(3, affine=False), (6, 3, 2, 2, 2)),
    "without running statistics": (lambda: nn.BatchNorm1d(3, track_running_stats=False), (6, 3)),
    "synchronised": (lambda: nn.SyncBatchNorm(3), (6, 3, 4)),
    "own class": (lambda: Scaled(3), (6, 3)),
    "lazy": (_lazy, (6, 3)),
    "instance": (lambda: nn.InstanceNorm1d(3, affine=True, track_running_stats=True), (6, 3, 4)),
    "instance without running statistics": (lambda: nn.InstanceNorm2d(3), (6, 3, 4, 4)),
    "group": (lambda: nn.GroupNorm(3, 3), (6, 3, 4)),
    "layer": (lambda: nn.LayerNorm(3), (6, 3)),
}


def _public(norm: nn.Module) -> dict[str, Any]:
    """Every public attribute; methods by their type, but for `forward`, which only has to be there."""
    found = {}
    for name in dir(norm):
        value = None if name.startswith("_") else getattr(norm, name)
        found[name] = (name == "forward" or type(value)) if callable(value) else value
    return found


def _alike(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)


def _prepared(norm: nn.Module, group: Group) -> Any:
    """The norm in a model that is prepared, on a rank that has four of six samples or the other two."""
    model = PreparedModel(nn.Sequential(norm).double(), group, lambda: 1.0, lambda: True)
    model.compute(part_of(group.rank, (4, 2)))
    return model.model.get_submodule("0")


@pytest.mark.parametrize("name", NORMS)
def test_prepared_norms_preserve_all_public_attributes(name: str) -> None:
    norm = NORMS[name][0]().double()
    before, text, kind, names = _public(norm), repr(norm), type(norm), set(dir(norm))

    def check(group: Group) -> None:
        own = copy.deepcopy(norm)
        found = _prepared(own, group)
        after = _public(found)
        assert found is own
        assert type(found) is kind
        assert repr(found) == text
        assert set(dir(found)) == names
        assert after.keys() == before.keys()
        assert all(_alike(after[key], value) for key, value in before.items())
        assert all(isinstance(found, base) for base in kind.__mro__)

    together(2, check)


@pytest.mark.parametrize("name", NORMS)
def test_prepared_norms_train_evaluate_and_copy_as_in_one_process(name: str) -> None:
    make, shape = NORMS[name]
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3 + 1
    whole = make().double()
    plain = copy.deepcopy(whole)
    trained, frozen = whole(x), copy.deepcopy(whole).eval()(x)
    state = {key: value.clone() for key, value in whole.state_dict().items()}

    def check(group: Group) -> None:
        rows = slice(0, 4) if group.rank == 0 else slice(4, 6)
        norm = _prepared(copy.deepcopy(plain), group)
        twin = copy.deepcopy(norm)
        seen: list[str] = []
        norm.register_forward_pre_hook(lambda *_: seen.append("before"))
        norm.register_forward_hook(lambda *_: seen.append("after"))
        for own in (norm, twin):  # a copy, such as an average, has the statistics of all ranks
            torch.testing.assert_close(own(x[rows]), trained[rows], rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(dict(own.state_dict()), state, rtol=1e-10, atol=1e-10)
        assert seen == ["before", "after"]
        torch.testing.assert_close(norm.eval()(x[rows]), frozen[rows], rtol=1e-10, atol=1e-10)

    together(2, check)


def test_changed_momentum_and_reset_statistics_take_effect() -> None:
    x = torch.randn(6, 3, dtype=torch.float64)
    whole = nn.BatchNorm1d(3).double()
    whole(x)

    def change(norm: Any) -> None:
        norm.reset_running_stats()
        norm.momentum = 0.7

    change(whole)
    whole(x)

    def check(group: Group) -> None:
        norm = _prepared(nn.BatchNorm1d(3), group)
        rows = slice(0, 4) if group.rank == 0 else slice(4, 6)
        norm(x[rows])
        change(norm)
        norm(x[rows])
        torch.testing.assert_close(dict(norm.state_dict()), dict(whole.state_dict()), rtol=1e-10, atol=1e-10)

    together(2, check)


def test_prepared_model_saves_and_loads_as_a_plain_model() -> None:
    def check(group: Group) -> None:
        x = torch.randn(5, 3, dtype=torch.float64)
        model = _prepared(nn.BatchNorm1d(3), group)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        expected = nn.BatchNorm1d(3).double()(x)
        torch.testing.assert_close(loaded(x), expected)  # by no statistics but its own

    together(2, check)


def test_norm_that_synchronises_its_own_statistics_is_refused() -> None:
    def check(group: Group) -> None:
        with refused(InvalidInput):
            _prepared(OwnSynchronised(3), group)

    together(2, check)


def test_joined_evaluation_batches_do_not_move_statistics() -> None:
    def check(group: Group) -> None:
        model = PreparedModel(nn.BatchNorm1d(3), group, lambda: 1.0, lambda: True)
        model.compute(BatchPart(first=0, samples=2, total=4, loaded=2, is_joined=True))
        model.model.eval()(torch.randn(2, 3))
        with refused(InvalidInput):
            model.model.train()(torch.randn(2, 3))

    together(2, check)


def test_norm_list_covers_every_norm_of_pytorch() -> None:
    tried = {base for make, _ in NORMS.values() for base in type(make()).__mro__}
    known = {kind for kind in vars(nn).values() if isinstance(kind, type) and issubclass(kind, _NormBase)}
    alike = {kind for kind in known if "Lazy" in kind.__name__ or kind is nn.InstanceNorm3d}
    assert known - alike <= tried


def test_replicated_batch_moves_statistics_as_in_one_process() -> None:
    x = torch.randn(6, 3, dtype=torch.float64)
    whole = nn.BatchNorm1d(3).double()
    whole(x)

    def check(group: Group) -> None:
        model = PreparedModel(nn.BatchNorm1d(3).double(), group, lambda: 1.0, lambda: False).model
        model(x)
        torch.testing.assert_close(dict(model.state_dict()), dict(whole.state_dict()), rtol=1e-10, atol=1e-10)

    together(2, check)
