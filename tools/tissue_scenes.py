"""Synthetic slides on which tissue is hard to find, with the true mask.

A scene is a picture of 960 by 720 pixels of 8 µm, drawn from optical densities: tissue with texture on glass, and what
the condition adds. The conditions "full" are regions that are full of tissue, "blank" are slides without any.
`tools/make_slides.py --condition NAME` writes scenes as slides; `tools/bench_tissue.py` measures
how well their tissue is found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import cv2
import numpy as np
from numpy.typing import NDArray

from histopipe.geometry import Size

SCENE_MPP = 8.0
WIDTH, HEIGHT = 960, 720
Rng = np.random.Generator
Image = NDArray[np.float32]
Mask = NDArray[np.bool_]

HAEMATOXYLIN_EOSIN = ((0.25, 0.45, 0.22), (0.55, 0.62, 0.35))
"""Densities of red, green and blue in eosin-rich and in nucleus-rich tissue."""
HAEMATOXYLIN_DAB = ((0.10, 0.09, 0.07), (0.25, 0.35, 0.45))
INKS = {
    "blue": (1.3, 0.75, 0.25), "green": (1.0, 0.35, 0.75), "red": (0.08, 0.95, 1.0), "black": (1.1, 1.1, 1.1),
    "purple": (0.6, 1.0, 0.25), "yellow": (0.05, 0.4, 1.0),
}  # fmt: skip


def scene(condition: str, seed: int) -> tuple[NDArray[np.uint8], Mask]:
    """Return a picture, (720, 960, 3) uint8 RGB, and where it has tissue, (720, 960) bool."""
    rng = np.random.default_rng((seed, list(CONDITIONS).index(condition)))
    if condition.startswith(("blank", "full")):
        truth = np.full((HEIGHT, WIDTH), condition.startswith("full"))
    else:
        truth = _pieces(rng, condition)
    glass = _glass(rng, condition)
    density = _tissue(rng, condition) * truth[..., None]
    light = 1 + _noise(rng, 400, 0.012)
    picture = (glass * light[..., None] * 10**-density).astype(np.float32)
    picture, truth = CONDITIONS[condition](rng, picture, truth)
    blurred = cv2.GaussianBlur(picture, (0, 0), 0.7)
    noisy = blurred + rng.normal(0, rng.uniform(0.5, 3), picture.shape)
    flags = [cv2.IMWRITE_JPEG_QUALITY, int(rng.integers(40, 92))]
    _, jpeg = cv2.imencode(".jpg", np.clip(noisy, 0, 255).astype(np.uint8)[..., ::-1], flags)
    decoded = np.asarray(cv2.imdecode(jpeg, cv2.IMREAD_COLOR), np.uint8)
    return np.ascontiguousarray(decoded[..., ::-1]), truth


class ScenePainter:
    """Draws a scene as level 0 of a slide, enlarged by a whole number."""

    def __init__(self, picture: NDArray[np.uint8], times: int, tile: int) -> None:
        self._picture, self._times, self._tile = picture, times, tile
        self.size = Size(picture.shape[1] * times, picture.shape[0] * times)

    def tile_row(self, top: int) -> NDArray[np.uint8]:
        """Return one row of tiles, (tile, width, 3) uint8; the width is a multiple of the tile."""
        tile, times = self._tile, self._times
        rows = np.minimum(np.arange(top, top + tile) // times, len(self._picture) - 1)
        width = -(-self.size.width // tile) * tile
        columns = np.minimum(np.arange(width) // times, self._picture.shape[1] - 1)
        return self._picture[rows][:, columns]


def _glass(rng: Rng, condition: str) -> NDArray[np.float64]:
    if condition in ("tinted", "blank tinted", "full tinted"):
        return np.array([rng.uniform(225, 245), rng.uniform(218, 240), rng.uniform(205, 235)])
    if condition == "dark slide":
        return np.full(3, rng.uniform(120, 190)) + rng.uniform(-8, 8, 3)
    return np.full(3, rng.uniform(232, 250)) + rng.uniform(-3, 3, 3)


def _pieces(rng: Rng, condition: str) -> Mask:
    truth = np.zeros((HEIGHT, WIDTH), np.bool_)
    count = int(rng.integers(1, 4))
    ys, xs = np.mgrid[:HEIGHT, :WIDTH].astype(np.float32)
    for i in range(count):
        radius = rng.uniform(0.14, 0.30) * HEIGHT * (1.2 if count == 1 else 0.9)
        x = WIDTH * (i + 0.5) / count + rng.uniform(-0.05, 0.05) * WIDTH
        y = HEIGHT * rng.uniform(0.4, 0.6)
        if condition != "biopsy":
            truth |= _outline(rng, x, y, radius)
            continue
        angle = rng.uniform(-0.3, 0.3)
        across = (ys - y) * np.cos(angle) - (xs - x) * np.sin(angle)
        across += 12 * np.sin(xs / 60 + rng.uniform(0, 6))
        along = (xs - x) * np.cos(angle) + (ys - y) * np.sin(angle)
        truth |= (abs(across) < rng.uniform(5, 14)) & (abs(along) < WIDTH / count * 0.4)
    return truth


def _outline(rng: Rng, x: float, y: float, radius: float) -> Mask:
    """Return the inside of a smooth closed curve."""
    ys, xs = np.mgrid[:HEIGHT, :WIDTH].astype(np.float32)
    angle, total = np.arctan2(ys - y, xs - x), np.ones((HEIGHT, WIDTH), np.float32)
    for k in range(2, 7):
        total += rng.uniform(0, 0.09) * np.cos(k * angle + rng.uniform(0, 2 * np.pi))
    return np.asarray(np.hypot(xs - x, ys - y) < radius * total)


def _noise(rng: Rng, scale: int, strength: float) -> Image:
    """Return smooth noise with details of about `scale` pixels."""
    small = rng.normal(0, 1, (HEIGHT // scale + 3, WIDTH // scale + 3)).astype(np.float32)
    large = cv2.resize(small, (WIDTH, HEIGHT), interpolation=cv2.INTER_CUBIC)
    return np.asarray(strength * large, np.float32)


def _tissue(rng: Rng, condition: str) -> Image:
    """Return the density of tissue, as if it were everywhere, (H, W, 3)."""
    strengths = {
        "pale": (0.10, 0.28),
        "fat": (0.6, 1.0),
        "faint ihc": (0.6, 1.3),
        "full pale": (0.10, 0.28),
        "full faint ihc": (0.6, 1.3),
        "full dense": (1.0, 1.5),
        "full even": (0.6, 1.1),
    }
    strength = rng.uniform(*strengths.get(condition, (0.5, 1.2)))
    texture = _noise(rng, 40, 0.12) + _noise(rng, 6, 0.15) + _noise(rng, 2, 0.12)
    mix = np.clip(0.35 + 2 * (_noise(rng, 50, 0.2) + _noise(rng, 8, 0.2)), 0, 1)[..., None]
    if condition == "full even":  # as a lymph node on a thumbnail
        texture, mix = texture * 0.1, 0.8 + 0.1 * mix
    if condition.endswith("faint ihc"):
        mix = np.clip(mix - 0.75, 0, 1) * rng.uniform(0.2, 1.5)
    stains = HAEMATOXYLIN_DAB if condition.endswith("ihc") else HAEMATOXYLIN_EOSIN
    low, high = map(np.array, stains)
    density = ((1 - mix) * low + mix * high) * np.clip(
        strength * (1 + texture[..., None]), 0.04, None
    )
    if condition == "fat" or (condition in ("pale", "h&e") and rng.random() < 0.4):
        place = _noise(rng, 70, 1) > rng.uniform(-0.6, 0.3)
        if condition != "fat":
            x, y = WIDTH * rng.uniform(0.3, 0.7), HEIGHT * rng.uniform(0.4, 0.6)
            place = _outline(rng, x, y, rng.uniform(0.15, 0.3) * HEIGHT)
        membranes = 0.10 * np.exp(-6 * abs(_noise(rng, 5, 1))) + 0.012
        fat = membranes[..., None] * np.array([2.1, 3.6, 2.4]) * rng.uniform(0.8, 1.4)
        density = np.where(place[..., None], fat, density)
    return np.asarray(density, np.float32)


def _plain(_: Rng, picture: Image, truth: Mask) -> tuple[Image, Mask]:
    return picture, truth


def _fluorescence(rng: Rng, _: Image, truth: Mask) -> tuple[Image, Mask]:
    texture = _noise(rng, 40, 0.24) + _noise(rng, 6, 0.3) + _noise(rng, 2, 0.24)
    signal = truth * np.clip(rng.uniform(0.25, 0.8) * (1 + texture), 0.06, 1)
    colours = np.array([[0.2, 0.3, 1], [0.2, 1, 0.2], [1, 0.3, 0.2], [0.8, 0.8, 0.8]])
    colour = colours[rng.integers(4)] * rng.uniform(60, 230)
    return (rng.uniform(2, 14) + signal[..., None] * colour).astype(np.float32), truth


def _border(rng: Rng, picture: Image, truth: Mask) -> tuple[Image, Mask]:
    width, colour = int(rng.uniform(8, 60)), (0, 255, 128)[rng.integers(3)]
    sides = (np.s_[:width], np.s_[-width:], np.s_[:, :width], np.s_[:, -width:])
    for side in rng.permutation(4)[: rng.integers(1, 5)].tolist():
        picture[sides[side]], truth[sides[side]] = colour, False
    return picture, truth


def _coverslip(rng: Rng, picture: Image, truth: Mask) -> tuple[Image, Mask]:
    """Draw grey lines near the border, which may cross tissue."""
    density = np.zeros((HEIGHT, WIDTH), np.float32)
    for _ in range(rng.integers(1, 4)):
        start, drift = rng.uniform(0.03, 0.12), rng.uniform(-0.02, 0.02)
        start = start if rng.random() < 0.5 else 1 - start
        ends = [(int(WIDTH * start), 0), (int(WIDTH * (start + drift)), HEIGHT)]
        if rng.random() < 0.5:
            ends = [(0, int(HEIGHT * start)), (WIDTH, int(HEIGHT * (start + drift)))]
        strength, width = float(rng.uniform(0.15, 1.0)), int(rng.integers(2, 9))
        cv2.line(density, ends[0], ends[1], strength, width, cv2.LINE_AA)
    if rng.random() < 0.5:
        picture[:, : int(WIDTH * 0.03)] *= 0.93
    return picture * 10 ** -density[..., None], truth


def _dust(rng: Rng, picture: Image, truth: Mask) -> tuple[Image, Mask]:
    density = np.zeros((HEIGHT, WIDTH), np.float32)
    for _ in range(rng.integers(20, 150)):
        radius = int(rng.uniform(1, 7))
        centre = (int(rng.uniform(0, WIDTH)), int(rng.uniform(0, HEIGHT)))
        axes, angle = (
            (radius, max(1, int(radius * rng.uniform(0.3, 1)))),
            float(rng.uniform(0, 180)),
        )
        strength = float(rng.uniform(0.1, 1))
        cv2.ellipse(density, centre, axes, angle, 0, 360, strength, -1, cv2.LINE_AA)
    return picture * 10 ** -density[..., None], truth


def _bubbles(rng: Rng, picture: Image, truth: Mask) -> tuple[Image, Mask]:
    density = np.zeros((HEIGHT, WIDTH), np.float32)
    for _ in range(rng.integers(2, 9)):
        ring = np.zeros_like(density)
        centre = (int(rng.uniform(0, WIDTH)), int(rng.uniform(0, HEIGHT)))
        strength, width = float(rng.uniform(0.08, 0.5)), int(rng.integers(2, 6))
        cv2.circle(ring, centre, int(rng.uniform(15, 70)), strength, width, cv2.LINE_AA)
        density = np.maximum(density, ring)
    return picture * 10 ** -cv2.GaussianBlur(density, (0, 0), 1.2)[..., None], truth


def _pen(rng: Rng, picture: Image, truth: Mask) -> tuple[Image, Mask]:
    ink = np.zeros((HEIGHT, WIDTH), np.float32)
    for _ in range(rng.integers(1, 4)):
        steps = np.vstack(
            [[rng.uniform(0, WIDTH), rng.uniform(0, HEIGHT)], rng.normal(0, 60, (14, 2))]
        )
        points = np.cumsum(steps, axis=0).astype(np.int32)
        if rng.random() < 0.3:
            points = np.asarray(cv2.convexHull(points), np.int32)
        cv2.polylines(ink, [points], False, 1.0, int(rng.integers(6, 28)), cv2.LINE_AA)
    colour = np.array(list(INKS.values())[rng.integers(len(INKS))]) * rng.uniform(0.6, 1.2)
    return (picture * 10 ** -(ink[..., None] * colour)).astype(np.float32), truth & (ink < 0.5)


def _white_holes(rng: Rng, picture: Image, truth: Mask) -> tuple[Image, Mask]:
    """Draw fat cells as empty as glass, or large lumina of glands, into a region full of tissue."""
    if rng.random() < 0.5:
        seeds = np.ones((HEIGHT, WIDTH), np.uint8)
        count = WIDTH * HEIGHT // int(rng.integers(40, 110))
        seeds[rng.integers(0, HEIGHT, count), rng.integers(0, WIDTH, count)] = 0
        _, cells = cv2.distanceTransformWithLabels(
            seeds, cv2.DIST_L2, 3, labelType=cv2.DIST_LABEL_PIXEL
        )
        empty = (cells == np.roll(cells, 1, 0)) & (cells == np.roll(cells, 1, 1))
        empty &= _noise(rng, 70, 1) > rng.uniform(-0.8, 0.5)
    else:
        lumina = np.zeros((HEIGHT, WIDTH), np.uint8)
        for _ in range(rng.integers(100, 600)):
            centre = (int(rng.uniform(0, WIDTH)), int(rng.uniform(0, HEIGHT)))
            axes = (int(rng.integers(2, 9)), int(rng.integers(2, 9)))
            cv2.ellipse(lumina, centre, axes, float(rng.uniform(0, 180)), 0, 360, 1, -1)
        empty = lumina.astype(np.bool_)
    glass = np.full(3, rng.uniform(235, 250)) + rng.uniform(-3, 3, 3)
    return np.where(empty[..., None], glass, picture).astype(np.float32), truth


def _crop(rng: Rng, picture: Image, truth: Mask) -> tuple[Image, Mask]:
    """Cut out a region of 0.3 to 1 mm."""
    high, wide = rng.integers(40, 120, 2).tolist()
    top, left = int(rng.integers(HEIGHT - high)), int(rng.integers(WIDTH - wide))
    part = np.s_[top : top + high, left : left + wide]
    return picture[part], truth[part]


def _margin(rng: Rng, picture: Image, truth: Mask) -> tuple[Image, Mask]:
    """Put a narrow margin of glass at one or two sides of a region full of tissue."""
    sides = (np.s_[:, :24], np.s_[:, -40:], np.s_[:40], np.s_[-24:])
    for side in rng.permutation(4)[: rng.integers(1, 3)].tolist():
        truth[sides[side]] = False
    glass = np.full(3, rng.uniform(232, 250)) + rng.uniform(-3, 3, 3)
    return np.where(truth[..., None], picture, glass).astype(np.float32), truth


def _core(rng: Rng, picture: Image, truth: Mask) -> tuple[Image, Mask]:
    """Cut a region to a disk, as a core of a tissue array is; around it is glass, or white or black without any."""
    ys, xs = np.mgrid[:HEIGHT, :WIDTH]
    radius = HEIGHT * rng.uniform(0.48, 0.62)
    truth &= np.hypot(xs - WIDTH / 2, ys - HEIGHT / 2) < radius
    around = (rng.uniform(232, 250), 255.0, 0.0)[rng.integers(3)]
    middle = np.s_[:, (WIDTH - HEIGHT) // 2 : (WIDTH + HEIGHT) // 2]
    cut = np.where(truth[..., None], picture, around).astype(np.float32)
    return cut[middle], truth[middle]


Change = Callable[[Rng, Image, Mask], tuple[Image, Mask]]
CONDITIONS: Mapping[str, Change] = {
    "h&e": _plain,
    "pale": _plain,
    "fat": _plain,
    "faint ihc": _plain,
    "tinted": _plain,
    "dark slide": _plain,
    "fluorescence": _fluorescence,
    "border": _border,
    "coverslip": _coverslip,
    "pen": _pen,
    "dust": _dust,
    "bubbles": _bubbles,
    "blank": _plain,
    "biopsy": _plain,
    "full h&e": _plain,
    "full dense": _plain,
    "full even": _plain,
    "full pale": _plain,
    "full ihc": _plain,
    "full faint ihc": _plain,
    "full tinted": _plain,
    "full holes": _white_holes,
    "full small": _crop,
    "full margin": _margin,
    "full core": _core,
    "blank tinted": _plain,
    "blank pen": _pen,
    "blank dust": _dust,
    "blank small": _crop,
}
"""What each condition changes in a picture and in the true mask."""
