"""Command line: help, version, wrong flags, and agreement with the documentation."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from io import BytesIO, TextIOWrapper
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click import Option
from click.testing import CliRunner

import histopipe
from helpers.click_commands import click_command
from helpers.commands import COMMAND, RunCommand
from helpers.paths import PROJECT
from histopipe._version import __version__
from histopipe.cli import COMMANDS, GROUPS, training
from histopipe.cli import histopipe as cli
from histopipe.cli.parameters import show_json, show_text
from histopipe.errors import ExitCode
from histopipe.system.output import counted

Tool = Callable[..., tuple[int, str]]


def test_every_command_has_help(run: RunCommand) -> None:
    """Each option has a text, and no text has a range. `test_settings` checks the list of commands."""
    overview = run("--help").stdout
    for name, (_, summary) in COMMANDS.items():
        assert name in overview and summary in overview
        done = CliRunner().invoke(cli, [name, "--help"])
        assert done.exit_code == 0 and f"Example: histopipe {name}" in done.output
        assert not re.search(r"<=|>=|x[<>]|[<>]x|RANGE", done.output), name
        options = [each for each in click_command(name).params if isinstance(each, Option)]
        assert all(option.help for option in options), name


def test_removed_commands_and_functions_name_their_replacement() -> None:
    for name, replacement in histopipe.REMOVED.items():
        done = CliRunner().invoke(cli, [name, "s.lmdb", "--any", "x"])
        assert done.exit_code == ExitCode.USAGE
        assert f"`histopipe {name}` was removed in 0.3: use {replacement}" in done.output
        with pytest.raises(AttributeError, match=rf"histopipe\.{name} was removed in 0\.3: use "):
            getattr(histopipe, name)


def test_documentation_uses_existing_commands_and_flags() -> None:
    """Every `histopipe COMMAND --flag` of the pages and of the examples for clusters exists."""
    docs, docker = PROJECT / "docs", PROJECT / "docker"
    count = 0
    for page in (
        *(PROJECT / "README.md", *docs.rglob("*.md")),
        *(path for path in (docs / "clusters").iterdir() if path.suffix != ".md"),
        *(path for path in docker.iterdir() if path.is_file()),
    ):
        text = page.read_text().replace("\\\n", " ")
        for name, rest in re.findall(r"\bhistopipe ([a-z][a-z-]+)((?: [^\n`|;#]*)?)", text):
            if name in COMMANDS:  # otherwise a sentence
                count += 1
                options = click_command(name).params
                declared = {flag for each in options for flag in (*each.opts, *each.secondary_opts)}
                flags = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", rest)) - {"--help"}
                assert flags <= declared, f"{page.name}: histopipe {name}{rest}"
    assert count > 100


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tool:
    """Function that runs a program of tools/ in this process, and returns its exit code and output."""

    def run_tool(name: str, *arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        return importlib.import_module(name).main(), capsys.readouterr().out

    return run_tool


def test_word_check_reads_comments_strings_and_prose(tmp_path: Path, tool: Tool) -> None:
    texts = {
        "a.py": 'told = "the disk is told"  # at hand\n',
        "b.md": "A stranger.\n\n```\nsaid\n```\n`whatever`\n",
        "c.html": "<p>as it is</p>\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    code, output = tool("check_words", *(tmp_path / name for name in texts))
    words = re.findall(r": '(.+?)'; write:", output)
    assert (code, words) == (1, ["told", "at hand", "stranger", "as it is"])


def test_name_check_reads_the_syntax_tree(tmp_path: Path, tool: Tool) -> None:
    package = tmp_path / "histopipe" / "tasks"
    package.mkdir(parents=True)
    (package / "a.py").write_text(
        "Grid = dict[str, int]\n"
        "def read(found):\n"
        "    for it in found: print(f'{it} found')\n"
        "    return isinstance(found, Metrics) or task is None or config.task == 'survival'\n"
    )
    (tmp_path / "histopipe" / "a.py").write_text(
        "class _Grid:\n    it: int = 1\nclass Judged: ...\n"
    )
    code, output = tool("check_names", tmp_path)
    assert code == 1
    assert sorted(re.sub(r"^histopipe/", "", line) for line in output.splitlines()) == [
        "9 wrong names",
        "a.py:2: `it` is no name for a variable",
        "a.py:3: `Judged` is no name for a class",
        "classes or aliases have the same name: histopipe/a.py:1 _Grid, histopipe/tasks/a.py:1 Grid",
        "modules have the same name: histopipe/a.py, histopipe/tasks/a.py",
        "tasks/a.py:2: `found` is no name for a variable",
        "tasks/a.py:3: `it` is no name for a variable",
        "tasks/a.py:4: a task is asked for its class: Metrics; make it a method of the task",
        "tasks/a.py:4: a task is compared with None; make it a method of the task",
        "tasks/a.py:4: a task is compared with the name of a task; make it a method of the task",
    ]


PAGES = {
    "```console\n$ cd /; pwd\n/\n$ pwd\n/\n```\n": None,
    "```sh\nfalse\n```\n": None,
    "```python\nx = 'one'\n```\n\n```python\nprint(x)\n```\n```text\none\n```\n": None,
    "```console\n$ echo AUC 0.912, 480 slides in 2 s\nAUC 0.93, 483 slides in 9 s\n```\n": None,
    "```console\n$ printf 'n  patches/s\\n9         80\\n'\nn  patches/s\n9        990\n```\n": None,
    "```console\n$ echo [2/9] complete a: 5\n[1/9] complete a: 5\n```\n": None,
    "<!-- run: cd; touch slide.svs -->\n```console\n$ ls slide.svs\nslide.svs\n```\n": None,
    "```console\n$ echo slides 12\nslides 9\n```\n": "printed: slides 12",
    "```console\n$ printf 'a\\nb\\n'\nb\na\n```\n": "not printed: a",
    "```console\n$ false\n```\n": "FAILED: exit code",
    "```python\nprint('one')\n```\n```text\ntwo\n```\n": "not printed: two",
    "```console\n$ echo AUC 0.912\nAUC 0.712\n```\n": "other numbers: AUC 0.712",
    "```console\n$ echo 480 slides\n580 slides\n```\n": "printed: 480 slides",
}
"""Pages, and what is wrong with each."""


def check_pages(folder: Path, pages: dict[str, str | None]) -> tuple[int, list[str]]:
    """Return the exit code of the check of pages, and its output by page."""
    files = [folder / f"{number:02}.md" for number in range(len(pages))]
    for file, text in zip(files, pages, strict=True):
        file.write_text(text)
    command = [sys.executable, str(PROJECT / "tools" / "check_pages.py"), *map(str, files)]
    environment = {**os.environ, "HOME": str(folder)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    return done.returncode, re.split(r"^\S+\.md:\d+: .*$", done.stdout, flags=re.MULTILINE)


def test_page_check_compares_output(tmp_path: Path) -> None:
    assert check_pages(tmp_path, {text: None for text, wrong in PAGES.items() if not wrong})[0] == 0
    code, outputs = check_pages(tmp_path, PAGES)
    messages = [wrong for wrong in PAGES.values() if wrong]
    assert code == 1 and f"{len(messages)} failures" in outputs[-1]
    for message, output in zip(messages, outputs[-len(messages) :], strict=True):
        assert message in output


@pytest.mark.parametrize(
    ("python", "messages"),
    [
        ("", []),  # python3.11 is a shim that fails
        ("python3.11", ["python3.11: shim: no such version"]),
        ("python3.12", ["python3.12: found Python 3.9.2, expected 3.11 to 3.13"]),
        ("python3.13", ["python3.13: cannot create environments: venv or ensurepip is missing"]),
        ("python2", ["python2: not found", "make PYTHON=/path/to/python3.12"]),
    ],
)
def test_make_finds_a_python_that_runs(tmp_path: Path, python: str, messages: list[str]) -> None:
    """The names are programs that fail, and one that runs."""
    programs = {
        "python3.11": "echo shim: no such version >&2; exit 127",
        "python3.12": f'exec {sys.executable} -c "import sys; sys.version_info = (3, 9, 2); $2"',
        "python3.13": f"exec {sys.executable} -c \"import sys; sys.modules['ensurepip'] = None; $2\"",
        "python3": f'exec {sys.executable} "$@"',
    }
    for name, code in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{code}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "head").symlink_to(str(shutil.which("head")))
    done = subprocess.run(
        [str(shutil.which("sh")), PROJECT / "tools" / "find_python", python],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    expected = ("", 1) if messages else ("python3\n", 0)
    assert (done.stdout, done.returncode) == expected, done.stderr
    assert all(message in done.stderr for message in messages)


def test_exit_codes_are_documented_and_locks_have_hashes_and_no_index_url() -> None:
    text = (PROJECT / "docs" / "reference" / "exit-codes.md").read_text()
    assert all(f"| {int(code)} |" in text for code in ExitCode)
    for lock in (PROJECT / "requirements").glob("*.lock"):
        text = lock.read_text()
        assert "://" not in text and "--hash=sha256:" in text


def test_version_and_unknown_commands(run: RunCommand) -> None:
    assert run("--version").stdout == f"histopipe, version {__version__}\n"
    heading = "Unreleased" if ".dev" in __version__ else __version__
    assert f"## [{heading}]" in (PROJECT / "CHANGELOG.md").read_text()
    for typed, message in (
        ("nothing", "No such command 'nothing'.\n"),
        ("trian", "No such command 'trian'. Did you mean 'train'?"),
        ("verfy", "No such command 'verfy'. Did you mean 'verify'?"),
    ):
        done = run(typed)
        assert (done.returncode, message in done.stderr) == (2, True), done.stderr
    done = run()
    places = [done.stderr.index(f"\n{title}:\n") for title in GROUPS]
    assert done.returncode == 2 and places == sorted(places)
    assert all(f"\n  {name} " in done.stderr for names in GROUPS.values() for name in names)


def test_default_folders_of_one_second_are_different(
    run: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = SimpleNamespace(now=lambda: datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC))
    monkeypatch.setattr(training, "datetime", now)
    monkeypatch.chdir(tmp_path)
    folders = [training._new_folder({}) for _ in range(3)]
    names = [(folder.name.partition("20260102-030405")[2], folder.is_dir()) for folder in folders]
    assert names == [("", True), ("-2", True), ("-3", True)]
    # A training that fails at once leaves no folder.
    assert run("train", "missing.lmdb").returncode == ExitCode.NOTHING
    assert sorted(Path("runs").iterdir()) == sorted(folders)


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "ascii"])
@pytest.mark.parametrize("name", [b"a", "é".encode(), "切片 😀".encode(), b"slide-\xff"])
def test_any_path_can_be_printed(
    name: bytes, encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Characters that can be encoded are not escaped."""
    printed, path = BytesIO(), os.fsdecode(name)
    monkeypatch.setattr(sys, "stdout", TextIOWrapper(printed, encoding, write_through=True))
    show_text(path)
    show_json({"path": path})
    text, *lines = printed.getvalue().decode(encoding).splitlines()
    assert json.loads("".join(lines)) == {"path": path}
    plain = path.encode(encoding, "replace").decode(encoding) == path
    assert text == (path if plain else path.encode("ascii", "backslashreplace").decode())
    assert (path in "".join(lines)) == plain


