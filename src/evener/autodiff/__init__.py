"""The thin engine: automatic differentiation with PyTorch's names on NumPy alone.

    from evener import autodiff as ad
    from evener.autodiff import nn, optim, functional as F

    model = nn.Sequential(nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = optim.SGD(model.parameters(), lr=0.01)
    arena = ad.Arena()
    for images, labels in batches:
        with arena:
            optimizer.zero_grad()
            F.cross_entropy(model(ad.from_numpy(images)), ad.from_numpy(labels)).backward()
            optimizer.step()

In the order in which a step passes: `tensors` and `functional` ask `rules` (a table) how to compute on a `backends`
array, in memory of an `arena`; `graph` walks back and adds gradients to the flat buffers of `parameters`; `optim` makes
one pass over them. It stands alone: nothing of Evener is imported here.
"""

from evener.autodiff import functional, nn, optim
from evener.autodiff.arena import Arena
from evener.autodiff.backends import Backend, NumpyBackend, default_backend, set_default_backend
from evener.autodiff.checker import gradcheck
from evener.autodiff.errors import AutodiffError
from evener.autodiff.files import load_file, save_file
from evener.autodiff.graph import is_grad_enabled, no_grad
from evener.autodiff.parameters import Parameter, ParameterArena
from evener.autodiff.randomness import get_rng_state, manual_seed, rand, randint, randn, randperm, set_rng_state
from evener.autodiff.tensors import Tensor, arange, cat, from_numpy, full, ones, stack, tensor, where, zeros

__all__ = [
    "Arena",
    "AutodiffError",
    "Backend",
    "NumpyBackend",
    "Parameter",
    "ParameterArena",
    "Tensor",
    "arange",
    "cat",
    "default_backend",
    "from_numpy",
    "full",
    "functional",
    "get_rng_state",
    "gradcheck",
    "is_grad_enabled",
    "load_file",
    "manual_seed",
    "nn",
    "no_grad",
    "ones",
    "optim",
    "rand",
    "randint",
    "randn",
    "randperm",
    "save_file",
    "set_default_backend",
    "set_rng_state",
    "stack",
    "tensor",
    "where",
    "zeros",
]
