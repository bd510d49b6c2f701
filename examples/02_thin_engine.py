"""Training without PyTorch: the thin engine on NumPy alone, for machines with one core and little memory.

    python examples/02_thin_engine.py                     # XOR, in a second
    python examples/02_thin_engine.py --mnist FOLDER      # handwritten digits: 5000 steps in about two seconds

Whoever knows PyTorch can read this: names and meanings are the same. New is the arena: what is made inside
`with arena:` takes its memory from there, and leaving the block takes all of it back at once.
"""

import argparse
import time
from pathlib import Path

import numpy as np

from evener import autodiff as ad
from evener.autodiff import functional as F
from evener.autodiff import nn, optim


def learn_xor() -> None:
    """Two inputs, one of which is 1: what no single layer can tell."""
    ad.manual_seed(1)
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1), nn.Sigmoid())
    optimizer = optim.Adam(model.parameters(), lr=0.05)
    inputs = ad.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    targets = ad.tensor([[0.0], [1.0], [1.0], [0.0]])
    arena = ad.Arena()
    for step in range(1, 401):
        with arena:
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            if step % 100 == 0:
                print(f"step {step}: loss {loss.item():.5f}")
    for pair, output in zip(inputs.tolist(), model(inputs).tolist(), strict=True):
        print(f"{pair[0]:.0f} xor {pair[1]:.0f} = {output[0]:.2f}")


class Digits(nn.Module):
    """[N, 784] -> logarithms of ten probabilities [N, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(784, 32)
        self.output = nn.Linear(32, 10)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -1.0, 1.0)

    def forward(self, images: ad.Tensor) -> ad.Tensor:
        return F.log_softmax(self.output(F.relu(self.hidden(images))), 1)


def learn_digits(folder: Path, updates: int) -> None:
    """Four fifths of MNIST's training images to learn from, one fifth to validate with."""
    from evener.data.mnist import read_mnist

    pixels, classes = read_mnist(folder, "train")
    images, labels = pixels.reshape(-1, 784).astype(np.float32) / 255, classes.astype(np.int64)
    order = np.random.default_rng(0).permutation(len(images))
    training, validation = np.split(order, [len(order) * 4 // 5])

    ad.manual_seed(0)
    model = Digits()
    optimizer = optim.SGD(model.parameters(), lr=0.01)
    arena, rng = ad.Arena(), np.random.default_rng(1)
    start = time.perf_counter()
    for update in range(1, updates + 1):
        batch = rng.choice(training, 32)
        with arena:
            optimizer.zero_grad()
            loss = F.nll_loss(model(ad.from_numpy(images[batch])), ad.from_numpy(labels[batch]))
            loss.backward()
            optimizer.step()
            if update % 1000 == 0:
                print(f"update {update}: loss {loss.item():.3f}")
    seconds = time.perf_counter() - start
    with ad.no_grad():
        guesses = model(ad.from_numpy(images[validation])).argmax(1).numpy()
    accuracy = (guesses == labels[validation]).mean()
    print(f"{updates} updates in {seconds:.1f} s; {accuracy:.2%} of {len(validation)} validation images are right")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mnist", type=Path, metavar="FOLDER", help="that holds MNIST's four IDX files")
    parser.add_argument("--updates", type=int, default=5000)
    options = parser.parse_args()
    if options.mnist is None:
        learn_xor()
    else:
        learn_digits(options.mnist, options.updates)


if __name__ == "__main__":
    main()
