"""Presets of encoders: architecture, preprocessing, scale, licence and source of the weights, one TOML file each."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from histopipe.errors import UsageError
from histopipe.pretrained.architecture import NAMINGS, Architecture, Interpolation
from histopipe.system.output import message
from histopipe.system.settings import check_type


def from_table(kind: type[Any], values: Mapping[str, Any], where: str) -> Any:
    """Create a dataclass from the values of a TOML table, with checked names and types."""
    hints = get_type_hints(kind)
    faults = {
        "unknown": values.keys() - hints.keys(),
        "missing": {field.name for field in fields(kind) if field.default is MISSING}
        - values.keys(),
    }
    if any(faults.values()):
        texts = [f"{fault}: {', '.join(sorted(names))}" for fault, names in faults.items() if names]
        raise UsageError(f"{where}: fields", found="; ".join(texts), expected=", ".join(hints))
    return kind(
        **{
            name: checked_value(hints[name], value, f"{where}: {name}")
            for name, value in values.items()
        }
    )


def checked_value(hint: Any, value: Any, where: str) -> Any:
    """Return a value of a TOML file with the type of a field: a tuple for a list, and a float for a whole number.

    Raises:
        UsageError: it has another type, a list another length, or a whole number is negative or far too large.
    """
    check_type(where, value, hint)
    parts = get_args(hint) if get_origin(hint) is tuple else ()
    if parts and parts[-1] is not ... and len(value) != len(parts):
        raise UsageError(where, found=repr(value), expected=f"a list of {len(parts)} values")
    if hint is int and not 0 <= value < 1 << 40:
        raise UsageError(where, found=value, expected="a whole number, 0 or more")
    if parts:
        return tuple(map(float, value)) if parts[0] is float else tuple(value)
    return float(value) if hint is float else value


FOLDER = Path(__file__).with_name("presets")
SUFFIX = ".toml"
_MPP_TOLERANCE = 0.2
"""Published recipes resize patches of 256 pixels at 0.5 mpp to 224, which is 0.57 mpp, and scanners differ by 2 %."""
_SHOWN = 3
"""Mismatches that a message lists."""
_LARGEST = 4096
"""Largest input in pixels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preprocessing:
    """How a patch becomes the input of a network.

    Attributes:
        size: side of the input in pixels: the centre of the resized patch.
        resize: side in pixels to which a patch is resized; 0: as `size`.
        trained_size: side in pixels of the inputs that the position embeddings in the file are for; 0: as `size`.
        interpolation: filter of the resizing, antialiased and rounded as in PIL.
        mean, std: normalization of each channel, for pixels from 0 to 1.
    """

    size: int
    resize: int = 0
    trained_size: int = 0
    interpolation: Interpolation = "bilinear"
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    @property
    def resized(self) -> int:
        """Side in pixels to which a patch is resized."""
        return self.resize or self.size

    @property
    def trained(self) -> int:
        """Side in pixels of the inputs that the position embeddings in the file are for."""
        return self.trained_size or self.size


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedEncoder:
    """What presets of encoders of patches and of slides have in common.

    Attributes:
        name: name on the command line.
        title, licence, reference: for people.
        repository, files: where the weights are on Hugging Face, and names of the file, best first.
        parameters: number of weights; 0: unknown.
    """

    name: str
    title: str = ""
    licence: str = ""
    reference: str = ""
    repository: str = ""
    files: tuple[str, ...] = ()
    parameters: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset(PublishedEncoder):
    """An encoder of patches that can be named.

    Attributes:
        mpp: scales that it was trained on, in µm per pixel; empty: any.
        naming: names of the weights, see `NAMINGS`.
        architecture: of a Vision Transformer; None for a Keras model or a SavedModel.
        preprocessing: its input.
    """

    mpp: tuple[float, ...] = ()
    naming: str = "timm"
    architecture: Architecture | None = None
    preprocessing: Preprocessing

    def check_patches(
        self, patch_size: int, mpps: Sequence[float | None], *, allowed: bool
    ) -> str | None:
        """Check that patches have a size and scale that the network was trained on.

        Args:
            patch_size: side of the patches in pixels.
            mpps: scales of the patches of each slide, in µm per pixel; None if unknown.
            allowed: warn of a mismatch and return it, instead of raising an error.

        Raises:
            UsageError: the patches do not fit.
        """
        resized = self.preprocessing.resized
        problems = []
        if patch_size < resized:
            problems.append(f"patches of {patch_size} pixels would be enlarged")
        elif self.mpp:
            for mpp in sorted(set(mpps), key=lambda mpp: mpp or 0.0):
                seen = (mpp or 0.0) * patch_size / resized
                if mpp is None:
                    problems.append("slides of unknown scale")
                elif not any(
                    abs(seen - trained) <= _MPP_TOLERANCE * trained for trained in self.mpp
                ):
                    problems.append(
                        f"{mpp:.3g} mpp, which is {seen:.3g} mpp after resizing to {resized} pixels"
                    )
        if not problems:
            return None
        omitted = f" and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        mismatch = f"patches of {patch_size} pixels: {'; '.join(problems[:_SHOWN])}{omitted}"
        if allowed:
            message(f"warning: {mismatch}; continuing because of --allow-mismatch")
            return mismatch
        scales = f" at {' or '.join(f'{mpp:g}' for mpp in self.mpp)} mpp" if self.mpp else ""
        raise UsageError(
            f"the patches do not fit {self.name}",
            found=mismatch,
            expected=f"patches of {resized} pixels{scales}, or a little larger",
            todo="ingest the slides with another --patch-size and --mpp, or add --allow-mismatch",
        )


