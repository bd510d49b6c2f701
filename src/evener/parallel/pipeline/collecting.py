"""Brings what the stages of a pipeline hold together on the first rank, one tensor at a time."""

from __future__ import annotations

from collections.abc import Mapping

import safetensors.torch
from torch import Tensor

from evener.comm.group import Group


def collect_tensors(group: Group, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of all ranks on the first one, those of a name that several have once; elsewhere none.

    Every rank of `group` calls this, with none if it has nothing to add. The tensors of others come on the CPU.
    """
    if not group.is_leader:
        assert group.mesh is not None
        for name, tensor in own.items():
            group.mesh.send_to(0, safetensors.torch.save({name: tensor.detach().cpu().contiguous()}))
        group.mesh.send_to(0, b"")
        return {}
    found = {name: tensor.detach() for name, tensor in own.items()}
    for rank in range(1, group.size):
        assert group.mesh is not None
        while message := group.mesh.receive_from(rank):
            for name, tensor in safetensors.torch.load(message).items():
                found.setdefault(name, tensor)
    return found
