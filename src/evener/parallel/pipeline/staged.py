"""Pipeline parallelism, with or without replicas, as the training loop sees it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from evener.comm.exchange import Route
from evener.comm.group import Group
from evener.oracle.division.layout import WHOLE, Region
from evener.oracle.division.pieces import Piece
from evener.oracle.division.plan import Shard
from evener.parallel.full_state import gather_tensors, pieces_of
from evener.parallel.gradient_hooks import GradientHooks
from evener.parallel.norms import has_batch_norm
from evener.parallel.optimizer import HeldModel, HeldParameter
from evener.parallel.parallel_model import Criterion
from evener.parallel.pipeline.pipeline import Pipeline
from evener.parallel.pipeline.sharded_stage import nothing_of, over_world
from evener.parallel.redistribute import regions
from evener.parallel.refusals import refuse_sharded_hooks
from evener.records.decoding import decode_json
from evener.records.errors import InvalidInput, InvalidValue
from evener.system import accelerators


class StagedModel:
    """A model in stages, one on each rank of a replica. `options` are those of the Pipeline."""

    def __init__(self, model: nn.Module, group: Group, replica: int, criterion: Criterion, **options: Any) -> None:
        self.group, self.replica, self.rng_stream = group, replica, replica
        self._criterion = criterion
        self._whole = [(name, p.detach().to("meta"), p.requires_grad) for name, p in model.named_parameters()]
        self._hooks = GradientHooks.taken_off(model)
        is_normalised = has_batch_norm(model)
        self.pipeline = Pipeline(model, loss=criterion.loss, on=group, **options)
        if (
            is_normalised and self.pipeline.micro_batches > 1
        ):  # otherwise the comparison before the first step detects it
            _refuse_moved(self.pipeline.moved_buffers())
        self.is_reporter = self.pipeline.is_reporter
        self._shards = _shards_of_all(self.pipeline, group)
        refuse_sharded_hooks(self._hooks.names, self._shards)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters of this rank's stage."""
        return self.pipeline.parameters()

    def train(self, mode: bool = True) -> Pipeline:
        """Set training or evaluation mode."""
        return self.pipeline.train(mode)

    def add_gradients(self, inputs: Any, targets: Any, *, samples: int, total: int, is_last: bool) -> Tensor:
        """Run forward and backward; the pipeline splits the batch into micro-batches itself."""
        if not is_last:
            raise InvalidValue(
                "accumulate", "several micro-batches", "1, because a pipeline makes micro-batches itself"
            )
        present = nullcontext() if samples else self.pipeline.uncounted()
        with present, self._criterion.autocast():
            loss = accelerators.wide(self.pipeline.step(inputs, targets, total if samples else math.inf).detach())
        self._hooks.run(self.pipeline.named_parameters())
        return loss if self.is_reporter else torch.zeros_like(loss)

    @torch.no_grad()
    def predict(self, inputs: Any) -> Any:
        """Return the outputs on the last stage, else None. All ranks of the replica call this."""
        with self._criterion.autocast():
            outputs = self.pipeline(inputs)
        return outputs if self.is_reporter else None

    def clip(self, largest: float) -> None:
        """Scale all gradients of the model to a norm of at most `largest`."""
        self.pipeline.clip_gradients(largest)

    def gather_weights(self) -> dict[str, Tensor]:
        """Return the state dict of the whole model on the first rank, and an empty one elsewhere."""
        absent = {name: part for name, part, _ in self._absent()}
        return gather_tensors(self.group, absent | self.pipeline.state_dict(), self._shards)

    def own_weights(self) -> tuple[dict[str, Tensor], dict[str, Piece]]:
        """Return this stage's state dict, and by name the piece of each divided tensor."""
        local = self.pipeline.state_dict()
        return local, pieces_of({name: self._shards[name] for name in local if name in self._shards}, self.group.rank)

    def buffers(self) -> Iterator[Tensor]:
        """Return the buffers of this rank's stage."""
        return self.pipeline.buffers()

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Load this rank's stage from the state dict of a whole model."""
        try:
            self.pipeline.load_state_dict(weights)
        except (InvalidValue, RuntimeError) as error:
            raise InvalidInput(" ".join(str(error).split())) from error

    def held(self) -> HeldModel:
        """Describe all parameters. The first rank that has a weight owns it."""
        local, group = dict(self.pipeline.named_parameters()), self.group
        rows = [decode_json(row) for row in group.all_gather_bytes(msgspec.json.encode(list(local)))]
        holders = {name: rank for rank, names in reversed(list(enumerate(rows))) for name in names}
        absent_parts = {name: nn.Parameter(part, trainable) for name, part, trainable in self._absent()}
        parameters = []
        for name, whole, requires_grad in self._whole:
            if name in self._shards:
                layout, shape = self._shards[name].layout, tuple(whole.shape)
                route = Route(regions(layout, shape, group.size), regions(WHOLE, shape, group.size))
                part = local[name] if name in local else absent_parts[name]
                parameters.append(HeldParameter(name, shape, part, route, is_here=name in local))
                continue
            is_here = name in local
            absent = torch.empty(0, dtype=whole.dtype, device=group.device)
            parameter = local[name] if is_here else nn.Parameter(absent, requires_grad)
            all_of: Region = (((0, whole.numel()),),)
            owned: tuple[Region, ...] = tuple(all_of if rank == holders[name] else ((),) for rank in range(group.size))
            route = Route(owned, (all_of,) * group.size)
            parameters.append(HeldParameter(name, tuple(whole.shape), parameter, route, is_here))
        return HeldModel(group, parameters, "element" if self._shards else "tensor", self._shards)

    def _absent(self) -> Iterator[tuple[str, Tensor, bool]]:
        """Yield name, empty part and trainability of the divided weights of other stages."""
        here = self.pipeline.shards
        for name, whole, requires_grad in self._whole:
            if name in self._shards and name not in here:
                yield name, nothing_of(self._shards[name], whole, self.group.device), requires_grad


def _shards_of_all(pipeline: Pipeline, group: Group) -> dict[str, Shard]:
    """Return by name how the ranks of `group` hold the weights that the ranks of a stage divide."""
    if pipeline.teams is None:
        return {}
    teams = pipeline.teams.teams
    team = teams[pipeline.teams.team_of(group.rank)]
    local = [over_world(shard, team, group.size) for shard in pipeline.shards.values()]
    rows = group.all_gather_bytes(msgspec.json.encode(local))
    shards = (shard for row in rows for shard in decode_json(row, list[Shard]))
    return {shard.name: shard for shard in shards}


def _refuse_moved(names: Sequence[str]) -> None:
    """Raise InvalidInput if every micro-batch changes a buffer."""
    for name in names:
        raise InvalidInput(
            f"{name} changes with every micro-batch of a pipeline, instead of once per step: use --micro-batches 1 or "
            "a strategy without pipelines"
        )
