"""What random recipes are made of: each part makes a module for tensors of a shape, or None where it does not fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

Shape = Sequence[int]
Part = Callable[[Shape, int], nn.Module | None]


class Do(nn.Module):
    """A function of tensors, and of the modules that it is given."""

    def __init__(self, function: Callable[..., Any], *modules: nn.Module) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(modules)

    def forward(self, x: Any) -> Any:
        return self.function(x, *self.parts)


class InTraining(nn.Module):
    """Something else in training than in evaluation."""

    def __init__(self, module: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.function = module, function

    def forward(self, x: Any) -> Any:
        return self.function(x, self.module) if self.training else self.module(x)


def _conv(shape: Shape, n: int, **settings: Any) -> nn.Conv2d:
    groups = 2 if n % 3 == 0 and shape[1] % 2 == 0 else 1
    filters = groups * (1 + n % 4)
    return nn.Conv2d(shape[1], filters, 1 + n % 3, 1 + n % 5 // 4, padding=1, groups=groups, bias=n % 7 > 0, **settings)


def _same(shape: Shape, **settings: Any) -> nn.Conv2d:
    return nn.Conv2d(shape[1], shape[1], 3, padding=1, **settings)


def _same_linear(shape: Shape) -> nn.Linear:
    return nn.Linear(shape[-1], shape[-1])


def _hooked(module: Any, n: int) -> Any:
    if n % 4 == 0:
        module.register_forward_hook(lambda m, args, out: out * 0.7)
    elif n % 4 == 1:
        module.register_forward_pre_hook(lambda m, args: (args[0].tanh(),))
    elif n % 4 == 2:
        module.register_full_backward_hook(
            lambda m, grads, outs: tuple(None if g is None else g.clamp(-1e-2, 1e-2) for g in grads)
        )
    else:
        module.weight.register_hook(lambda grad: grad - grad.mean())
    return module


def _tuple_of(first: nn.Module, second: nn.Module) -> nn.Module:
    inner = Do(lambda x, a, b: (a(x), b(x)), first, second)

    def both(x: Any, pair: Any) -> Any:
        a, b = pair(x)
        return a + b.sigmoid()

    return Do(both, inner)


def _half_relu(x: Any, module: Any) -> Any:
    y = module(x)
    y.narrow(1, 0, y.shape[1] // 2).relu_()
    return y


def _slice_scaled(x: Any, module: Any) -> Any:
    y = module(x)
    y[:, :1] *= 0.5
    return y


def _scaled_without_grad(x: Any, module: Any) -> Any:
    y = module(x)
    with torch.no_grad():
        scale = 1 + y.abs().mean(tuple(range(1, y.dim())), keepdim=True)
    return y / scale


def _recurrent(shape: Shape, n: int) -> nn.Module:
    kind: Any = (nn.LSTM, nn.GRU, nn.RNN)[n % 3]
    return Do(lambda x, rnn: rnn(x)[0], kind(shape[2], 2 + n % 5, batch_first=True, bidirectional=n % 4 == 0))


def _attention(shape: Shape, n: int) -> nn.Module | None:
    if shape[2] % 2:
        return None
    layer = nn.MultiheadAttention(shape[2], 2, batch_first=True)
    return Do(lambda x, attend: x + attend(x, x, x, need_weights=n % 2 == 0)[0], layer)


_ACTIVATIONS: list[Callable[[], nn.Module]] = [
    *(nn.ReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Softsign, nn.Tanhshrink),
    *(nn.LeakyReLU, nn.Hardtanh, nn.Hardswish, nn.LogSigmoid, nn.CELU, nn.SELU, nn.ReLU6, nn.Softshrink, nn.Hardshrink),
    lambda: nn.ReLU(inplace=True),
    lambda: nn.Softmax(1),
    lambda: nn.PReLU(),
    lambda: Do(lambda x: F.relu(x, inplace=True)),
    lambda: Do(torch.square),
    lambda: Do(lambda x: x.clamp(-1, 1)),
    lambda: Do(lambda x: torch.where(x > 0, x, 0.1 * x)),
    lambda: Do(lambda x: x.mul(2).add_(1).tanh_()),
    lambda: Do(lambda x: x - x.mean()  if x.dim() == 0 else x - x.flatten(1).mean(1).view(-1, *[1] * (x.dim() - 1))),
    lambda: Do(lambda x: F.normalize(x, dim=1)),
]  # fmt: skip

ANY: dict[str, Part] = {
    "activation": lambda s, n: _ACTIVATIONS[n % len(_ACTIVATIONS)](),
    "dropout_off": lambda s, n: nn.Dropout(0.0),
    "identity": lambda s, n: nn.Identity(),
    "detached": lambda s, n: Do(lambda x: x + 0.3 * x.detach().tanh()),
    "scaled_in_training": lambda s, n: InTraining(nn.Identity(), lambda x, m: 1.1 * x),
    "doubled": lambda s, n: Do(lambda x: x + x),
    "flat_layer_norm": lambda s, n: nn.LayerNorm(list(s[1:])),
    "gain": lambda s, n: _gain(()),
    "channel_gain": lambda s, n: _gain((s[1], *[1] * (len(s) - 2))),
    "roll": lambda s, n: Do(lambda x: torch.roll(x, 1, 1 + n % (x.dim() - 1))),
    "flip": lambda s, n: Do(lambda x: x.flip(1 + n % (x.dim() - 1))),
    "cumsum": lambda s, n: Do(lambda x: x.cumsum(1 + n % (x.dim() - 1)) / 4),
    "sorted": lambda s, n: Do(lambda x: x.sort(1 + n % (x.dim() - 1)).values),
}


class _Gain(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gain = nn.Parameter(0.5 + torch.rand(tuple(shape)))

    def forward(self, x: Any) -> Any:
        return x * self.gain


def _gain(shape: Shape) -> nn.Module:
    return _Gain(shape)


IMAGES: dict[str, Part] = {
    "conv": _conv,
    "conv_padded": lambda s, n: _conv(s, n, padding_mode=("zeros", "reflect", "replicate", "circular")[n % 4]),
    "conv_dilated": lambda s, n: nn.Conv2d(s[1], 3, 3, padding=2, dilation=2),
    "depthwise": lambda s, n: _same(s, groups=s[1]),
    "transposed": lambda s, n: nn.ConvTranspose2d(s[1], 2 + n % 3, 1 + n % 3, 1 + n % 2),
    "batch_norm": lambda s, n: nn.BatchNorm2d(s[1], affine=n % 4 > 0, track_running_stats=n % 5 > 0),
    "group_norm": lambda s, n: nn.GroupNorm(2 if s[1] % 2 == 0 else 1, s[1]),
    "instance_norm": lambda s, n: nn.InstanceNorm2d(s[1], affine=n % 2 == 0) if s[2] * s[3] > 1 else None,
    "local_response": lambda s, n: nn.LocalResponseNorm(2 + n % 2),
    "max_pool": lambda s, n: nn.MaxPool2d(2 + n % 2, 1 + n % 2, padding=1, ceil_mode=n % 3 == 0),
    "mean_pool": lambda s, n: nn.AvgPool2d(2 + n % 2, 1 + n % 2, padding=1, count_include_pad=n % 3 > 0),
    "adaptive_pool": lambda s, n: (nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)[n % 2]((1 + n % 3, 1 + n % 2)),
    "upsample": lambda s, n: nn.Upsample(
        scale_factor=1.5 + n % 2 / 2, mode=("nearest", "bilinear", "bicubic", "nearest-exact", "area")[n % 5]
    ),
    "resize": lambda s, n: Do(lambda x: F.interpolate(x, size=(4, 5), mode="bilinear", align_corners=n % 2 == 0)),
    "pad": lambda s, n: Do(lambda x: F.pad(x, (1, 0, n % 2, 1), mode=("constant", "replicate", "circular")[n % 3])),
    "crop": lambda s, n: Do(lambda x: x[:, :, 1:, : s[3] - 1]) if min(s[2:]) > 3 else None,
    "pixel_shuffle": lambda s, n: nn.PixelShuffle(2) if s[1] % 4 == 0 else None,
    "pixel_unshuffle": lambda s, n: nn.PixelUnshuffle(2) if s[2] % 2 == s[3] % 2 == 0 else None,
    "channel_shuffle": lambda s, n: nn.ChannelShuffle(2) if s[1] % 2 == 0 else None,
    "swapped": lambda s, n: Do(lambda x: x.transpose(2, 3)),
    "channels_last": lambda s, n: Do(lambda x, m: m(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2), nn.Linear(s[1], 4)),
    "excited": lambda s, n: Do(lambda x, m: x * m(x.mean((2, 3), keepdim=True)).sigmoid(), nn.Conv2d(s[1], s[1], 1)),
    "hooked": lambda s, n: _hooked(_same(s), n),
    "tuple": lambda s, n: _tuple_of(_same(s), nn.Conv2d(s[1], s[1], 1)),
    "half_relu": lambda s, n: Do(_half_relu, _same(s)) if s[1] > 1 else None,
    "slice_scaled": lambda s, n: Do(_slice_scaled, _same(s)),
    "without_grad": lambda s, n: Do(_scaled_without_grad, _same(s)),
    "weight_norm": lambda s, n: parametrizations.weight_norm(_same(s)),
    "spectral_norm": lambda s, n: parametrizations.spectral_norm(_same(s)),
    "checkpointed": lambda s, n: InTraining(_same(s), lambda x, m: checkpoint(m, x, use_reentrant=False)),
    "twice": lambda s, n: Do(lambda x, m: m(m(x).tanh()) + x, _same(s)),
    "norm_twice": lambda s, n: Do(lambda x, m, c: m(c(m(x))), nn.BatchNorm2d(s[1]), _same(s)),
    "coordinates": lambda s, n: Do(lambda x: torch.cat((x, torch.ones_like(x[:, :1]).cumsum(2) / 5), 1)),
    "to_rows": lambda s, n: nn.Flatten() if s[1] * s[2] * s[3] < 150 else None,
    "mean_to_rows": lambda s, n: Do(lambda x: x.mean((2, 3)) if n % 2 else x.amax((2, 3))),
    "to_sequence": lambda s, n: Do(lambda x: x.flatten(2) if n % 2 else x.flatten(2).transpose(1, 2)),
}
ROWS: dict[str, Part] = {
    "linear": lambda s, n: nn.Linear(s[1], 1 + n % 8, bias=n % 5 > 0),
    "batch_norm": lambda s, n: nn.BatchNorm1d(s[1], affine=n % 4 > 0, track_running_stats=n % 5 > 0),
    "group_norm": lambda s, n: nn.GroupNorm(2, s[1]) if s[1] % 2 == 0 and s[1] > 2 else None,
    "layer_norm": lambda s, n: nn.LayerNorm(s[1]),
    "gated": lambda s, n: nn.GLU(1) if s[1] % 2 == 0 else None,
    "bilinear": lambda s, n: Do(lambda x, m: m(x, x.tanh()), nn.Bilinear(s[1], s[1], 3)),
    "hooked": lambda s, n: _hooked(_same_linear(s), n),
    "tuple": lambda s, n: _tuple_of(_same_linear(s), _same_linear(s)),
    "half_relu": lambda s, n: Do(_half_relu, _same_linear(s)) if s[1] > 1 else None,
    "without_grad": lambda s, n: Do(_scaled_without_grad, _same_linear(s)),
    "weight_norm": lambda s, n: parametrizations.weight_norm(_same_linear(s)),
    "spectral_norm": lambda s, n: parametrizations.spectral_norm(_same_linear(s)),
    "topk": lambda s, n: Do(lambda x: x.topk(max(1, s[1] // 2), 1).values),
    "split": lambda s, n: Do(lambda x: torch.cat(x.split([1, s[1] - 1], 1)[::-1], 1)) if s[1] > 1 else None,
    "tied": lambda s, n: Do(lambda x, m: F.linear(m(x).tanh(), m.weight.t()), nn.Linear(s[1], 5)),
    "repeated": lambda s, n: Do(lambda x: x.repeat(1, 2)) if s[1] < 12 else None,
    "to_sequence": lambda s, n: Do(lambda x: x.view(x.shape[0], 2, -1)) if s[1] % 2 == 0 else None,
    "to_images": lambda s, n: Do(lambda x: x.view(-1, 1, 2, s[1] // 2)) if s[1] % 2 == 0 else None,
}
SEQUENCES: dict[str, Part] = {
    "linear": lambda s, n: nn.Linear(s[2], 2 + n % 7),
    "recurrent": _recurrent,
    "attention": _attention,
    "conv": lambda s, n: nn.Conv1d(s[1], 2 + n % 4, 1 + n % 3, padding=1),
    "layer_norm": lambda s, n: nn.LayerNorm(s[2]),
    "batch_norm": lambda s, n: nn.BatchNorm1d(s[1]),
    "transposed": lambda s, n: Do(lambda x: x.transpose(1, 2)),
    "encoder": lambda s, n: nn.TransformerEncoderLayer(s[2], 1, 8, dropout=0.0, batch_first=True, norm_first=n % 2 > 0),
    "hooked": lambda s, n: _hooked(_same_linear(s), n),
    "tuple": lambda s, n: _tuple_of(_same_linear(s), _same_linear(s)),
    "slice_scaled": lambda s, n: Do(_slice_scaled, _same_linear(s)),
    "without_grad": lambda s, n: Do(_scaled_without_grad, _same_linear(s)),
    "pooled": lambda s, n: nn.MaxPool1d(2, 1) if s[2] > 2 else None,
    "mean_to_rows": lambda s, n: Do(lambda x: x.mean(1)),
    "last_to_rows": lambda s, n: Do(lambda x: x[:, -1]),
    "to_rows": lambda s, n: nn.Flatten(),
    "to_images": lambda s, n: Do(lambda x: x.unsqueeze(1)),
}
"""By number of dims, with samples first; a number chooses settings."""
PARTS: dict[int, dict[str, Part]] = {4: IMAGES, 2: ROWS, 3: SEQUENCES}
JOINS = ("residual", "beside", "product", "twin", "in_training")
"""Of branches: added to their input, concatenated, multiplied, one network twice, only in training."""
