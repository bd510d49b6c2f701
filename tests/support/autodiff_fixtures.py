"""Tests that ask for `backend` run once with each back end of the thin engine as the default one.

Every run of pytest loads this file, whichever tests it is for: PyTorch is imported only for those of the thin engine.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from evener.autodiff import Backend, NumpyBackend, manual_seed, set_default_backend


@pytest.fixture(params=["numpy", "torch"])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    chosen = NumpyBackend() if request.param == "numpy" else _torch_backend()
    before = set_default_backend(chosen)
    yield chosen
    set_default_backend(before)


@pytest.fixture(autouse=True)
def _seeded_on_one_thread(request: pytest.FixtureRequest) -> Iterator[None]:
    if "autodiff" not in request.path.parts:
        yield
        return
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    manual_seed(0)
    yield
    torch.set_num_threads(threads)


def _torch_backend() -> Backend:
    from evener.autodiff.backends.torch_backend import TorchBackend

    return TorchBackend()
