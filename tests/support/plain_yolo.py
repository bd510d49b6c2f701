"""Plain `yolo train` of one process, given what nodes have: the images of every batch, and what is drawn for each.

Loop, model, loss, BatchNorm and validation are Ultralytics' own; only its order of images, and the random numbers of
their transforms, are others. So what differs from a training on nodes is what dividing a batch makes different.
"""

from __future__ import annotations

from typing import Any

import torch

from evener.data.sampler import Division, ShuffledSampler
from evener.frontends.yolo.sharded_loader import ShardedLoader
from evener.oracle.apportion import NodeCost


def in_order_of_nodes(base: Any, *, is_backwards: bool = False) -> type:
    """The trainer class `base` of a task, whose training batches are those of all nodes.

    Args:
        base: of Ultralytics.
        is_backwards: whether the images of every batch lie in the opposite order, so that sums are rounded otherwise.
    """

    def get_dataloader(self: Any, dataset_path: Any, batch_size: int = 16, rank: int = -1, mode: str = "train") -> Any:
        plain = base.get_dataloader(self, dataset_path, batch_size, rank, mode)
        if mode != "train":
            return plain
        if is_backwards:
            collate = plain.collate_fn
            plain.collate_fn = lambda samples: collate(samples[::-1])
        sampler = ShuffledSampler(
            count=len(plain.dataset),
            batch_size=plain.batch_size,
            accumulate=1,
            seed=self.args.seed,
            rank=0,
            division=Division([NodeCost(unit_seconds=1.0)]),
        )
        return ShardedLoader(plain, lambda: sampler, seed=self.args.seed, epoch=lambda: self.epoch)

    return type(f"Ordered{base.__name__}", (base,), {"get_dataloader": get_dataloader})


@torch.no_grad()
def round_otherwise(trainer: Any) -> None:
    """Have every weight of a trainer's model be the next number above or below it, as if it were rounded otherwise."""
    generator = torch.Generator().manual_seed(0)
    for weight in trainer.model.parameters():
        up = torch.randint(0, 2, weight.shape, generator=generator).to(weight.device)
        weight.copy_(torch.nextafter(weight, (2.0 * up - 1) * torch.inf))
