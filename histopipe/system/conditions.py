"""Conditions on the cells of a row, such as `sample_type == 'Primary Tumor' and age >= 60`.

Python parses a condition, but evaluates no part of it.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

from histopipe.errors import UsageError
from histopipe.system.table_cells import cell_number

_ORDERS = {ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge}


def parse_condition(text: str) -> tuple[tuple[str, ...], Callable[[dict[str, str]], bool]]:
    """Return the columns of a condition, as written, and a function that returns whether a row fulfils it.

    Numbers are compared as numbers, and everything else as text. A missing cell fulfils no comparison, except with ''.
    The row has a cell for each of the columns. The function raises a UsageError if a cell that is compared by size is no
    number.

    Raises:
        UsageError: the text is no condition.

    Example:
        >>> columns, is_fulfilled = parse_condition("grade in ('2', '3') and age >= 60")
        >>> columns, is_fulfilled({"grade": "3", "age": "71"})
        (('grade', 'age'), True)
    """
    columns: dict[str, str] = {}
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        _holds(tree, columns)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UsageError(
            "--where",
            found=f"{text!r}: {error}",
            expected="columns, 'texts' and numbers with == != < <= > >= in, not in, and, or, not, ()",
            todo="write underscores for blanks, and a capital for words of Python: Class == 'Macro'",
        ) from error
    return tuple(columns), partial(_holds, tree)


def _holds(tree: ast.expr, row: dict[str, str]) -> bool:
    """Return whether a row fulfils a tree. All parts are evaluated, also to check them. Raise ValueError for other trees.

    Columns that the row lacks are added to it as missing.
    """
    match tree:
        case ast.BoolOp(op=kind, values=parts):
            return (all if isinstance(kind, ast.And) else any)(
                [_holds(each, row) for each in parts]
            )
        case ast.UnaryOp(op=ast.Not(), operand=part):
            return not _holds(part, row)
        case ast.Compare(left=first, ops=operators, comparators=rest):
            pairs = zip(operators, pairwise([first, *rest]), strict=True)
            results = [_compare(kind, left, right, row) for kind, (left, right) in pairs]
            return all(results)
    raise ValueError(f"{ast.unparse(tree)!r} is no comparison")


def _compare(kind: ast.cmpop, left: ast.expr, right: ast.expr, row: dict[str, str]) -> bool:
    values: list[Any] = [_value(left, row)]
    if isinstance(kind, ast.In | ast.NotIn) and isinstance(right, ast.List | ast.Tuple):
        equal = [_compare(ast.Eq(), left, item, row) for item in right.elts]
        return values != [""] and any(equal) == isinstance(kind, ast.In)
    values.append(_value(right, row))
    if type(kind) not in (ast.Eq, ast.NotEq, *_ORDERS):
        raise ValueError(f"{ast.unparse(left)!r} and {ast.unparse(right)!r} cannot be compared so")
    with_blank = any(isinstance(tree, ast.Constant) and tree.value == "" for tree in (left, right))
    if "" in values and not with_blank:
        return False
    of_equality = isinstance(kind, ast.Eq | ast.NotEq)
    if not of_equality or not all(isinstance(value, str) for value in values):
        texts, values = values, [cell_number(v) if isinstance(v, str) else v for v in values]
    if of_equality:
        return bool(values[0] == values[1]) == isinstance(kind, ast.Eq)
    if math.isnan(sum(values)):
        raise UsageError(
            f"--where: {ast.unparse(left)} and {ast.unparse(right)} are compared by size",
            found=" and ".join(map(repr, texts)),
            expected="numbers",
            todo="make such cells missing values by --na",
        )
    return bool(_ORDERS[type(kind)](*values))


def _value(tree: ast.expr, row: dict[str, str]) -> Any:
    match tree:
        case ast.Name() | ast.Attribute():  # such as `demographic.vital_status`
            name = ast.unparse(tree)
            if all(map(str.isidentifier, name.split("."))):
                return row.setdefault(name, "")
        case ast.Constant(value=bool() as constant):
            raise ValueError(
                f"cells are texts: write '{constant}' as in the table, such as '{str(constant).upper()}'"
            )
        case ast.Constant(value=str() | int() | float() as constant):
            return constant
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
    raise ValueError(f"{ast.unparse(tree)!r} is neither a column, a 'text' nor a number")
