"""Links between real processes over Gloo, and the arithmetic on them."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._C._distributed_c10d import FileStore

from evener.benchmark import links
from evener.benchmark.links import latency_and_cost, measure_links, pairs
from evener.comm.group import Group
from evener.comm.joining import join_group
from evener.comm.signed_store import SignedStore
from evener.records.errors import InvalidValue, NodeLost
from evener.records.profile import LinkProfile

Body = Callable[[Group], object]


def run_ranks(size: int, body: Body, folder: Path, patience: float = 30.0) -> list[object]:
    """Return the result of `body` on each of `size` rank processes; a failing rank fails the test."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "evener.benchmark.links"])
    ranks: list[tuple[BaseProcess, Connection]] = []
    try:
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            process: BaseProcess = context.Process(
                target=_one_rank, args=(rank, size, body, str(folder / "store"), patience, theirs)
            )
            process.start()
            theirs.close()
            ranks.append((process, ours))
        deadline = time.monotonic() + 60
        answers = [_answer(ours, deadline) for _, ours in ranks]
    finally:
        for process, ours in ranks:
            process.kill()
            process.join()
            ours.close()
    failures = [str(answer) for ok, answer in answers if not ok]
    assert not failures, "\n".join(failures)
    return [answer for _, answer in answers]


def _answer(connection: Connection, deadline: float) -> tuple[bool, object]:
    if not connection.poll(max(0, deadline - time.monotonic())):
        return False, "a rank did not finish in time"
    try:
        answer: tuple[bool, object] = connection.recv()
    except EOFError:
        return False, "a rank died"
    return answer


def _one_rank(rank: int, size: int, body: Body, store: str, patience: float, answer: Connection) -> None:
    torch.set_num_threads(1)
    try:
        group = join_group(
            rank=rank,
            nodes=[f"node-{r}" for r in range(size)],
            device=torch.device("cpu"),
            store=SignedStore(FileStore(store, size), b"0" * 16),
            patience=patience,
            longest_wait=patience,
        )
        answer.send((True, body(group)))
    except BaseException:
        answer.send((False, traceback.format_exc()))
    time.sleep(60)  # until killed: a rank that leaves early would disturb the others
    os._exit(0)


def measure_whole_and_part(group: Group) -> tuple[tuple[LinkProfile, ...], tuple[LinkProfile, ...] | None]:
    part, again = group.subgroup([0, 2]), group.subgroup([0, 2])
    assert part is None or (again is not None and again.process_group is part.process_group)
    return measure_links(group, seconds=0.2), measure_links(part, first=5, seconds=0.2) if part else None


def sum_of_a_part_of_a_part(group: Group) -> float | None:
    part = group.subgroup([0, 2, 3])
    pair = part.subgroup([1, 2]) if part else None
    return float(pair.all_sum(torch.tensor([1.0 + group.rank]), "test")) if pair else None


def test_subgroup_can_form_its_own_subgroups(tmp_path: Path) -> None:
    assert run_ranks(4, sum_of_a_part_of_a_part, tmp_path) == [None, None, 7.0, 7.0]


def narrowed_twice(group: Group) -> tuple[int, int, list[str], float, float] | None:
    if not (group.narrow([0, 1, 2, 3]) and group.narrow([0, 2, 3]) and group.narrow([1, 2])):
        return None
    number = torch.tensor([1.0 + group.rank])
    gathered = float(group.all_sum(number, "test"))
    return group.rank, group.size, list(group.nodes), gathered, float(group.all_reduce(number, "test"))


def test_narrowed_group_consists_of_the_remaining_ranks(tmp_path: Path) -> None:
    left = ["node-2", "node-3"]
    assert run_ranks(4, narrowed_twice, tmp_path) == [None, None, (0, 2, left, 3.0, 3.0), (1, 2, left, 3.0, 3.0)]


@pytest.mark.alone
def test_all_ranks_get_the_same_plausible_link_of_every_pair(tmp_path: Path) -> None:
    answers = run_ranks(3, measure_whole_and_part, tmp_path)
    whole, parts = zip(*answers, strict=True)
    assert whole[0] == whole[1] == whole[2]
    assert [(link.source, link.target) for link in whole[0]] == [(0, 1), (0, 2), (1, 2)]
    assert parts[1] is None
    assert parts[0] == parts[2]
    assert [(link.source, link.target) for link in parts[0]] == [(5, 6)]
    for link in (*whole[0], *parts[0]):
        assert link.backend == "gloo"
        assert 1e-6 < link.alpha < 0.1
        assert 1e-12 < link.beta < 1e-7


