"""Modules, with PyTorch's names, state and first values."""

from evener.autodiff.nn import init
from evener.autodiff.nn.attention import MultiheadAttention
from evener.autodiff.nn.containers import ModuleList, Sequential
from evener.autodiff.nn.functions import GELU, Dropout, Flatten, LogSoftmax, ReLU, Sigmoid, Softmax, Tanh
from evener.autodiff.nn.images import AvgPool2d, Conv2d, MaxPool2d
from evener.autodiff.nn.linear import Embedding, Linear
from evener.autodiff.nn.losses import CrossEntropyLoss, MSELoss, NLLLoss
from evener.autodiff.nn.module import Module
from evener.autodiff.nn.normalisation import BatchNorm2d, LayerNorm
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
