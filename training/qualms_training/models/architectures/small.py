"""A small convolutional network that trains in seconds, for the `tiny` recipe and the tests."""

from torch import Tensor, nn

from qualms_training.errors import ModelError

MIN_SIDE = 4  # pooling twice leaves one pixel


class SmallNet(nn.Module):
    """Two padded 3x3 convolutions, each with ReLU and pooling, and one linear layer: about 4,000 weights.

    Suggested taps: `pool1` (8, 8, 8) and `pool2` (16, 4, 4) for 16x16 images.
    """

    def __init__(self, classes: int, channels: int = 3, height: int = 16, width: int = 16) -> None:
        super().__init__()
        if min(height, width) < MIN_SIDE:
            raise ModelError(
                f"The small net was given images of {height}x{width} pixels; it takes {MIN_SIDE}x{MIN_SIDE} or more."
            )
        self.conv1 = nn.Conv2d(channels, 8, kernel_size=3, padding=1)
        self.relu1 = nn.ReLU()
        self.pool1 = nn.MaxPool2d(2)
        self.conv2 = nn.Conv2d(8, 16, kernel_size=3, padding=1)
        self.relu2 = nn.ReLU()
        self.pool2 = nn.MaxPool2d(2)
        self.fc = nn.Linear(16 * (height // 4) * (width // 4), classes)

    def forward(self, x: Tensor) -> Tensor:
        """Normalised images (N, C, H, W) to logits (N, K)."""
        x = self.pool1(self.relu1(self.conv1(x)))
        x = self.pool2(self.relu2(self.conv2(x)))
        logits: Tensor = self.fc(x.flatten(1))
        return logits
