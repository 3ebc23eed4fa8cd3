"""LeNet: the paper's base for MNIST, as in the authors' code."""

from torch import Tensor, nn

from qualms_training.errors import ModelError

MIN_SIDE = 16  # smaller images have no pixels left after the second pool


class LeNet(nn.Module):
    """Two unpadded 5x5 convolutions, each with ReLU and pooling, then 120-84-K units.

    Taps of the paper: `pool1` (6, 14, 14) and `pool2` (16, 5, 5) for 32x32 images.
    """

    def __init__(self, classes: int, channels: int = 3, height: int = 32, width: int = 32) -> None:
        super().__init__()
        if min(height, width) < MIN_SIDE:
            raise ModelError(
                f"LeNet was given images of {height}x{width} pixels; it takes {MIN_SIDE}x{MIN_SIDE} or more."
            )
        self.conv1 = nn.Conv2d(channels, 6, kernel_size=5)
        self.relu1 = nn.ReLU()
        self.pool1 = nn.MaxPool2d(2)
        self.conv2 = nn.Conv2d(6, 16, kernel_size=5)
        self.relu2 = nn.ReLU()
        self.pool2 = nn.MaxPool2d(2)
        self.fc1 = nn.Linear(16 * _after_both_pools(height) * _after_both_pools(width), 120)
        self.relu3 = nn.ReLU()
        self.fc2 = nn.Linear(120, 84)
        self.relu4 = nn.ReLU()
        self.fc3 = nn.Linear(84, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Normalised images (N, C, H, W) to logits (N, K)."""
        x = self.pool1(self.relu1(self.conv1(x)))
        x = self.pool2(self.relu2(self.conv2(x))).flatten(1)
        x = self.relu3(self.fc1(x))
        x = self.relu4(self.fc2(x))
        logits: Tensor = self.fc3(x)
        return logits


def _after_both_pools(size: int) -> int:
    return ((size - 4) // 2 - 4) // 2
