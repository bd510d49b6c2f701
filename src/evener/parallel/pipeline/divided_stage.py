"""Stages whose layers several ranks divide: a pipeline of teams, each of which does its stage by `filter` or `channel`.

     lane 0    rank 0  ---->  rank 2        activations and gradients travel along a lane, whole
               |   |          |   |         within a stage, the ranks of all lanes divide every convolution and linear
     lane 1    rank 1  ---->  rank 3        layer: what one of them makes is whole on all of them
              stage 0        stage 1

So a lane is a pipeline like any other, and every layer is divided as THE TABLE of the oracle says. What is not divided,
such as norms, all ranks of a stage do alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from evener.comm.group import Group
from evener.oracle.division import rules
from evener.oracle.division.layout import Layout, Replica
from evener.oracle.division.plan import Arrangement, ReplicaPlan, Shard, plan_among
from evener.oracle.division.planner import divide_network
from evener.oracle.division.rules import Division
from evener.parallel.divided import divided_copy
from evener.parallel.op_call import OpGraph
from evener.parallel.op_graph import op_graph
from evener.parallel.op_registry import of_module
from evener.parallel.pipeline.partition_problem import PartitionProblem
from evener.parallel.pipeline.stage_layout import StageLayout
from evener.parallel.pipeline.stage_modules import StageModules
from evener.parallel.process_mesh import ProcessMesh
from evener.parallel.rank_program import RankProgram
from evener.records.errors import require
from evener.tracer.ir import record
from evener.tracer.meta_model import on_meta


@dataclass(frozen=True, kw_only=True)
class StageTeams:
    """The ranks of every stage, and how they divide its layers.

    Attributes:
        division: `filter`, `channel` or `hybrid`, which leave every value whole on all of them.
        teams: ranks, equally many for every stage; which stage each team has is decided when the model is cut.
        shares: of the work of a team, one a rank, relative; None to go by how fast each was measured to be.
    """

    division: Division
    teams: tuple[tuple[int, ...], ...]
    shares: tuple[tuple[float, ...], ...] | None = None

    def __post_init__(self) -> None:
        allowed = "filter, channel or hybrid, which leave activations whole"
        require(self.division in ("filter", "channel", "hybrid"), "division", self.division, allowed)
        sizes = [len(team) for team in self.teams]
        require(len(set(sizes)) == 1, "teams", sizes, "of equally many ranks")
        fits = self.shares is None or sizes == [len(shares) for shares in self.shares]
        require(fits, "shares", self.shares, "one a rank")

    @property
    def lanes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that activations pass, for each rank of a team."""
        return tuple(zip(*self.teams, strict=True))

    def team_of(self, rank: int) -> int:
        """Number of the team that `rank` belongs to."""
        return next(number for number, team in enumerate(self.teams) if rank in team)


def form_team(world: Group, teams: StageTeams, speeds: Sequence[float]) -> ProcessMesh:
    """This rank among those that divide a stage with it; every rank of `world` calls this.

    Args:
        world: all ranks.
        teams: of them.
        speeds: of the ranks of the own team, relative; they count where shares are not given.
    """
    groups = [world.subgroup(team) for team in teams.teams]
    own = teams.team_of(world.rank)
    group = groups[own]
    assert group is not None
    group.traffic = world.traffic
    shares = teams.shares[own] if teams.shares is not None else tuple(speeds)
    arrangement = Arrangement(division=teams.division, replicas=(Replica(shares=shares),))
    return ProcessMesh(world=group, group=group, arrangement=arrangement, index=0)


