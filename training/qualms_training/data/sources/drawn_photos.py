"""Photo-like JPEG files of any number of classes, drawn by our own code: to try a run of ImageNet's size without a download.

A class is a combination of two hues, a shape, the number of shapes and the direction and width of stripes; images of a class
differ in position, size, brightness, background and noise.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from qualms_training.errors import DataError

_QUALITY = 90
_CORNERS = (3, 4, 5, 6, 8, 0)
"""corners of the shapes; 0 is an ellipse"""


def draw_photos(out: Path, count: int, classes: int, size: tuple[int, int] = (640, 480), seed: int = 0) -> None:
    """Write `count` JPEG files of `size` (width, height) to OUT/class0000/000.jpg and so on, as many of each class as possible.

    The same arguments always give the same pixels.
    """
    if classes < 2 or count < classes:
        raise DataError(
            f"{count:,} images of {classes:,} classes were requested; needed are two or more classes with an image each."
        )
    if out.is_dir() and any(out.iterdir()):
        raise DataError(f"Folder {out} is not empty; name a new one.")
    try:
        for label in range(classes):
            (out / f"class{label:04}").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"Folder {out} cannot be written to: {error.strerror}.") from error

    def write(index: int) -> None:
        label, number = index % classes, index // classes
        image = draw_photo(label, size, np.random.default_rng((seed, label, number)))
        image.save(out / f"class{label:04}" / f"{number:03}.jpg", quality=_QUALITY)

    with ThreadPoolExecutor() as pool:
        list(pool.map(write, range(count)))


def draw_photo(label: int, size: tuple[int, int], rng: np.random.Generator) -> Image.Image:
    """One image of a class, of `size` (width, height)."""
    of_class = np.random.default_rng((1, label))
    width, height = size
    hue, contrast_hue = of_class.integers(256, size=2).tolist()
    corners, copies = int(of_class.choice(_CORNERS)), int(of_class.integers(1, 6))
    angle, period = of_class.uniform(0, np.pi), of_class.uniform(0.04, 0.2) * width
    image = _background(size, hue, angle + rng.normal(0, 0.05), period, rng)
    draw, side = ImageDraw.Draw(image), min(width, height)
    for _ in range(copies):
        radius = side * rng.uniform(0.12, 0.25)
        x, y = rng.uniform(0.15, 0.85, 2) * (width, height)
        colour = _rgb(
            (contrast_hue + int(rng.integers(-8, 9))) % 256, int(rng.integers(150, 256)), int(rng.integers(120, 256))
        )
        if corners:
            turned = int(rng.integers(360))
            draw.regular_polygon((x, y, radius), corners, rotation=turned, fill=colour)
        else:
            draw.ellipse((x - radius, y - 0.7 * radius, x + radius, y + 0.7 * radius), fill=colour)
    return image.filter(ImageFilter.BoxBlur(float(rng.uniform(0, 1.5))))


def _background(size: tuple[int, int], hue: int, angle: float, period: float, rng: np.random.Generator) -> Image.Image:
    """Stripes in the hue of the class under uneven light, with noise."""
    width, height = size
    frequency, phase = 2 * np.pi / period, rng.uniform(0, 2 * np.pi)
    across = (np.arange(width) * (frequency * np.cos(angle)) + phase).astype(np.float32)
    down = (np.arange(height) * (frequency * np.sin(angle))).astype(np.float32)[:, np.newaxis]
    stripes = np.sin(across) * np.cos(down) + np.cos(across) * np.sin(down)  # the sine of the sum, with few sines
    coarse = Image.fromarray(rng.integers(0, 256, (6, 8), np.uint8)).resize(size, Image.Resampling.BICUBIC)
    light = np.asarray(coarse, np.float32) * np.float32(90 / 255)
    noise = rng.integers(-10, 11, (height, width), np.int8)
    value = np.clip(np.float32(rng.uniform(60, 110)) + light + 30 * stripes + noise, 0, 255).astype(np.uint8)
    colour = _rgb((hue + int(rng.integers(-6, 7))) % 256, int(rng.integers(90, 200)), 255)
    grey = Image.fromarray(value)
    return Image.merge("RGB", [grey.point([level * part // 255 for level in range(256)]) for part in colour])


def _rgb(hue: int, saturation: int, value: int) -> tuple[int, int, int]:
    red, green, blue = Image.new("HSV", (1, 1), (hue, saturation, value)).convert("RGB").tobytes()
    return red, green, blue
