"""All strategies that divide layers: filter, channel, spatial, hybrid and sharded, also combined with data parallelism.

A `DividedModel` is the `ParallelModel` of these strategies. It holds a `ShardedModule`, one rank's part of a model; the
strategy `sharded` is one of them.
Outputs, gradients and weights equal those of one process. Every rank of a replica passes in the replica's whole batch,
gets the whole outputs, and computes the loss of all its samples. Gradients of its weights are complete when
`backward()` returns.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from evener.comm.exchange import Route
from evener.oracle.division.layout import ALIKE, WHOLE, Layout, length
from evener.oracle.division.pieces import Piece
from evener.oracle.division.plan import ReplicaPlan, Shard, plan_replica, plan_replicas
from evener.parallel.drawn_ops import refuse_own_draws
from evener.parallel.full_state import gather_tensors, own_part, pieces_of
from evener.parallel.gradient_hooks import GradientHooks, copied
from evener.parallel.gradient_sums import GradientSums
from evener.parallel.norm_forward import compute_by
from evener.parallel.norm_statistics import DataAxis
from evener.parallel.op_call import Nest, OpGraph
from evener.parallel.op_graph import op_graph, unknown_undivided
from evener.parallel.optimizer import HeldModel, HeldParameter
from evener.parallel.optimizer_probe import Scope
from evener.parallel.parallel_model import Criterion
from evener.parallel.process_mesh import ProcessMesh
from evener.parallel.rank_program import RankProgram
from evener.parallel.redistribute import part_of, regions
from evener.parallel.refusals import (
    Pass,
    gather_sample_counts,
    refuse_parts,
    refuse_sharded_hooks,
    refuse_ties,
    tensors_in_order,
)
from evener.parallel.shared_statistics import SharedNorms, uncounted
from evener.records.errors import InvalidInput
from evener.system.accelerators import CPU
from evener.tracer.meta_model import on_meta


class ShardedModule(nn.Module):
    """This rank's part of a model.

    Args:
        model: The whole model, on this rank's device; only the parts that this rank needs are copied.
        mesh: The position of this rank.
        inputs: Example inputs; their shape decides how layers are divided.
        recompute: Whether backward recomputes activations instead of keeping them.
        compiles: Whether operations between exchanges are compiled.

    Attributes:
        part: This rank's part of the model, under the model's names.
        plans: The plan of every replica, for the example.
        shards: The weights of the operations, by name.
        share: This replica's share of the last batch's samples: the factor of its mean loss in the whole batch's.
        sums: Completes gradients during backward.
        hooks: The user's hooks on gradients of parameters.

    Raises:
        InvalidInput: The model cannot be traced, or has a weight that cannot be divided.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: ProcessMesh,
        inputs: Sequence[Tensor],
        recompute: bool = False,
        compiles: bool = False,
    ) -> None:
        super().__init__()
        self.mesh, self._recompute, self._compiles = mesh, recompute, compiles
        self._samples = _Samples((0, len(inputs[0]), len(inputs[0])))
        self.hooks = GradientHooks(model)
        self._op_graph = partial(op_graph, on_meta(model), device=mesh.group.device, whole=self.hooks.names)
        graph = self._op_graph(inputs, training=True)
        self.plans = plan_replicas(graph.network, mesh.arrangement)
        self.shards = self.plan.shards
        refuse_sharded_hooks(self.hooks.names, self.shards)
        self.part = sharded_copy(model, self.plan, mesh.group.rank)
        self._normalise()
        self._random = any(call.is_random or isinstance(call.function, nn.Dropout) for call in graph.calls)
        self._random |= any(isinstance(module, nn.Dropout) for module in model.modules())
        self._programs = {_key(inputs, True): self._program(graph, self.plan)}
        evaluating = self._op_graph(inputs, training=False)  # untraceable models are refused before the first step
        self._add_program(inputs, evaluating, training=False)
        if len(self.plans) > 1:
            refuse_own_draws(graph, len(inputs[0]), training=True)
            refuse_own_draws(evaluating, len(inputs[0]), training=False)
        self._present = True
        self.share = 1.0
        self.sums = GradientSums(self.part, self.plans, mesh)

    @property
    def plan(self) -> ReplicaPlan:
        """The plan of this replica, for the example."""
        return self.plans[self.mesh.index]

    def forward(self, *inputs: Tensor) -> Nest:
        """Return the model's outputs for the samples of this replica, whole on every rank of it.

        Raises InvalidInput if ranks of the replica have different shapes, modes or random generator states.
        """
        self._agree(inputs)
        return self._program_of(inputs, self.training)(inputs)

    @contextmanager
    def without_samples(self) -> Iterator[None]:
        """Pass a stand-in sample that does not count, so that this replica joins every collective."""
        self._present = False
        try:
            with uncounted(self):
                yield
        finally:
            self._present = True

    def gather_weights(self) -> dict[str, Tensor]:
        """Return the state dict of the whole model on the replica's first rank, and an empty one elsewhere.

        All ranks of the replica call this.
        """
        return gather_tensors(self.mesh.group, self.part.state_dict(), self.state_shards())

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Load this rank's part of every weight from a state dict of the whole model.

        Raises InvalidInput if the names or shapes differ.
        """
        state = self.part.state_dict()
        if state.keys() != weights.keys():
            missing, unknown = sorted(state.keys() - weights.keys()), sorted(weights.keys() - state.keys())
            raise InvalidInput(
                f"the state dict lacks {missing or 'nothing'} and has unknown names: {unknown or 'none'}"
            )
        for name, shard in self.state_shards().items():
            state[name].copy_(own_part(shard, weights[name], self.mesh.group.rank))

    def held(self) -> HeldModel:
        """Describe the parameters of `part`, as the ranks of the replica have them."""
        group, shards = self.mesh.group, self.state_shards()
        parameters = []
        for name, parameter in self.part.named_parameters():
            layout, shape, route = shards[name].layout, shards[name].shape, None
            if layout.state == "split":
                route = Route(regions(layout, shape, group.size), regions(WHOLE, shape, group.size))
            parameters.append(HeldParameter(name, shape, parameter, route))
        suffices: Scope = "element" if any(one.route for one in parameters) else "model"
        return HeldModel(group, parameters, suffices, shards, is_first=self.mesh.index == 0)

    def state_shards(self) -> dict[str, Shard]:
        """Return by name how every tensor of the state dict is held. Tensors of no operation are alike on all ranks."""
        state = self.part.state_dict(keep_vars=True)
        by_tensor = {id(state[name]): shard for name, shard in self.shards.items() if name in state}
        return {
            name: by_tensor.get(id(tensor), Shard(name, tuple(tensor.shape), ALIKE, tensor.requires_grad))
            for name, tensor in state.items()
        }

    def _agree(self, inputs: Sequence[Tensor]) -> None:
        """Check that the ranks are about to compute the same.

        In training, also exchange the replicas' numbers of samples.
        """
        group, index = (self.mesh.world if self.training else self.mesh.group), self.mesh.index
        samples = len(inputs[0]) if self._present else 0
        draws_on = inputs[0].device if self.mesh.has_same_generators else CPU
        is_drawing = self._random and self.training
        counts = gather_sample_counts(
            group, Pass.of(index, samples, inputs, self.training, draws_on if is_drawing else None)
        )
        if not self.training:
            counts, index = [samples], 0
        self._samples.now = sum(counts[:index]), counts[index], sum(counts)
        self.share = counts[index] / sum(counts)

    def _program_of(self, inputs: Sequence[Tensor], training: bool) -> RankProgram:
        if _key(inputs, training) not in self._programs:
            self._add_program(inputs, self._op_graph(inputs, training=training), training)
        return self._programs[_key(inputs, training)]

    def _add_program(self, inputs: Sequence[Tensor], graph: OpGraph, training: bool) -> None:
        graph = unknown_undivided(graph, self.plan)
        plan = plan_replica(graph.network, self.mesh.arrangement.division, self.mesh.replica, before=self.plan)
        refuse_parts(self.part, self.shards, plan.shards)
        self._random |= training and any(call.is_random for call in graph.calls)
        self._programs[_key(inputs, training)] = self._program(graph, plan)

    def _program(self, graph: OpGraph, plan: ReplicaPlan) -> RankProgram:
        return RankProgram(graph, plan, self.part, self.mesh, self._samples, self._recompute, self._compiles)

    def _normalise(self) -> None:
        """Give BatchNorms whose samples or pixels are divided the statistics of the whole batch."""
        network = self.plan.network
        for i, operation in enumerate(network.operations):
            layer = self.part.get_submodule(operation.name) if operation.kind == "batch_norm" else None
            if isinstance(layer, _BatchNorm):
                layouts = tuple(plan.steps[i].choice.gives for plan in self.plans)
                shared = self._shared(layouts, operation.shape[1])
                if shared is not None:
                    compute_by(layer, shared)

    def _shared(self, layouts: tuple[Layout, ...], channels: int) -> SharedNorms | None:
        """Return the computation of a norm whose values have these layouts; None if this rank has all it needs."""
        mesh = self.mesh
        if layouts[mesh.index].along(2) is not None:
            return SharedNorms(lambda _: mesh.world, mesh.group) if mesh.world.size > 1 else None
        if len(layouts) == 1:
            return None
        axis = DataAxis(mesh, layouts, channels)
        return SharedNorms(lambda _: axis)


class _Samples:
    """The samples of the batch that are this replica's. Programs refer to this object instead of the model.

    Args:
        now: First sample of this replica, its number of samples, number of all samples.
    """

    def __init__(self, now: tuple[int, int, int]) -> None:
        self.now = now

    def __call__(self) -> tuple[int, int, int]:
        return self.now


def _key(inputs: Sequence[Tensor], training: bool) -> tuple[Any, ...]:
    return (training, *(tuple(x.shape) for x in inputs))


def sharded_copy(model: nn.Module, plan: ReplicaPlan, rank: int) -> nn.Module:
    """Return a copy of `model` whose layers have only the filters or channels of `rank`; it does nothing in place.

    Parameters and buffers keep the model's names; only their shapes shrink.

    """
    shards = plan.shards
    refuse_ties(model, shards)
    memo: dict[int, Any] = {}
    for name, shard in shards.items():
        if shard.layout.state == "split":
            tensor: Tensor = operator.attrgetter(name)(model)
            part_tensor = part_of(tensor.detach(), shard.layout.region(rank, shard.shape)).clone()
            memo[id(tensor)] = (
                nn.Parameter(part_tensor, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else part_tensor
            )
    part = copied(model, memo)
    GradientHooks.taken_off(part)
    modules: list[Any] = list(part.modules())
    for module in modules:
        if hasattr(module, "inplace"):
            module.inplace = False
    for operation, step in zip(plan.network.operations, plan.steps, strict=True):
        reads = step.choice.needs[0].along(1) if step.choice.mode == "filter" else None
        if operation.groups > 1 and reads is not None:
            width = plan.network.operations[operation.inputs[0]].shape[1] // operation.groups
            layer: Any = part.get_submodule(operation.name)
            layer.groups = max(1, length(reads[rank]) // width)
    return part


class DividedModel:
    """A model whose layers the ranks of a replica divide. The arguments are those of `ShardedModule`."""

    rng_stream = 0
    """Random numbers are drawn for the samples of all replicas, as in a single process."""

    def __init__(
        self,
        model: nn.Module,
        mesh: ProcessMesh,
        example: Any,
        criterion: Criterion,
        recompute: bool = False,
        compiles: bool = False,
    ) -> None:
        self.group, self.replica, self.is_reporter = mesh.world, mesh.index, mesh.group.is_leader
        self._criterion = criterion
        self.model = ShardedModule(model, mesh, tensors_in_order(example), recompute, compiles)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters of this rank's part."""
        return self.model.part.parameters()

    def train(self, mode: bool = True) -> nn.Module:
        """Set training or evaluation mode."""
        return self.model.train(mode)

    def add_gradients(self, inputs: Any, targets: Any, *, samples: int, total: int, is_last: bool) -> Tensor:
        """Run forward and backward; every rank computes the loss of all samples of its replica."""
        travelling = nullcontext() if is_last else self.model.sums.accumulating()
        present = nullcontext() if samples else self.model.without_samples()
        with travelling, present:
            loss = self._criterion.backward(self._outputs, inputs, targets, samples / total) * self.is_reporter
        if is_last:
            self.model.hooks.run(self.model.part.named_parameters())
        return loss

    @torch.no_grad()
    def predict(self, inputs: Any) -> Any:
        """Return the outputs on the replica's first rank, else None. All ranks of the replica call this."""
        with self._criterion.autocast():
            outputs = self._outputs(inputs)
        return outputs if self.is_reporter else None

    def _outputs(self, inputs: Any) -> Any:
        return self.model(*tensors_in_order(inputs))

    def clip(self, largest: float) -> None:
        """Scale all gradients of the model to a norm of at most `largest`."""
        self.model.sums.clip(largest)

    def gather_weights(self) -> dict[str, Tensor]:
        """Return the state dict of the whole model on the first rank, and an empty one elsewhere."""
        weights = self.model.gather_weights() if self.replica == 0 else {}
        return weights if self.group.is_leader else {}

    def own_weights(self) -> tuple[dict[str, Tensor], dict[str, Piece]]:
        """Return this rank's state dict, and by name the piece that each partial tensor is."""
        model = self.model
        return model.part.state_dict(), pieces_of(model.state_shards(), model.mesh.group.rank)

    def buffers(self) -> Iterator[Tensor]:
        """Return the buffers of this rank's part."""
        return self.model.part.buffers()

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Load this rank's part from the state dict of a whole model."""
        self.model.load_weights(weights)

    def held(self) -> HeldModel:
        """Describe the parameters as the ranks of the replica have them."""
        return self.model.held()
