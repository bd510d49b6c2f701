"""Modules with PyTorch's names, state and initial values."""

from evener.autodiff.nn import init
from evener.autodiff.nn.layers import (
    GELU,
    AvgPool2d,
    BatchNorm2d,
    Conv2d,
    CrossEntropyLoss,
    Dropout,
    Embedding,
    Flatten,
    LayerNorm,
    Linear,
    LogSoftmax,
    MaxPool2d,
    MSELoss,
    MultiheadAttention,
    NLLLoss,
    ReLU,
    Sigmoid,
    Softmax,
    Tanh,
)
from evener.autodiff.nn.module import Module, ModuleList, Sequential
from evener.autodiff.parameters import Parameter

__all__ = [
    "GELU",
    "AvgPool2d",
    "BatchNorm2d",
    "Conv2d",
    "CrossEntropyLoss",
    "Dropout",
    "Embedding",
    "Flatten",
    "LayerNorm",
    "Linear",
    "LogSoftmax",
    "MSELoss",
    "MaxPool2d",
    "Module",
    "ModuleList",
    "MultiheadAttention",
    "NLLLoss",
    "Parameter",
    "ReLU",
    "Sequential",
    "Sigmoid",
    "Softmax",
    "Tanh",
    "init",
]
