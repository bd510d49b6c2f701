"""Assignment of trials to nodes: literal cases."""

from __future__ import annotations

from evener.search.placement import RunningTrial, SearchNode, Team, is_fast, takes_next, team_for

SPEEDS = {"a": 1.0, "b": 0.5, "c": 0.25}


def search_nodes(**free_in: float) -> list[SearchNode]:
    return [SearchNode(name, SPEEDS[name], seconds) for name, seconds in free_in.items()]


def test_slow_node_takes_trials_only_while_many_remain() -> None:
    assert takes_next("c", search_nodes(a=5, b=5, c=0), 40, work=10)
    assert not takes_next("c", search_nodes(a=5, b=5, c=0), 2, work=10)
    assert takes_next("a", search_nodes(a=0, b=5, c=0), 1, work=10)
    assert not takes_next("c", search_nodes(c=0), 0, work=10)


def test_idle_nodes_join_the_trial_that_ends_last() -> None:
    running = [RunningTrial(1, ("a",), 10.0), RunningTrial(2, ("c",), 20.0)]
    assert team_for(search_nodes(b=0), running, SPEEDS, regroup_seconds=3) == Team(2, ("c", "b"))
    assert team_for(search_nodes(b=0), running, SPEEDS, regroup_seconds=3, divides=False) == Team(2, ("b",))
    assert team_for(search_nodes(b=0), running, SPEEDS, regroup_seconds=60) is None
    assert team_for([], running, SPEEDS, regroup_seconds=0) is None
    assert team_for(search_nodes(c=0), [RunningTrial(1, ("a",), 1.0)], SPEEDS, regroup_seconds=0.5) is None


def test_the_fastest_node_continues_alone_if_a_team_mostly_waits() -> None:
    shared = [RunningTrial(1, ("a", "b"), 20.0, steps=100)]
    assert team_for([], shared, SPEEDS, exchange_seconds=0.003) is None
    assert team_for([], shared, SPEEDS, exchange_seconds=0.5) == Team(1, ("a",))
    alone = [RunningTrial(1, ("a",), 20.0, steps=100)]
    assert team_for(search_nodes(b=0), alone, SPEEDS, exchange_seconds=0.5) is None


def test_upper_rungs_need_half_of_the_fastest_speed() -> None:
    assert [is_fast(speed, 1.0) for speed in (1.0, 0.5, 0.49)] == [True, True, False]
