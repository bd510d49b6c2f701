"""Plays a sequence of events, ticks and rounds, written as words, to membership."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import get_args

from evener.ps.master.node_rules import decide, tick
from evener.ps.master.node_state import Decision, NodeState, Occurrence, OpenRound, Transition

Row = tuple[float, str, list[str]]
"""Time, what happens (`node incarnation what`, `round n`, `tick`), and the sentences of the transitions."""


@dataclass(frozen=True)
class Scene:
    """All nodes and the open round, as a master holds them together."""

    nodes: dict[str, NodeState] = field(default_factory=dict)
    round: int = 0
    opened: float = 0.0
    awaited: frozenset[str] = frozenset()
    patience: float = 15.0

    @property
    def present(self) -> tuple[str, ...]:
        return tuple(sorted(name for name, node in self.nodes.items() if node.presence == "present"))

    def round_of(self, name: str) -> OpenRound:
        return OpenRound(self.round, self.opened, name in self.awaited, self.patience)

    def with_node(self, name: str, decided: Decision) -> Scene:
        nodes = self.nodes if decided.state is None else {**self.nodes, name: decided.state}
        return replace(self, nodes=nodes, awaited=self.awaited if decided.is_awaited else self.awaited - {name})


Outcome = tuple[Scene, tuple[Transition, ...]]


def after(scene: Scene, words: str, now: float) -> Outcome:
    """What follows from one row's words."""
    transitions: tuple[Transition, ...] = ()
    match words.split():
        case ["tick"]:
            for name in sorted(scene.nodes):
                decided = tick(name, scene.nodes[name], now, scene.round_of(name))
                scene, transitions = scene.with_node(name, decided), transitions + decided.transitions
        case ["round", number]:
            scene = replace(scene, round=int(number), opened=now, awaited=frozenset(scene.present))
        case ["restart"]:
            nodes = {name: node.shifted(-now).shifted(now).restarted(now) for name, node in scene.nodes.items()}
            scene = replace(scene, nodes=nodes, awaited=frozenset())
        case [name, incarnation, what]:
            occurrence = next(one for one in get_args(Occurrence) if one == what)
            decided = decide(name, scene.nodes.get(name), occurrence, int(incarnation), now, scene.round_of(name))
            scene, transitions = scene.with_node(name, decided), decided.transitions
        case _:
            raise AssertionError(words)
    return scene, transitions


def play(rows: list[Row]) -> Scene:
    """The scene after all rows, each of which must give its transitions."""
    scene = Scene()
    for now, words, expected in rows:
        scene, transitions = after(scene, words, now)
        assert [str(transition) for transition in transitions] == expected, f"at {now}: {words}"
    return scene


LATE = "it is heard, but its update did not come in time"

JOINED: list[Row] = [
    (0, "a 1 joined", ["round 0: admit node a: it joined"]),
    (0, "b 1 joined", ["round 0: admit node b: it joined"]),
]
