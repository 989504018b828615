"""Check the libraries that histopipe needs: their versions, OpenSlide's formats, and the speed of JPEG."""

from __future__ import annotations

import importlib
import os
import time
from importlib import metadata

from packaging.requirements import Requirement

from histopipe.diagnostics.machine import Check, State
from histopipe.errors import MachineShort
from histopipe.system.worker_pool import WorkerDied, WorkerPool

_IMPORTS = {"openslide-python": "openslide", "pillow": "PIL", "scikit-image": "skimage"}
"""Names of modules that differ from the package's."""
_DECODINGS = 9
_FASTER = 1.15
"""With SIMD, libjpeg-turbo decodes 1.5 to 4 times as fast."""


def libraries() -> Check:
    """Check that every library that ingest needs can be loaded, in a supported version."""
    versions, wrong = {}, []
    for requirement in map(Requirement, metadata.requires("histopipe") or []):
        if requirement.marker is not None:
            continue  # of an extra
        name = requirement.name
        try:
            versions[name] = metadata.version(name)
            if name != "openslide-bin":  # has no module
                importlib.import_module(_IMPORTS.get(name, name))
        except Exception as error:  # noqa: BLE001 - a broken library may raise anything
            wrong.append(f"{name}: {error}")
            continue
        if not requirement.specifier.contains(versions[name], prereleases=True):
            wrong.append(f"{name} {versions[name]}, where {requirement} is wanted")
    if wrong:
        todo = "install histopipe anew, into an environment of its own"
        return Check("libraries", "; ".join(wrong), State.BAD, todo, versions)
    return Check("libraries", f"all {len(versions)} are there", facts=versions)


def openslide() -> Check:
    """Check which slides OpenSlide can open."""
    try:
        from histopipe.slides.slide import openslide_formats  # late: the library may be broken

        version, formats = openslide_formats()
    except (ImportError, OSError) as error:
        found = f"cannot be loaded: {error}"
        return Check("OpenSlide", found, State.BAD, "pip install openslide-bin")
    facts = {"version": version, "formats": formats}
    return Check("OpenSlide", f"{version}: {', '.join(formats) or 'formats unknown'}", facts=facts)


def jpeg() -> Check:
    """Check whether the JPEG library uses SIMD, by measuring its speed with and without."""
    try:
        used, plain = _seconds(None), _seconds(_without_simd)
    except (WorkerDied, MachineShort, ImportError) as error:
        return Check("JPEG", f"cannot be decoded: {error}", State.BAD, "install simplejpeg anew")
    facts = {"megapixels_per_second": round(1 / used), "without_simd": round(1 / plain)}
    found = f"{1 / used:.0f} megapixels a second on one core, {plain / used:.1f} times as fast as without SIMD"
    if plain < used * _FASTER:
        todo = "its libjpeg-turbo was built without SIMD: install simplejpeg from its wheel"
        return Check("JPEG", found, State.WARNING, todo, facts)
    return Check("JPEG", found, facts=facts)


def _seconds(prepare: object) -> float:
    """Return the seconds to decode a megapixel, in a new process: the library chooses its instructions once."""
    with WorkerPool(1, prepare) as pool:  # type: ignore[arg-type]
        return pool.submit_within(60.0, _decode).result()


def _without_simd() -> None:
    os.environ["JSIMD_FORCENONE"] = "1"  # libjpeg-turbo's own switch


def _decode() -> float:
    import numpy as np
    import simplejpeg

    steps = np.random.default_rng(0).integers(-3, 4, (1000, 1000, 3))
    content = simplejpeg.encode_jpeg(np.cumsum(steps, axis=1).astype(np.uint8), 85)
    best = float("inf")
    for _ in range(_DECODINGS):
        started = time.perf_counter()
        simplejpeg.decode_jpeg(content)
        best = min(best, time.perf_counter() - started)
    return best
