"""Wide ResNet 16-4: the paper's base for CIFAR-100, with dropout and a hidden layer in its head."""

from torch import Tensor, nn

WIDTHS = (64, 128, 256)  # four times the 16, 32, 64 channels of a ResNet
HIDDEN = 256
DROPOUT = 0.3


class WideResNet16x4(nn.Module):
    """Three groups of two pre-activation blocks, global average pooling, then 256-K units.

    Taps of the paper: `group2.0`, `group2` (128, 16, 16), `group3.0`, `group3` (256, 8, 8) and
    `pool` (256, 1, 1) for 32x32 images.
    """

    def __init__(self, classes: int, channels: int = 3) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 16, kernel_size=3, padding=1, bias=False)
        self.group1 = _group(16, WIDTHS[0], stride=1)
        self.group2 = _group(WIDTHS[0], WIDTHS[1], stride=2)
        self.group3 = _group(WIDTHS[1], WIDTHS[2], stride=2)
        self.bn = nn.BatchNorm2d(WIDTHS[2])
        self.relu = nn.ReLU()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc1 = nn.Linear(WIDTHS[2], HIDDEN)
        self.fc1_relu = nn.ReLU()
        self.fc2 = nn.Linear(HIDDEN, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Normalised images (N, C, H, W) to logits (N, K)."""
        x = self.group3(self.group2(self.group1(self.conv(x))))
        x = self.pool(self.relu(self.bn(x))).flatten(1)
        logits: Tensor = self.fc2(self.fc1_relu(self.fc1(x)))
        return logits


class WideBlock(nn.Module):
    """Normalise, activate and convolve, twice, and add the input.

    Where the shape changes, the input passes the first activation and a 1x1 convolution before it is added.
    """

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu1 = nn.ReLU()
        self.conv1 = nn.Conv2d(channels, width, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu2 = nn.ReLU()
        self.dropout = nn.Dropout(DROPOUT)
        self.conv2 = nn.Conv2d(width, width, kernel_size=3, padding=1, bias=False)
        self.shortcut = (
            None
            if channels == width and stride == 1
            else nn.Conv2d(channels, width, kernel_size=1, stride=stride, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Features (N, C, H, W) to (N, width, H/stride, W/stride)."""
        active = self.relu1(self.bn1(x))
        added = x if self.shortcut is None else self.shortcut(active)
        hidden = self.dropout(self.relu2(self.bn2(self.conv1(active))))
        total: Tensor = self.conv2(hidden) + added
        return total


def _group(channels: int, width: int, stride: int) -> nn.Sequential:
    return nn.Sequential(WideBlock(channels, width, stride), WideBlock(width, width, stride=1))
