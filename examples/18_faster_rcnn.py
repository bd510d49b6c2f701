"""torchvision's Faster R-CNN: batches are lists of images and of boxes, whose number differs from image to image.

    evener run examples/18_faster_rcnn.py --local-nodes 1.0,0.5                    needs: pip install -e '.[vision]'

Which anchors and proposals it learns from, torchvision draws anew in every step, and each node for its own images:
losses are alike on any number of nodes, not equal. The comparison before the first step draws alike, and has to hold.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.ops import MultiScaleRoIAlign, box_iou

import evener  # 1

SIZE = 64
Sample: TypeAlias = tuple[Tensor, dict[str, Tensor]]


def sample(draw: torch.Generator) -> Sample:
    """An image (3, H, W) with one to three squares, bright (class 1) or dark (class 2), and where they are."""
    image, count = 0.5 + 0.05 * torch.randn(3, SIZE, SIZE, generator=draw), int(torch.randint(1, 4, (), generator=draw))
    corners, sides = torch.randint(0, 40, (count, 2), generator=draw), torch.randint(12, 24, (count, 1), generator=draw)
    labels = torch.randint(1, 3, (count,), generator=draw)
    for (x, y), side, label in zip(corners.tolist(), sides[:, 0].tolist(), labels.tolist(), strict=True):
        image[:, y : y + side, x : x + side] = 2.0 - label
    return image, {"boxes": torch.cat([corners, corners + sides], 1).float(), "labels": labels}


def collate(samples: list[Sample]) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Lists, as torchvision's detectors take them."""
    return [image for image, _ in samples], [target for _, target in samples]


def detector() -> nn.Module:
    """A small one, which looks at as many anchors and proposals of each image: its loss is a mean over images."""
    widths, layers = (3, 16, 32, 32), []
    for before, after in pairwise(widths):
        layers += [nn.Conv2d(before, after, 3, 2, 1), nn.GroupNorm(4, after), nn.ReLU()]
    backbone: Any = nn.Sequential(*layers)
    backbone.out_channels = widths[-1]
    model: nn.Module = FasterRCNN(
        backbone,
        num_classes=3,
        min_size=SIZE,
        max_size=SIZE,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
        rpn_anchor_generator=AnchorGenerator(sizes=((12, 18, 24),), aspect_ratios=((1.0,),)),
        rpn_batch_size_per_image=32,
        rpn_pre_nms_top_n_train=64,
        rpn_pre_nms_top_n_test=32,
        rpn_nms_thresh=0.9,
        box_roi_pool=MultiScaleRoIAlign(featmap_names=["0"], output_size=4, sampling_ratio=2),
        box_batch_size_per_image=32,
    )
    return model


@torch.no_grad()
def found_in(model: nn.Module, loader: Any, device: torch.device) -> Tensor:
    """(boxes that overlap by half with one of their class that the model is sure of, all boxes) of this node's part."""
    model.eval()
    sums = torch.zeros(2)
    for images, targets in loader:
        for made, target in zip(model([image.to(device) for image in images]), targets, strict=True):
            sure = made["scores"] > 0.5
            overlaps = box_iou(target["boxes"], made["boxes"][sure].cpu()) > 0.5
            alike = target["labels"][:, None] == made["labels"][sure].cpu()
            sums += torch.tensor([float((overlaps & alike).any(1).sum()), len(target["labels"])])
    return sums


def main() -> None:
    """Train it, and look how many boxes it finds."""
    run = evener.join()  # 2
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(0)
    train: Any = [sample(draw) for _ in range(64)]
    test: Any = [sample(draw) for _ in range(16)]
    loader: Any = DataLoader(train, 8, shuffle=True, collate_fn=collate)
    tests: Any = DataLoader(test, 8, collate_fn=collate)
    model = detector()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer, loader, tests = run.prepare(model, optimizer, loader, tests)  # 3
    for epoch in run.epochs(4):  # 4
        model.train()
        total = 0.0
        for images, targets in loader:
            there = [{name: value.to(run.device) for name, value in target.items()} for target in targets]
            loss = sum(model([image.to(run.device) for image in images], there).values())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += float(run.mean(loss))  # 5
        found, boxes = run.sum(found_in(model, tests, run.device)).tolist()  # 6
        print(f"epoch {epoch + 1}  loss {total / len(loader):.3f}  found {found:.0f} of {boxes:.0f} boxes")


if __name__ == "__main__":
    main()
