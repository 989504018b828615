"""Tensors of checkpoint files: `.safetensors`, and PyTorch's files."""

from __future__ import annotations

import io
import math
import pickletools
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from histopipe.errors import UsageError, reported_as
from histopipe.system.files import describe_file

_FLOATS = (np.float16, np.float32, np.float64, ml_dtypes.bfloat16)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor in a file.

    Attributes:
        shape, dtype: shape, and type in the file.
        path, name: the file, and the name of the tensor, for messages.
        load: reads the values.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    path: Path
    load: Callable[[], NDArray[Any]]
    name: str = ""

    def read(self) -> NDArray[np.float32]:
        """Read the values as float32.

        Raises:
            UsageError: the values are damaged, not finite, or no floating-point numbers.
        """
        if self.dtype not in _FLOATS:
            raise unusable(self.path, f"{self.name} of type {self.dtype}")
        try:
            values = self.load()
        except Exception as error:  # zipfile and safetensors raise errors of many classes
            raise unusable(self.path, f"{self.name}: {error}") from error
        converted = np.asarray(values, np.float32, order="C")
        if not np.isfinite(converted).all():
            raise unusable(self.path, f"{self.name}: values that are not finite numbers")
        return converted


def unusable(path: Path, problem: str, why: str = "") -> UsageError:
    """Return the error for a file that is not usable as weights."""
    return UsageError(
        f"{path} cannot be used as weights",
        found=problem[:300],
        expected="a .safetensors file, or a state dict of PyTorch",
        todo=why or "download the file again, and compare its size with that of the source",
    )


_MOST_PICKLE_BYTES = 16 << 20
_MOST_INSTRUCTIONS = 1_000_000
_LONGEST_NAME = 1000
"""Limits of untrusted pickles: a state dict needs far less, and larger ones could fill the memory or take endless time."""
_OLD_MAGIC, _OLD_VERSION = 0x1950A86A20F9469CFC6C, 1001
"""First two pickles of PyTorch's format before version 1.6."""
_MOST_DIMENSIONS = 8
_STORAGES = {
    "FloatStorage": np.dtype(np.float32),
    "DoubleStorage": np.dtype(np.float64),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "LongStorage": np.dtype(np.int64),
    "IntStorage": np.dtype(np.int32),
    "ShortStorage": np.dtype(np.int16),
    "CharStorage": np.dtype(np.int8),
    "ByteStorage": np.dtype(np.uint8),
    "BoolStorage": np.dtype(np.bool_),
}


@dataclass(frozen=True, slots=True)
class _Storage:
    """`count` numbers in a file."""

    key: str
    dtype: np.dtype[Any]
    count: int

    @property
    def size(self) -> int:
        """Bytes."""
        return self.count * self.dtype.itemsize


