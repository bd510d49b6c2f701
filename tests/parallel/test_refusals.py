"""What cannot be taken apart is refused with its line, and ranks that differ with their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evener.comm.group import Group
from evener.oracle.division.layout import Replica
from evener.oracle.division.plan import Arrangement, plan_replica
from evener.parallel.op_graph import op_graph
from evener.parallel.process_mesh import form_process_mesh
from evener.parallel.refusals import (
    Pass,
    gather_sample_counts,
    refuse_lazy,
    refuse_parts_of_batches,
    require_same,
    tensors_in_order,
)
from evener.parallel.sharded import ShardedModule, sharded_copy
from evener.records.errors import InvalidInput, file_line, place_of
from support.thread_ranks import together

HERE = file_line(__file__, 0).partition(",")[0]
IMAGES = torch.zeros(2, 3, 6, 6)


class Model(nn.Module):
    def __init__(self, code: Callable[..., Any]) -> None:
        super().__init__()
        self.conv, self.code = nn.Conv2d(3, 4, 1), code

    def forward(self, x: Tensor) -> Any:
        return self.code(self.conv(x))


def test_data_dependent_control_flow_is_refused_with_its_line() -> None:
    with pytest.raises(InvalidInput, match=rf"cannot be divided layer by layer, because of {HERE}, .*sum"):
        op_graph(Model(lambda y: y if y.sum() > 0 else -y), [IMAGES])


def test_error_in_a_step_names_its_place_in_the_model() -> None:
    def code(y: Tensor) -> Any:
        return torch.linalg.cholesky(y[:, :2, :2, :2] * 0.0).sum((2, 3))  # zeros have no such factor

    model, line = Model(code), code.__code__.co_firstlineno + 1

    def work(group: Group) -> None:
        mesh = form_process_mesh(group, Arrangement(division="filter", replicas=(Replica(shares=(1, 1)),)))
        with pytest.raises(RuntimeError) as raised:
            ShardedModule(model, mesh, [IMAGES])(IMAGES)
        assert place_of(raised.value) == f" (in the model at {HERE}, line {line})"

    together(2, work)


class Tied(nn.Module):
    """A convolution and a transposed one, whose filters lie along other dims, share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 3, 1, bias=False), nn.ConvTranspose2d(3, 3, 1, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))  # type: ignore[no-any-return]


def test_tied_weight_needed_in_different_parts_is_refused() -> None:
    model = Tied()
    plan = plan_replica(op_graph(model, [IMAGES]).network, "filter", Replica(shares=(1, 1)))
    with pytest.raises(InvalidInput, match=r"^first\.weight and second\.weight are the same weight"):
        sharded_copy(model, plan, 0)


def test_inputs_must_be_positional_tensors() -> None:
    x = torch.zeros(2)
    assert tensors_in_order(x) == [x]
    assert tensors_in_order((x, x)) == (x, x)
    for inputs, name in (({"x": x}, "dict"), ([x, 3], "list")):
        with pytest.raises(InvalidInput, match=f"takes tensors as inputs, not a {name}$"):
            tensors_in_order(inputs)


def refused(ranks: int, work: Callable[[Group], Any]) -> str:
    """What every rank is told."""

    def one(group: Group) -> str:
        with pytest.raises(InvalidInput) as refusal:
            work(group)
        return str(refusal.value)

    (said,) = set(together(ranks, one))
    return said


def test_ranks_of_a_replica_with_different_shapes_are_named() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))

    def work(group: Group) -> None:
        mesh = form_process_mesh(group, Arrangement(division="sharded", replicas=(Replica(shares=(1, 1)),)))
        part = ShardedModule(model, mesh, [torch.zeros(4, 3)])
        part(torch.zeros(4 + group.rank, 3))

    said = refused(2, work)
    assert said.startswith("nodes n0 and n1 of one replica must compute the same, but have inputs (((4, 3)")


def test_ranks_in_different_modes_are_named_and_samples_may_differ() -> None:
    def work(group: Group) -> list[int]:
        replica, x = min(group.rank, 1), torch.zeros(2, 3)
        assert gather_sample_counts(group, Pass.of(replica, 2 + replica, [x], True, None)) == [2, 3]
        return gather_sample_counts(group, Pass.of(replica, 2, [x], group.rank < 2, None))

    said = refused(3, work)
    assert said.endswith("nodes n1 and n2 of one replica must compute the same, but have one model in training and "
                         "one in evaluation mode")  # fmt: skip


def test_require_same_compares_a_value_with_every_rank() -> None:
    require_same(lambda own: [own, own], "the cut", "a")
    with pytest.raises(InvalidInput, match="the cut is not the same on all ranks: this one and rank 1 differ"):
        require_same(lambda own: [own, b"other"], "the cut", "a")


def test_lazy_layer_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"1.weight of the model \(LazyLinear\) gets its shape from the first batch"):
        refuse_lazy(nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2)))
    assert refuse_lazy(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("module", "rule"),
    [
        (nn.BatchNorm2d(3, track_running_stats=False), r"1 \(BatchNorm2d, without running statistics\) evaluates with"),
        (nn.Embedding(3, 4, max_norm=1.0), r"1 \(Embedding, with max_norm\) rescales the rows"),
        (nn.EmbeddingBag(3, 4, max_norm=1.0), r"1 \(EmbeddingBag, with max_norm\) rescales the rows"),
    ],
)
def test_modules_that_need_all_samples_are_refused_by_name(module: nn.Module, rule: str) -> None:
    refuse_parts_of_batches(nn.Sequential(nn.Embedding(3, 4), nn.BatchNorm1d(4)))
    with pytest.raises(InvalidInput, match=rule):
        refuse_parts_of_batches(nn.Sequential(nn.Identity(), module))
