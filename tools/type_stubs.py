"""Write `histopipe/__init__.pyi`: the public functions with the names, types and defaults of their settings.

python tools/type_stubs.py
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import types
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import histopipe
from histopipe.system.settings import Setting

FILE = Path(__file__).parents[1] / "histopipe" / "__init__.pyi"
_HEAD = '''"""Types of the public names. Written by `python tools/type_stubs.py` from the declarations of settings. Do not edit."""

'''
_OWN = ("HistopipeError", "__version__")


def stubs() -> str:
    """Return the content of the file."""
    imports: dict[str, set[str]] = defaultdict(set)
    imports["collections.abc"] |= {"Mapping", "Sequence"}
    imports["typing"] |= {"Literal"}
    imports["histopipe._version"].add("__version__ as __version__")
    imports["histopipe.errors"].add("HistopipeError as HistopipeError")
    functions = []
    for name, module in vars(histopipe)["_MODULES"].items():
        value = getattr(importlib.import_module(module), name)
        if isinstance(value, type) or not hasattr(value, "takes"):
            imports[module].add(f"{name} as {name}")
        else:
            functions.append(_function(value, imports))
    lines = [
        module if module.startswith("import ") else f"from {module} import {name}"
        for module, names in sorted(imports.items())
        for name in sorted(names)
        if f"{name} as {name}" not in names
    ]
    end = "__all__: list[str]\nREMOVED: dict[str, str]\n"
    return "\n".join([_HEAD + "\n".join(lines), *functions, end])


def _function(function: Callable[..., Any], imports: dict[str, set[str]]) -> str:
    signature = inspect.signature(function)
    settings: dict[str, Setting] = function.__dict__["takes"]
    first = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    parts = list[str]()
    for parameter in first:
        if parameter.kind is parameter.KEYWORD_ONLY and not any(p[0] == "*" for p in parts):
            parts.append("*")
        star = "*" * (parameter.kind is parameter.VAR_POSITIONAL)
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        parts.append(f"{star}{parameter.name}: {parameter.annotation}{default}")
    parts += [
        f"{name}: {_type_of(setting)} = {_value(setting)}"
        for name, setting in settings.items()
        if name not in signature.parameters
    ]
    texts = [str(p.annotation) for p in first] + [str(signature.return_annotation)]
    for name in {n for text in texts for n in _names(text)} - {"str", "int", "float", "bool"}:
        if home := _home(function, name):
            imports[home].add(name)
    arguments = "".join(f"    {part},\n" for part in parts)
    return f"\ndef {function.__name__}(\n{arguments}) -> {signature.return_annotation}: ...\n"


def _value(setting: Setting) -> str:
    value = setting.default
    return repr(value) if isinstance(value, str | int | float | tuple | None) else "..."


def _type_of(setting: Setting) -> str:
    text = _type_text(setting.type)
    if setting.format == "path" or setting.path:
        text = re.sub(r"\bstr\b(?! \| Path)", "str | Path", text)
    if setting.is_list and "Sequence[str | Path]" in text:  # one path stands for a list of one
        text = f"str | Path | {text}"
    optional = setting.default_text is not None and "None" not in text
    return f"{text} | None" if optional else text


def _type_text(hint: Any) -> str:
    """Return a type that a user may pass: any sequence for a list, and a number for a unit."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, parts))}]"
    if origin in (Union, types.UnionType):
        return " | ".join(dict.fromkeys(map(_type_text, parts)))
    if origin in (Sequence, tuple):
        return f"Sequence[{_type_text(parts[0])}]"
    if origin is not None:
        return f"{origin.__name__}[{', '.join(map(_type_text, parts))}]"
    hint = getattr(hint, "__supertype__", hint)
    return "None" if hint is type(None) else str(hint.__name__)


def _names(annotation: str) -> Iterable[str]:
    return [node.id for node in ast.walk(ast.parse(annotation)) if isinstance(node, ast.Name)]


def _home(function: Callable[..., Any], name: str) -> str:
    """Return the module from which the module of a function takes a name, also one for type checkers only."""
    module = importlib.import_module(function.__module__)
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.ImportFrom) and name in [each.name for each in node.names]:
            return str(node.module)
        if isinstance(node, ast.Import) and name in [each.asname for each in node.names]:
            return f"import {node.names[0].name} as {name}"
    return "" if name in dir(__builtins__) else function.__module__


if __name__ == "__main__":
    FILE.write_text(stubs(), encoding="utf-8")
