"""With this folder on PYTHONPATH, Python processes of a test compute YOLO in double precision, and keep it on disk.

Ultralytics calls `float()` and `half()` where it means its usual precisions.
"""

import torch

import torchvision_operators  # noqa: F401

torch.set_default_dtype(torch.float64)
torch.Tensor.float = torch.Tensor.half = torch.Tensor.double  # type: ignore[method-assign]
