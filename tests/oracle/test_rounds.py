"""Rounds of agreements at a master: prices by hand, and the measured ones of mnist's network on slow lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest

from evener.commands.plan import bytes_of_contributions
from evener.oracle.cost.model import CostModel, TrainingJob
from evener.oracle.rounds import (
    LOCAL_STEPS,
    SAMPLES_NEEDED,
    Rounds,
    best_hub,
    chosen_rounds,
    exact_rounds,
    price_rounds,
    rounds_advice,
    rounds_of_ranks,
)
from evener.oracle.search import search
from evener.records.errors import DoesNotFit
from evener.records.profile import BatchTiming, ClusterProfile, DeviceProfile, LinkProfile, TaskTiming
from support.imagined_machines import MANY, convolutions, device

BYTES = {"none": 4_000_000, "bf16": 2_000_000, "int8": 1_015_625, "top-k": 28_000}
BATCH = 64


def timed(node: str, seconds: float, memory: int = MANY) -> DeviceProfile:
    """A node that takes `seconds` for a batch, in proportion to its samples."""
    batches = tuple(
        BatchTiming(samples=n, forward_seconds=seconds * n / BATCH, backward_seconds=0.0) for n in (1, BATCH)
    )
    timing = TaskTiming(task="timed", precision="fp32", batches=batches)
    return msgspec.structs.replace(device(node, 0, memory=memory), timings=(timing,))


def star(seconds: Sequence[float], megabits: Sequence[float], memory: Sequence[int] = ()) -> CostModel:
    """Nodes of a master that trains nothing itself to speak of, each with a line of its own."""
    memories = memory or [MANY] * len(seconds)
    nodes = [timed(f"n{i}", each, m) for i, (each, m) in enumerate(zip(seconds, memories, strict=True))]
    rates = [min(a, b) * 1e6 / 8 for a in megabits for b in megabits]
    links = tuple(
        LinkProfile(source=i, target=j, alpha=0.001, beta=1 / rates[i * len(nodes) + j])
        for i in range(len(nodes))
        for j in range(i)
    )
    job = TrainingJob(graph=convolutions(), batch_size=BATCH, optimizer="sgd", task="timed")
    return CostModel(job, ClusterProfile(devices=tuple(nodes), links=links))


def by_compression(rounds: Sequence[Rounds]) -> dict[str, Rounds]:
    return {one.compression: one for one in rounds if one.agreement == "local steps"}


def sync_of(rounds: Sequence[Rounds]) -> Rounds:
    (one,) = (one for one in rounds if one.agreement == "sync" and one.compression == "none")
    return one


def test_sync_divides_a_batch_and_exchanges_the_weights_both_ways() -> None:
    model = star([1.0, 1.0, 2.0], [100, 100, 100])
    sync = sync_of(price_rounds(model, 0, BYTES))
    assert sync.samples == BATCH
    assert sync.compute_seconds == pytest.approx(26 / BATCH, abs=1e-3)  # 26, 26 and 12 of 64
    assert sync.exchange_seconds == pytest.approx(2 * (0.001 + 2 * 4e6 * 8 / 100e6))  # two nodes elsewhere


def test_slow_line_bounds_the_exchange_alone() -> None:
    sync = sync_of(price_rounds(star([1, 1, 1], [100, 100, 10]), 0, BYTES))
    assert sync.exchange_seconds == pytest.approx(2 * (0.001 + 4e6 * 8 / 10e6))


def test_local_steps_are_the_fewest_with_which_nodes_compute_nine_tenths() -> None:
    rounds = by_compression(price_rounds(star([0.2, 0.4, 1.0], [100, 100, 100]), 0, BYTES))
    for one in rounds.values():
        assert one.computing >= 0.9
        steps = [one.local_steps, round(one.local_steps / 2), max(1, round(one.local_steps / 5))]
        assert one.samples == BATCH * sum(steps)
        assert one.compute_seconds == pytest.approx(
            max(n * s for n, s in zip(steps, (0.2, 0.4, 1.0), strict=True)), rel=1e-3
        )
        fewer = [n for n in LOCAL_STEPS if n < one.local_steps]
        assert not fewer or 0.2 * fewer[-1] < 0.9 * (0.2 * fewer[-1] + one.exchange_seconds)
    assert [rounds[code].local_steps for code in BYTES] == sorted(
        (r.local_steps for r in rounds.values()), reverse=True
    )


@pytest.mark.parametrize(("optimizer", "codes"), [("momentum", ["none", "top-k"]), ("adam", ["none"])])
def test_sync_is_priced_with_the_compression_that_its_optimizer_can_have(optimizer: str, codes: list[str]) -> None:
    model = star([0.2, 0.4], [10, 10])
    rounds = price_rounds(CostModel(replace(model.job, optimizer=optimizer), model.profile), 0, BYTES)
    assert sorted(one.compression for one in rounds if one.agreement == "sync") == codes


def test_encoding_takes_time_even_on_a_fast_line() -> None:
    model = star([0.2, 0.4], [1e9, 1e9])
    of = by_compression(price_rounds(model, 0, dict.fromkeys(BYTES, 0)))
    lines = of["none"].exchange_seconds
    coding = {code: (one.exchange_seconds - lines) / model.job.graph.parameters for code, one in of.items()}
    assert coding["none"] == 0
    assert coding["int8"] == pytest.approx(2 * 1.8e-9 + 3 * 0.4e-9)
    assert coding["top-k"] == pytest.approx(2 * 10.7e-9 + 3 * 0.7e-9)


def test_line_too_slow_for_all_local_steps_gets_the_most() -> None:
    none = by_compression(price_rounds(star([0.001, 0.001], [1, 1]), 0, BYTES))["none"]
    assert none.local_steps == LOCAL_STEPS[-1]
    assert none.computing < 0.9


def test_margin_is_the_number_of_samples_at_which_both_are_as_soon() -> None:
    rounds = price_rounds(star([0.2, 0.4, 0.8], [100, 20, 100]), 0, BYTES)
    sync = sync_of(rounds)
    for one in rounds:
        as_soon = replace(one, needed=one.margin(sync))
        assert as_soon.goal_seconds == pytest.approx(sync.goal_seconds)
    assert [one.goal_seconds for one in rounds] == sorted(one.goal_seconds for one in rounds)


def test_master_is_where_the_lines_are_fastest() -> None:
    assert best_hub(star([1, 1, 1, 1], [10, 20, 100, 100])) == 2
    assert best_hub(star([1, 1], [10, 10])) == 0


def test_node_that_cannot_hold_a_batch_divides_batches_but_makes_no_local_steps() -> None:
    small = star([1.0, 1.0], [100, 100])
    needed = int(small.whole_state_bytes + 40 * small.whole_sample_bytes)
    rounds = price_rounds(star([1.0, 1.0], [100, 100], [MANY, needed]), 0, BYTES)
    assert sync_of(rounds).nodes == 2
    assert {one.nodes for one in by_compression(rounds).values()} == {1}
    with pytest.raises(DoesNotFit):
        price_rounds(star([1.0, 1.0], [100, 100], [needed // 4, needed // 4]), 0, BYTES)


def test_alike_rounds_are_decided_by_fewer_local_steps() -> None:
    words = {"agreement": "local steps", "nodes": 2, "exchange_seconds": 0.0, "sent_bytes": 1}
    long, short = (
        Rounds(**words, local_steps=n, samples=100 * n, compute_seconds=n * each)  # type: ignore[arg-type]
        for n, each in ((200, 1.0), (20, 1.01))
    )
    assert chosen_rounds([long, short]) is short
    assert chosen_rounds([long, replace(short, needed=1.1)]) is long


def test_advice_names_what_is_soonest_and_what_it_assumes() -> None:
    slow = star([0.2, 0.4, 0.8], [0.1, 0.1, 0.1])
    sizes = bytes_of_contributions(slow.job.graph)
    rounds = price_rounds(slow, 0, sizes)
    ranks = rounds_of_ranks(search(slow).best, BATCH)
    assert exact_rounds(rounds, ranks) is min((sync_of(rounds), ranks), key=lambda one: one.goal_seconds)
    best = chosen_rounds(rounds)
    for part in (f"--local-steps {best.local_steps}", f"--compress {best.compression}", f"{best.needed:g} times"):
        assert part in rounds_advice(rounds, ranks, "n0")
    fast = star([1.0, 1.0], [100_000, 100_000])
    assert "--local-steps" not in rounds_advice(
        price_rounds(fast, 0, sizes), rounds_of_ranks(search(fast).best, BATCH), "n0"
    )


def test_contributions_have_the_bytes_that_compression_leaves() -> None:
    graph = convolutions(norm=True)
    sizes = bytes_of_contributions(graph)
    assert sizes.keys() == SAMPLES_NEEDED.keys()
    assert sizes["none"] == graph.parameter_bytes + graph.buffer_bytes
    assert sizes["bf16"] - graph.buffer_bytes == 2 * graph.parameters
    assert sizes["top-k"] < sizes["int8"] < sizes["bf16"] < sizes["none"]


def test_measured_times_of_mnist_on_slow_lines_are_predicted() -> None:
    """docs/lab/master.md: until 97 %, 0.88 MB over lines of 100 Mbit/s, to nodes that take 0.154 s for 128 samples."""
    sizes = {"none": 880_000, "int8": 225_000, "top-k": 6_300}
    epochs_of_sync, samples = 4, 12_800
    model = star([0.154 * BATCH / 128] * 4, [100] * 4)
    model = CostModel(replace(model.job, batch_size=128), model.profile)
    rounds = price_rounds(model, 0, sizes, devices=[1, 2, 3])  # the master's machine does not train
    seconds = {one.compression: one.goal_seconds for one in rounds if one.local_steps > 1}
    seconds["sync"] = sync_of(rounds).goal_seconds
    for name, measured in (("sync", 170.8), ("none", 28.2), ("int8", 27.7), ("top-k", 42.1)):
        assert seconds[name] * epochs_of_sync * samples == pytest.approx(measured, rel=0.12)
