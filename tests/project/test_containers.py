"""Container images and cluster files: Dockerfiles, locks, Compose, Slurm and Kubernetes."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import check_image_locks
import pytest
import yaml

from helpers.paths import PROJECT
from histopipe.cli.analysis import embed
from histopipe.cli.stores import ingest
from histopipe.cli.training import train

DOCKER, CLUSTERS = PROJECT / "docker", PROJECT / "docs" / "clusters"
DOCKERFILES = (DOCKER / "Dockerfile", DOCKER / "Dockerfile.cpu")


def instructions(path: Path) -> list[list[str]]:
    text = re.sub(r"\\\n", " ", path.read_text())
    return [line.split() for line in text.splitlines() if line and not line.startswith("#")]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_finds_no_problems(path: Path) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_copied_files_are_in_build_context(path: Path) -> None:
    sent = re.findall(r"^!(.*)$", (PROJECT / ".dockerignore").read_text(), re.MULTILINE)
    copied = [
        Path(name)
        for words in instructions(path)
        if words[0] == "COPY" and not words[1].startswith("--from")
        for name in words[1:-1]
    ]
    assert copied and all((PROJECT / name).exists() for name in copied)
    assert all(any(name.match(pattern) for pattern in sent) for name in copied), copied


def test_images_differ_only_in_cuda() -> None:
    texts = [
        re.sub(r" NVIDIA_\w+=\S+", "", " ".join(map(" ".join, instructions(path))))
        for path in DOCKERFILES
    ]
    assert texts[0].replace("gpu.lock", "cpu.lock").split() == texts[1].split()


def test_images_have_tested_versions() -> None:
    """The locks of the images contain the versions of the largest lock of the tests."""

    def versions(name: str) -> dict[str, str]:
        text = (PROJECT / "requirements" / f"{name}.lock").read_text()
        return dict(re.findall(r"^([a-z0-9-]+)==(\S+)", text, re.MULTILINE))

    tested, locks = versions("nightly"), {name: versions(name) for name in ("gpu", "cpu")}
    tested["tensorflow-cpu"] = tested["tensorflow"]
    for locked in locks.values():
        assert all(tested.get(name, version) == version for name, version in locked.items())
        assert all(name.startswith("nvidia-") for name in locked.keys() - tested.keys())
    assert "nvidia-cudnn-cu12" in locks["gpu"].keys() - locks["cpu"].keys()


def test_libraries_of_images_without_wheels_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of the lock of the tests are installed from wheels there; pip lists the wheels of all others."""
    asked: list[str] = []

    def versions(name: str) -> list[str]:
        asked.append(name)
        return ["1.0", "0.9"]

    monkeypatch.setattr(check_image_locks, "versions_with_wheels", versions)
    numpy = (
        (PROJECT / "requirements" / "nightly.lock").read_text().split("numpy==")[1].split(" ")[0]
    )
    lock = tmp_path / "gpu.lock"
    lock.write_text(
        f"numpy=={numpy} \\\n    --hash=sha256:0\nonly-source==1.1 \\\nwith-wheel==1.0 \\\n"
    )
    assert check_image_locks.main([lock]) == 1
    assert sorted(asked) == ["only-source", "with-wheel"]
    assert capsys.readouterr().out == f"{lock}: no wheel of only-source==1.1\n"
    lock.write_text("with-wheel==0.9 \\\n")
    assert check_image_locks.main([lock]) == 0
    makefile = (PROJECT / "Makefile").read_text()
    assert "tools/install.py requirements/nightly.lock" in makefile


def test_slides_are_read_only_in_containers() -> None:
    composed = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    assert set(composed["services"]) == {"histopipe", "cpu"}
    for service in composed["services"].values():
        slides, *writable = service["volumes"]
        assert slides.endswith(":/slides:ro") and service["shm_size"]
        assert {volume.rpartition(":")[2] for volume in writable} == {"/stores", "/runs"}
        assert (DOCKER / service["build"]["context"] / service["build"]["dockerfile"]).exists()


def check_flags(called: list[list[str]]) -> None:
    """Check that there are commands, with flags, and that each has every flag of its line."""
    assert called
    for words in called:
        command = next(c for c in (train, embed, ingest) if c.name in words)
        options = {n for option in command.params for n in (*option.opts, *option.secondary_opts)}
        used = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert used and used <= options


@pytest.mark.parametrize("name", ["embed.sbatch", "ingest.sbatch", "train.sbatch"])
def test_slurm_scripts(name: str) -> None:
    path = CLUSTERS / name
    assert subprocess.run(["bash", "-n", path], check=False).returncode == 0
    lines = [line for line in path.read_text().splitlines() if "histopipe " in line]
    commands = [shlex.split(line, comments=True) for line in lines]
    check_flags([w[w.index("histopipe") + 1 :] for w in commands if "histopipe" in w])


def test_kubernetes_manifest() -> None:
    manifests = list(yaml.safe_load_all((CLUSTERS / "kubernetes.yaml").read_text()))
    called: list[list[str]] = []
    for manifest in manifests:
        if manifest["kind"] == "Service":
            selected = manifest["spec"]["selector"]
            assert any(labels(other) == selected for other in manifests)
            continue
        pod = manifest["spec"]["template"]["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in (*pod["containers"], *pod.get("initContainers", ())):
            assert {mount["name"] for mount in container.get("volumeMounts", ())} <= volumes
            called += [
                shlex.split(part)
                for part in " ".join(container.get("args", ())).split(";")
                if "histopipe " in part
            ]
    assert len(called) == 4
    check_flags(called)


def labels(manifest: dict[str, Any]) -> dict[str, str] | None:
    template = manifest["spec"].get("template")
    return template["metadata"]["labels"] if template else None
