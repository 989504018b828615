"""Presets of encoders: architecture, input, scale, licence and source of the weights, one TOML file each.

Encoders of patches have a table [input], and those of slides a table [network].
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from histopipe.errors import UsageError
from histopipe.pretrained.architecture import (
    NAMINGS,
    Architecture,
    Interpolation,
    SlideArchitecture,
)
from histopipe.system.output import message, some
from histopipe.system.settings import check_type


def from_table(
    kind: type[Any],
    values: Mapping[str, Any],
    where: str,
    *,
    omitted: Collection[str] = (),
    **parts: Any,
) -> Any:
    """Create a dataclass from the values of a TOML table, with checked names and types.

    `parts` are fields that are read already, and `omitted` further fields that the table must not have.
    """
    every = get_type_hints(kind)
    hints = {name: every[name] for name in every if name not in (*omitted, *parts)}
    required = {field.name for field in fields(kind) if field.default is MISSING}
    faults = {
        "unknown": values.keys() - hints.keys(),
        "missing": required - values.keys() - parts.keys(),
    }
    if any(faults.values()):
        texts = [f"{fault}: {', '.join(sorted(names))}" for fault, names in faults.items() if names]
        raise UsageError(f"{where}: fields", found="; ".join(texts), expected=", ".join(hints))
    checked = {
        name: checked_value(hints[name], value, f"{where}: {name}")
        for name, value in values.items()
    }
    return kind(**checked, **parts)


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


SUFFIX = ".toml"
_PATCHES, _SLIDES = (Path(__file__).with_name(name) for name in ("presets", "slide_presets"))
"""Folders of the presets of patch encoders, and of slide encoders."""
_OF_PATCHES = ("naming", "architecture", "input")
_OF_SLIDES = ("sha256", "patch_encoders", "patch_size", "network")
"""Fields that presets of one kind have alone."""
_TOLERANCE = 0.2
"""Of mpp, or of the side of a patch in µm. Published recipes resize patches of 256 pixels at 0.5 mpp to 224, which is 0.57 mpp,
and scanners differ by 2 %."""
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
class Preset:
    """An encoder of patches or of slides that can be named.

    Attributes:
        name: name on the command line.
        title, licence, reference: for people.
        repository, files: where the weights are on Hugging Face, and names of the file, best first.
        parameters: number of weights; 0: unknown.
        mpp: scales of the patches that it was trained on, in µm per pixel; empty: any. Of slide encoders, one.
        input: of patch encoders; None for slide encoders.
        naming: of patch encoders: names of the weights, see `NAMINGS`.
        architecture: of a Vision Transformer; None for slide encoders, a Keras model or a SavedModel.
        network: architecture of a slide encoder; None for patch encoders.
        patch_encoders: of slide encoders: names of the encoders whose features it takes; the first is the usual one.
        patch_size: of slide encoders: side of the patches that it was trained on, in pixels.
        sha256: of slide encoders: checksums of the published files, where they are known.
    """

    name: str
    title: str = ""
    licence: str = ""
    reference: str = ""
    repository: str = ""
    files: tuple[str, ...] = ()
    parameters: int = 0
    mpp: tuple[float, ...] = ()
    input: Preprocessing | None = None
    naming: str = "timm"
    architecture: Architecture | None = None
    network: SlideArchitecture | None = None
    patch_encoders: tuple[str, ...] = ()
    patch_size: int = 0
    sha256: tuple[str, ...] = ()

    @property
    def preprocessing(self) -> Preprocessing:
        """The input of a patch encoder. Raise a UsageError for a slide encoder."""
        if self.input is None:
            raise UsageError(
                f"--model {self.name}", found="a slide encoder", expected="an encoder of patches"
            )
        return self.input

    @property
    def slide_network(self) -> SlideArchitecture:
        """The architecture of a slide encoder. Raise a UsageError for a patch encoder."""
        if self.network is None:
            raise UsageError(
                f"--model {self.name}", found="an encoder of patches", expected="a slide encoder"
            )
        return self.network

    @property
    def dimension(self) -> int | None:
        """Number of features; None if it is unknown."""
        network = self.network or self.architecture
        return network.dimension if network else None

    def to_json(self) -> dict[str, Any]:
        """Return the fields of this kind of preset, and the dimension."""
        omitted = _OF_SLIDES if self.network is None else _OF_PATCHES
        values = {name: value for name, value in asdict(self).items() if name not in omitted}
        if self.network is not None:
            values["mpp"] = self.mpp[0]
        return {**values, "dimension": self.dimension}

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
                elif not any(abs(seen - trained) <= _TOLERANCE * trained for trained in self.mpp):
                    problems.append(
                        f"{mpp:.3g} mpp, which is {seen:.3g} mpp after resizing to {resized} pixels"
                    )
        if not problems:
            return None
        omitted = f" and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        mismatch = f"patches of {patch_size} pixels: {'; '.join(problems[:_SHOWN])}{omitted}"
        if allowed:
            return _allowed(mismatch)
        scales = f" at {' or '.join(f'{mpp:g}' for mpp in self.mpp)} mpp" if self.mpp else ""
        raise UsageError(
            f"the patches do not fit {self.name}",
            found=mismatch,
            expected=f"patches of {resized} pixels{scales}, or a little larger",
            todo="ingest the slides with another --patch-size and --mpp, or add --allow-mismatch",
        )

    def check_features(
        self,
        record: Mapping[str, Any] | None,
        dimension: int,
        where: Path,
        *,
        sides_um: Iterable[float] = (),
        allowed: bool,
    ) -> str | None:
        """Check that features of patches are those that the network takes.

        Args:
            record: what the folder records of the encoder; None if another tool made it.
            dimension: number of features.
            where: the folder, for messages.
            sides_um: sides of the patches in µm that the files of another tool have; 0: unknown.
            allowed: warn of another encoder or other patches and return it, instead of raising an error.

        Raises:
            UsageError: they are not.
        """
        expected, problems = f"features of {' or '.join(self.patch_encoders)}", list[str]()
        features = self.slide_network.features
        if dimension != features:
            raise UsageError(
                f"{where} does not fit {self.name}",
                found=f"{dimension} features per patch",
                expected=f"{features}, {expected}",
            )
        encoder = record and str(record.get("preset") or Path(str(record.get("encoder"))).stem)
        if encoder and encoder not in self.patch_encoders:
            problems.append(f"features of {encoder}")
        patches = (record or {}).get("patches") or {}
        side = (patches.get("patch_size") or 0) * (patches.get("patch_mpp") or 0)
        trained = self.patch_size * self.mpp[0]
        of_files = {*sides_um}
        sides = sorted({side, *of_files} - {0})
        of_patches = f"patches of {trained:g} µm: {self.patch_size} pixels at {self.mpp[0]:g} mpp"
        wrong = [f"{side:.4g}" for side in sides if abs(side - trained) > _TOLERANCE * trained]
        if wrong:
            problems.append(f"patches of {some(wrong)} µm")
        unknown = [
            *["its encoder"] * (not encoder),
            *["the scale of its patches"] * (not side and (not sides or 0 in of_files)),
        ]
        if unknown:
            message(
                f"warning: {where} does not record {' and '.join(unknown)}: {self.name} needs {expected}, of {of_patches}"
            )
        if not problems:
            return None
        mismatch = " and ".join(problems)
        if allowed:
            return _allowed(mismatch, f"{where}: ")
        raise UsageError(
            f"{where} does not fit {self.name}",
            found=mismatch,
            expected=f"{expected}, of {of_patches}",
            todo=f"embed with --model {self.patch_encoders[0]}, or add --allow-mismatch",
        )


def _allowed(mismatch: str, where: str = "") -> str:
    """Warn of a mismatch that is allowed, and return it."""
    message(f"warning: {where}{mismatch}; continuing because of --allow-mismatch")
    return mismatch


def preset_names() -> list[str]:
    """Return the names of all presets of patch encoders."""
    return _names(_PATCHES)


def slide_preset_names() -> list[str]:
    """Return the names of all presets of slide encoders."""
    return _names(_SLIDES)


def _names(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob(f"*{SUFFIX}"))


def load_preset(model: str | Path) -> Preset:
    """Load a preset by its name, or from the path of a TOML file.

    Raises:
        UsageError: there is no such preset, or a field is missing, unknown or wrong.
    """
    folder = _SLIDES if model in slide_preset_names() else _PATCHES
    path = Path(model) if str(model).endswith(SUFFIX) else folder / f"{model}{SUFFIX}"
    try:
        values = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"preset {path.stem} cannot be read",
            found=str(error),
            expected=f"a TOML file, or one of {', '.join(_names(folder))}",
        ) from error
    of_slides = not {"network", "patch_encoders"}.isdisjoint(values)
    tables: dict[str, type] = (
        {"network": SlideArchitecture}
        if of_slides
        else {"input": Preprocessing, "architecture": Architecture}
    )
    parts: dict[str, Any] = {}
    for table, kind in tables.items():
        content = values.pop(table, None if kind is Architecture else {})
        if content is not None:
            if not isinstance(content, dict):
                raise UsageError(
                    f"{path.name}: {table}", found=repr(content), expected=f"a table [{table}]"
                )
            parts[table] = from_table(kind, content, f"{path.name}, [{table}]")
    if of_slides and not isinstance(values.get("mpp", ()), list):
        values["mpp"] = [values["mpp"]]
    omitted = _OF_PATCHES if of_slides else _OF_SLIDES
    preset: Preset = from_table(Preset, values, path.name, omitted=omitted, name=path.stem, **parts)
    check_preset(preset, path.name)
    return preset


def slide_preset(model: str) -> Preset | None:
    """Return the slide encoder that a value of `--model` names; None if it is another encoder.

    Raises:
        UsageError: a TOML file cannot be read, or a field is missing, unknown or wrong.
    """
    if model not in slide_preset_names() and not model.endswith(SUFFIX):
        return None
    preset = load_preset(model)
    return None if preset.network is None else preset


def check_preset(preset: Preset, where: str) -> None:
    """Check values that depend on each other.

    Raises:
        UsageError: they do not fit.
    """
    if preset.network is not None:
        _check_slide_encoder(preset, preset.network, where)
        return
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


def _check_slide_encoder(preset: Preset, network: SlideArchitecture, where: str) -> None:
    for name, number in {
        **{
            name: getattr(network, name)
            for name in ("features", "width", "hidden", "depth", "heads")
        },
        "patch_size": preset.patch_size,
        "mpp": preset.mpp[0] if len(preset.mpp) == 1 else 0,
        "patch_encoders": len(preset.patch_encoders),
    }.items():
        if not 0 < number < 1 << 20:
            raise UsageError(f"{where}: {name}", found=number, expected="a number above 0")
    needed = {"longnet": ("segments", "ratios"), "perceiver": ("latents",)}.get(network.family, ())
    missing = [name for name in needed if not getattr(network, name)]
    uneven = network.width % network.heads or any(network.heads % (r or 1) for r in network.ratios)
    if missing or uneven or len(network.segments) != len(network.ratios):
        raise UsageError(
            f"{where}: network",
            found=f"no {missing[0]}"
            if missing
            else f"width {network.width}, {network.heads} heads, "
            f"segments {network.segments}, ratios {network.ratios}",
            expected="a width that is a multiple of the heads, and a ratio for each segment, of which the heads are a multiple",
        )
