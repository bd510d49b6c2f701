"""What holds for membership whatever happens, in whatever order."""

from __future__ import annotations

from itertools import pairwise
from typing import get_args

from hypothesis import given
from hypothesis import strategies as st

from evener.ps.master.node_state import Occurrence, Transition
from support.membership_script import Outcome, Scene, after

# Laws. Times are eighths of a second, so that sums and differences of them are exact.

seconds = st.integers(0, 8 * 40).map(lambda eighths: eighths / 8)
events = st.builds(
    "{} {} {}".format,
    st.sampled_from("abc"),
    st.sampled_from([1, 1, 1, 1, 2, 3]),
    st.sampled_from(["joined", "heard", "late", *get_args(Occurrence)]),
)
words = st.one_of(st.just("tick"), st.just("round 5"), st.sampled_from(["tick", "tick", "restart"]), events, events)
stories = st.lists(st.tuples(seconds, words), max_size=40).map(
    lambda story: [(0.0, f"{node} 1 joined") for node in "abc"] + story
)
"""What happens, and how many seconds after what happened before it."""

Step = tuple[float, str, Scene, Outcome]
"""Time, words, the scene before, and what followed."""


def steps_of(story: list[tuple[float, str]], start: float = 0.0) -> list[Step]:
    scene, now, steps = Scene(), start, []
    for pause, word in story:
        now += pause
        outcome = after(scene, word, now)
        steps.append((now, word, scene, outcome))
        scene = outcome[0]
    return steps


@given(stories, st.integers(0, 8 * 100))
def test_node_silent_for_the_patience_is_no_member_after_a_tick(story: list[tuple[float, str]], pause: int) -> None:
    heard: dict[str, float] = {}
    for now, word, before, (scene, decisions) in steps_of([*story, (pause / 8, "tick")]):
        node, _, what = [*word.split(), "", ""][:3]
        dismissed = any(decision.kind == "dismiss" for decision in decisions)
        if word == "restart":
            heard = dict.fromkeys(heard, now + before.patience)
        elif what in ("joined", "heard", "contributed", "refused") and not dismissed:
            heard[node] = now
        elif word == "tick":
            members = {name for name, standing in scene.nodes.items() if standing.is_member}
            assert not {name for name in members if now - heard[name] >= scene.patience}


@given(stories)
def test_excluded_departed_or_unknown_node_is_never_awaited(story: list[tuple[float, str]]) -> None:
    for now, _, before, (scene, decisions) in steps_of(story):
        assert all(scene.nodes[name].presence in ("present", "away") for name in scene.awaited)
        for decision in decisions:
            if decision.kind in ("exclude", "wait"):
                assert decision.node not in scene.awaited | set(scene.present)
                assert scene.nodes[decision.node].until == now + decision.seconds
            if decision.kind == "take back":
                assert before.nodes[decision.node].until <= now


@given(stories)
def test_node_no_longer_awaited_has_contributed_or_been_passed_over(story: list[tuple[float, str]]) -> None:
    for _, word, before, (scene, decisions) in steps_of(story):
        if word.startswith(("round", "restart")):
            continue
        given_up = {decision.node for decision in decisions if decision.kind == "pass over"}
        contributed = {word.split()[0]} if word.endswith("contributed") else set()
        assert given_up <= before.awaited
        assert before.awaited - scene.awaited <= given_up | contributed
        assert scene.awaited <= before.awaited - given_up


@given(stories)
def test_exclusion_never_shrinks_within_a_streak(story: list[tuple[float, str]]) -> None:
    exclusions: dict[str, list[tuple[float, float]]] = {}
    for now, _, _, (_, decisions) in steps_of(story):
        for decision in decisions:
            if decision.kind == "exclude":
                exclusions.setdefault(decision.node, []).append((now, decision.seconds))
                assert 10 <= decision.seconds <= 320
                assert decision.seconds <= 10 * 2 ** (len(exclusions[decision.node]) - 1)
    for several in exclusions.values():
        for (first, shorter), (second, longer) in pairwise(several):
            in_streak = second - first < shorter + 150
            assert not in_streak or longer == min(320, 2 * shorter)


@given(stories)
def test_same_inputs_give_the_same_outputs(story: list[tuple[float, str]]) -> None:
    assert steps_of(story) == steps_of(story)


@given(stories, st.integers(-(8**6), 8**6))
def test_only_time_differences_matter(story: list[tuple[float, str]], start: int) -> None:
    assert _decisions(steps_of(story)) == _decisions(steps_of(story, start=start / 8))


def _decisions(steps: list[Step]) -> list[tuple[Transition, ...]]:
    return [outcome[1] for *_, outcome in steps]


@given(stories)
def test_decisions_about_one_node_do_not_depend_on_the_others(story: list[tuple[float, str]]) -> None:
    alone = [(pause, word if word[:2] in ("a ", "ti", "ro", "re") else "tick") for pause, word in story]
    together = [(pause, "tick" if word == "tick" else word) for pause, word in story]
    of_a = [[d for d in ds if d.node == "a"] for ds in _decisions(steps_of(_ticked(together)))]
    assert of_a == [[*ds] for ds in _decisions(steps_of(_ticked(alone)))]


def _ticked(story: list[tuple[float, str]]) -> list[tuple[float, str]]:
    """The story with a tick before everything that happens, so that both tellings of it tick at the same times."""
    return [part for pause, word in story for part in ((pause, "tick"), (0.0, word))]
