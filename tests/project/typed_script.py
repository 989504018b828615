"""A script as users write them. `make lint` checks its types: each comment stands for an error that mypy must report."""

from __future__ import annotations

from pathlib import Path

import histopipe

histopipe.ingest("slides", "patches.lmdb", mpp=0.5, patch_size=512, labels=Path("labels.csv"))
histopipe.ingest(["a.svs", "b.svs"], mag=20, tissue="masks", exclude=["pen"], part="1/4")
histopipe.ingest("slides", patchsize=512)  # type: ignore[call-arg]
histopipe.ingest("slides", patch_size="512")  # type: ignore[arg-type]
histopipe.ingest("slides", codec="webp")  # type: ignore[arg-type]
result = histopipe.train("patches.lmdb", out="runs/first", epochs=5, learning_rate=1e-4, seed=1)
folder: Path = result.folder
histopipe.train(out="runs/mil", mil="features", pooling="gated", covariates=["age", "stage"])
histopipe.train("patches.lmdb", out="runs/first", epoch=5)  # type: ignore[call-arg]
histopipe.train("patches.lmdb", out="runs/first", optimizer="adm")  # type: ignore[arg-type]
histopipe.train("patches.lmdb", epochs=5)  # type: ignore[call-arg]
histopipe.cross_validate("patches.lmdb", out="runs/cv", folds=5, seeds=3)
histopipe.embed("slides", out="features", model="uni", weights="uni", precision="mixed_bfloat16")
histopipe.predict("runs/first", ["new"], out="predictions", heatmaps=True)  # type: ignore[call-arg]
