"""A rank's part of a step among fake peers begins the exchanges of a real step and leaves no trace."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evener.benchmark.exchanges import distinct_sizes, measure_exchanges
from evener.benchmark.fake_group import EventTrace, fake_group
from evener.comm.group import Group
from evener.comm.step_timing import StepTimer
from evener.oracle.division.layout import Replica
from evener.oracle.division.plan import Arrangement
from evener.oracle.division.rules import DivisionName
from evener.oracle.replay import ExchangeTiming, TraceEvent, replay
from evener.parallel.parallel_model import Criterion, ParallelModel
from evener.parallel.process_mesh import ProcessMesh, form_process_mesh
from evener.parallel.replicated import ReplicatedModel
from evener.parallel.sharded import DividedModel
from evener.parallel.shared_statistics import synchronise_norms
from evener.training.predict import Step, profile_step
from support.thread_ranks import together

CPU = torch.device("cpu")
CRITERION = Criterion(loss=nn.functional.cross_entropy, autocast=nullcontext, scale=lambda loss: loss)
IMAGES, LABELS = torch.rand(4, 3, 12, 8), torch.tensor([0, 1, 2, 3])


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )


MODEL = network()


def step(model: ParallelModel) -> None:
    timer = model.group.timer
    timer.resume("fb")
    model.add_gradients(IMAGES, LABELS, samples=len(IMAGES), total=len(IMAGES), is_last=True)
    timer.pause()


def silent(place: ProcessMesh, trace: EventTrace) -> ProcessMesh:
    """Return the same mesh among fake peers."""
    world = fake_group(place.world, range(place.world.size), StepTimer(CPU), trace)
    if place.group is place.world:
        return replace(place, world=world, group=world)
    group = fake_group(place.group, place.arrangement.ranks_of(place.index), world.timer, trace)
    group.traffic = world.traffic
    return replace(place, world=world, group=group)


@pytest.mark.parametrize(
    ("division", "replicas"),
    [
        ("filter", [(1, 1)]),
        ("channel", [(2, 1)]),
        ("hybrid", [(1, 1, 1)]),
        ("sharded", [(3, 1)]),
        ("spatial", [(2, 1, 1)]),
        ("filter", [(1, 1), (1,)]),
        ("sharded", [(1,), (1, 1)]),
        ("spatial", [(1, 1), (1,)]),
    ],
)
def test_rank_starts_the_exchanges_of_a_real_step(
    division: DivisionName, replicas: Sequence[tuple[float, ...]]
) -> None:
    arrangement = Arrangement(division=division, replicas=tuple(Replica(shares=shares) for shares in replicas))

    def rank(group: Group) -> tuple[dict[str, float], dict[str, float], tuple[TraceEvent, ...]]:
        place, trace = form_process_mesh(group, arrangement), EventTrace(CPU)
        aloud = DividedModel(copy.deepcopy(MODEL), place, IMAGES, CRITERION)
        alone = DividedModel(copy.deepcopy(MODEL), silent(place, trace), IMAGES, CRITERION)
        step(aloud)
        step(alone)
        return aloud.group.traffic.sent, alone.group.traffic.sent, trace.finish()

    rows = together(arrangement.size, rank)
    for real, fake, _ in rows:
        assert fake == real
    played = replay([beats for _, _, beats in rows], lambda *_: 0.001)  # all parts go together
    begun = max(sum(beat.act == "begin" for beat in beats) for _, _, beats in rows)
    assert begun > 2
    assert all(0.001 <= one.exchanging <= begun * 0.0011 for one in played)


def test_replica_starts_the_exchanges_of_a_real_step() -> None:
    def rank(group: Group) -> tuple[dict[str, float], dict[str, float]]:
        quiet = fake_group(group, range(group.size), StepTimer(CPU), EventTrace(CPU))
        aloud, alone = (
            ReplicatedModel(synchronise_norms(copy.deepcopy(MODEL), where), where, CRITERION)
            for where in (group, quiet)
        )
        step(aloud)
        step(alone)
        return group.traffic.sent, quiet.traffic.sent

    for real, fake in together(2, rank):
        assert fake == real
        assert set(real) == {"gradients", "statistics"}


def test_fake_groups_have_the_devices_of_the_real_ranks() -> None:
    def rank(group: Group) -> list[tuple[bool, bool]]:
        quiet = fake_group(group, range(group.size), StepTimer(CPU), EventTrace(CPU))
        groups = [one for one in (quiet, quiet.subgroup([0, 1])) if one is not None]
        return [(one.has_accelerators, one.has_same_generators()) for one in groups]

    assert together(3, rank) == [[(False, True)] * 2, [(False, True)] * 2, [(False, True)]]


def test_all_ranks_profile_the_same_number_of_steps() -> None:
    def rank(group: Group) -> list[int]:
        trace = EventTrace(CPU)
        quiet = fake_group(group, range(group.size), StepTimer(CPU), trace)

        def part() -> None:
            quiet.all_reduce(torch.rand(100 * (1 + group.rank)).sum(), "gradients")

        return [len(beats) for beats in profile_step(group, trace, lambda: part, 0.05)]

    first, second = together(2, rank)
    assert first == second
    assert 1 <= len(first) <= 7
    assert set(first) == {3}  # one exchange is begun, needed, and the step finished


def test_a_short_run_is_profiled_once() -> None:
    (beats,) = together(1, lambda group: profile_step(group, EventTrace(CPU), lambda: time.localtime, 0.05, rounds=0))
    assert len(beats) == 1


def test_no_rank_profiles_if_one_cannot_copy_its_model() -> None:
    def rank(group: Group) -> int:
        def prepare() -> Step:
            if group.rank == 1:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return time.localtime

        return len(profile_step(group, EventTrace(CPU), prepare, 0.05))

    with pytest.warns(UserWarning, match=r"nothing is predicted: .*CUDA out of memory"):
        assert together(3, rank) == [0, 0, 0]


def test_rank_that_fails_in_its_step_leaves_the_others_synchronised() -> None:
    def rank(group: Group) -> int:
        def step() -> None:
            group.all_gather_bytes(b"what I am about to do")
            if group.rank == 2:
                raise ValueError("no such step")

        return len(profile_step(group, EventTrace(CPU), lambda: step, 0.05))

    with pytest.warns(UserWarning, match="nothing is predicted: .*no such step"):
        assert together(3, rank) == [0, 0, 0]


def test_all_ranks_get_the_same_exchange_timings() -> None:
    def rank(group: Group) -> list[ExchangeTiming]:
        return measure_exchanges(group, {"exchange": [64, 200_000], "all-reduce": [4096], "all-gather": [64]})

    first, *others = together(3, rank)
    assert all(other == first for other in others)
    assert [(one.kind, [point.nbytes for point in one.points]) for one in first] == [
        ("all-gather", [64]),
        ("all-reduce", [4096]),
        ("exchange", [64, 200_000]),
    ]
    assert first[2].points[1].seconds > 0


def test_nearly_equal_sizes_are_measured_once() -> None:
    assert distinct_sizes([0, 100, 101, 120, 200]) == [4, 120, 200]


def test_fake_peers_return_the_statistics_of_the_rank_itself() -> None:
    """A rank would reject statistics of zero and compute something else."""

    def rank(group: Group) -> list[Tensor]:
        quiet: Any = fake_group(group, range(group.size), StepTimer(CPU), EventTrace(CPU))
        return list(quiet.all_gather(torch.tensor([1.0, 2.0]), "statistics"))

    for rows in together(2, rank):
        assert [row.tolist() for row in rows] == [[1.0, 2.0], [1.0, 2.0]]


def test_rank_without_samples_gets_statistics_from_fake_peers() -> None:
    def rank(group: Group) -> list[Tensor]:
        quiet: Any = fake_group(group, range(group.size), StepTimer(CPU), EventTrace(CPU))
        return list(quiet.all_gather(torch.zeros(2), "statistics"))

    first, second = together(2, rank)
    assert [row.tolist() for row in first] == [[0.0, 0.0], [2.0, 2.0]]
    assert [row.tolist() for row in second] == [[2.0, 2.0], [0.0, 0.0]]


def test_rank_with_an_uncounted_stand_in_profiles_a_step() -> None:
    def rank(group: Group) -> int:
        trace = EventTrace(CPU)
        quiet = fake_group(group, range(group.size), StepTimer(CPU), trace)
        model = ReplicatedModel(synchronise_norms(copy.deepcopy(MODEL), quiet), quiet, CRITERION)

        def part() -> None:
            number = 0 if group.rank == 2 else len(IMAGES)
            model.add_gradients(IMAGES, LABELS, samples=number, total=2 * len(IMAGES), is_last=True)

        return len(profile_step(group, trace, lambda: part, 0.05))

    assert all(together(3, rank))
