"""Shares follow changes of speed and ignore noise."""

import random

from evener.oracle.apportion import NodeCost
from evener.oracle.rebalance import Balance


def balance(*units: float, shares: tuple[int, ...]) -> Balance:
    return Balance(costs=tuple(NodeCost(unit_seconds=u) for u in units), shares=shares, is_tried=True)


def steps(
    state: Balance, seconds_per_sample: list[float], count: int, noise: float = 0.0, seed: int = 0
) -> tuple[Balance, int]:
    """Return the balance after `count` steps at these speeds, and the number of changes."""
    draw, moves = random.Random(seed), 0
    for _ in range(count):
        took = [
            n * u * (1 + draw.uniform(-noise, noise)) for n, u in zip(state.shares, seconds_per_sample, strict=True)
        ]
        decision = state.observe(state.shares, took).decide()
        state, moves = decision.balance, moves + (decision.shares is not None)
    return state, moves


def test_a_node_that_slows_to_a_third_gets_a_third_within_ten_steps() -> None:
    state, moves = steps(balance(1.0, 1.0, shares=(64, 64)), [1.0, 3.0], 10)
    assert state.shares == (96, 32)
    assert moves == 1


def test_noise_of_a_twentieth_moves_nothing() -> None:
    for seed in range(20):
        state, _ = steps(balance(1.0, 1.0, shares=(64, 64)), [1.0, 1.0], 200, noise=0.05, seed=seed)
        assert state.shares == (64, 64)


def test_noise_of_a_fifth_rarely_moves_samples() -> None:
    for seed in range(20):
        state, moves = steps(balance(1.0, 1.0, shares=(64, 64)), [1.0, 1.0], 200, noise=0.2, seed=seed)
        assert abs(state.shares[0] - 64) <= 8
        assert moves <= 200 / 16


def test_a_lasting_difference_of_a_tenth_is_eventually_corrected() -> None:
    state, moves = steps(balance(1.0, 1.0, shares=(640, 640)), [1.0, 1.2], 24)
    assert state.shares == (698, 582)
    assert moves == 1


def test_a_single_slow_step_moves_nothing() -> None:
    state, _ = steps(balance(1.0, 0.5, shares=(20, 40)), [1.0, 0.5], 5)
    state = state.observe(state.shares, [200.0, 20.0])
    assert state.decide().shares is None


def test_a_node_that_recovers_gets_its_share_back() -> None:
    state, _ = steps(balance(1.0, 1.0, shares=(64, 64)), [1.0, 3.0], 12)
    state, _ = steps(state, [1.0, 1.0], 12)
    assert state.shares == (64, 64)


def test_a_wrong_trial_is_corrected_after_the_first_steps() -> None:
    fresh = Balance(costs=(NodeCost(unit_seconds=1.0), NodeCost(unit_seconds=1.0)), shares=(64, 64))
    state, moves = steps(fresh, [1.0, 1.15], 4)
    assert state.shares == (69, 59)
    assert moves == 1
    confirmed, moves = steps(fresh, [1.0, 1.0], 10)
    assert confirmed.is_tried
    assert moves == 0


def test_a_slightly_wrong_trial_is_corrected_after_a_few_more_steps() -> None:
    fresh = Balance(costs=(NodeCost(unit_seconds=1.0), NodeCost(unit_seconds=1.0)), shares=(640, 640))
    state, moves = steps(fresh, [1.0, 1.06], 10)
    assert state.shares == (659, 621)
    assert moves == 1


def test_a_lasting_difference_of_a_twentieth_is_corrected_if_steps_are_steady() -> None:
    state, moves = steps(balance(1.0, 1.0, shares=(640, 640)), [1.0, 1.06], 24, noise=0.01)
    assert abs(state.shares[0] - 659) <= 3
    assert moves == 1


def test_a_difference_of_a_twentieth_is_ignored_if_steps_vary() -> None:
    _, moves = steps(balance(1.0, 1.0, shares=(640, 640)), [1.0, 1.06], 48, noise=0.3, seed=3)
    assert moves == 0


def test_nothing_is_decided_before_every_node_was_timed() -> None:
    state = balance(1.0, 1.0, shares=(64, 64)).observe((64, 64), [64.0, 192.0])
    assert state.decide().shares is None


def test_memory_bounds_hold_when_shares_move() -> None:
    workers = (NodeCost(unit_seconds=1.0, max_units=70), NodeCost(unit_seconds=1.0))
    state, _ = steps(Balance(costs=workers, shares=(64, 64), is_tried=True), [1.0, 3.0], 20)
    assert state.shares == (70, 58)


def test_shares_always_sum_to_the_batch() -> None:
    draw = random.Random(1)
    state = balance(1.0, 2.0, 3.0, shares=(30, 15, 10))
    for _ in range(30):
        state, _ = steps(state, [draw.uniform(0.2, 5) for _ in range(3)], 6)
        assert sum(state.shares) == 55


