"""Container images and cluster files: Dockerfiles, locks, Compose, Slurm and Kubernetes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock, call

import check_image_locks
import pytest
import yaml

from helpers.paths import PROJECT

DOCKER, CLUSTERS = PROJECT / "docker", PROJECT / "docs" / "clusters"
DOCKERFILES = (DOCKER / "Dockerfile", DOCKER / "Dockerfile.cpu")


def locked_versions(lock: str) -> dict[str, str]:
    text = (PROJECT / "requirements" / f"{lock}.lock").read_text()
    return dict(re.findall(r"^([\w.-]+)==([^ \\;]+)", text, re.MULTILINE))


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
    assert copied
    for name in copied:
        assert (PROJECT / name).exists() and any(name.match(pattern) for pattern in sent), name


def test_images_differ_only_in_cuda() -> None:
    texts = [
        re.sub(r" NVIDIA_\w+=\S+", "", " ".join(map(" ".join, instructions(path))))
        for path in DOCKERFILES
    ]
    assert texts[0].replace("gpu.lock", "cpu.lock").split() == texts[1].split()


def test_images_have_tested_versions() -> None:
    """The locks of the images contain the versions of the largest lock of the tests."""
    tested = locked_versions("nightly")
    tested["tensorflow-cpu"] = tested["tensorflow"]
    for lock in ("gpu", "cpu"):
        further = locked_versions(lock).items() - tested.items()
        assert all(name.startswith("nvidia-") for name, _ in further)
        assert ("nvidia-cudnn-cu12" in dict(further)) == (lock == "gpu")


@pytest.mark.parametrize(("part", "whole"), [("train", "dev"), ("dev", "nightly")])
def test_a_lock_is_part_of_the_next_one(part: str, whole: str) -> None:
    """They are installed one after the other into one environment."""
    assert locked_versions(part) and locked_versions(part).items() <= locked_versions(whole).items()


def test_libraries_of_images_without_wheels_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of the lock of the tests are installed from wheels there; pip lists the wheels of all others."""
    versions = MagicMock(return_value=["1.0", "0.9"])
    monkeypatch.setattr(check_image_locks, "versions_with_wheels", versions)
    lock, numpy = tmp_path / "gpu.lock", locked_versions("nightly")["numpy"]
    lock.write_text(
        f"numpy=={numpy} \\\n    --hash=sha256:0\nonly-source==1.1 \\\nwith-wheel==1.0 \\\n"
    )
    assert check_image_locks.main([lock]) == 1
    assert sorted(versions.mock_calls) == [call("only-source"), call("with-wheel")]
    assert capsys.readouterr().out == f"{lock}: no wheel of only-source==1.1\n"
    lock.write_text("with-wheel==0.9 \\\n")
    assert check_image_locks.main([lock]) == 0


def test_slides_are_read_only_in_containers() -> None:
    composed = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    assert set(composed["services"]) == {"histopipe", "cpu"}
    for service in composed["services"].values():
        slides, *writable = service["volumes"]
        assert slides.endswith(":/slides:ro") and service["shm_size"]
        assert {volume.rpartition(":")[2] for volume in writable} == {"/stores", "/runs"}
        assert (DOCKER / service["build"]["context"] / service["build"]["dockerfile"]).exists()


@pytest.mark.parametrize("name", ["embed.sbatch", "ingest.sbatch", "train.sbatch"])
def test_slurm_scripts(name: str) -> None:
    """The flags are those of `test_documentation_uses_existing_commands_and_flags`."""
    assert subprocess.run(["bash", "-n", CLUSTERS / name], check=False).returncode == 0


def test_kubernetes_manifest() -> None:
    manifests = list(yaml.safe_load_all((CLUSTERS / "kubernetes.yaml").read_text()))
    pods = [each["spec"]["template"] for each in manifests if each["kind"] != "Service"]
    for manifest in manifests:
        if manifest["kind"] == "Service":
            assert manifest["spec"]["selector"] in [pod["metadata"]["labels"] for pod in pods]
    for pod in (each["spec"] for each in pods):
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in (*pod["containers"], *pod.get("initContainers", ())):
            assert {mount["name"] for mount in container.get("volumeMounts", ())} <= volumes
