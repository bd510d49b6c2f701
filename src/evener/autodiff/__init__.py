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
one pass over them. It is self-contained and imports nothing of Evener.
"""

from evener.autodiff import functional, nn, optim
from evener.autodiff.arena import Arena
from evener.autodiff.backends.interface import Backend
from evener.autodiff.backends.numpy_backend import NumpyBackend, default_backend, set_default_backend
from evener.autodiff.checker import gradcheck
from evener.autodiff.errors import AutodiffError
from evener.autodiff.graph import is_grad_enabled, no_grad
from evener.autodiff.parameters import Parameter, ParameterArena
from evener.autodiff.tensors.creation import (
    arange,
    cat,
    from_numpy,
    full,
    get_rng_state,
    load_file,
    manual_seed,
    ones,
    rand,
    randint,
    randn,
    randperm,
    same_draws,
    save_file,
    set_rng_state,
    stack,
    tensor,
    where,
    zeros,
)
from evener.autodiff.tensors.tensor import Tensor

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
    "same_draws",
    "save_file",
    "set_default_backend",
    "set_rng_state",
    "stack",
    "tensor",
    "where",
    "zeros",
]
