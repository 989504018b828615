"""Check the arguments of public functions against their annotations."""

from __future__ import annotations

import functools
import inspect
import numbers
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from histopipe.errors import UsageError

_TEXTS: Mapping[Any, str] = types.MappingProxyType(
    {
        str: "a text",
        Path: "a path",
        int: "a whole number",
        float: "a number",
        bool: "True or False",
        types.NoneType: "None",
    }
)
_NUMBERS: Mapping[Any, type] = types.MappingProxyType({int: numbers.Integral, float: numbers.Real})


@functools.cache
def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that raises a UsageError for an argument that its annotation does not allow."""
    signature = inspect.signature(function)
    # Settings of an `Unpack` are checked where they are read. Their class may be imported for type checkers only.
    annotations = {
        name: text
        for name, text in function.__annotations__.items()
        if name != "return" and not text.startswith("Unpack")
    }
    hints = get_type_hints(types.SimpleNamespace(__annotations__=annotations), function.__globals__)
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            hints[name] = types.GenericAlias(Sequence, (hints[name],))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        check_arguments(bound.arguments, hints)
        return function(*bound.args, **bound.kwargs)

    call.__module__ = "histopipe"  # for pickle, which finds it by module and name
    return call


def check_arguments(values: MutableMapping[str, Any], hints: Mapping[str, Any]) -> None:
    """Check that values have the types and choices of annotations, by name, and convert them by `plain_value`.

    Values without an annotation are not checked.

    Raises:
        UsageError: the message has the name, the value, and what is allowed.
    """
    for name in values.keys() & hints.keys():
        value = values[name] = plain_value(values[name])
        check_type(name, value, hints[name])
        if name == "workers" and value is not None and value < 1:
            raise UsageError(name, found=value, expected="a whole number, 1 or more")


def check_type(name: str, value: object, hint: Any) -> None:
    """Raise a UsageError with the name, the value and what is allowed unless a value has the type of an annotation."""
    if not has_type(value, hint):
        raise UsageError(name, found=repr(value)[:80], expected=type_text(hint))


def plain_value(value: Any) -> Any:
    """Return iterators as lists, since a check reads them, and numbers of NumPy as those of Python, for JSON."""
    # If NumPy is not loaded, no value is of it. Loading it takes time.
    numpy = sys.modules.get("numpy")
    if isinstance(value, Iterator):
        return list(value)
    return value.item() if numpy is not None and isinstance(value, numpy.generic) else value


def has_type(value: Any, hint: Any) -> bool:
    """Return whether an annotation allows a value."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(has_type(value, part) for part in parts)
    if origin is Literal:
        return isinstance(value, str) and value in parts
    if origin in (Sequence, tuple):
        listed = isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)
        return listed and all(has_type(item, parts[0]) for item in value)
    hint = getattr(hint, "__supertype__", hint)
    kind = _NUMBERS.get(hint, origin or hint)
    is_number = isinstance(value, bool) and hint in _NUMBERS
    return kind is Any or (isinstance(value, kind) and not is_number)


def type_text(hint: Any) -> str:
    """Return the values that an annotation allows, as text."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Literal:
        return " or ".join(map(repr, parts))
    if origin in (Union, types.UnionType):
        return " or ".join(map(type_text, parts))
    if origin in (Sequence, tuple):
        return f"a list, each item {type_text(parts[0])}"
    hint = getattr(hint, "__supertype__", hint)
    return _TEXTS.get(hint, getattr(hint, "__name__", str(hint)))