def learnt(costs: list[tuple[float, float]], count: int, seed: int, is_learning: bool = True) -> tuple[Balance, int]:
    """The balance after `count` steps of nodes with these (fixed, unit) seconds, which were not predicted."""
    state = Balance(costs=(NodeCost(unit_seconds=1.0),) * 2, shares=(32, 32), is_learning=is_learning)
    draw, moves = random.Random(seed), 0
    for _ in range(count):
        took = [
            (fixed + n * unit) * draw.uniform(0.95, 1.05) for n, (fixed, unit) in zip(state.shares, costs, strict=True)
        ]
        decision = state.observe(state.shares, took).decide()
        state, moves = decision.balance, moves + (decision.shares is not None)
    return state, moves


def test_a_fitted_fixed_cost_keeps_shares_from_drifting() -> None:
    costs = [(2e-3, 1e-6), (2.6e-3, 1e-6)]
    for seed in range(10):
        state, moves = learnt(costs, 300, seed)
        assert min(state.shares) >= 16, seed
        assert moves <= 6, seed
    drifted, _ = learnt(costs, 300, 0, is_learning=False)
    assert min(drifted.shares) == 0


def test_nodes_finish_together_under_proportional_and_affine_costs() -> None:
    for seed in range(5):
        state, _ = learnt([(0.0, 1e-3), (0.0, 3e-3)], 300, seed)
        assert abs(state.shares[0] - 48) <= 2, seed
        state, _ = learnt([(10e-3, 1e-3), (10e-3, 3e-3)], 300, seed)
        assert abs(state.shares[0] - 48) <= 3, seed


def test_changed_speed_outweighs_earlier_timings() -> None:
    state, _ = learnt([(1e-3, 1e-3), (1e-3, 2e-3)], 100, 0)
    for _ in range(100):
        took = [3 * (1e-3 + state.shares[0] * 1e-3), 1e-3 + state.shares[1] * 2e-3]
        state = state.observe(state.shares, took).decide().balance
    assert abs(state.shares[0] - 26) <= 3


def busy(draw: random.Random) -> float:
    """Return the noise of a busy machine: a fifth more or less, sometimes three times as much."""
    return draw.lognormvariate(0, 0.2) * (draw.uniform(1, 3) if draw.random() < 0.1 else 1)


def test_small_model_shares_do_not_drift_on_a_busy_machine() -> None:
    for seed in range(4):
        draw = random.Random(seed)
        workers = (NodeCost(unit_seconds=1.0, min_units=2),) * 2
        state, moves = Balance(costs=workers, shares=(32, 32), is_learning=True), 0
        for _ in range(400):
            took = [(fixed + n * 1e-6) * busy(draw) for n, fixed in zip(state.shares, (2e-3, 2.6e-3), strict=True)]
            decision = state.observe(state.shares, took).decide()
            state, moves = decision.balance, moves + (decision.shares is not None)
        assert min(state.shares) >= 2, seed
        assert moves <= 4, seed


def test_threefold_slowdown_is_detected_after_brief_calibration() -> None:
    for seed in range(3):
        state, _ = learnt([(0.0, 1e-3), (0.0, 1.25e-3)], 100, seed)
        draw = random.Random(seed)
        for _ in range(60):
            took = [n * unit * draw.uniform(0.95, 1.05) for n, unit in zip(state.shares, (1e-3, 3.75e-3), strict=True)]
            state = state.observe(state.shares, took).decide().balance
        assert abs(state.shares[0] - 51) <= 3, seed


def test_reverted_changes_raise_the_bound_until_they_are_forgotten() -> None:
    state, _ = steps(balance(1.0, 1.0, shares=(64, 64)), [1.0, 3.0], 12)
    state, _ = steps(state, [1.0, 1.0], 12)
    assert state.doubt == 1
    assert state.observe(state.shares, [64.0, 64.0 * 1.9]).doubt == 1
    hesitant, _ = steps(state, [1.0, 2.2], 3)
    assert hesitant.shares == state.shares
    confident, _ = steps(Balance(costs=state.costs, shares=state.shares, is_tried=True), [1.0, 2.2], 3)
    assert confident.shares != state.shares
    later, _ = steps(state, [1.0, 1.0], 250)
    assert later.doubt == 0


def test_a_node_keeps_its_minimum_and_regains_its_share_on_recovery() -> None:
    workers = (NodeCost(unit_seconds=1.0, min_units=2), NodeCost(unit_seconds=1.0, min_units=2))
    state, _ = steps(Balance(costs=workers, shares=(32, 32), is_tried=True), [1.0, 500.0], 20)
    assert state.shares == (62, 2)
    state, _ = steps(state, [1.0, 1.0], 40)
    assert abs(state.shares[0] - 32) <= 1