def read_table_file(path: Path, names: Sequence[str]) -> dict[str, Any]:
    """Return the content of the TOML file of a preset. Raise a UsageError if it cannot be read; `names` are those of the others."""
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"preset {path.stem} cannot be read",
            found=str(error),
            expected=f"a TOML file, or one of {', '.join(names)}",
        ) from error


def preset_names() -> list[str]:
    """Return the names of all presets."""
    return sorted(path.stem for path in FOLDER.glob(f"*{SUFFIX}"))


def load_preset(model: str | Path) -> Preset:
    """Load a preset by its name, or from the path of a TOML file.

    Raises:
        UsageError: there is no such preset, or a field is missing, unknown or wrong.
    """
    path = Path(model) if str(model).endswith(SUFFIX) else FOLDER / f"{model}{SUFFIX}"
    values = read_table_file(path, preset_names())
    parts: dict[str, Any] = {"name": path.stem}
    for table, field, kind in (
        ("architecture", "architecture", Architecture),
        ("input", "preprocessing", Preprocessing),
    ):
        content = values.pop(table, {} if kind is Preprocessing else None)
        if content is not None:
            if not isinstance(content, dict):
                raise UsageError(
                    f"{path.name}: {table}", found=repr(content), expected=f"a table [{table}]"
                )
            parts[field] = from_table(kind, content, f"{path.name}, [{table}]")
    twice = parts.keys() & values.keys()
    if twice:
        raise UsageError(f"{path.name}: fields", found=f"unknown: {', '.join(sorted(twice))}")
    preset: Preset = from_table(Preset, {**values, **parts}, path.name)
    check_preset(preset, path.name)
    return preset


def check_preset(preset: Preset, where: str) -> None:
    """Check values that depend on each other.

    Raises:
        UsageError: they do not fit.
    """
    if preset.naming not in NAMINGS:
        raise UsageError(f"{where}: naming", found=preset.naming, expected=", ".join(NAMINGS))
    settings, network = preset.preprocessing, preset.architecture
    numbers = {"mean": (settings.mean, -math.inf), "std": (settings.std, 0), "mpp": (preset.mpp, 0)}
    if network is not None:
        names = ("epsilon", "patch", "width", "depth", "heads", "hidden")
        numbers |= {name: ((getattr(network, name),), 0) for name in names}
    for name, (values, above) in numbers.items():
        if not all(math.isfinite(value) and value > above for value in values):
            raise UsageError(
                f"{where}: {name}", found=list(values), expected=f"finite numbers above {above:g}"
            )
    if not 0 < settings.size <= settings.resized <= _LARGEST:
        raise UsageError(
            f"{where}: size",
            found=settings.size,
            expected=f"1 to {min(settings.resized, _LARGEST)}, the size after resizing",
        )
    if network is None:
        return
    patch = f"the network's patch of {network.patch} pixels"
    for name, number, divisor, text in (
        ("size", settings.size, network.patch, patch),
        ("trained_size", settings.trained_size, network.patch, patch),
        ("width", network.width, network.heads, f"heads, {network.heads}"),
    ):
        if number % divisor:
            raise UsageError(f"{where}: {name}", found=number, expected=f"a multiple of {text}")
    if (network.pooling == "attention") != bool(network.pool_width and NAMINGS[preset.naming].pool):
        raise UsageError(
            f"{where}: pooling",
            found=f"{network.pooling}, pool_width {network.pool_width}, naming {preset.naming}",
            expected='"attention" with a pool_width, and naming = "conch" or "conch-v1.5"',
        )
    for name, part in (
        ("layer_scale", "scale1"),
        ("gated", "gated_in"),
        ("registers", "registers"),
    ):
        if getattr(network, name) and part not in NAMINGS[preset.naming].names:
            raise UsageError(
                f"{where}: {name}",
                found=str(getattr(network, name)).lower(),
                expected=f'none with naming = "{preset.naming}"',
            )
