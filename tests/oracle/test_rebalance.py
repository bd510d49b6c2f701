"""Shares follow the machines, and do not follow noise."""

import random

from evener.oracle.apportion import Worker
from evener.oracle.rebalance import Balance


def balance(*units: float, shares: tuple[int, ...]) -> Balance:
    return Balance(workers=tuple(Worker(unit_seconds=u) for u in units), shares=shares, is_tried=True)


def steps(
    state: Balance, seconds_per_sample: list[float], count: int, noise: float = 0.0, seed: int = 0
) -> tuple[Balance, int]:
    """The balance after `count` steps at these speeds, and how often the shares were moved."""
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


def test_noise_of_a_fifth_moves_few_samples_and_seldom() -> None:
    for seed in range(20):
        state, moves = steps(balance(1.0, 1.0, shares=(64, 64)), [1.0, 1.0], 200, noise=0.2, seed=seed)
        assert abs(state.shares[0] - 64) <= 8
        assert moves <= 200 / 16


def test_a_lasting_difference_of_a_tenth_is_mended_in_the_end() -> None:
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


def test_a_wrong_promise_of_the_trial_is_corrected_after_the_first_steps() -> None:
    fresh = Balance(workers=(Worker(unit_seconds=1.0), Worker(unit_seconds=1.0)), shares=(64, 64))
    state, moves = steps(fresh, [1.0, 1.15], 4)
    assert state.shares == (69, 59)
    assert moves == 1
    confirmed, moves = steps(fresh, [1.0, 1.0], 10)
    assert confirmed.is_tried
    assert moves == 0


def test_a_slightly_wrong_promise_is_corrected_after_a_few_more() -> None:
    fresh = Balance(workers=(Worker(unit_seconds=1.0), Worker(unit_seconds=1.0)), shares=(640, 640))
    state, moves = steps(fresh, [1.0, 1.06], 10)
    assert state.shares == (659, 621)
    assert moves == 1


def test_a_lasting_difference_of_a_twentieth_is_mended_where_steps_are_steady() -> None:
    state, moves = steps(balance(1.0, 1.0, shares=(640, 640)), [1.0, 1.06], 24, noise=0.01)
    assert abs(state.shares[0] - 659) <= 3
    assert moves == 1


def test_where_steps_vary_it_is_left_to_them() -> None:
    _, moves = steps(balance(1.0, 1.0, shares=(640, 640)), [1.0, 1.06], 48, noise=0.3, seed=3)
    assert moves == 0


def test_nothing_is_decided_before_every_node_was_seen() -> None:
    state = balance(1.0, 1.0, shares=(64, 64)).observe((64, 64), [64.0, 192.0])
    assert state.decide().shares is None


def test_memory_bounds_hold_when_shares_move() -> None:
    workers = (Worker(unit_seconds=1.0, most=70), Worker(unit_seconds=1.0))
    state, _ = steps(Balance(workers=workers, shares=(64, 64), is_tried=True), [1.0, 3.0], 20)
    assert state.shares == (70, 58)


def test_shares_always_sum_to_the_batch() -> None:
    draw = random.Random(1)
    state = balance(1.0, 2.0, 3.0, shares=(30, 15, 10))
    for _ in range(30):
        state, _ = steps(state, [draw.uniform(0.2, 5) for _ in range(3)], 6)
        assert sum(state.shares) == 55


def learnt(costs: list[tuple[float, float]], count: int, seed: int, is_learning: bool = True) -> tuple[Balance, int]:
    """The balance after `count` steps of nodes with these (fixed, unit) seconds, which nobody predicted."""
    state = Balance(workers=(Worker(unit_seconds=1.0),) * 2, shares=(32, 32), is_learning=is_learning)
    draw, moves = random.Random(seed), 0
    for _ in range(count):
        took = [
            (fixed + n * unit) * draw.uniform(0.95, 1.05) for n, (fixed, unit) in zip(state.shares, costs, strict=True)
        ]
        decision = state.observe(state.shares, took).decide()
        state, moves = decision.balance, moves + (decision.shares is not None)
    return state, moves


