"""Recipes by what is special about them, one file a kind."""

import torchvision_operators  # noqa: F401
