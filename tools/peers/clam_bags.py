"""Train CLAM-SB on bags with CLAM's loop: bags per second of the second epoch. Called by tools/bench_mil.py.

    clam_bags.py CHECKOUT BAGS

CLAM reads a file of PyTorch per bag. They are written next to the bags once.
"""

import contextlib
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pandas as pd
import torch

EPOCHS = 2


def main() -> None:
    """Train with the hyperparameters that histopipe gets, too."""
    checkout, bags = map(Path, sys.argv[1:])
    sys.path.insert(0, str(checkout))
    from dataset_modules.dataset_generic import Generic_Split
    from models.model_clam import CLAM_SB
    from utils.core_utils import train_loop_clam
    from utils.utils import get_optim, get_split_loader

    rows = []
    folder = bags.with_name(f"{bags.name}-clam")
    files = folder / "pt_files"
    files.mkdir(parents=True, exist_ok=True)
    for path in sorted(bags.glob("*.h5")):
        with h5py.File(path) as file:
            rows.append({"slide_id": path.stem, "label": "ab".index(file.attrs["label"])})
            if not (files / f"{path.stem}.pt").exists():
                torch.save(torch.from_numpy(file["features"][:]), files / f"{path.stem}.pt")
    dataset = Generic_Split(pd.DataFrame(rows), str(folder))
    dimension = dataset[0][0].shape[1]
    model = CLAM_SB(dropout=0.25, n_classes=2, embed_dim=dimension)
    optimizer = get_optim(model, SimpleNamespace(opt="adam", lr=3e-4, reg=1e-5))
    loader = get_split_loader(dataset, training=True)
    seconds = []
    for epoch in range(EPOCHS):
        begun = time.perf_counter()
        with contextlib.redirect_stdout(sys.stderr):
            train_loop_clam(
                epoch, model, loader, optimizer, 2, 0.7, None, torch.nn.CrossEntropyLoss()
            )
        seconds.append(time.perf_counter() - begun)
    print(len(dataset) / seconds[-1])


np.random.seed(1)
torch.manual_seed(1)
main()
