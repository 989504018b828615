"""What a stranger meets first: help, versions, wrong flags, and documentation that keeps up."""

from __future__ import annotations

from conftest import PROJECT, Run

from histopipe._version import __version__
from histopipe.cli import COMMANDS
from histopipe.errors import ExitCode


def test_every_command_has_help_and_a_place_in_the_readme(run: Run) -> None:
    readme = (PROJECT / "README.md").read_text()
    shown = run("--help").stdout
    for name, (_, summary) in COMMANDS.items():
        assert name in shown
        assert summary in shown
        assert f"histopipe {name}" in readme
        done = run(name, "--help")
        assert done.returncode == 0
        assert f"Example: histopipe {name}" in done.stdout


def test_every_option_is_explained(run: Run) -> None:
    for name in COMMANDS:
        text = run(name, "--help").stdout
        options = [
            line
            for line in text.splitlines()
            if line.startswith("  --") and "  " not in line.strip()
        ]
        following = [text.splitlines()[text.splitlines().index(line) + 1] for line in options]
        assert all(line.startswith("      ") for line in following), name


def test_exit_codes_are_documented() -> None:
    text = (PROJECT / "docs" / "architecture.md").read_text()
    for code in ExitCode:
        assert f"| {int(code)} |" in text


def test_version_and_unknown_commands(run: Run) -> None:
    assert run("--version").stdout == f"histopipe, version {__version__}\n"
    assert f"## {__version__}" in (PROJECT / "CHANGELOG.md").read_text()
    done = run("nothing")
    assert done.returncode == 2
    assert "No such command 'nothing'" in done.stderr
    assert run().returncode == 2


def test_no_address_of_an_index_is_in_a_lock() -> None:
    for lock in (PROJECT / "requirements").glob("*.lock"):
        assert "://" not in lock.read_text()
        assert "--hash=sha256:" in lock.read_text()
