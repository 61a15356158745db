"""Networks for 32x32 images that torchvision does not have: ResNet of 6n + 2 layers, and Wide ResNet."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# name: (depth, widening factor), Zagoruyko and Komodakis, "Wide Residual Networks", 2016
WIDE = {"wrn_40_8": (40, 8), "wrn_10_2": (10, 2)}
# name: depth, He et al., "Deep Residual Learning for Image Recognition", 2016, section 4.2
THIN = {"resnet110": 110, "resnet20": 20, "resnet8": 8}


def build(name: str, channels: int, classes: int) -> nn.Module:
    """The network `name` of WIDE or THIN for images float[N, channels, H, W]; gives float[N, classes]."""
    is_wide = name in WIDE
    depth, factor = WIDE[name] if is_wide else (THIN[name], 1)
    block, outside = (_WideBlock, 4) if is_wide else (_ThinBlock, 2)  # outside: layers that are in no block
    layers: list[nn.Module] = [_conv(channels, 16, 3, 1)]
    if not is_wide:
        layers += [nn.BatchNorm2d(16), nn.ReLU()]
    have = 16
    for width, stride in ((16 * factor, 1), (32 * factor, 2), (64 * factor, 2)):
        for number in range((depth - outside) // 6):
            layers.append(block(have, width, stride if number == 0 else 1))
            have = width
    if is_wide:
        layers += [nn.BatchNorm2d(have), nn.ReLU()]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(have, classes))
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return net


def _conv(inputs: int, outputs: int, kernel: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


class _ThinBlock(nn.Module):
    """Two convolutions; where the shape changes, the shortcut drops pixels and adds zero channels: no parameters."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first, self.norm1 = _conv(inputs, outputs, 3, stride), nn.BatchNorm2d(outputs)
        self.second, self.norm2 = _conv(outputs, outputs, 3, 1), nn.BatchNorm2d(outputs)
        self.stride, self.added = stride, outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.second(F.relu(self.norm1(self.first(x)))))
        before = self.added // 2
        short = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, before, self.added - before))
        return F.relu(out + short)


class _WideBlock(nn.Module):
    """Normalisation before each of two convolutions; a 1x1 convolution as the shortcut where the width changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.norm1, self.first = nn.BatchNorm2d(inputs), _conv(inputs, outputs, 3, stride)
        self.norm2, self.second = nn.BatchNorm2d(outputs), _conv(outputs, outputs, 3, 1)
        self.short = _conv(inputs, outputs, 1, stride) if inputs != outputs else None

    def forward(self, x: Tensor) -> Tensor:
        active = torch.relu(self.norm1(x))
        out = self.second(torch.relu(self.norm2(self.first(active))))
        return out + (x if self.short is None else self.short(active))
