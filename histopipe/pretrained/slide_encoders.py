"""Presets of slide encoders, and the files of their weights."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from histopipe.errors import UsageError
from histopipe.pretrained.architecture import check_shapes, common_prefix
from histopipe.pretrained.checkpoints import Tensor
from histopipe.pretrained.presets import SUFFIX, PublishedEncoder, from_table, read_table_file
from histopipe.system.output import message, some

FOLDER = Path(__file__).with_name("slide_presets")
_TOLERANCE = 0.2
"""Of the side of a patch in µm, as for patch encoders."""


Family = Literal["abmil", "clam", "madeleine", "moozy", "titan", "longnet", "perceiver"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlideArchitecture:
    """Architecture of a slide encoder.

    Attributes:
        family: kind of the network, see `histopipe.training.slide_networks`.
        features: number of features of a patch.
        width: of the tokens, or hidden features, and of the vector except with the pooling "inputs".
        hidden: width of feed-forward networks, or of gated attention.
        depth, heads: number of blocks, and of attention heads.
        inner_depth: number of blocks of a Perceiver after each attention to the patches.
        patient_depth: number of blocks of the transformer of a patient's slides; 0: none.
        latents: number of queries of a Perceiver.
        segments, ratios: lengths and dilations of LongNet's attention.
        pooling: "attention", attention over "inputs" of the network, the "class" token or the "mean" of the patches.
    """

    family: Family
    features: int
    width: int
    hidden: int
    depth: int = 1
    heads: int = 1
    inner_depth: int = 0
    patient_depth: int = 0
    latents: int = 0
    segments: tuple[int, ...] = ()
    ratios: tuple[int, ...] = ()
    pooling: Literal["attention", "inputs", "class", "mean"] = "class"

    @property
    def dimension(self) -> int:
        """Number of values of the vector of a slide."""
        return self.features if self.pooling == "inputs" else self.width

    @property
    def has_attention(self) -> bool:
        """Whether the network pools patches by attention."""
        return self.family not in ("moozy", "longnet")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidePreset(PublishedEncoder):
    """A slide encoder that can be named.

    Attributes:
        sha256: checksums of the published files, where they are known.
        patch_encoders: names of the encoders whose features it takes; the first is the usual one.
        patch_size, mpp: of the patches that it was trained on, in pixels and µm per pixel.
        network: its architecture.
    """

    sha256: tuple[str, ...] = ()
    patch_encoders: tuple[str, ...]
    patch_size: int
    mpp: float
    network: SlideArchitecture

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
        expected, problems = f"features of {' or '.join(self.patch_encoders)}", []
        if dimension != self.network.features:
            raise UsageError(
                f"{where} does not fit {self.name}",
                found=f"{dimension} features per patch",
                expected=f"{self.network.features}, {expected}",
            )
        encoder = record and str(record.get("preset") or Path(str(record.get("encoder"))).stem)
        if encoder and encoder not in self.patch_encoders:
            problems.append(f"features of {encoder}")
        patches = (record or {}).get("patches") or {}
        side = (patches.get("patch_size") or 0) * (patches.get("patch_mpp") or 0)
        trained = self.patch_size * self.mpp
        of_files = {*sides_um}
        sides = sorted({side, *of_files} - {0})
        of_patches = f"patches of {trained:g} µm: {self.patch_size} pixels at {self.mpp:g} mpp"
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
        if allowed:
            message(
                f"warning: {where}: {' and '.join(problems)}; continuing because of --allow-mismatch"
            )
            return " and ".join(problems)
        raise UsageError(
            f"{where} does not fit {self.name}",
            found=" and ".join(problems),
            expected=f"{expected}, of {of_patches}",
            todo=f"embed with --model {self.patch_encoders[0]}, or add --allow-mismatch",
        )


def slide_preset_names() -> list[str]:
    """Return the names of all presets of slide encoders."""
    return sorted(path.stem for path in FOLDER.glob(f"*{SUFFIX}"))


def slide_preset(model: str) -> SlidePreset | None:
    """Return the slide encoder that a value of `--model` names, or a TOML file with a table [network]; else None.

    Raises:
        UsageError: the file cannot be read, or a field is missing, unknown or wrong.
    """
    if model not in slide_preset_names() and not model.endswith(SUFFIX):
        return None
    path = Path(model) if model.endswith(SUFFIX) else FOLDER / f"{model}{SUFFIX}"
    values = read_table_file(path, slide_preset_names())
    network = values.pop("network", None)
    if network is None and "patch_encoders" not in values:
        return None
    if not isinstance(network, dict):
        raise UsageError(f"{path.name}: network", found=repr(network), expected="a table [network]")
    parts = {
        "name": path.stem,
        "network": from_table(SlideArchitecture, network, f"{path.name}, [network]"),
    }
    preset: SlidePreset = from_table(SlidePreset, {**values, **parts}, path.name)
    _check(preset, path.name)
    return preset


def _check(preset: SlidePreset, where: str) -> None:
    network = preset.network
    for name, number in {
        **{
            name: getattr(network, name)
            for name in ("features", "width", "hidden", "depth", "heads")
        },
        "patch_size": preset.patch_size,
        "mpp": preset.mpp,
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


def select_weights(
    tensors: Mapping[str, Tensor],
    expected: Mapping[str, tuple[int, ...]],
    path: Path,
    *,
    first: str,
    unused: str,
) -> dict[str, Tensor]:
    """Return the tensors of a network by their names, without the prefix of wrappers.

    Args:
        tensors: those of the file.
        expected: name and shape of each weight.
        path: the file.
        first: name of a weight that each file has.
        unused: pattern of names that the network does not use.

    Raises:
        UsageError: tensors are missing, surplus or misshapen.
    """
    prefix = common_prefix(tensors, first, path)
    names = {name.removeprefix(prefix): name for name in tensors if name.startswith(prefix)}
    selected = {
        name: tensors[full]
        for name, full in names.items()
        if name in expected or not re.match(unused, name)
    }
    check_shapes(selected, expected, path)
    return selected
