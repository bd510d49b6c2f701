"""Stages whose layers several ranks divide: a pipeline of teams, each of which divides its stage's layers.

     lane 0    rank 0  ---->  rank 2        a lane sends whole activations and gradients
               |   |          |   |         within a stage, the ranks of all lanes divide every convolution and linear
     lane 1    rank 1  ---->  rank 3        layer, whose outputs are whole on all of them
              stage 0        stage 1

A lane is thus an ordinary pipeline, and every layer is divided according to the oracle's table. All ranks of a stage
compute undivided layers, such as norms, alike.
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
from evener.oracle.division.rules import DivisionName
from evener.parallel.op_call import OpGraph
from evener.parallel.op_graph import op_graph
from evener.parallel.op_registry import of_module
from evener.parallel.pipeline.partition_problem import PartitionProblem
from evener.parallel.pipeline.stage_layout import StageLayout
from evener.parallel.pipeline.stage_modules import StageModules
from evener.parallel.process_mesh import ProcessMesh
from evener.parallel.rank_program import RankProgram
from evener.parallel.sharded import sharded_copy
from evener.records.errors import require
from evener.tracer.ir import record
from evener.tracer.meta_model import on_meta


@dataclass(frozen=True, kw_only=True)
class StageTeams:
    """The ranks of each stage, and the division of its layers.

    Attributes:
        division: `filter`, `channel` or `hybrid`, which leave every value whole on all ranks.
        teams: Teams of equally many ranks, one per stage; the cut of the model decides which stage each team has.
        shares: Relative shares of a team's work, one per rank; None to use the measured speeds.
    """

    division: DivisionName
    teams: tuple[tuple[int, ...], ...]
    shares: tuple[tuple[float, ...], ...] | None = None

    def __post_init__(self) -> None:
        allowed = "filter, channel or hybrid, because these leave activations whole"
        require(self.division in ("filter", "channel", "hybrid"), "division", self.division, allowed)
        sizes = [len(team) for team in self.teams]
        require(len(set(sizes)) == 1, "teams", sizes, "of equally many ranks")
        fits = self.shares is None or sizes == [len(shares) for shares in self.shares]
        require(fits, "shares", self.shares, "one per rank")

    @property
    def lanes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that activations pass, one lane for each rank of a team."""
        return tuple(zip(*self.teams, strict=True))

    def team_of(self, rank: int) -> int:
        """Return the number of the team that `rank` belongs to."""
        return next(number for number, team in enumerate(self.teams) if rank in team)


def form_team(world: Group, teams: StageTeams, speeds: Sequence[float]) -> ProcessMesh:
    """Return this rank's position among the ranks that divide its stage. Every rank of `world` calls this.

    Args:
        world: All ranks.
        teams: The teams of all ranks.
        speeds: Relative speeds of the ranks of this team, used if there are no shares.
    """
    groups = [world.subgroup(team) for team in teams.teams]
    team_index = teams.team_of(world.rank)
    group = groups[team_index]
    assert group is not None
    group.traffic = world.traffic
    shares = teams.shares[team_index] if teams.shares is not None else tuple(speeds)
    arrangement = Arrangement(division=teams.division, replicas=(Replica(shares=shares),))
    return ProcessMesh(group, group, arrangement, 0, has_same_generators=group.has_same_generators())


