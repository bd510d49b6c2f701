"""With this folder on PYTHONPATH, Python processes of a test can import torchvision: see `torchvision_operators`."""

import torchvision_operators  # noqa: F401
