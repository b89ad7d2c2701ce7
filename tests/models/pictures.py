"""Pictures: printed text that is drawn here, and the two photographs that scikit-learn ships."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

Array = NDArray[Any]

LINES = (
    "bfloat16 keeps eight bits of every weight",
    "Total: 1,284.50 EUR",
    "The quick brown fox jumps over the lazy dog",
    "Order 20431, shipped 14 March",
    "Gate B12, boarding 08:45",
    "A proof that sees everything",
    "Invoice no. 77-0192-A",
    "half the memory, the same answer",
)


def page(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return a page of printed lines of various sizes, dark on light, slightly grainy."""
    random = np.random.default_rng(seed)
    picture = Image.new("RGB", (width, height), tuple(int(v) for v in random.integers(215, 256, 3)))
    draw = ImageDraw.Draw(picture)
    top = int(random.integers(8, 24))
    while top < height - 24:
        size = int(random.integers(14, 34))
        text = LINES[random.integers(len(LINES))]
        draw.text((int(random.integers(4, width // 4)), top), text, (20, 20, 40), ImageFont.load_default(size))
        top += size + int(random.integers(10, 40))
    return _grain(picture, random)


def line(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return one printed line that fills the height and is cut off at the right edge."""
    random = np.random.default_rng(seed)
    picture = Image.new("RGB", (width, height), "white")
    font = ImageFont.load_default(height * 0.65)
    ImageDraw.Draw(picture).text((6, height * 0.1), LINES[seed % len(LINES)], "black", font)
    return _grain(picture, random)


def captcha(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return five letters and digits at uneven heights, with two lines drawn through them."""
    random = np.random.default_rng(seed)
    picture = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(picture)
    step = width // 5
    for place in range(5):
        sign = "ABDEFGHKLMNPRSTUXYZ23456789"[random.integers(27)]
        at = (place * step + 4, int(random.integers(0, height // 4)))
        ink = tuple(int(v) for v in random.integers(0, 140, 3))
        draw.text(at, sign, ink, ImageFont.load_default(height * 0.7))
    for _ in range(2):
        a, b = random.integers(0, height, 2)
        draw.line((0, int(a), width, int(b)), (120, 120, 120), 2)
    return picture


def strew(picture: Image.Image, seed: int = 0) -> None:
    """Write six large letters at random places of ``picture``."""
    random = np.random.default_rng(seed)
    draw = ImageDraw.Draw(picture)
    for _ in range(6):
        at = (int(random.integers(0, picture.width - 70)), int(random.integers(0, picture.height - 80)))
        sign = "ABDEFGHKLMNPRSTUXYZ23456789"[random.integers(27)]
        draw.text(at, sign, "white", ImageFont.load_default(int(random.integers(40, 70))), stroke_width=2)


def _grain(picture: Image.Image, random: np.random.Generator) -> Image.Image:
    noisy = np.asarray(picture, np.float32) + random.normal(0, 4, (picture.height, picture.width, 1))
    return Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8))


def photographs(width: int, height: int, count: int, seed: int = 0) -> list[Image.Image]:
    """Return crops of the two photographs in scikit-learn (CC BY), scaled to ``width`` × ``height``."""
    from sklearn.datasets import load_sample_images

    random = np.random.default_rng(seed)
    originals = [Image.fromarray(image) for image in load_sample_images().images]
    found = []
    for index in range(count):
        original = originals[index % len(originals)]
        left, top = random.integers(0, original.width // 3), random.integers(0, original.height // 3)
        box = (int(left), int(top), original.width, original.height)
        found.append(original.crop(box).resize((width, height)))
    return found


def channels_first(picture: Image.Image) -> NDArray[np.float32]:
    """Return the picture as [1, 3, height, width], from −1 to 1."""
    values = (np.asarray(picture, np.float32) / 255 - 0.5) / 0.5
    return np.ascontiguousarray(values.transpose(2, 0, 1)[None])
