"""Division of work over processes, and the index of a process in its array of jobs."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from histopipe.errors import UsageError
from histopipe.system.locks import locked
from histopipe.system.parts import PartOptions, read_part
from histopipe.system.shared_folders import PartsPlan, Share, divide

WORK = st.dictionaries(st.text(max_size=3), st.integers(0, 10_000), max_size=40)


@given(WORK, st.integers(1, 9))
def test_parts_have_each_item_once_and_equal_work(work: dict[str, int], count: int) -> None:
    parts = divide(work, count)
    assert len(parts) == count and sorted(name for part in parts for name in part) == sorted(work)
    sums = [sum(work[name] for name in part) for part in parts]
    # Largest first: the parts differ by no more than the last item that the largest one took.
    assert max(sums) - min(sums) <= max((work[part[-1]] for part in parts if part), default=0)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1 or len(set(work.values())) > 1
    assert divide(dict(reversed(work.items())), count) == parts


def array(index: int) -> dict[str, str]:
    """Return the variable of Slurm for a task."""
    return {"SLURM_ARRAY_TASK_ID": str(index)}


@pytest.mark.parametrize(
    ("text", "environment", "expected"),
    [
        ("3/4", {}, (3, 4)),
        ("slurm/4", array(3), (3, 4)),  # also of one task that is submitted again
        ("kubernetes/5", {"JOB_COMPLETION_INDEX": "0"}, (1, 5)),
    ],
)
def test_parts_of_arrays(text: str, environment: dict[str, str], expected: tuple[int, int]) -> None:
    assert read_part(text, environment) == expected


@pytest.mark.parametrize(
    ("text", "environment", "message"),
    [
        (
            "0/4",
            {},
            "--part: found 0/4, expected I/N, slurm/N or kubernetes/N, with I from 1",
        ),
        ("5/4", {}, "--part: found 5/4"),
        ("1", {}, "--part: found 1,"),
        ("", {}, "--part: found ,"),
        (
            "slurm",
            array(1),
            "--part: found slurm, expected",
        ),  # alone, a task would do all of the work
        ("slurm/3", {}, "--part slurm/3: found no SLURM_ARRAY_TASK_ID, expected a job of an array"),
        (
            "slurm/3",
            array(0),
            "--part slurm/3: found SLURM_ARRAY_TASK_ID=0, .* --array=1-3",
        ),
        ("kubernetes", {}, "--part: found kubernetes,"),
        ("kubernetes/x", {}, "no JOB_COMPLETION_INDEX"),
    ],
)
def test_wrong_parts(text: str, environment: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_part(text, environment)


def test_join_replaces_the_part() -> None:
    assert PartOptions(part="2/4").share == Share(2, 4)
    assert PartOptions(part="2/4", join=True).share == Share(join=True)
    assert PartOptions(cluster="local:2").share == Share()
    with pytest.raises(UsageError, match="--cluster: found with --part or --join"):
        PartOptions(part="2/4", cluster="local:2")


def test_parts_have_locks_of_their_own(tmp_path: Path) -> None:
    """Files are locked, since network filesystems do not lock folders for other machines."""
    out = tmp_path / "out"
    with Share(1, 2).held(out), Share(2, 2).held(out):
        with pytest.raises(UsageError, match="1-of-2 is in use"), Share(1, 2).held(out):
            pass
        for path in (out / "parts" / "lock", out / "parts" / "1-of-2" / "lock"):
            with locked(path) as is_free:
                assert path.is_file() and not is_free
    refused = pytest.raises(UsageError, match="in use by a process without --part")
    with Share().held(out), refused, Share(1, 2).held(out):
        pass


@pytest.mark.parametrize(("share", "seconds"), [(Share(), 5), (Share(join=True), 60)])
def test_what_a_process_waits_for_is_shown_within_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: Share, seconds: int
) -> None:
    slept, messages = list[float](), list[tuple[float, str]]()
    clock = SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append)
    monkeypatch.setattr("histopipe.system.locks.time", clock)
    monkeypatch.setattr(
        "histopipe.system.locks.message", lambda text: messages.append((sum(slept), text))
    )
    refused = pytest.raises(UsageError, match="is in use by parts; wait until it ends")
    with Share(1, 2).held(tmp_path), refused, share.held(tmp_path):
        pass
    assert seconds <= sum(slept) < seconds + 0.1
    ((second, text),) = messages
    assert second < 1
    assert text == f"{tmp_path} is in use by parts: waiting up to {seconds} s for it"


def test_values_of_the_newest_part_count(tmp_path: Path) -> None:
    """Items may be divided otherwise and done again, for example because their input was corrected."""
    for second, (share, value) in enumerate([(Share(2, 3), 1), (Share(1, 2), 2), (Share(2, 3), 3)]):
        share.folder(tmp_path).mkdir(parents=True, exist_ok=True)
        share.end(tmp_path, {"failed": f"{value}"}, rows={"a": value, f"{value}": 0})
        os.utime(share.folder(tmp_path) / "journal", (second, second))
        joined = Share(join=True)
        assert joined.joined(tmp_path, "rows")["a"] == value
        assert joined.joined(tmp_path) == {"failed": f"{value}"}
    assert joined.joined(tmp_path, "rows") == {"a": 3, "2": 0, "3": 0}
    assert Share().joined(tmp_path) == {}
    # What a part has recorded does not count while it does its items again.
    with Share(1, 2).held(tmp_path):
        assert "parts that have not ended: 1-of-2," in str(joined.missing(tmp_path, "b"))


def test_settings_of_parts_must_be_equal(tmp_path: Path) -> None:
    path, how = tmp_path / "settings.json", {"ignored": (), "contents": "files"}
    Share(1, 2).record(path, {"a": 1}, **how)
    with pytest.raises(UsageError, match="other settings: found a 1, expected a 2"):
        Share(2, 2).record(path, {"a": 2}, **how)
    Share(2, 2).record(path, {"a": 1}, **how)  # the wrong one has left nothing
    with pytest.raises(UsageError, match="other settings"):
        Share(join=True).record(path, {"a": 3}, **how)
    assert not path.exists()
    Share(join=True).record(path, {"a": 1}, **how)
    assert path.exists()


def test_plan_of_parts() -> None:
    assert str(PartsPlan.of({"a": 1000, "b": 600, "c": 500}, 2, "patches")).splitlines() == [
        "part 1/2   1 slide  1,000 patches",
        "part 2/2  2 slides  1,100 patches",
    ]