def test_a_small_model_s_fixed_cost_is_learnt_and_keeps_shares_from_drifting() -> None:
    costs = [(2e-3, 1e-6), (2.6e-3, 1e-6)]
    for seed in range(10):
        state, moves = learnt(costs, 300, seed)
        assert min(state.shares) >= 16, seed
        assert moves <= 6, seed
    drifted, _ = learnt(costs, 300, 0, is_learning=False)
    assert min(drifted.shares) == 0


def test_proportional_and_affine_costs_are_both_divided_so_that_nodes_finish_together() -> None:
    for seed in range(5):
        state, _ = learnt([(0.0, 1e-3), (0.0, 3e-3)], 300, seed)
        assert abs(state.shares[0] - 48) <= 2, seed
        state, _ = learnt([(10e-3, 1e-3), (10e-3, 3e-3)], 300, seed)
        assert abs(state.shares[0] - 48) <= 3, seed


def test_a_node_whose_speed_changes_is_believed_though_its_earlier_times_say_otherwise() -> None:
    state, _ = learnt([(1e-3, 1e-3), (1e-3, 2e-3)], 100, 0)
    for _ in range(100):
        took = [3 * (1e-3 + state.shares[0] * 1e-3), 1e-3 + state.shares[1] * 2e-3]
        state = state.observe(state.shares, took).decide().balance
    assert abs(state.shares[0] - 26) <= 3


def busy(draw: random.Random) -> float:
    """What a step takes on a machine that does other things: a fifth more or less, now and then three times as much."""
    return draw.lognormvariate(0, 0.2) * (draw.uniform(1, 3) if draw.random() < 0.1 else 1)


def test_on_a_busy_machine_shares_of_small_models_do_not_drift_to_one_node() -> None:
    for seed in range(4):
        draw = random.Random(seed)
        workers = (Worker(unit_seconds=1.0, least=2),) * 2
        state, moves = Balance(workers=workers, shares=(32, 32), is_learning=True), 0
        for _ in range(400):
            took = [(fixed + n * 1e-6) * busy(draw) for n, fixed in zip(state.shares, (2e-3, 2.6e-3), strict=True)]
            decision = state.observe(state.shares, took).decide()
            state, moves = decision.balance, moves + (decision.shares is not None)
        assert min(state.shares) >= 2, seed
        assert moves <= 4, seed


def test_a_change_by_three_is_seen_whatever_little_was_learnt_before() -> None:
    for seed in range(3):
        state, _ = learnt([(0.0, 1e-3), (0.0, 1.25e-3)], 100, seed)
        draw = random.Random(seed)
        for _ in range(60):
            took = [n * unit * draw.uniform(0.95, 1.05) for n, unit in zip(state.shares, (1e-3, 3.75e-3), strict=True)]
            state = state.observe(state.shares, took).decide().balance
        assert abs(state.shares[0] - 51) <= 3, seed


def test_changes_that_are_taken_back_ask_for_more_until_they_are_forgotten() -> None:
    state, _ = steps(balance(1.0, 1.0, shares=(64, 64)), [1.0, 3.0], 12)
    state, _ = steps(state, [1.0, 1.0], 12)
    assert state.doubt == 1
    assert state.observe(state.shares, [64.0, 64.0 * 1.9]).doubt == 1
    hesitant, _ = steps(state, [1.0, 2.2], 3)
    assert hesitant.shares == state.shares
    confident, _ = steps(Balance(workers=state.workers, shares=state.shares, is_tried=True), [1.0, 2.2], 3)
    assert confident.shares != state.shares
    later, _ = steps(state, [1.0, 1.0], 250)
    assert later.doubt == 0


def test_a_node_keeps_what_it_is_given_at_least_and_is_believed_when_it_has_recovered() -> None:
    workers = (Worker(unit_seconds=1.0, least=2), Worker(unit_seconds=1.0, least=2))
    state, _ = steps(Balance(workers=workers, shares=(32, 32), is_tried=True), [1.0, 500.0], 20)
    assert state.shares == (62, 2)
    state, _ = steps(state, [1.0, 1.0], 40)
    assert abs(state.shares[0] - 32) <= 1
