"""Training in the manner of PyTorch's ImageNet example: a ResNet, crops and flips, a schedule, top-1 and top-5.

    evener run examples/10_imagenet.py --local-nodes 1.0,0.5                     on random images, to see it run
    evener run examples/10_imagenet.py --data IMAGENET --depths 3,4,6,3 --width 64 --size 224 --batch-size 256

IMAGENET holds train/CLASS/*.JPEG and val/CLASS/*.JPEG, which torchvision reads. The batch size is that of all nodes
together, so that learning rate and schedule are those of one machine.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

import evener  # 1
from evener.experiments.models.resnet import resnet152


def main() -> None:
    """Train, evaluate after every epoch, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--depths", default="1,1,2,1", help="blocks of the four stages; 3,4,6,3 is a ResNet-50")
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=24)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--workers", type=int, default=0)
    words = parser.parse_args()
    run = evener.join()  # 2
    torch.manual_seed(0)
    train, test = (data_of(words.data, part, words.size) for part in ("train", "val"))
    loader = DataLoader(train, words.batch_size, shuffle=True, num_workers=words.workers)
    tests = DataLoader(test, words.batch_size, num_workers=words.workers)
    first, second, third, fourth = map(int, words.depths.split(","))
    model: torch.nn.Module = resnet152(1000 if words.data else 10, words.width, (first, second, third, fourth))
    model = model.to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * words.batch_size / 256, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30, gamma=0.1)
    model, optimizer, loader, tests = run.prepare(model, optimizer, loader, tests)  # 3
    for epoch in run.epochs(words.epochs):  # 4
        model.train()
        for images, target in loader:
            loss = F.cross_entropy(model(images.to(run.device)), target.to(run.device))
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
        scheduler.step()
        right = run.sum(evaluate(model, tests, run.device)).tolist()  # 5
        if run.leader:
            print(f"epoch {epoch + 1}  top-1 {right[0] / right[2]:.3f}  top-5 {right[1] / right[2]:.3f}")
            torch.save(run.state(model), "imagenet.pt")


@torch.no_grad()
def evaluate(model: torch.nn.Module, loader: Any, device: torch.device) -> torch.Tensor:
    """(samples whose class is first, whose class is among the first five, all) of this node's part."""
    model.eval()
    found = torch.zeros(3, dtype=torch.float64)
    for images, target in loader:
        hits = (model(images.to(device)).topk(5)[1] == target.to(device)[:, None]).cpu()
        found += torch.tensor([float(hits[:, 0].sum()), float(hits.sum()), float(len(target))])
    return found


def data_of(folder: Path | None, part: str, size: int) -> Dataset[Any]:
    """Images of a folder; or a few random ones."""
    if folder is None:
        draw, count = torch.Generator().manual_seed(0), 72 if part == "train" else 48
        return TensorDataset(
            torch.randn(count, 3, size, size, generator=draw), torch.randint(0, 10, (count,), generator=draw)
        )
    from torchvision import datasets, transforms

    crop = [transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip()]
    middle = [transforms.Resize(size * 8 // 7), transforms.CenterCrop(size)]
    scaled = transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    steps = [*(crop if part == "train" else middle), transforms.ToTensor(), scaled]
    found: Dataset[Any] = datasets.ImageFolder(str(folder / part), transforms.Compose(steps))
    return found


if __name__ == "__main__":
    main()