def _read_zip(path: Path) -> Any:
    with zipfile.ZipFile(path) as archive:
        members = {item.filename: item for item in archive.infolist()}
        names = [name for name in members if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(names) != 1:
            raise unusable(path, "an archive without data.pkl")
        if any(item.compress_type != zipfile.ZIP_STORED for item in members.values()):
            raise unusable(path, "an archive with compressed members")  # of any size
        if members[names[0]].file_size > _MOST_PICKLE_BYTES:
            raise unusable(path, f"a data.pkl of {members[names[0]].file_size} bytes")
        prefix = names[0].removesuffix("data.pkl")
        if f"{prefix}byteorder" in members and archive.read(f"{prefix}byteorder") != b"little":
            raise unusable(path, "numbers in big-endian order")

        def load(storage: _Storage) -> bytes:
            with zipfile.ZipFile(path) as file:  # compares the CRC of the member
                return file.read(f"{prefix}data/{storage.key}")

        machine = _Machine(path, load)
        content = machine.run(io.BytesIO(archive.read(names[0])))
        for key, storage in machine.storages.items():
            member = members.get(f"{prefix}data/{key}")
            _check_size(storage, member.file_size if member else 0)
        return content


def _read_old(path: Path) -> Any:
    starts: dict[str, int] = {}

    def load(storage: _Storage) -> bytes:
        with path.open("rb") as file:
            file.seek(starts[storage.key])
            return file.read(storage.size)

    with path.open("rb") as file:
        pickles, size = io.BytesIO(file.read(_MOST_PICKLE_BYTES)), file.seek(0, io.SEEK_END)
        machine = _Machine(path, load)
        magic, version, system, content, keys = (machine.run(pickles) for _ in range(5))
        if (magic, version) != (_OLD_MAGIC, _OLD_VERSION):
            raise unusable(path, "a pickle of another kind")
        if system.get("little_endian") is not True:
            raise unusable(path, "numbers in big-endian order")
        if sorted(keys) != sorted(machine.storages):
            raise unusable(path, "storages without a place")
        place = pickles.tell()
        for key in keys:
            storage, starts[key] = machine.storages[key], place + 8
            file.seek(place)
            if file.read(8) != storage.count.to_bytes(8, "little"):
                raise unusable(path, f"storage {key} with another number of values")
            _check_size(storage, size - starts[key])
            place = starts[key] + storage.size
    return content


def _check_size(storage: _Storage, size: int) -> None:
    if size < storage.size:
        raise ValueError(f"damaged storage {storage.key}: {size} bytes for {storage.count} numbers")


class _Machine:
    """Interpreter of the instructions that occur in pickles of state dicts."""

    def __init__(self, path: Path, load: Callable[[_Storage], bytes]) -> None:
        self._path, self._load = path, load
        self.storages: dict[str, _Storage] = {}
        self._names: dict[str, Callable[..., Any] | np.dtype[Any]] = {
            "collections OrderedDict": self._dictionary,
            "torch Size": tuple,
            "torch._utils _rebuild_tensor_v2": self._tensor,
            "torch._utils _rebuild_parameter": lambda data, *_: data,
            "torch._utils _rebuild_parameter_with_state": lambda data, *_: data,
            **{f"torch {name}": dtype for name, dtype in _STORAGES.items()},
        }

    def run(self, pickle: io.BytesIO) -> Any:
        """Return the object that the next pickle describes."""
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        try:
            for number, (opcode, argument, _) in enumerate(pickletools.genops(pickle)):
                if number > _MOST_INSTRUCTIONS:
                    raise unusable(self._path, "too many pickle instructions")
                if opcode.name == "STOP":
                    return self._stack.pop()
                self._step(opcode.name, argument)
        except UsageError:
            raise
        except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
            raise unusable(self._path, f"a damaged pickle ({error})") from error
        raise unusable(self._path, "a truncated pickle")

    def _step(self, name: str, argument: Any) -> None:  # noqa: PLR0912 - a branch per instruction
        stack = self._stack
        match name:
            case "PROTO" | "FRAME":
                pass
            case "MARK":
                self._marks.append(len(stack))
            case "BINPUT" | "LONG_BINPUT" | "MEMOIZE":
                self._memo[len(self._memo) if name == "MEMOIZE" else argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(self._memo[argument])
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple([stack.pop() for _ in range(int(name[-1]))][::-1]))
            case "LIST":
                stack.append(self._since_mark())
            case "TUPLE":
                stack.append(tuple(self._since_mark()))
            case "APPEND" | "APPENDS":
                values = self._since_mark() if name == "APPENDS" else [stack.pop()]
                self._top(list).extend(values)
            case "SETITEM" | "SETITEMS":
                pairs = (
                    self._since_mark() if name == "SETITEMS" else [stack.pop(), stack.pop()][::-1]
                )
                self._top(dict).update(self._dictionary(zip(pairs[::2], pairs[1::2], strict=True)))
            case "GLOBAL":
                stack.append(self._named(argument))
            case "STACK_GLOBAL":
                attribute, module = stack.pop(), stack.pop()
                if type(attribute) is not str or type(module) is not str:
                    raise ValueError("a name that is no text")
                stack.append(self._named(f"{module} {attribute}"))
            case "REDUCE":
                arguments, function = stack.pop(), stack.pop()
                if not callable(function) or not isinstance(arguments, tuple):
                    raise unusable(self._path, "a call of something that is no function")
                stack.append(function(*arguments))
            case "BUILD":  # attributes of an OrderedDict, which a state dict does not need
                stack.pop()
                self._top(dict)
            case "BINPERSID":
                stack.append(self._storage(stack.pop()))
            case _ if name in _LITERALS:
                stack.append(_LITERALS[name]() if argument is None else argument)
            case _:
                raise unusable(self._path, f"the pickle instruction {name}")

    def _named(self, name: str) -> Any:
        if name not in self._names:
            raise unusable(
                self._path,
                f"the name {name.replace(' ', '.')[:80]!r} in its pickle",
                "Files with other objects than tensors could run code when they are loaded with PyTorch.",
            )
        return self._names[name]

    def _since_mark(self) -> list[Any]:
        mark = self._marks.pop()
        values = self._stack[mark:]
        del self._stack[mark:]
        return values

    def _top(self, kind: type) -> Any:
        if type(self._stack[-1]) is not kind:
            raise TypeError(f"expected a {kind.__name__}")
        return self._stack[-1]

    def _dictionary(self, items: Any = ()) -> dict[Any, Any]:
        """Create a dictionary. Other keys, such as nested tuples, could take endless time to hash."""
        pairs = [(name, value) for name, value in items]
        if not all(
            type(name) is int or (type(name) is str and len(name) <= _LONGEST_NAME)
            for name, _ in pairs
        ):
            raise ValueError("a name that is no short text")
        return dict(pairs)

    def _storage(self, persistent: Any) -> _Storage:
        kind, dtype, key, _, count, *view = persistent
        if type(key) is not str or view not in ([], [None]):
            raise ValueError("a storage without a name, or a part of one")
        if kind != "storage" or not isinstance(dtype, np.dtype) or type(count) is not int:
            raise ValueError("a persistent id that is no storage")
        storage = _Storage(key, dtype, count)
        if count < 0 or self.storages.setdefault(key, storage) != storage:
            raise ValueError(f"storage {key} with two sizes or types")
        return storage

    def _tensor(
        self,
        storage: _Storage,
        offset: int,
        size: tuple[int, ...],
        stride: tuple[int, ...],
        *_: Any,
    ) -> Tensor:
        if type(size) is not tuple or type(stride) is not tuple:  # a list could be changed later
            raise ValueError("a tensor whose shape is no tuple")
        if not isinstance(storage, _Storage) or not all(
            type(n) is int and n >= 0 for n in (offset, *size, *stride)
        ):
            raise ValueError("a tensor with negative numbers")
        if len(size) != len(stride) or len(size) > _MOST_DIMENSIONS:
            raise ValueError("a tensor with a wrong number of dimensions")
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        if math.prod(size) and last >= storage.count:
            raise ValueError("a tensor that is larger than its storage")
        if math.prod(size) > storage.count:
            raise ValueError("a tensor with more numbers than its storage")

        def load() -> NDArray[Any]:
            values = np.frombuffer(self._load(storage), storage.dtype, storage.count)[offset:]
            steps = [step * storage.dtype.itemsize for step in stride]
            return np.lib.stride_tricks.as_strided(values, size, steps, writeable=False)

        return Tensor(size, storage.dtype, self._path, load)


_LITERALS: Mapping[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "BINUNICODE": str,
    "SHORT_BINUNICODE": str,
    "BININT": int,
    "BININT1": int,
    "BININT2": int,
    "LONG1": int,
    "BINFLOAT": float,
}
"""Instructions that push a value: their argument, or what the function returns."""


_MOST_TENSORS = 20_000
_LONGEST_PREFIX = 2000
_TORCH_READERS = {b"PK": _read_zip, b"\x80\x02\x8a\x0a": _read_old}
"""Readers of PyTorch's formats by their beginning: a zip archive, and before version 1.6 the pickle of a long number."""


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint file by name, without reading their values.

    Names of nested dictionaries are joined by dots.

    Raises:
        UsageError: the file cannot be read, is damaged, or contains anything else than a state dict.
    """
    with reported_as(UsageError, f"{path} cannot be read", OSError), path.open("rb") as file:
        head = file.read(4)
    if path.suffix == ".safetensors":
        return _safetensors(path)
    for beginning, read in _TORCH_READERS.items():
        if head.startswith(beginning):
            return _torch_tensors(path, read)
    raise unusable(path, describe_file(path))


def _torch_tensors(path: Path, read: Callable[[Path], Any]) -> dict[str, Tensor]:
    """Return the tensors of nested dictionaries. The limits prevent endless work on references to the same objects."""
    try:
        content = read(path)
    except UsageError:
        raise
    except Exception as error:  # zipfile raises errors of many classes on damaged files
        raise unusable(path, str(error)) from error
    if not isinstance(content, dict):
        raise unusable(path, f"a {type(content).__name__}")
    tensors: dict[str, Tensor] = {}
    waiting: list[tuple[str, Mapping[Any, Any]]] = [("", content)]
    while waiting:
        prefix, values = waiting.pop()
        if max(len(tensors), len(waiting)) > _MOST_TENSORS or len(prefix) > _LONGEST_PREFIX:
            raise unusable(path, "dictionaries nested too deep, or too many tensors")
        for name, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"{prefix}{name}"] = replace(value, name=f"{prefix}{name}")
            elif isinstance(value, Mapping):
                waiting.append((f"{prefix}{name}.", value))
    return tensors


def _safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError, safe_open

    def read(name: str) -> NDArray[Any]:
        with safe_open(path, framework="numpy") as file:
            return np.asarray(file.get_tensor(name))

    tensors: dict[str, Tensor] = {}
    try:
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                part = file.get_slice(name)
                dtype = _SAFETENSORS_TYPES.get(part.get_dtype())
                if dtype is None:
                    raise unusable(path, f"{name} of type {part.get_dtype()}")
                tensors[name] = Tensor(
                    tuple(part.get_shape()), dtype, path, partial(read, name), name
                )
    except (SafetensorError, OSError, ValueError) as error:
        raise unusable(path, f"{describe_file(path)}: {error}") from error
    return tensors


_SAFETENSORS_TYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