class ShardedLayer(nn.Module):
    """A layer of which this rank has some filters or channels. Inputs and outputs are whole.

    Its weights have the names of the whole layer.

    Args:
        layer: The whole layer, of one input.
        mesh: The ranks that divide it.
        example: Example input; inputs of other shapes are divided in the same way.
    """

    def __init__(self, layer: nn.Module, mesh: ProcessMesh, example: Tensor) -> None:
        super().__init__()
        self._mesh = mesh
        self._whole = (on_meta(nn.Sequential(layer)),)  # a tuple hides it from this module's children
        graph = self._graph(example)
        self.plan = self._plan(graph)
        self._part = (sharded_copy(nn.Sequential(layer), self.plan, mesh.group.rank),)
        for name, parameter in self._part[0].get_submodule("0").named_parameters():
            self.register_parameter(name, parameter)
        self._programs = {tuple(example.shape): self._program(graph, self.plan)}

    @property
    def shards(self) -> dict[str, Shard]:
        """Its weights, by their names in the layer."""
        shards = {name.removeprefix("0."): shard for name, shard in self.plan.shards.items()}
        return {name: replace(shard, name=name) for name, shard in shards.items()}

    def forward(self, x: Tensor) -> Tensor:
        """Return the whole layer's output for `x`, which all ranks have."""
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
        """Plan the division of the layer.

        All ranks compute the layers before it alike, so each has its input's gradient.
        """
        (replica,) = self._mesh.arrangement.replicas
        choices = before.divided.choices if before is not None else {}
        division = self._mesh.arrangement.division
        divided = divide_network(graph.network, division, replica.size, choices, inputs=rules.alike)
        return plan_among(divided, replica)

    def _program(self, graph: OpGraph, plan: ReplicaPlan) -> RankProgram:
        samples = graph.network.operations[0].shape[0]
        return RankProgram(graph, plan, self._part[0], self._mesh, lambda: (0, samples, samples))


def shard_stage(
    problem: PartitionProblem, layout: StageLayout, stage: int, modules: StageModules, mesh: ProcessMesh
) -> tuple[StageModules, dict[str, Shard]]:
    """Return this rank's part of its stage, whose layers `mesh` divides, and the shards of their weights by name.

    Layers that share weights with another layer stay whole.

    Args:
        problem: The model that was cut.
        layout: The layout of the stages.
        stage: This rank's stage.
        modules: The whole stage; its divided layers are replaced in place.
        mesh: The ranks of the stage.
    """
    shared = _weights_of_several(modules.root) | _names_of_several(layout)
    shards: dict[str, Shard] = {}
    for node in problem.traced.operations:
        target = str(node.target)
        if node.op != "call_module" or layout.operations[node.name] != stage or len(node.all_input_nodes) != 1:
            continue
        layer, x = modules.root.get_submodule(target), record(node.all_input_nodes[0]).value
        names = {f"{target}.{name}" for name, _ in layer.named_parameters()}
        if isinstance(layer, ShardedLayer) or not names or not isinstance(x, Tensor):
            continue
        if names - modules.parameters.keys() or not shared.isdisjoint(names):
            continue
        if of_module(layer, [tuple(x.shape)], tuple(record(node).value.shape))["kind"] not in (
            "convolution",
            "linear",
        ):
            continue
        divided = ShardedLayer(layer, mesh, x)
        modules.root.set_submodule(target, divided)
        shards |= {f"{target}.{name}": replace(s, name=f"{target}.{name}") for name, s in divided.shards.items()}
    parameters = {
        name: modules.root.get_parameter(name) if name in shards else p for name, p in modules.parameters.items()
    }
    return replace(modules, parameters=parameters), shards


def _weights_of_several(root: nn.Module) -> set[str]:
    """Return names of the parameters in `root` that are there more than once."""
    places = [(name, id(p)) for name, p in root.named_parameters(remove_duplicate=False)]
    counts = Counter(key for _, key in places)
    return {name for name, key in places if counts[key] > 1}


def _names_of_several(layout: StageLayout) -> set[str]:
    """Return names of the parameters that more than one stage uses."""
    counts = Counter(name for names in layout.parameters for name in names)
    return {name for name, count in counts.items() if count > 1}


def over_world(shard: Shard, team: Sequence[int], size: int) -> Shard:
    """Return `shard`, which the ranks `team` hold, among all ranks; the others hold nothing of it."""
    parts = tuple(
        (dim, tuple(intervals[team.index(rank)] if rank in team else () for rank in range(size)))
        for dim, intervals in shard.layout.parts
    )
    return replace(shard, layout=Layout(shard.layout.state, parts))


def nothing_of(shard: Shard, like: Tensor, device: torch.device) -> Tensor:
    """Return the empty part of a divided tensor on ranks of other stages; `like` has its dtype."""
    divided = {dim for dim, _ in shard.layout.parts}
    sizes = [0 if dim in divided else size for dim, size in enumerate(shard.shape)]
    return torch.empty(sizes, dtype=like.dtype, device=device)
