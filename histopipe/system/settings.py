"""Settings, each declared once as a dataclass field. Flags, checks, TOML files, search spaces and tables use it.

A dataclass declares them for the command line, for Python functions, which take them as `**settings: Any`, and for
files. Public functions show them in their signature and documentation (`takes`), and `__init__.pyi`, which is generated,
shows them to type checkers. A `TypedDict` for `Unpack` would be a second declaration.

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Example:
        epochs: int = setting(20, "Number of epochs.", group="Training", at_least=1)

The type of the field decides how a flag is parsed: `bool`, `int`, `float`, `str`, `Literal[...]` for a choice, and
tuples of these for lists. This module imports nothing slow, and modules that declare settings do not either, because
`--help` imports them. A class that is only a base of others has `init`, `repr` and `eq` False: creating these methods
takes half of the time of a class.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import numbers
import os
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import (
    Any,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from histopipe.errors import UsageError
from histopipe.system.grouping import grouped_values

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
F = TypeVar("F", bound=Callable[..., Any])
_NUMBERS: Mapping[Any, type] = types.MappingProxyType({int: numbers.Integral, float: numbers.Real})


def takes(*declared: Mapping[str, Setting]) -> Callable[[F], F]:
    """Return a decorator that records the settings which a function takes as `**settings`. The first of a name counts."""

    def record(function: F) -> F:
        function.__dict__["takes"] = {
            n: each for table in reversed(declared) for n, each in table.items()
        }
        return function

    return record


class _Signature(inspect.Signature):
    """A signature with all settings, for completion. Its text has `**settings` in their place: `help` has a line for each."""

    text = ""

    def __str__(self) -> str:
        return self.text or super().__str__()

    def format(self, **_: Any) -> str:
        """Return the text, which `help` shows from Python 3.13 on."""
        return str(self)


@functools.cache
def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that raises a UsageError for an argument that its annotation does not allow."""
    signature = inspect.signature(function)
    # The class of the result may be imported for type checkers only.
    annotations = {k: text for k, text in function.__annotations__.items() if k != "return"}
    hints = get_type_hints(types.SimpleNamespace(__annotations__=annotations), function.__globals__)
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            hints[name] = types.GenericAlias(Sequence, (hints[name],))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        # Values without an annotation are not checked.
        for name in bound.arguments.keys() & hints.keys():
            value = bound.arguments[name] = plain_value(bound.arguments[name])
            check_type(name, value, hints[name])
            if name == "workers" and value is not None and value < 1:
                raise UsageError(name, found=value, expected="a whole number, 1 or more")
        return function(*bound.args, **bound.kwargs)

    call.__module__ = "histopipe"  # for pickle, which finds it by module and name
    taken = getattr(function, "takes", {})
    if settings := [taken[name] for name in taken if name not in signature.parameters]:
        call.__dict__["__signature__"] = _with_settings(signature, settings)
        call.__doc__ = f"{inspect.cleandoc(call.__doc__ or '')}\n\n{_describe(settings)}"
    return call


def _with_settings(signature: inspect.Signature, settings: Iterable[Setting]) -> _Signature:
    arguments = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    of_settings = [
        inspect.Parameter(
            setting.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None if setting.default is MISSING else setting.default,
            annotation=setting.type if setting.default_text is None else setting.type | None,
        )
        for setting in settings
    ]
    with_settings = _Signature(
        [*arguments, *of_settings], return_annotation=signature.return_annotation
    )
    with_settings.text = str(signature)
    return with_settings


def _describe(settings: Iterable[Setting]) -> str:
    """Return one line per setting, by group."""
    groups = grouped_values(
        (
            setting.group,
            f"    {setting.name}: {setting.help}"
            + (f" [{setting.default_shown}]" if setting.default_shown else ""),
        )
        for setting in settings
    )
    return "\n\n".join("\n".join([f"{name}:", *lines]) for name, lines in groups.items())


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
    if hint in _NUMBERS:
        return isinstance(value, _NUMBERS[hint]) and not isinstance(value, bool)
    return hint is Any or isinstance(value, origin or hint)


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


