"""Slides whose patches lie in stores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from histopipe.dataset.labelling import class_codes
from histopipe.dataset.options import OnError
from histopipe.dataset.orders import Sequential
from histopipe.dataset.patch_batches import PatchBatches
from histopipe.dataset.sample_table import SampleTable
from histopipe.dataset.selection import select
from histopipe.dataset.splits import patches_crc
from histopipe.errors import UsageError
from histopipe.inference.classifier import Classifier, check_scale
from histopipe.inference.slide_info import SlideFacts
from histopipe.inference.stored_patches import COLUMNS, Normalise, load_piece
from histopipe.inference.stream import Piece
from histopipe.slides.tables import SlideLabel
from histopipe.store.store import Store, check_patch_sizes
from histopipe.system.tensorflow import load_quietly


@dataclass(slots=True)
class StoredSlide:
    """A slide of a store, as `SlidePatches`."""

    facts: SlideFacts
    store: Store
    number: int
    batches: PatchBatches
    normalise: Normalise | None

    @property
    def thumbnail(self) -> bytes | None:
        """A JPEG of the slide, if the store has one."""
        return self.store.thumbnail(self.number)

    def drawn(self, classes: Sequence[str]) -> dict[tuple[int, int], int]:
        """The class that is drawn on each patch, a place in `classes` or -1, by its corner."""
        index = self.store.index(self.number)
        corners = zip(index["x_l0"].tolist(), index["y_l0"].tolist(), strict=True)
        return dict(
            zip(corners, class_codes(self.store, self.number, classes).tolist(), strict=True)
        )

    @property
    def steps(self) -> int:
        """Batches."""
        return self.batches.steps_per_epoch

    def load(self, step: int) -> Piece:
        """As `SlidePatches`."""
        return load_piece(self.batches, self.normalise, step)

    def ended(self) -> SlideFacts:
        """The facts, once all is predicted."""
        skipped = len(self.batches.skipped)
        return replace(self.facts, patches=len(self.batches.table) - skipped, skipped=skipped)


def stored_slides(
    stores: Sequence[Store],
    classifier: Classifier,
    *,
    batch_size: int,
    on_error: OnError,
    labels: Mapping[str, SlideLabel] | None,
) -> Iterator[StoredSlide]:
    """Every slide that has patches.

    Args:
        stores: where they are.
        classifier: what they go through.
        batch_size: patches at once.
        on_error: "skip" leaves out damaged patches; with "raise" their slides fail.
        labels: by slide id, in place of the recorded ones.

    Raises:
        UsageError: the patches are not such as the model was trained on.
        NothingToDo: stains are wanted and not measured.
    """
    check_patch_sizes(stores)
    for store in stores:
        _check_spec(store, classifier)
    normalise = None
    if classifier.stain_norm != "none":
        stain = load_quietly("histopipe.inference.stain")
        normalise = stain.numpy_normaliser(stores, classifier.stain_norm)
    for rows in select(stores):
        if not rows.count:
            continue
        store = stores[rows.store]
        record = store.records[rows.slide]
        table = SampleTable([rows])
        batches = PatchBatches(
            stores, table, batch_size=batch_size, order=Sequential(len(table)), on_error=on_error,
            columns=COLUMNS,
        )  # fmt: skip
        source = f"store {store.uuid}, patches {patches_crc(store, rows.slide):08x}"
        facts = SlideFacts.of(record, source=source)
        if labels is not None:
            said = labels.get(record.id, SlideLabel(None))
            facts = replace(facts, label=said.label, patient=said.patient or facts.patient)
        yield StoredSlide(facts, store, rows.slide, batches, normalise)


def _check_spec(store: Store, classifier: Classifier) -> None:
    """Refuse patches of another size or scale: a network sees no scale bar."""
    if store.patch_size != classifier.patch_size:
        raise UsageError(
            f"{store.path}: patches of another size than the model of {classifier.folder} takes",
            found=f"{store.patch_size} pixels", expected=f"{classifier.patch_size}",
        )  # fmt: skip
    for record in store.complete.values() if store.spec.get("level") is not None else ():
        check_scale(record, classifier)
    names = ("mpp", "level")
    spec = classifier.spec
    if spec is not None and any(store.spec.get(name) != spec.get(name) for name in names):
        raise UsageError(
            f"{store.path}: patches of another scale than the model of {classifier.folder} was trained on",
            found=", ".join(f"{name} {store.spec.get(name)}" for name in names),
            expected=", ".join(f"{name} {spec.get(name)}" for name in names),
            todo="ingest the slides as those of the training were",
        )  # fmt: skip
