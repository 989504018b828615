"""Kill the viewer's server and the browser at random moments of labelling, and check that no saved act is lost.

    python tools/kill_labels.py STORE --kills 50

A headless Chromium labels the patches of the first slide of STORE, act by act; each fourth act is a mark of the slide. An act
is saved when the page shows this. After each SIGKILL of the server, or of the browser, the viewer starts again with the same
journal. Then every act that a page has shown as saved must be in the journal, and none twice.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from selenium import webdriver
from selenium.common.exceptions import WebDriverException
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

from histopipe.labels.journal import read_labels

CLASSES = ("a", "b")
TOKEN = "kill-labels-of-raters"  # noqa: S105 - of this machine only
LABEL = """
const labels = window.histopipe.labels, {x, y} = window.histopipe.panes[0].slide.grids[0];
window.saved = [];
const saved = labels.saved.bind(labels);
labels.saved = (answer, act) => {
  saved(answer, act);
  if (document.querySelector('#label-state').textContent.includes('saved at') || labels.waiting.length) {
    window.saved.push(answer.acts);
  }
};
let at = arguments[0];
window.timer = setInterval(() => {
  if (labels.waiting.length >= 3) return;
  const row = at++ % x.length;
  if (at % 4) labels.label([[0, x[row], y[row]]], labels.state.classes[at % 2]);
  else labels.send({act: 'mark', slide: 0, marked: at % 8 === 0});
}, 5);
"""


def start_viewer(store: Path, journal: Path, port: int) -> subprocess.Popen[bytes]:
    """Start the command, and wait until it listens."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "histopipe",
        "view",
        str(store),
        "--journal",
        str(journal),
    ]
    options = [
        "--rater",
        "killer",
        "--classes",
        ",".join(CLASSES),
        "--port",
        str(port),
        "--token",
        TOKEN,
    ]
    process = subprocess.Popen(
        [*command, *options, "--no-browser"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    atexit.register(process.kill)
    if process.stdout is not None:
        process.stdout.readline()
    return process


def start_browser(port: int) -> webdriver.Chrome:
    """Open the page."""
    options = Options()
    options.binary_location = shutil.which("chromium") or ""
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    driver.get(f"http://127.0.0.1:{port}/{TOKEN}/")
    end = time.monotonic() + 60
    while not driver.execute_script(
        "return Boolean(window.histopipe?.panes[0]?.slide?.grids[0]?.x)"
    ):
        if time.monotonic() > end:
            raise SystemExit("the page does not load")
        time.sleep(0.05)
    return driver


def kill_browser(driver: webdriver.Chrome) -> None:
    """Kill all processes of the browser, of which some have no living parent: those that have its folder."""
    folder = driver.capabilities["chrome"]["userDataDir"].encode()
    driver.service.process.kill()
    driver.service.process.wait()
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if folder in (path / "cmdline").read_bytes():
                os.kill(int(path.name), signal.SIGKILL)


def check(journal: Path, confirmed: int) -> int:
    """Return the number of acts in the journal. All that were shown as saved must be there, and each once."""
    with tempfile.TemporaryDirectory() as copy:  # the server may write meanwhile
        path = Path(shutil.copy(journal / "killer.jsonl", copy))
        count = read_labels(Path(copy), "killer", CLASSES).count
        ids = [json.loads(line)["id"] for line in path.read_bytes().split(b"\n")[:-1]]
    if count < confirmed or len({*ids}) < len(ids) or len(ids) != count:
        text = f"the journal has {count}, {len({*ids})} different"
        raise SystemExit(f"{confirmed} acts were shown as saved, {text}")
    return count


def main() -> None:
    """Run the trial."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("store", type=Path)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--port", type=int, default=8797)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rng, confirmed, torn = random.Random(options.seed), 0, 0
    with tempfile.TemporaryDirectory() as scratch:
        journal = Path(scratch) / "journal"
        server, driver = start_viewer(options.store, journal, options.port), None
        for number in range(options.kills):
            if driver is None:
                driver = start_browser(options.port)
                driver.execute_script(LABEL, confirmed)
            end = time.monotonic() + rng.uniform(0.3, 2.0)
            while time.monotonic() < end:
                confirmed = max([confirmed, *driver.execute_script("return window.saved")])
            if rng.random() < 0.5:
                server.kill()
                server.wait()
                content = (journal / "killer.jsonl").read_bytes()
                torn += not content.endswith(b"\n")
                check(journal, confirmed)
                server = start_viewer(options.store, journal, options.port)
                # The page goes on, and sends again what has no answer.
            else:
                kill_browser(driver)
                driver = None
                check(journal, confirmed)
            print(f"kill {number + 1}: {confirmed} acts shown as saved", flush=True)
        if driver is not None:
            with_waiting = "return window.histopipe.labels.waiting.length"
            driver.execute_script("clearInterval(window.timer)")
            while driver.execute_script(with_waiting):
                time.sleep(0.1)
            try:
                confirmed = max([confirmed, *driver.execute_script("return window.saved")])
            finally:
                driver.quit()
        server.terminate()
        server.wait()
        count = check(journal, confirmed)
    print(
        f"{options.kills} kills: {confirmed} acts shown as saved, {count} in the journal, each once; {torn} torn lines"
    )


if __name__ == "__main__":
    try:
        main()
    except WebDriverException as error:
        raise SystemExit(f"the browser failed: {error.msg}") from error
