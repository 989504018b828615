"""Settings, each declared once as a dataclass field. Flags, checks, TOML files, search spaces and tables use it.

A dataclass declares them for the command line, for Python functions, which take them as `**settings: Any`, and for
files. A `TypedDict` for `Unpack` would be a second declaration, since type checkers cannot derive it from a dataclass.

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Example:
        epochs: int = setting(20, "Number of epochs.", group="Training", at_least=1)

The type of the field decides how a flag is parsed: `bool`, `int`, `float`, `str`, `Literal[...]` for a choice, and
tuples of these for lists. This module imports nothing slow, and modules that declare settings do not either, because
`--help` imports them.
"""

from __future__ import annotations

import dataclasses
import functools
import tomllib
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import (
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from histopipe.errors import UsageError
from histopipe.system.arguments import check_type, plain_value
from histopipe.system.files import read_text

Format = Literal["", "path", "share", "duration", "repeated"]
"""Format of a flag, if not that of its type: "share" also accepts 10%; "duration" is in seconds and also accepts 2h.

The flag of a list has the items with commas, or if it is "path" or "repeated" one item, and may be repeated.
"""
_SETTING = "setting"
SettingsT = TypeVar("SettingsT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The declaration of a setting, except its type and default.

    Attributes:
        help: description, one line.
        group: heading under which it is listed.
        at_least, at_most, above, below: bounds of a number.
        default_text: text to list for the default, which then depends on the data; None to list its value.
        metavar: placeholder of the value in `--help`; None for that of its type.
        resume: the setting may change when a run is resumed.
        search: `histopipe tune` may try different values.
        per_worker: the value may differ between the workers of a training.
    """

    help: str
    group: str
    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None
    default_text: str | None = None
    format: Format = ""
    metavar: str | None = None
    resume: bool = False
    search: bool = True
    per_worker: bool = False


def setting(default: Any, help: str, *, group: str, **options: Any) -> Any:
    """Declare a setting. `options` are attributes of `Setting`. The default `dataclasses.MISSING` makes it required."""
    about = Setting(help=help, group=group, **options)
    return dataclasses.field(default=default, metadata={_SETTING: about})


class DeclaredSetting(NamedTuple):
    """A declared setting of a class, with the name, the resolved type and the default of its field."""

    name: str
    type: Any
    default: Any
    about: Setting

    @property
    def flag(self) -> str:
        """Flag on the command line."""
        return flag(self.name)

    @property
    def value_type(self) -> Any:
        """The type of its value, without None; the first of several."""
        return _first_type(self.type)

    @property
    def is_list(self) -> bool:
        """Whether its value is a list or a tuple."""
        return get_origin(self.value_type) in (Sequence, tuple)

    @property
    def is_path_list(self) -> bool:
        """Whether its value is a list of paths: one text stands for one path."""
        return self.is_list and self.about.format == "path"

    @property
    def is_repeated(self) -> bool:
        """Whether its flag may be repeated, once for each item of a list."""
        return self.is_list and self.about.format in ("path", "repeated")

    @property
    def item_type(self) -> Any:
        """The type of its value, or of the items of a list."""
        return _first_type(get_args(self.value_type)[0]) if self.is_list else self.value_type

    @property
    def word(self) -> str | None:
        """Text that is allowed in the place of a number, such as "column"; None if there is none."""
        kinds = () if self.is_list or self.choices else get_args(self.type)
        return next((word for kind in kinds for word in get_args(kind)), None)

    @property
    def choices(self) -> tuple[str, ...]:
        """Allowed texts; empty if any text is allowed."""
        return get_args(self.item_type) if get_origin(self.item_type) is Literal else ()

    def check(self, value: Any) -> None:
        """Raise a UsageError unless type, choice and bounds of a value are allowed."""
        check_type(self.name, value, self.type)
        if not isinstance(value, int | float) or isinstance(value, bool):
            return
        about = self.about
        inside = (
            (about.at_least is None or value >= about.at_least)
            and (about.at_most is None or value <= about.at_most)
            and (about.above is None or value > about.above)
            and (about.below is None or value < about.below)
            and abs(value) < inf
        )
        if not inside:
            raise UsageError(self.flag, found=value, expected=self.range_text or "a finite number")

    @property
    def range_text(self) -> str:
        """The allowed range of a number, such as "1 or more"; empty if there is none."""
        about = self.about
        if about.above is not None:
            most = "" if about.at_most is None else f", up to {about.at_most:g}"
            return f"more than {about.above:g}{most}"
        if about.below is not None:
            return f"from {about.at_least:g} to below {about.below:g}"
        if about.at_most is not None:
            return f"from {about.at_least:g} to {about.at_most:.10g}"
        return "" if about.at_least is None else f"{about.at_least:g} or more"


def _first_type(kind: Any) -> Any:
    """Return a type without None, the first of several, and the type that a NewType stands for."""
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(part for part in get_args(kind) if part is not type(None))
    return getattr(kind, "__supertype__", kind)


def declared_settings(*classes: type) -> Mapping[str, DeclaredSetting]:
    """Return the declared settings of classes, by name. If several classes declare a setting, the first wins."""
    return _settings_of(classes)


@functools.cache
def _settings_of(classes: tuple[Any, ...]) -> Mapping[str, DeclaredSetting]:
    declared: dict[str, DeclaredSetting] = {}
    for kind in classes:
        hints = get_type_hints(kind)
        for field in dataclasses.fields(kind):
            about = field.metadata.get(_SETTING)
            if about is not None and field.name not in declared:
                declared[field.name] = DeclaredSetting(
                    field.name, hints[field.name], field.default, about
                )
    return types.MappingProxyType(declared)


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
    declared = declared_settings(*classes)
    return {name: value for name, value in values.items() if name in declared}


def split_settings(
    values: Mapping[str, Any], *classes: type
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return those of some values that the classes declare, and the rest."""
    declared = select_settings(values, *classes)
    return declared, {name: value for name, value in values.items() if name not in declared}


def read_arguments(
    values: Mapping[str, Any], declared: Mapping[str, DeclaredSetting]
) -> dict[str, Any]:
    """Return the arguments of a Python function by name, without those that are None.

    None is allowed where the type allows it, and where the default depends on the data.

    Raises:
        UsageError: an argument is unknown, or its declaration does not allow the value.
    """
    check_known(values, declared, "unknown options")
    arguments = {name: plain_value(value) for name, value in values.items()}
    for name, value in arguments.items():
        if value is not None or declared[name].about.default_text is None:
            declared[name].check(value)
    return {name: value for name, value in arguments.items() if value is not None}


def make_settings(kind: type[SettingsT], values: Mapping[str, Any]) -> SettingsT:
    """Return a dataclass of settings for the arguments of a Python function. Raises as `read_arguments`."""
    return kind(**read_arguments(values, declared_settings(kind)))


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file, or raise a UsageError."""
    try:
        return tomllib.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        deep = isinstance(error, RecursionError)
        reason = "its brackets are nested too deep" if deep else str(error)
        raise UsageError(f"{path} cannot be read", found=reason, expected="TOML") from error


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

    values: dict[str, Any] = {}
    for group in groups:
        values |= {name: getattr(group, name) for name in declared_settings(type(group))}
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
