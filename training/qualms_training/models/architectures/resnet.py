"""ResNet-20 for small images: a base that can be trained on a CPU.

Shortcuts are option A of He et al. (2016): where the shape changes, the input is subsampled and padded with
zero channels. They have no parameters, as in the 0.27 M parameters of that paper's CIFAR table.
"""

from torch import Tensor, nn
from torch.nn import functional as F

WIDTHS = (16, 32, 64)
BLOCKS_PER_STAGE = 3


class ResNet20(nn.Module):
    """Three stages of three basic blocks, global average pooling and one linear layer.

    Suggested taps: `stage1` (16, 32, 32), `stage2` (32, 16, 16), `stage3` (64, 8, 8) for 32x32 images.
    """

    def __init__(self, classes: int, channels: int = 3) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, WIDTHS[0], kernel_size=3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(WIDTHS[0])
        self.relu = nn.ReLU()
        self.stage1 = _stage(WIDTHS[0], WIDTHS[0], stride=1)
        self.stage2 = _stage(WIDTHS[0], WIDTHS[1], stride=2)
        self.stage3 = _stage(WIDTHS[1], WIDTHS[2], stride=2)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(WIDTHS[2], classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Normalised images (N, C, H, W) to logits (N, K)."""
        x = self.relu(self.bn(self.conv(x)))
        x = self.stage3(self.stage2(self.stage1(x)))
        logits: Tensor = self.fc(self.pool(x).flatten(1))
        return logits


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with batch normalisation, the input added before the last activation."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(width, width, kernel_size=3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu2 = nn.ReLU()
        self.stride = stride
        self.zero_channels = width - channels

    def forward(self, x: Tensor) -> Tensor:
        """Features (N, C, H, W) to (N, width, H/stride, W/stride)."""
        hidden = self.bn2(self.conv2(self.relu1(self.bn1(self.conv1(x)))))
        active: Tensor = self.relu2(hidden + self._shortcut(x))
        return active

    def _shortcut(self, x: Tensor) -> Tensor:
        if self.zero_channels == 0:
            return x
        before = self.zero_channels // 2
        after = self.zero_channels - before
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, before, after))


def _stage(channels: int, width: int, stride: int) -> nn.Sequential:
    first = BasicBlock(channels, width, stride)
    return nn.Sequential(first, *(BasicBlock(width, width, stride=1) for _ in range(BLOCKS_PER_STAGE - 1)))