def without_streams(closed: str, *command: str) -> list[str]:
    """Return a command that runs another one without some standard streams, such as `>&-`."""
    return ["sh", "-c", f'exec "$@" {closed}', "sh", *command]


def test_closed_output_does_not_change_the_exit_code() -> None:
    def start(*command: str, **options: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, stderr=subprocess.PIPE, **options)

    command = [*COMMAND, "encoders"]
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as closed, Path("/dev/full").open("wb") as full:
        processes = [
            (0, b"", start(*command, stdout=closed)),
            (0, b"", start(*without_streams(">&-", *command))),
            (0, b"", start(*without_streams("<&- >&- 2>&-", *command, "--json"))),
            (6, b"No space left on device", start(*command, stdout=full)),
        ]
    for code, message, process in processes:
        _, errors = process.communicate(timeout=60)
        assert (process.returncode, b"Traceback" in errors) == (code, False), errors
        assert message in errors


def test_files_do_not_get_the_numbers_of_closed_streams(tmp_path: Path) -> None:
    script = (
        "import os, sys; from histopipe.cli import _open_closed_streams as f; f();"
        "print(open(sys.argv[1], 'w').fileno() > 2, file=open(sys.argv[1] + '.txt', 'w'))"
    )
    command = [sys.executable, "-P", "-c", script, str(tmp_path / "a")]
    subprocess.run(without_streams("<&- >&- 2>&-", *command), check=True)
    assert (tmp_path / "a.txt").read_text() == "True\n"


def test_plurals() -> None:
    counts = ((1, "patch"), (2, "patch"), (1, "tile"), (1000, "class"))
    assert [counted(count, noun) for count, noun in counts] == [
        "1 patch",
        "2 patches",
        "1 tile",
        "1,000 classes",
    ]
