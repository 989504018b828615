"""Scale, magnification and channels in the OME-XML of OME-TIFF files.

Source:
    The OME data model, schema 2016-06: https://docs.openmicroscopy.org/ome-model
"""

from __future__ import annotations

from dataclasses import dataclass

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
    """First image of an OME-XML: µm per pixel and magnification as text, and the names of the channels.

    `samples` is the number of samples per pixel of all channels together, 3 for an RGB image.
    """

    mpp_x: str | None = None
    mpp_y: str | None = None
    objective_power: str | None = None
    channels: tuple[str, ...] = ()
    samples: int = 1


def read_ome(text: str) -> OmeImage:
    """Read OME-XML. A text that cannot be parsed has no values."""
    try:
        root = ElementTree.fromstring(text)
    except (ElementTree.ParseError, DefusedXmlException, ValueError):
        return OmeImage()
    space = root.tag.partition("}")[0] + "}" if root.tag.startswith("{") else ""
    pixels = root.find(f"{space}Image/{space}Pixels")
    if pixels is None:
        return OmeImage()
    channels = pixels.findall(f"{space}Channel")
    names = [
        it.get("Name") or it.get("Fluor") or f"channel {n}" for n, it in enumerate(channels, 1)
    ]
    counts = [it.get("SamplesPerPixel", "1") for it in channels]
    objective = root.find(f"{space}Instrument/{space}Objective")
    return OmeImage(
        _size(pixels.get("PhysicalSizeX"), pixels.get("PhysicalSizeXUnit", "")),
        _size(pixels.get("PhysicalSizeY"), pixels.get("PhysicalSizeYUnit", "")),
        None if objective is None else objective.get("NominalMagnification"),
        tuple(names), sum(int(it) if it.isdecimal() else 1 for it in counts) or 1,
    )  # fmt: skip


def _size(value: str | None, unit: str) -> str | None:
    try:
        return None if value is None else f"{float(value) * _UM[unit]:.9g}"
    except (ValueError, KeyError):
        return None
