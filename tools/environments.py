"""Virtual environments of other tools that benchmarks compare with."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def install(
    environment: Path, steps: Sequence[Sequence[str]], python: str = sys.executable
) -> tuple[str | None, list[str]]:
    """Create an environment, unless it exists, and install packages in `steps`, each with the arguments of pip.

    Returns:
        The error, if a step failed, and the versions of the packages that the steps pin.
    """
    program = environment / "bin" / "python"
    print(f"install {environment.name}", file=sys.stderr)
    if not program.exists():
        made = subprocess.run(
            [python, "-m", "venv", environment], capture_output=True, text=True, check=False
        )
        if made.returncode:
            return f"{python} cannot make an environment: {made.stderr.strip()[-200:]}", []
    for step in steps:
        done = subprocess.run(
            [program, "-m", "pip", "install", "--quiet", *step],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "ERROR" in line]
            reason = (lines or ["no message"])[-1].strip()
            return f"pip cannot install {step[-1]}: {reason}", []
    pinned = {
        text.split("==")[0].split("[")[0].lower() for step in steps for text in step if "==" in text
    }
    frozen = subprocess.check_output([program, "-m", "pip", "freeze"], text=True).splitlines()
    return None, [line for line in frozen if line.split("==")[0].lower() in pinned]
