"""Weights in files: safetensors, the format that PyTorch's world reads and writes too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from evener.autodiff.tensors import Tensor, tensor

if TYPE_CHECKING:
    from pathlib import Path


def save_file(state: Mapping[str, Any], path: Path | str) -> None:
    """Write a state (`model.state_dict()`, or arrays by name) to a safetensors file."""
    from safetensors.numpy import save_file as write  # 50 ms that only who saves should pay

    write({name: _contiguous(value) for name, value in state.items()}, str(path))


def load_file(path: Path | str) -> dict[str, Tensor]:
    """The tensors of a safetensors file by name, for `model.load_state_dict`."""
    from safetensors.numpy import load_file as read

    return {name: tensor(array) for name, array in read(str(path)).items()}


def _contiguous(value: Any) -> np.ndarray[Any, Any]:
    return np.array(value.detach().numpy() if isinstance(value, Tensor) else value, order="C")