PathLike = str | Path
Format = Literal["", "path", "share", "duration", "repeated"]
"""Format of a flag, if not that of its type: "share" also accepts 10%; "duration" is in seconds and also accepts 2h.

The flag of a list has the items with commas, or if it is "path" or "repeated" one item, and may be repeated.
"""
ANY_PATH = r"(?P<path>.*)"
NETWORK_PATH = r"(?P<path>.*(/|\.(keras|onnx|h5|py|toml)(:|$)).*)"
"""The path of a network, perhaps with a function after a colon; not the name of one."""
WEIGHTS_PATH = r"(?!([\w.-]+=)?(none|imagenet|auto)$)([\w.-]+=)?(?P<path>.*)"
"""The path of weights, perhaps after the name of their network, as in NAME=FILE."""
_SETTING = "setting"
SettingsT = TypeVar("SettingsT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The declaration of a setting.

    Attributes:
        name, type, default: name, resolved type and default of its field.
        help: description, one line.
        group: heading under which it is listed.
        at_least, at_most, above, below: bounds of a number.
        default_text: text to list for the default, which then depends on the data; None to list its value.
        path: regular expression of the texts that have a path, which is its group `path`; empty if none has one. Paths in
            the file of a study are relative to its folder.
        metavar: placeholder of the value in `--help`; None for that of its type.
        flag_name: its flag, if that has another name.
        resume: the setting may change when a run is resumed.
        search: `histopipe tune` may try different values.
        per_worker: the value may differ between the workers of a training.
        hidden: `--help` does not list it.
    """

    name: str = ""
    type: Any = None
    default: Any = None
    help: str
    group: str
    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None
    default_text: str | None = None
    format: Format = ""
    path: str = ""
    metavar: str | None = None
    flag_name: str = ""
    resume: bool = False
    search: bool = True
    per_worker: bool = False
    hidden: bool = False

    @property
    def flag(self) -> str:
        """Flag on the command line."""
        return self.flag_name or flag(self.name)

    @property
    def is_list(self) -> bool:
        """Whether its value is a list or a tuple."""
        return get_origin(_first_type(self.type)) in (Sequence, tuple)

    @property
    def is_path_list(self) -> bool:
        """Whether its value is a list of paths: one text stands for one path."""
        return self.is_list and self.format == "path"

    @property
    def is_repeated(self) -> bool:
        """Whether its flag may be repeated, once for each item of a list."""
        return self.is_list and self.format in ("path", "repeated")

    @property
    def item_type(self) -> Any:
        """The type of its value, or of the items of a list."""
        kind = _first_type(self.type)
        return _first_type(get_args(kind)[0]) if self.is_list else kind

    @property
    def default_shown(self) -> str:
        """The default as text; empty for none."""
        value = self.default
        if self.default_text is not None:
            return self.default_text
        if value is None or value is MISSING or value is False:
            return ""
        if self.format == "share":
            return f"{value:.0%}"
        if isinstance(value, tuple):
            return ",".join(map(str, value))
        return f"{value:g}" if isinstance(value, float) else str(value)

    @property
    def word(self) -> str | None:
        """Text that is allowed in the place of a number, such as "column"; None if there is none."""
        types = () if self.is_list or self.choices else get_args(self.type)
        return next((word for kind in types for word in get_args(kind)), None)

    @property
    def choices(self) -> tuple[str, ...]:
        """Allowed texts; empty if any text is allowed."""
        return get_args(self.item_type) if get_origin(self.item_type) is Literal else ()

    def check(self, value: Any) -> None:
        """Raise a UsageError unless type, choice and bounds of a value are allowed."""
        check_type(self.flag_name or self.name, value, self.type)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and not (
            (self.at_least is None or value >= self.at_least)
            and (self.at_most is None or value <= self.at_most)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
            and abs(value) < float("inf")
        ):
            raise UsageError(self.flag, found=value, expected=self.range_text or "a finite number")

    def with_absolute_paths(self, value: Any) -> Any:
        """Return a value whose paths are absolute."""
        pattern = ANY_PATH if self.format == "path" else self.path
        if not pattern or value is None:
            return value
        if self.is_list:
            return tuple(absolute_path(item, pattern, Path()) for item in value)
        return absolute_path(value, pattern, Path())

    @property
    def range_text(self) -> str:
        """The allowed range of a number, such as "1 or more"; empty if there is none."""
        if self.above is not None:
            most = "" if self.at_most is None else f", up to {self.at_most:g}"
            return f"more than {self.above:g}{most}"
        if self.below is not None:
            return f"from {self.at_least:g} to below {self.below:g}"
        if self.at_most is not None:
            return f"from {self.at_least:g} to {self.at_most:.10g}"
        return "" if self.at_least is None else f"{self.at_least:g} or more"


def absolute_path(text: str, pattern: str, folder: Path) -> str:
    """Return a text with its path, as of `Setting.path`, from a folder; the text itself if it has none, or a URL.

    The path is absolute, so that a run can be resumed from any folder. Symbolic links, ~ and $HOME are those of a shell.
    """
    match = re.fullmatch(pattern, text, re.DOTALL) if pattern else None
    if match is None or "://" in text:
        return text
    path = os.path.expandvars(os.path.expanduser(match["path"]))  # noqa: PTH111 - no other function replaces $HOME
    return text[: match.start("path")] + os.path.abspath(folder / path)  # noqa: PTH100 - symbolic links stay


def path_unless(*words: str) -> str:
    """Return the `path` of a setting whose value is a path, or one of these words."""
    return rf"(?!({'|'.join(words)})$){ANY_PATH}"


def setting(default: Any, help: str, *, group: str, **options: Any) -> Any:
    """Declare a setting. `options` are attributes of `Setting`. The default `dataclasses.MISSING` makes it required."""
    return field(default=default, metadata={_SETTING: Setting(help=help, group=group, **options)})


def _first_type(kind: Any) -> Any:
    """Return a type without None, the first of several, and the type that a NewType stands for."""
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(part for part in get_args(kind) if part is not type(None))
    return getattr(kind, "__supertype__", kind)


def declared_settings(*classes: type) -> Mapping[str, Setting]:
    """Return the declared settings of classes, by name. If several classes declare a setting, the first wins."""
    return _settings_of(
        classes
    )  # mypy does not let `functools.cache` take some of the classes one by one


@functools.cache
def _settings_of(classes: tuple[Any, ...]) -> Mapping[str, Setting]:
    declared: dict[str, Setting] = {}
    for kind in classes:
        hints = _hints(kind)
        for entry in fields(kind):
            if _SETTING in entry.metadata and entry.name not in declared:
                declared[entry.name] = replace(
                    entry.metadata[_SETTING],
                    name=entry.name,
                    type=hints[entry.name],
                    default=entry.default,
                )
    return types.MappingProxyType(declared)


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    """Return the types of the annotations of a class, by name.

    `typing.get_type_hints` takes three times as long, which is a tenth of the time of `--help`.
    """
    inherited = (_hints(base) for base in reversed(kind.__bases__) if base is not object)
    names = vars(sys.modules[kind.__module__])
    hints = dict[str, Any](itertools.chain(*(each.items() for each in inherited)))
    for name, text in kind.__annotations__.items():
        hints[name] = eval(text, names, dict(vars(kind)))  # noqa: S307 - our own source
    return hints


def check_settings(values: Any) -> None:
    """Raise a UsageError if a setting of a dataclass has a value that its declaration does not allow."""
    for name, declared in declared_settings(type(values)).items():
        declared.check(getattr(values, name))


def check_known(
    names: Iterable[str], declared: Iterable[str], where: str = "unknown settings"
) -> None:
    """Raise a UsageError if a name is not that of a declared setting."""
    unknown = set(names) - set(declared)
    if unknown:
        raise UsageError(
            where, found=", ".join(sorted(unknown)), expected=", ".join(sorted(declared))
        )


def select_settings(values: Mapping[str, Any], *classes: type) -> dict[str, Any]:
    """Return those of some values that the classes declare."""
    return {name: values[name] for name in values if name in declared_settings(*classes)}


def split_settings(
    values: Mapping[str, Any], *classes: type
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return those of some values that the classes declare, and the rest."""
    declared = select_settings(values, *classes)
    return declared, {name: value for name, value in values.items() if name not in declared}


def read_arguments(values: Mapping[str, Any], declared: Mapping[str, Setting]) -> dict[str, Any]:
    """Return the arguments of a Python function by name, without those that are None.

    None is allowed where the type allows it, and where the default depends on the data.

    Raises:
        UsageError: an argument is unknown, or its declaration does not allow the value.
    """
    check_known(values, declared, "unknown options")
    arguments = {name: plain_value(value) for name, value in values.items()}
    for name, value in arguments.items():
        if value is not None or declared[name].default_text is None:
            declared[name].check(value)
    return {name: value for name, value in arguments.items() if value is not None}


def make_settings(kind: type[SettingsT], values: Mapping[str, Any]) -> SettingsT:
    """Return a dataclass of settings for the arguments of a Python function. Raises as `read_arguments`."""
    return kind(**read_arguments(values, declared_settings(kind)))


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file, or raise a UsageError."""
    # Imported late: `--help` does not need them.
    import tomllib

    from histopipe.system.files import read_text

    try:
        return tomllib.loads(read_text(path).removeprefix("\ufeff"))  # editors of Windows write it
    except (OSError, ValueError, RecursionError) as error:
        deep = isinstance(error, RecursionError)
        raise UsageError(
            f"{path} cannot be read",
            found="its brackets are nested too deep" if deep else str(error),
            expected="TOML",
        ) from error


def read_settings(path: Path, *classes: type) -> dict[str, Any]:
    """Read settings of some dataclasses from a TOML file. Types and choices are checked, ranges are not.

    Raises:
        UsageError: the file cannot be read, has an unknown setting, or a value of another type.
    """
    values = read_toml(path)
    declared = declared_settings(*classes)
    check_known(values, declared, f"{path}: unknown settings")
    for name, value in values.items():
        if not (declared[name].is_path_list and isinstance(value, str)):
            check_type(f"{path}: {name}", value, declared[name].type)
    return values


def to_toml(*groups: Any) -> str:
    """Return the settings of dataclasses as TOML, without those that are None."""
    # Imported late: tomli-w is optional.
    import tomli_w

    values = {
        name: getattr(group, name) for group in groups for name in declared_settings(type(group))
    }
    return tomli_w.dumps({name: value for name, value in values.items() if value is not None})


def flag(name: str) -> str:
    """Return the flag of a setting."""
    return f"--{name.replace('_', '-')}"


def config_value(value: Any) -> Any:
    """Return a value in the form of a configuration: tuples for lists, texts for paths, numbers of Python."""
    value = plain_value(value)
    if isinstance(value, list | tuple):
        return tuple(map(config_value, value))
    return str(value) if isinstance(value, Path) else value
