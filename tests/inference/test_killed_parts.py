"""Parts that are killed at random and done again, and lost workers, leave the files of one process."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from helpers.commands import COMMAND, succeed
from helpers.results import files
from helpers.slides import make_slides

pytestmark = pytest.mark.nightly(
    reason="many kills; test_parts_joins_and_plain_commands_in_any_order shows what remains of one"
)


@pytest.fixture(scope="module")
def slides(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Slides, and next to them the masks that one process writes."""
    folder = tmp_path_factory.mktemp("cohort") / "slides"
    make_slides(folder, "--count", "8", "--size", "2048x2048")
    succeed("tissue", folder, "--out", folder.with_name("masks"))
    return folder


def test_killed_parts_are_done_again(slides: Path, tmp_path: Path) -> None:
    chance, out = random.Random(1), tmp_path / "masks"

    def start(number: int) -> subprocess.Popen[bytes]:
        words = ["tissue", slides, "--out", out, "--part", f"{number}/3", "--workers", "1"]
        return subprocess.Popen([*COMMAND, *map(str, words)], stderr=subprocess.DEVNULL)

    steady, killed = start(3), 0
    while killed < 6:
        parts = [start(1), start(2)]
        time.sleep(chance.uniform(0.2, 1.5))
        for part in parts:
            killed += part.poll() is None
            part.kill()
            part.wait()
    assert [part.wait() for part in (steady, start(1), start(2))] == [0, 0, 0]
    for _ in range(2):
        succeed("tissue", slides, "--out", out, "--join")
    assert files(out) == files(slides.with_name("masks"))


def test_lost_worker(slides: Path, tmp_path: Path) -> None:
    out = tmp_path / "masks"
    with subprocess.Popen(
        [*COMMAND, "tissue", str(slides), "--out", str(out), "--cluster", "local:2"],
        stderr=subprocess.PIPE,
        text=True,
    ) as command:
        while not list(out.rglob("*.png")):
            assert command.poll() is None
            time.sleep(0.02)
        tasks = Path(f"/proc/{command.pid}/task").glob("*/children")
        children = [int(child) for task in tasks for child in task.read_text().split()]
        workers = [c for c in children if "spawn_main" in Path(f"/proc/{c}/cmdline").read_text()]
        assert len(workers) == 2
        os.kill(workers[0], signal.SIGKILL)
        _, stderr = command.communicate()
    assert command.returncode == 0, stderr
    assert files(out) == files(slides.with_name("masks"))