def leave_rank_0_alone(group: Group) -> str:
    if group.rank == 1:
        group.barrier()  # the one before the pair; then no answer
        return ""
    start = time.monotonic()
    try:
        measure_links(group)
    except NodeLost as error:
        return f"{time.monotonic() - start:.1f} {error}"
    return "no error"


@pytest.mark.slow
def test_silent_rank_is_reported_within_the_time_limit(tmp_path: Path) -> None:
    seconds, _, sentence = str(run_ranks(2, leave_rank_0_alone, tmp_path, patience=8.0)[0]).partition(" ")
    assert sentence.startswith("node node-0 (rank 0)")
    assert float(seconds) < 40


def test_single_process_has_no_links() -> None:
    alone = join_group(rank=0, nodes=["only"], device=torch.device("cpu"), store=None, patience=1.0)
    assert measure_links(alone) == ()
    with pytest.raises(InvalidValue) as caught:
        measure_links(alone, seconds=0)
    assert caught.value.field == "seconds"


@pytest.mark.parametrize(("size", "count"), [(1, 0), (2, 1), (3, 3), (8, 28), (9, 15), (20, 37)])
def test_all_pairs_are_measured_up_to_eight_ranks_then_ring_and_star(size: int, count: int) -> None:
    chosen = pairs(size)
    assert len(chosen) == len(set(chosen)) == count
    assert all(0 <= low < high < size for low, high in chosen)
    ring = {tuple(sorted((rank, (rank + 1) % size))) for rank in range(size) if size > 1}
    assert ring | {(0, rank) for rank in range(1, size)} <= set(chosen)


@given(st.floats(0, 1), st.floats(0, 1e-6), st.integers(1, 100), st.integers(10**4, 10**8))
def test_alpha_and_beta_of_an_exact_link_are_recovered(alpha: float, beta: float, small: int, large: int) -> None:
    found = latency_and_cost((small, alpha + beta * small), (large, alpha + beta * large))
    assert found[0] == pytest.approx(alpha, abs=1e-9 * (alpha + beta * large))
    assert found[1] == pytest.approx(beta, abs=1e-9 * (alpha + beta * large))


def test_half_round_trips_count_and_large_messages_take_long_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The peer is simulated: a link of 50 us and 1 GB/s, on which every third round trip is held up."""
    asked: list[int] = []

    def round_trip(group: Group, peer: int, nbytes: int, rounds: int) -> float:
        asked.append(nbytes)
        return 2 * (50e-6 + nbytes * 1e-9) + (0.001 if len(asked) % 3 == 0 else 0)

    monkeypatch.setattr(links, "_round_trip", round_trip)
    monkeypatch.setattr(links, "_send_header", lambda *args: None)
    monkeypatch.setattr("torch.distributed.get_backend", lambda group: "gloo")
    alone = join_group(rank=0, nodes=["only"], device=torch.device("cpu"), store=None, patience=1.0)
    link = links._ask(alone, 1, 0.01, first=4)
    assert (link.source, link.target) == (4, 5)
    assert link.alpha == pytest.approx(50e-6, rel=1e-3)
    assert link.beta == pytest.approx(1e-9, rel=1e-3)
    assert max(asked) == 4 << 20, "8.5 ms there and back; 1 MB takes 2 ms only"


def test_noisy_timings_give_no_negative_alpha_or_beta() -> None:
    assert latency_and_cost((8, 0.002), (1000, 0.001)) == (0.002, 0.0)
    assert latency_and_cost((900, 0.001), (1000, 1.0))[0] == 0


@pytest.mark.parametrize("size", range(2, 10))
def test_every_pair_meets_once_and_no_rank_has_two_partners(size: int) -> None:
    rounds = links._rounds_of_pairs(size)
    assert len(rounds) == size - 1 + size % 2
    assert all(partners[peer] == rank for partners in rounds for rank, peer in partners.items())
    met = sorted((rank, peer) for partners in rounds for rank, peer in partners.items() if rank < peer)
    assert met == [(a, b) for a in range(size) for b in range(a + 1, size)]