class DividedLayer(nn.Module):
    """A layer of which this rank has some filters or channels, under the names of the layer: whole values in and out.

    Args:
        layer: whole; of one input.
        mesh: the ranks that divide it.
        example: of its input; what other shapes need is divided alike.
    """

    def __init__(self, layer: nn.Module, mesh: ProcessMesh, example: Tensor) -> None:
        super().__init__()
        self._mesh = mesh
        self._whole = (on_meta(nn.Sequential(layer)),)  # in a tuple: no module of this one
        graph = self._graph(example)
        self.plan = self._plan(graph)
        self._part = (divided_copy(nn.Sequential(layer), self.plan, mesh.group.rank),)
        for name, parameter in self._part[0].get_submodule("0").named_parameters():
            self.register_parameter(name, parameter)
        self._programs = {tuple(example.shape): self._program(graph, self.plan)}

    @property
    def shards(self) -> dict[str, Shard]:
        """Its weights, by their names in the layer."""
        found = {name.removeprefix("0."): shard for name, shard in self.plan.shards.items()}
        return {name: replace(shard, name=name) for name, shard in found.items()}

    def forward(self, x: Tensor) -> Tensor:
        """What the whole layer makes of `x`, which all ranks have."""
        shape = tuple(x.shape)
        if shape not in self._programs:
            graph = self._graph(x)
            self._programs[shape] = self._program(graph, self._plan(graph, self.plan))
        made: Any = self._programs[shape]([x])
        output: Tensor = made
        return output

    def _graph(self, x: Tensor) -> OpGraph:
        return op_graph(self._whole[0], [x.detach().to("meta")], device=self._mesh.group.device)

    def _plan(self, graph: OpGraph, before: ReplicaPlan | None = None) -> ReplicaPlan:
        """All ranks do what comes before the layer alike, so each of them has the gradient of its input."""
        (replica,) = self._mesh.arrangement.replicas
        known = before.divided.choices if before is not None else {}
        division = self._mesh.arrangement.division
        divided = divide_network(graph.network, division, replica.size, known, inputs=rules.alike)
        return plan_among(divided, replica)

    def _program(self, graph: OpGraph, plan: ReplicaPlan) -> RankProgram:
        samples = graph.network.operations[0].shape[0]
        return RankProgram(graph, plan, self._part[0], self._mesh, lambda: (0, samples, samples))


def divide_stage(
    problem: PartitionProblem, layout: StageLayout, stage: int, modules: StageModules, mesh: ProcessMesh
) -> tuple[StageModules, dict[str, Shard]]:
    """What a rank has of its stage whose layers `mesh` divides, and by name how its ranks hold the weights of those.

    A layer stays whole whose weights another one has, too, or a hook sees.

    Args:
        problem: the model that was cut.
        layout: where its parts are.
        stage: of this rank.
        modules: of the whole stage; its divided layers are replaced in place.
        mesh: the ranks of the stage.
    """
    shared = _weights_of_several(modules.root) | _names_of_several(layout)
    shards: dict[str, Shard] = {}
    for node in problem.traced.operations:
        target = str(node.target)
        if node.op != "call_module" or layout.operations[node.name] != stage or len(node.all_input_nodes) != 1:
            continue
        layer, given = modules.root.get_submodule(target), record(node.all_input_nodes[0]).value
        names = {f"{target}.{name}" for name, _ in layer.named_parameters()}
        if isinstance(layer, DividedLayer) or not names or not isinstance(given, Tensor):
            continue
        if names - modules.parameters.keys() or not shared.isdisjoint(names):
            continue
        if of_module(layer, [tuple(given.shape)], tuple(record(node).value.shape))["kind"] not in (
            "convolution",
            "linear",
        ):
            continue
        divided = DividedLayer(layer, mesh, given)
        modules.root.set_submodule(target, divided)
        shards |= {f"{target}.{name}": replace(s, name=f"{target}.{name}") for name, s in divided.shards.items()}
    own = {name: modules.root.get_parameter(name) if name in shards else p for name, p in modules.parameters.items()}
    return replace(modules, parameters=own), shards


def _weights_of_several(root: nn.Module) -> set[str]:
    """Names of the parameters in `root` that are there more than once."""
    places = [(name, id(p)) for name, p in root.named_parameters(remove_duplicate=False)]
    counts = Counter(key for _, key in places)
    return {name for name, key in places if counts[key] > 1}


def _names_of_several(layout: StageLayout) -> set[str]:
    """Names of the parameters that more than one stage uses."""
    counts = Counter(name for names in layout.parameters for name in names)
    return {name for name, count in counts.items() if count > 1}


def over_world(shard: Shard, team: Sequence[int], size: int) -> Shard:
    """`shard`, which the ranks `team` hold, among all ranks: the others have nothing of it."""
    parts = tuple(
        (dim, tuple(own[team.index(rank)] if rank in team else () for rank in range(size)))
        for dim, own in shard.layout.parts
    )
    return replace(shard, layout=Layout(shard.layout.state, parts))


def nothing_of(shard: Shard, like: Tensor, device: torch.device) -> Tensor:
    """What a rank has of a divided tensor that is not on its stage; `like` has its type."""
    divided = {dim for dim, _ in shard.layout.parts}
    sizes = [0 if dim in divided else size for dim, size in enumerate(shard.shape)]
    return torch.empty(sizes, dtype=like.dtype, device=device)
