"""Read tensors of PyTorch's files (`.bin`, `.pt`, `.pth`) without PyTorch, and without running anything in them.

A file of `torch.save` is a zip archive with a pickle, `data.pkl`, and one uncompressed member per storage. Before
PyTorch 1.6 it was five pickles (a magic number, a version, facts about the system, the content, and the keys of the
storages), and then the storages. Pickles can run any code, so they are never loaded by Python's unpickler. `_Machine`
interprets the few instructions that a state dict needs, and knows only the names in `_names`.

Source: torch/serialization.py and torch/_utils.py of PyTorch 2, and the documentation of `pickletools`.
"""

from __future__ import annotations

import io
import math
import pickletools
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from histopipe.errors import UsageError
from histopipe.pretrained.tensors import Tensor, unusable

_MOST_PICKLE_BYTES = 16 << 20
_MOST_INSTRUCTIONS = 1_000_000
_LONGEST_NAME = 1000
_OLD_MAGIC, _OLD_VERSION = 0x1950A86A20F9469CFC6C, 1001
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


def read_torch_file(path: Path) -> Mapping[str, Any]:
    """Return the content of a file of `torch.save`: nested dictionaries and lists with `Tensor` values, read on demand.

    Raises:
        UsageError: the file is damaged, or contains anything else than a state dict.
    """
    try:
        content = _read(path)
    except UsageError:
        raise
    except Exception as error:  # zipfile raises errors of many classes on damaged files
        raise unusable(path, str(error)) from error
    if not isinstance(content, dict):
        raise unusable(path, f"a {type(content).__name__}")
    return content


def _read(path: Path) -> Any:
    with path.open("rb") as file:
        if file.read(2) != b"PK":
            return _read_old(path)
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
            return file.read(storage.count * storage.dtype.itemsize)

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
            place = starts[key] + storage.count * storage.dtype.itemsize
    return content


def _check_size(storage: _Storage, size: int) -> None:
    if size < storage.count * storage.dtype.itemsize:
        numbers = f"{storage.count} numbers"
        raise ValueError(f"damaged storage {storage.key}: {size} bytes for {numbers}")


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
        except (
            ValueError,
            IndexError,
            KeyError,
            TypeError,
            OverflowError,
            RecursionError,
        ) as error:
            raise unusable(self._path, f"a damaged pickle ({error})") from error
        raise unusable(self._path, "a truncated pickle")

    def _step(self, name: str, argument: Any) -> None:
        if not (self._push(name, argument) or self._collect(name) or self._apply(name)):
            raise unusable(self._path, f"the pickle instruction {name}")

    def _push(self, name: str, argument: Any) -> bool:
        """Carry out an instruction that pushes or remembers a value. Return whether it is one."""
        stack = self._stack
        if name in _LITERALS:
            stack.append(_LITERALS[name]() if argument is None else argument)
        elif name == "MARK":
            self._marks.append(len(stack))
        elif name in ("BINPUT", "LONG_BINPUT"):
            self._memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif name == "GLOBAL":
            stack.append(self._named(argument))
        else:
            return name in ("PROTO", "FRAME")
        return True

    def _collect(self, name: str) -> bool:
        """Carry out an instruction that puts values into a tuple, list or dictionary. Return whether it is one."""
        stack = self._stack
        if name in ("TUPLE", "LIST"):
            values = self._since_mark()
            stack.append(tuple(values) if name == "TUPLE" else values)
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            stack.append(tuple([stack.pop() for _ in range(int(name[-1]))][::-1]))
        elif name in ("APPEND", "APPENDS"):
            values = self._since_mark() if name == "APPENDS" else [stack.pop()]
            self._top(list).extend(values)
        elif name in ("SETITEM", "SETITEMS"):
            values = self._since_mark() if name == "SETITEMS" else [stack.pop(), stack.pop()][::-1]
            pairs = list(zip(values[::2], values[1::2], strict=True))
            self._top(dict).update(self._dictionary(pairs))
        else:
            return False
        return True

    def _apply(self, name: str) -> bool:
        """Carry out an instruction that makes an object. Return whether it is one."""
        stack = self._stack
        if name == "STACK_GLOBAL":
            attribute, module = stack.pop(), stack.pop()
            if type(attribute) is not str or type(module) is not str:
                raise ValueError("a name that is no text")
            stack.append(self._named(f"{module} {attribute}"))
        elif name == "REDUCE":
            arguments, function = stack.pop(), stack.pop()
            if not callable(function) or not isinstance(arguments, tuple):
                raise unusable(self._path, "a call of something that is no function")
            stack.append(function(*arguments))
        elif name == "BUILD":  # attributes of an OrderedDict, which a state dict does not need
            stack.pop()
            self._top(dict)
        elif name == "BINPERSID":
            stack.append(self._storage(stack.pop()))
        else:
            return False
        return True

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
        for name, _ in pairs:
            if not (type(name) is int or (type(name) is str and len(name) <= _LONGEST_NAME)):
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
        whole = (offset, *size, *stride)
        if not isinstance(storage, _Storage) or not all(type(n) is int and n >= 0 for n in whole):
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
    "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False, "EMPTY_DICT": dict, "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple, "BINUNICODE": str, "SHORT_BINUNICODE": str, "BININT": int, "BININT1": int, "BININT2": int,
    "LONG1": int, "BINFLOAT": float,
}  # fmt: skip
"""Instructions that push a value: their argument, or what the function returns."""
