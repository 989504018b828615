"""Conditions on rows of tables, compared with Python's own evaluation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.examples import examples
from histopipe.errors import UsageError
from histopipe.system.conditions import parse_condition

VALUES = st.sampled_from(["a", "b", "1", "2", "-3"])
COMPARISONS = st.one_of(
    st.tuples(st.sampled_from(["x", "y.z"]), st.sampled_from(["==", "!="]), VALUES.map(repr)).map(
        " ".join
    ),
    st.tuples(
        st.just("age"),
        st.sampled_from(["==", "!=", "<", "<=", ">", ">="]),
        st.sampled_from(["1", "2.5", "-3"]),
    ).map(" ".join),
    st.tuples(
        st.sampled_from(["x", "y.z"]),
        st.sampled_from(["in", "not in"]),
        st.lists(VALUES, min_size=1, max_size=3).map(repr),
    ).map(" ".join),
    st.just("-3 <= age < 2"),
)
CONDITIONS = st.recursive(
    COMPARISONS,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from([" and ", " or "]), inner).map(
            lambda parts: f"({''.join(parts)})"
        ),
        inner.map(lambda text: f"not ({text})"),
    ),
    max_leaves=5,
)


class Dotted:
    def __init__(self, z: str) -> None:
        self.z = z


@examples(300)
@given(text=CONDITIONS, x=VALUES, z=VALUES, n=st.sampled_from(["1", "2.5", "-3", "4e1"]))
def test_conditions_are_those_of_python(text: str, x: str, z: str, n: str) -> None:
    columns, is_fulfilled = parse_condition(text)
    expected = eval(text, {}, {"x": x, "y": Dotted(z), "age": float(n)})  # noqa: S307 - the reference
    assert is_fulfilled({"x": x, "y.z": z, "age": n}) == expected
    assert set(columns) == {name for name in ("x", "y.z", "age") if name in text}


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
    ],
)
def test_missing_cells_and_numbers(text: str, cell: str, *, expected: bool) -> None:
    assert parse_condition(text)[1]({"a": cell}) is expected


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
