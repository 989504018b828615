"""`--untrusted`, for every command that reads stores."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import click

_DEFAULT = "patches.lmdb"
"""The store of commands that are given none."""

F = TypeVar("F", bound=Callable[..., Any])


def untrusted_option(
    *parameters: str, features: str = "", coords: str = "", passed: bool = False
) -> Callable[[F], F]:
    """Add the flag to a command: its stores are verified before they are opened.

    Args:
        parameters: names of the command's parameters that hold paths of stores, among others.
        features, coords: names of parameters that hold a folder of HDF5 files.
        passed: give the flag to the command, too, as `untrusted`.
    """

    def decorate(command: F) -> F:
        @functools.wraps(command)
        def checked(*args: Any, untrusted: bool, **values: Any) -> Any:
            if untrusted:
                _check([path for name in parameters for path in _paths(name, values[name])])
                _check_hdf5(values.get(features), values.get(coords))
            if passed:
                values["untrusted"] = untrusted
            return command(*args, **values)

        flag = click.option(
            "--untrusted",
            is_flag=True,
            help="Treat the input as untrusted: verify stores before they are opened, follow no path in them.",
        )
        return cast(F, flag(checked))

    return decorate


def _paths(name: str, value: Any) -> list[Path]:
    values = value if isinstance(value, list | tuple) else [value]
    if name == "stores" and not values:
        values = [_DEFAULT]
    return [Path(path) for path in values if path is not None]


def _check(paths: list[Path]) -> None:
    # Late: only the flag needs it.
    from histopipe.maintenance.verify import check_untrusted

    for path in paths:
        inside = [path] if (path / "data.mdb").exists() else sorted(path.glob("[!.]*.lmdb"))
        for store in inside:
            check_untrusted(store)


def _check_hdf5(features: str | Path | None, coords: str | Path | None) -> None:
    # Late: as above.
    from histopipe.features.untrusted import check_coords, check_features

    if features is not None:
        check_features(Path(features))
    if coords is not None:
        check_coords(Path(coords))
