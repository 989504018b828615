"""Scale, magnification and channels in the OME-XML of OME-TIFF files.

Source:
    The OME data model, schema 2016-06: https://docs.openmicroscopy.org/ome-model
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from defusedxml import ElementTree
from defusedxml.common import DefusedXmlException

_UM = {
    "": 1.0,
    "µm": 1.0,
    "μm": 1.0,
    "um": 1.0,
    "micron": 1.0,
    "nm": 1e-3,
    "mm": 1e3,
    "cm": 1e4,
    "m": 1e6,
}
"""Micrometres per unit of a physical size. Other units, such as `pixel`, are no lengths."""


@dataclass(frozen=True, slots=True)
class OmeImage:
    """One image of an OME-XML: µm per pixel and magnification as text, and the names of the channels.

    `samples` is the number of samples per pixel of all channels together, 3 for an RGB image.
    """

    mpp_x: str | None = None
    mpp_y: str | None = None
    objective_power: str | None = None
    channels: tuple[str, ...] = ()
    samples: int = 1


def read_ome(text: str, page: int) -> OmeImage:
    """Read the image of an OME-XML whose pixels begin at a page of the TIFF file.

    A text that cannot be parsed, or has several images, none of which begins there, has no values.
    """
    try:
        root: Any = ElementTree.fromstring(text)
    except (ElementTree.ParseError, DefusedXmlException, ValueError):
        return OmeImage()
    space = root.tag.partition("}")[0] + "}" if root.tag.startswith("{") else ""
    images = root.findall(f"{space}Image[{space}Pixels]")
    chosen = [image for image in images if _first_page(image, space) == page] or images
    if not chosen or (len(images) > 1 and chosen is images):
        return OmeImage()
    pixels = chosen[0].find(f"{space}Pixels")
    channels = pixels.findall(f"{space}Channel")
    names = [
        channel.get("Name") or channel.get("Fluor") or f"channel {n}"
        for n, channel in enumerate(channels, 1)
    ]
    counts = [channel.get("SamplesPerPixel", "1") for channel in channels]
    return OmeImage(
        _size(pixels.get("PhysicalSizeX"), pixels.get("PhysicalSizeXUnit", "")),
        _size(pixels.get("PhysicalSizeY"), pixels.get("PhysicalSizeYUnit", "")),
        _magnification(root, chosen[0], space),
        tuple(names), sum(int(count) if count.isdecimal() else 1 for count in counts) or 1,
    )  # fmt: skip


def _first_page(image: Any, space: str) -> int:
    pages = [data.get("IFD", "0") for data in image.iterfind(f"{space}Pixels/{space}TiffData")]
    return min((int(number) for number in pages if number.isdecimal()), default=0)


def _magnification(root: Any, image: Any, space: str) -> str | None:
    """Return the magnification of the objective of an image; None if it names none of several."""
    names = [settings.get("ID") for settings in image.iterfind(f"{space}ObjectiveSettings")]
    powers = {
        objective.get("NominalMagnification")
        for objective in root.iterfind(f"{space}Instrument/{space}Objective")
        if not names or objective.get("ID") in names
    }
    return powers.pop() if len(powers) == 1 else None


def _size(value: str | None, unit: str) -> str | None:
    try:
        return None if value is None else f"{float(value) * _UM[unit]:.9g}"
    except (ValueError, KeyError):
        return None
