"""Build wheel and sdist of the version in `histopipe/_version.py`, and check each in a new environment.

make release    # or: python tools/release.py [--allow-changes]

The working tree must be clean, CITATION.cff must have the same version, and CHANGELOG.md a section `## [VERSION] - DATE`. The new environments get the exact
versions of requirements/base.lock. Both files are in dist/ afterwards. Publishing them is left to a person.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from setuptools import build_meta

PROJECT = Path(__file__).parents[1]
DIST = PROJECT / "dist"


def read_version() -> str:
    """Return the version in `histopipe/_version.py`."""
    match = re.search(r'__version__ = "(.+)"', (PROJECT / "histopipe" / "_version.py").read_text())
    if match is None:
        raise SystemExit("histopipe/_version.py: no __version__ found")
    return match[1]


def check_sources(version: str, *, allow_changes: bool) -> None:
    """Check that the changelog describes the version, and that all files are committed."""
    heading = rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$"
    if not re.search(heading, (PROJECT / "CHANGELOG.md").read_text(), re.MULTILINE):
        raise SystemExit(f"CHANGELOG.md: expected a heading '## [{version}] - YYYY-MM-DD'")
    if f"\nversion: {version}\n" not in (PROJECT / "CITATION.cff").read_text():
        raise SystemExit(f"CITATION.cff: expected the line 'version: {version}'")
    status = run("git", "status", "--porcelain")
    if status and not allow_changes:
        raise SystemExit(f"files that are not committed:\n{status}")


def run(*command: str | Path) -> str:
    """Run a command in the project, and return its output."""
    done = subprocess.run(
        list(map(str, command)), cwd=PROJECT, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def check_artifact(artifact: Path, version: str) -> None:
    """Install a wheel or sdist into a new environment, and run the command."""
    with tempfile.TemporaryDirectory() as folder:
        run(sys.executable, "-m", "venv", folder)
        pip = Path(folder) / "bin" / "pip"
        run(pip, "install", "--quiet", "--require-hashes", "-r", "requirements/base.lock")
        run(pip, "install", "--quiet", "--no-deps", artifact)
        histopipe = Path(folder) / "bin" / "histopipe"
        printed = run(histopipe, "--version")
        if version not in printed:
            raise SystemExit(f"{artifact.name}: found {printed!r}, expected version {version}")
        run(histopipe, "ingest", "--help")
    print(f"{artifact.name}: installed and started, {artifact.stat().st_size / 1e6:.1f} MB")


def main() -> None:
    """Check the sources, build, and check what was built."""
    parser = argparse.ArgumentParser(description="Build and check a release.")
    parser.add_argument("--allow-changes", action="store_true", help="Accept uncommitted files.")
    arguments = parser.parse_args()
    version = read_version()
    check_sources(version, allow_changes=arguments.allow_changes)
    shutil.rmtree(DIST, ignore_errors=True)
    names = [build_meta.build_wheel(str(DIST)), build_meta.build_sdist(str(DIST))]
    for name in names:
        check_artifact(DIST / name, version)


if __name__ == "__main__":
    main()
