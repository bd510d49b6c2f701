"""With this folder on PYTHONPATH, Ultralytics takes the devices of `support.standin`, whose kind it does not know."""

import importlib.abc
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import torch

import torchvision_operators  # noqa: F401

_MODULE = "ultralytics.utils.torch_utils"


def _take_stand_ins(module: ModuleType) -> None:
    parse, select = module.parse_device, module.select_device
    module.parse_device = lambda device="": device if "standin" in str(device) else parse(device)  # type: ignore[attr-defined]

    def select_device(device: Any = "", **words: Any) -> torch.device:
        selected = torch.device(device) if "standin" in str(device) else select(device, **words)
        assert isinstance(selected, torch.device)
        return selected

    module.select_device = select_device  # type: ignore[attr-defined]


class _Finder(importlib.abc.MetaPathFinder):
    """Changes the module when it is imported."""

    def find_spec(self, name: str, path: Any, _target: Any = None) -> ModuleSpec | None:
        """Return the spec of the module, whose loader also changes it; None for all others."""
        spec = PathFinder.find_spec(name, path) if name == _MODULE else None
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            _take_stand_ins(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder())
