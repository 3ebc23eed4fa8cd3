"""VGG16 for small images: the paper's base for CIFAR-10, with batch normalisation once per block and a short head."""

from torch import Tensor, nn

from qualms_training.errors import ModelError

BLOCKS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
SCALE = 32  # five poolings halve the image five times


class VGG16(nn.Module):
    """Thirteen 3x3 convolutions in five blocks, then 256-K units.

    Taps of the paper: `block1.pool` (64, 16, 16) to `block5.pool` (512, 1, 1) for 32x32 images.
    """

    def __init__(self, classes: int, channels: int = 3, height: int = 32, width: int = 32) -> None:
        super().__init__()
        if min(height, width) < SCALE:
            raise ModelError(f"VGG16 was given images of {height}x{width} pixels; it takes {SCALE}x{SCALE} or more.")
        self.block1 = _block(channels, BLOCKS[0])
        self.block2 = _block(BLOCKS[0][-1], BLOCKS[1])
        self.block3 = _block(BLOCKS[1][-1], BLOCKS[2])
        self.block4 = _block(BLOCKS[2][-1], BLOCKS[3])
        self.block5 = _block(BLOCKS[3][-1], BLOCKS[4])
        self.fc1 = nn.Linear(BLOCKS[4][-1] * (height // SCALE) * (width // SCALE), 256)
        self.relu = nn.ReLU()
        self.fc2 = nn.Linear(256, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Normalised images (N, C, H, W) to logits (N, K)."""
        x = self.block3(self.block2(self.block1(x)))
        x = self.block5(self.block4(x)).flatten(1)
        logits: Tensor = self.fc2(self.relu(self.fc1(x)))
        return logits


def _block(channels: int, widths: tuple[int, ...]) -> nn.Sequential:
    """Convolutions of the given widths, with batch normalisation after the last one only, then pooling."""
    block = nn.Sequential()
    for number, width in enumerate(widths, start=1):
        block.add_module(f"conv{number}", nn.Conv2d(channels, width, kernel_size=3, padding=1))
        if number == len(widths):
            block.add_module("bn", nn.BatchNorm2d(width))
        block.add_module(f"relu{number}", nn.ReLU())
        channels = width
    block.add_module("pool", nn.MaxPool2d(2))
    return block
