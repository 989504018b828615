"""Train on bags with STAMP's loop: bags per second of the second epoch. Called by tools/bench_mil.py.

    stamp_bags.py BAGS BATCH [--transmil]

The model is gated attention of CLAM's size, which STAMP does not have, so that loops are compared and not models; with
`--transmil` it is STAMP's TransMIL.

STAMP reads HDF5 files with its names of datasets. They are written next to the bags once.
"""

import logging
import sys
import tempfile
import time
from pathlib import Path

import h5py
import lightning
import torch
from stamp.modeling.data import PatientData, create_dataloader
from stamp.modeling.registry import ModelName, load_model_class
from stamp.modeling.train import train_model_

EPOCHS = 2


class GatedAttention(torch.nn.Module):
    """The model that histopipe trains with `--pooling gated`."""

    def __init__(self, dim_output: int, dim_input: int, dim_hidden: int) -> None:
        super().__init__()
        self.hidden = torch.nn.Sequential(
            torch.nn.Linear(dim_input, dim_hidden), torch.nn.ReLU(), torch.nn.Dropout(0.25)
        )
        self.tanh, self.sigmoid, self.score = (
            torch.nn.Linear(width, out) for width, out in ((dim_hidden, 256),) * 2 + ((256, 1),)
        )
        self.last = torch.nn.Linear(dim_hidden, dim_output)

    def forward(self, bags: torch.Tensor, **_: object) -> torch.Tensor:
        """Return logits of (B, N, F) features."""
        hidden = self.hidden(bags)
        gate = torch.tanh(self.tanh(hidden)) * torch.sigmoid(self.sigmoid(hidden))
        shares = torch.softmax(self.score(gate), dim=1)
        return self.last((shares * hidden).sum(dim=1))


class Clock(lightning.Callback):
    """Measures the training part of each epoch."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_epoch_start(self, *_: object) -> None:
        """Start the clock."""
        self.begun = time.perf_counter()

    def on_train_batch_end(self, *_: object) -> None:
        """Read the clock: validation follows the last batch."""
        self.last = time.perf_counter() - self.begun

    def on_validation_start(self, *_: object) -> None:
        """Keep the time of the epoch."""
        self.seconds.append(self.last)


def converted(path: Path) -> Path:
    """Return a bag with STAMP's names."""
    target = path.parent.with_name(f"{path.parent.name}-stamp") / path.name
    target.parent.mkdir(exist_ok=True)
    if not target.exists():
        with h5py.File(path) as file, h5py.File(target, "w") as out:
            out["feats"] = file["features"][:]
            out["coords"] = file["coords"][:].astype("float32")
            out.attrs["tile_size_um"] = 128.0
    return target


def main() -> None:
    """Train with the hyperparameters that histopipe gets, too."""
    bags, batch = Path(sys.argv[1]), int(sys.argv[2])
    patients = []
    for path in sorted(bags.glob("*.h5")):
        with h5py.File(path) as file:
            label, (size, dimension) = file.attrs["label"], file["features"].shape
        patients.append(PatientData(ground_truth=label, feature_files=[converted(path)]))
    loaders = [
        create_dataloader(
            feature_type="tile",
            task="classification",
            patient_data=chosen,
            bag_size=size,
            batch_size=count,
            shuffle=shuffle,
            num_workers=2,
            transform=None,
            categories=["a", "b"],
        )[0]
        for chosen, count, shuffle in ((patients, batch, True), (patients[:2], 1, False))
    ]
    lit_class, model_class = load_model_class("classification", "tile", ModelName.TRANS_MIL)
    model = lit_class(
        model_class=model_class if "--transmil" in sys.argv else GatedAttention,
        categories=["a", "b"],
        category_weights=torch.ones(2),
        dim_input=dimension,
        total_steps=len(loaders[0]) * EPOCHS,
        max_lr=3e-4,
        div_factor=25.0,
        model_name="trans_mil",
        ground_truth_label="label",
        train_patients=[],
        valid_patients=[],
        dim_hidden=512,
    )
    clock = Clock()
    model.configure_callbacks = lambda: [clock]
    with tempfile.TemporaryDirectory() as folder:
        train_model_(
            output_dir=Path(folder),
            model=model,
            train_dl=loaders[0],
            valid_dl=loaders[1],
            max_epochs=EPOCHS,
            patience=EPOCHS,
            accelerator="cpu",
        )
    print(len(patients) / clock.seconds[-1])


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    main()
