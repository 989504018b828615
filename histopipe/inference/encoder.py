"""Encoders: networks that compute features of patches, loaded by the options of `embed` or from a record of them."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from histopipe.errors import OutOfMemory, UsageError, first_line, needs_extra, reported_as
from histopipe.inference.options import EmbedOptions
from histopipe.inference.slide_run import Network, device_rows
from histopipe.pretrained.encoders import named_preset, own_file
from histopipe.runs import folder as run_folder
from histopipe.runs.task_config import read_config
from histopipe.system.files import file_sha256
from histopipe.system.folders import CONFIG
from histopipe.system.tensorflow import load_quietly, parse_devices
from histopipe.system.worker_pool import count_usable_cores
from histopipe.tasks.choices import StainNorm
from histopipe.tiling.network import is_colour, read_description

SMALL = "small-cnn"
"""The patch model of the quick start. As an encoder it has random weights, always the same: for demos and tests."""
_CHOICE = ("precision", "xla", "allow_mismatch")
"""Options of `embed` that choose an encoder, apart from its name and weights."""
_LIBRARIES = ("histopipe", "tensorflow", "tensorflow-cpu", "keras", "onnxruntime", "pillow")


def recorded_options(record: Mapping[str, Any], **options: Any) -> EmbedOptions:
    """Return the options that choose the encoder of a record of `encoder_record`, with other options.

    Raises:
        UsageError: the record has none, because an earlier version made it.
    """
    try:
        choice = {**record["given"], **options}
        weights = [choice["weights"]] if choice.get("weights") else []
        return EmbedOptions(**{**choice, "model": [choice["model"]], "weights": weights})
    except (KeyError, TypeError) as error:
        raise UsageError(
            "the features of the training do not record how to load their encoder",
            todo="predict a folder of features; or embed and train again",
        ) from error


def check_patches(
    options: EmbedOptions, patch_size: int, mpps: Sequence[float | None]
) -> str | None:
    """Check that patches fit a preset. Return the mismatch, if it is allowed, or None.

    Raises:
        UsageError: they do not fit.
    """
    preset = None if _is_run(options) else named_preset(options.encoder)
    return (
        None
        if preset is None
        else preset.check_patches(patch_size, mpps, allowed=options.allow_mismatch)
    )


def _is_run(options: EmbedOptions) -> bool:
    return run_folder.has_begun(Path(options.encoder))


def load_encoder(options: EmbedOptions, patch_size: int) -> Network:
    """Load the encoder onto its devices.

    Raises:
        UsageError: the encoder cannot be used.
        MachineShort: a library is not installed.
    """
    model, is_run = options.encoder, _is_run(options)
    is_onnx = Path(model).suffix == ".onnx"
    if is_onnx or is_run:
        if options.weights:
            raise UsageError(
                "--weights",
                found=f"--model {model}, which already contains weights",
                expected="--model with the name of a network",
            )
        if options.precision != "float32" or options.xla:
            raise UsageError(
                "--xla" if options.xla else f"--precision {options.precision}",
                found=f"--model {model}",
                expected="a network that is not an ONNX file or a run",
            )
    if is_onnx:
        return OnnxEncoder(
            Path(model),
            patch_size=patch_size,
            devices=options.devices,
            batch_size=64 if options.batch_size == "auto" else options.batch_size,
        )
    untrained = named_preset(model) or own_file(model) or model == SMALL
    return cast(
        Network,
        load_quietly("histopipe.inference.networks").keras_encoder(
            Path(model) if is_run else model,
            weights=str([*options.weights, "none" if untrained else "imagenet"][0]),
            patch_size=patch_size,
            devices=options.devices,
            batch_size=options.batch_size,
            precision=options.precision,
            xla=options.xla,
        ),
    )


def read_stain_norm(options: EmbedOptions) -> StainNorm:
    """Return the stain normalization of the options; else that of a run, or "none" for other encoders."""
    if options.stain_norm or not _is_run(options):
        return options.stain_norm or "none"
    return cast(
        StainNorm,
        read_config(Path(options.encoder) / CONFIG).get("stain_norm", "none"),
    )


def check_all_patches(
    choices: Sequence[EmbedOptions], patch_size: int, mpps: Sequence[float | None]
) -> list[str | None]:
    """Check that patches fit all encoders; see `check_patches`."""
    mismatches, errors = list[str | None](), dict[str, UsageError]()
    for choice in choices:
        try:
            mismatches.append(check_patches(choice, patch_size, mpps))
        except UsageError as error:
            errors[choice.encoder] = error
    if errors and len(choices) > 1:
        presets = {choice.encoder: named_preset(choice.encoder) for choice in choices}
        raise UsageError(
            "the encoders need different patches",
            found="; ".join(f"{name}: {error.found}" for name, error in errors.items()),
            expected=", ".join(
                f"{name} {preset.preprocessing.resized} pixels at {' or '.join(map(str, preset.mpp)) or 'any'} mpp"
                for name, preset in presets.items()
                if preset is not None
            ),
            todo="embed them separately, or add --allow-mismatch",
        )
    for problem in errors.values():
        raise problem
    return mismatches


def common_stain_norm(choices: Sequence[EmbedOptions]) -> StainNorm:
    """Return the stain normalization of all encoders. Raise a UsageError if they need different ones."""
    methods = {choice.encoder: read_stain_norm(choice) for choice in choices}
    if len(set(methods.values())) > 1:
        raise UsageError(
            "the encoders need different stain normalization",
            found=", ".join(f"{name} {method}" for name, method in methods.items()),
            expected="one method",
            todo="embed them separately, or name one with --stain-norm",
        )
    return next(iter(methods.values()))


def encoder_record(
    options: EmbedOptions,
    encoder: Network,
    patch_size: int,
    spec: Mapping[str, Any],
    mpps: Iterable[float | None],
    **settings: Any,
) -> dict[str, Any]:
    """Return what features depend on, for `features.json`, and how to compute features of other slides.

    `spec` is the tiling of the patches, and `mpps` are their scales.
    """
    choice = {
        **{name: getattr(options, name) for name in _CHOICE},
        "model": options.encoder,
        "weights": next(iter(options.weights), None),
    }
    choice |= {
        name: str(Path(choice[name]).absolute() if Path(choice[name]).exists() else choice[name])
        for name in ("model", "weights")
        if choice[name]
    }
    scales = sorted(mpp for mpp in mpps if mpp)
    return {
        **encoder.identity,
        **settings,
        "libraries": versions(),
        "given": choice,
        "patches": {
            "patch_size": patch_size,
            "spec": dict(spec),
            "patch_mpp": scales[len(scales) // 2] if scales else None,
        },
    }


def versions() -> dict[str, str]:
    """Return the versions of the libraries that features depend on."""
    versions = {}
    for name in _LIBRARIES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


_FILTERS = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}
_EXAMPLE = '{"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225], "size": 224}'
_MEMORY_SIGNS = ("allocate", "out of memory", "BFCArena")


class EncodersTogether:
    """Several encoders as one network, whose results are those of all, side by side."""

    def __init__(self, encoders: Sequence[Network], patch_size: int) -> None:
        self._encoders = encoders
        self.dimension = sum(encoder.dimension for encoder in encoders)
        self.batch_size = min(encoder.batch_size for encoder in encoders)
        self.identity: Mapping[str, Any] = {}
        # Once at the start, so that memory for all of them is there.
        blank = np.zeros((self.batch_size, patch_size, patch_size, 3), np.uint8)
        self.finish(self.start(self.prepare(blank)))

    def prepare(self, images: NDArray[np.uint8]) -> Any:
        """Return the inputs of each encoder."""
        return [encoder.prepare(images) for encoder in self._encoders]

    def start(self, inputs: Any) -> Any:
        """Start all encoders."""
        return [each.start(part) for each, part in zip(self._encoders, inputs, strict=True)]

    def finish(self, started: Any) -> NDArray[np.float32]:
        """Wait for the (B, D) results of all encoders, side by side; see `Network`."""
        parts = [each.finish(one) for each, one in zip(self._encoders, started, strict=True)]
        rows = min(map(len, parts))
        return np.concatenate([part[:rows] for part in parts], axis=1)


class OnnxEncoder:
    """An ONNX network, `NAME.onnx`: (B, 3, S, S) float32 in, (B, D) out; one session per device.

    `NAME.json` in the same folder describes the preprocessing. Patches are resized to the input size of the network.

    Raises:
        UsageError: the ONNX file or its JSON file cannot be used, or a device does not exist.
        MachineShort: onnxruntime is not installed.
    """

    def __init__(self, path: Path, *, patch_size: int, devices: str, batch_size: int) -> None:
        self._path, self.batch_size = path, batch_size
        self._preprocessing, self._sessions = _read_preprocessing(path), _sessions(path, devices)
        self._input, self._fixed = _check_input(
            self._sessions[0], path, self._preprocessing["size"]
        )
        device_rows(batch_size, len(self._sessions))  # checks the batch size
        self._pool = ThreadPoolExecutor(len(self._sessions), "histopipe-onnx")
        blank = np.zeros((1, patch_size, patch_size, 3), np.uint8)
        self.dimension = self._run(self._sessions[0], self.prepare(blank)).shape[1]
        self.identity: Mapping[str, Any] = {
            "encoder": path.name,
            "dimension": self.dimension,
            "patch_size": patch_size,
            "sha256": file_sha256(path),
            **self._preprocessing,
        }

    def prepare(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return (B, 3, S, S) float32, resized and normalized as the JSON file describes."""
        settings, side = self._preprocessing, self._preprocessing["size"]
        if images.shape[1] != side:
            filter_ = _FILTERS[settings["interpolation"]]
            images = np.stack(
                [np.asarray(Image.fromarray(one).resize((side, side), filter_)) for one in images]
            )
        std = np.array(settings["std"], np.float32)
        scale, offset = 1 / (255 * std), -np.array(settings["mean"], np.float32) / std
        values = np.empty((len(images), 3, side, side), np.float32)
        # One channel at a time and in place, so that it stays in the CPU cache: six times faster than all at once.
        for image, out in zip(images, values, strict=True):
            for channel, plane in enumerate(out):
                plane[...] = image[..., channel]
                np.multiply(plane, scale[channel], out=plane)
                np.add(plane, offset[channel], out=plane)
        return values

    def start(self, inputs: NDArray[np.float32]) -> Iterator[NDArray[np.float32]]:
        """Start computing a batch, and return an iterator that waits for the results of each device."""
        devices = min(len(self._sessions), len(inputs))  # the last ones may have no patch
        parts = [inputs[rows.start : rows.stop] for rows in device_rows(len(inputs), devices)]
        return self._pool.map(self._run, self._sessions[:devices], parts)

    def finish(self, started: Iterator[NDArray[np.float32]]) -> NDArray[np.float32]:
        """Wait for the (B, D) results, in the order of the batch."""
        return np.concatenate(list(started))

    def _run(self, session: Any, inputs: NDArray[np.float32]) -> NDArray[np.float32]:
        """Run rows in one session, in pieces if the network was exported with a fixed batch size."""
        size = self._fixed or len(inputs)
        rows = -(-len(inputs) // size) * size
        # A network with a fixed batch size needs full batches: rows are repeated.
        whole = np.resize(inputs, (rows, *inputs.shape[1:])) if rows > len(inputs) else inputs
        pieces = (whole[first : first + size] for first in range(0, rows, size))
        return np.concatenate([self._outputs(session, piece) for piece in pieces])[: len(inputs)]

    def _outputs(self, session: Any, inputs: NDArray[np.float32]) -> NDArray[np.float32]:
        try:
            values = np.asarray(session.run(None, {self._input: inputs})[0])
        except Exception as error:  # onnxruntime's errors have no other common base class
            why = first_line(error)
            if isinstance(error, MemoryError) or any(sign in str(error) for sign in _MEMORY_SIGNS):
                raise OutOfMemory(
                    "memory ran out while embedding", found=why, todo="use a smaller --batch-size"
                ) from error
            raise UsageError(f"{self._path} cannot be run", found=why) from error
        values = values.reshape(values.shape[:2]) if values.shape[2:] in ((), (1, 1)) else values
        if values.ndim != 2:
            raise UsageError(
                f"{self._path}: wrong first output",
                found=f"shape {values.shape}",
                expected="(patches, features)",
                todo="export the network with pooled features, or the class token, as its output",
            )
        return values.astype(np.float32)


def _read_preprocessing(path: Path) -> dict[str, Any]:
    json_path = path.with_suffix(".json")
    if not path.is_file():
        raise UsageError(f"{path} does not exist")
    settings = {"interpolation": "bilinear"} | read_description(
        json_path,
        "an ONNX file does not describe its preprocessing",
        _EXAMPLE,
        "write it with the mean, standard deviation and size that the network was trained with",
    )
    fits: dict[str, Callable[[Any], bool]] = {
        "mean": is_colour,
        "std": lambda value: is_colour(value) and min(value) > 0,
        "size": lambda value: type(value) is int and 0 < value <= 4096,
        "interpolation": lambda value: value in _FILTERS,
    }
    wrong = sorted(settings.keys() ^ fits.keys()) or [
        name for name, fits_it in fits.items() if not fits_it(settings[name])
    ]
    if wrong:
        raise UsageError(
            f"{json_path}: wrong {', '.join(wrong)}",
            found={name: settings.get(name) for name in wrong},
            expected=f"such as {_EXAMPLE}, interpolation one of {', '.join(_FILTERS)}",
        )
    return settings


def _sessions(path: Path, devices: str) -> list[Any]:
    with needs_extra(
        "onnx",
        "ONNX files need onnxruntime, which is not installed",
        ", or onnxruntime-gpu for GPUs",
    ):
        import onnxruntime as ort  # imported here: optional
    match = parse_devices(devices)
    has_gpu = "CUDAExecutionProvider" in ort.get_available_providers()
    if devices.startswith("gpu") and not has_gpu:
        raise UsageError(
            f"--devices {devices}",
            found="an onnxruntime without CUDA",
            todo="install onnxruntime-gpu instead, or use --devices cpu",
        )
    options = ort.SessionOptions()
    options.log_severity_level = 3
    providers: list[Any] = ["CPUExecutionProvider"] * int(match["cpus"] or 1)
    if has_gpu and not devices.startswith("cpu"):
        providers = [
            ("CUDAExecutionProvider", {"device_id": int(number)})
            for number in (match["gpus"] or "0").split(",")
        ]
    else:
        options.intra_op_num_threads = max(1, count_usable_cores() // len(providers))
    with reported_as(
        UsageError,
        f"{path} cannot be loaded",
        Exception,  # onnxruntime's errors have no other common base class
        reason=first_line,
        expected="an ONNX network with one input (patches, 3, size, size)",
    ):
        return [ort.InferenceSession(str(path), options, providers=[one]) for one in providers]


def _check_input(session: Any, path: Path, side: int) -> tuple[str, int | None]:
    """Return the name of the input, and its batch size if it is fixed."""
    inputs = session.get_inputs()
    shape = inputs[0].shape
    fits = len(inputs) == 1 and len(shape) == 4 and inputs[0].type == "tensor(float)"
    if not fits or any(
        isinstance(n, int) and n != w for n, w in zip(shape[1:], (3, side, side), strict=True)
    ):
        raise UsageError(
            f"{path}: wrong inputs",
            found="; ".join(f"{tensor.name} {tensor.shape} {tensor.type}" for tensor in inputs),
            expected=f"one input, float32 of shape (patches, 3, {side}, {side})",
        )
    return inputs[0].name, shape[0] if isinstance(shape[0], int) else None
