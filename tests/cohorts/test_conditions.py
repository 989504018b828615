"""Conditions on rows of tables, compared with their definition."""

from __future__ import annotations

import math
import operator
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.examples import examples
from histopipe.cohorts.cohort_values import parse_condition
from histopipe.errors import UsageError

CELLS = st.sampled_from(["", "a", "b", "1", "1.0", "-3", "True", "False"])
CONSTANTS = st.sampled_from(["", "a", "1", "1.0", "True", 1, 1.0, -3, 2.5])
NAMES = st.sampled_from(["x", "y.z"])
Tree = tuple[Any, ...]
# A condition of a table: comparisons, joined by not, and, or, each with parentheses.
TREES: st.SearchStrategy[Tree] = st.recursive(
    st.one_of(
        st.tuples(st.sampled_from(["==", "!="]), NAMES, CONSTANTS),
        st.tuples(
            st.sampled_from(["in", "not in"]),
            NAMES,
            st.lists(CONSTANTS, min_size=1, max_size=3),
        ),
        st.tuples(
            st.sampled_from(["<", "<=", ">", ">="]), st.just("n"), st.sampled_from([1, 2.5, -3])
        ),
    ),
    lambda inner: st.one_of(
        st.tuples(st.just("not"), inner),
        st.tuples(st.sampled_from(["and", "or"]), inner, inner),
    ),
    max_leaves=6,
)


def text_of(tree: Tree) -> str:
    match tree:
        case ("not", inner):
            return f"not ({text_of(inner)})"
        case ("and" | "or" as word, left, right):
            return f"({text_of(left)}) {word} ({text_of(right)})"
    return f"{tree[1]} {tree[0]} {tree[2]!r}"


def holds(tree: Tree, row: dict[str, str]) -> bool:
    """Return whether a row fulfils a tree, by the definition: a missing cell fulfils comparisons with '' only."""
    match tree:
        case ("not", inner):
            return not holds(inner, row)
        case ("and" | "or" as word, left, right):
            both = holds(left, row), holds(right, row)
            return all(both) if word == "and" else any(both)
        case ("in" | "not in" as word, name, constants):
            equal = any(holds(("==", name, constant), row) for constant in constants)
            return bool(row[name] != "" and equal == (word == "in"))
    word, name, constant = tree
    cell = row[name]
    if cell == "" and constant != "":
        return False
    if isinstance(constant, str):
        return bool((cell == constant) == (word == "=="))
    number = float(cell) if re.fullmatch(r"-?[\d.]+(e\d)?", cell) else math.nan
    compare = {"==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le}
    return bool((compare | {">": operator.gt, ">=": operator.ge})[word](number, constant))


@examples(600)
@given(TREES, CELLS, CELLS, st.sampled_from(["", "1", "-3", "4e1"]))
def test_conditions_equal_the_definition(tree: Tree, first: str, second: str, number: str) -> None:
    cells = {"x": first, "y.z": second, "n": number}
    columns, is_fulfilled = parse_condition(text_of(tree))
    assert is_fulfilled({name: cells[name] for name in columns}) == holds(tree, cells)


@pytest.mark.parametrize(
    ("text", "cell", "expected"),
    [
        ("a == 'x'", "", False),
        ("a != 'x'", "", False),
        ("a not in ['x']", "", False),
        ("not (a == 'x')", "", True),
        ("a == ''", "", True),
        ("a != ''", "x", True),
        ("a < 3", "", False),
        ("a == 2", "2.0", True),
        ("a == '2'", "2.0", False),
        ("a in (1, 'x')", "1.0", True),
        ("-3 <= a < 2", "-3", True),
        ("-3 <= a < 2", "2", False),
    ],
)
def test_missing_cells_and_numbers(text: str, cell: str, *, expected: bool) -> None:
    columns, is_fulfilled = parse_condition(text)
    assert (columns, is_fulfilled({"a": cell})) == (("a",), expected)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        "a =",
        "a == 1 and b",
        "f(a) == 1",
        "__import__('os').system('true') == 0",
        "a in b",
        "a is 1",
        "a == [1]",
        "a[0] == 1",
        "(lambda: 1)() == 1",
        "a == b'x'",
        "a == None",
        "a == False",
        "a in (True, 'x')",
        "f(x).y == 'a'",
        "a[0].y == 1",
        "(" * 500,
    ],
)
def test_everything_else_is_refused(text: str) -> None:
    with pytest.raises(
        UsageError, match=r"--where: found .*, expected columns, 'texts' and numbers"
    ):
        parse_condition(text)


def test_text_has_no_size() -> None:
    with pytest.raises(
        UsageError,
        match=r"--where: age and 60 are compared by size: found 'old' and 60, expected numbers",
    ):
        parse_condition("age > 60")[1]({"age": "old"})
