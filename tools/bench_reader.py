"""Measure the speed of reading patches, compared with the decoder alone and with other formats.

    python tools/bench_reader.py FOLDER                  all benchmarks: about 25 minutes and 25 GB in FOLDER
    python tools/bench_reader.py FOLDER speed cold       some benchmarks

All readers read the same patches, 256² in batches of 64, into tensors of tf.data. They are measured in turns in one
run, and compared by medians, since the speed of machines drifts.

    speed      histopipe, with and without the CRC check; the decode ceiling (simplejpeg on all cores, a buffer per thread);
               TFRecord files, HDF5, a folder of JPEGs and a tar
    rest       time of each stage between the ceiling and the reader
    calls      parallel calls, with new and with reused memory, for large and small patches, warm and cold (root only)
    delivery   how the time of a batch varies, and calls on more cores, simulated
    orders     balance, max_per_slide and block shuffle, compared with the plain shuffle
    cold       with an empty page cache (root only): with and without read-ahead
    leak       anonymous memory over 20 epochs, and over 20 epochs with a deliberate leak
    cgroup     a store larger than the memory limit of its cgroup (root only)
    scale      opening, memory and time per step, from 10⁴ to 10⁸ patches
"""

from __future__ import annotations

import argparse
import functools
import gc
import heapq
import io
import itertools
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import h5py
import numpy as np
import simplejpeg
import tensorflow as tf

from histopipe.dataset.batches import PatchBatches
from histopipe.dataset.sampling import Order, make_order
from histopipe.dataset.selection import SampleTable, select
from histopipe.dataset.tf_data import BatchFeed
from histopipe.geometry import Mpp
from histopipe.ingestion.patch_source import encode
from histopipe.store.format import INDEX_COLUMNS
from histopipe.store.record import SlideRecord
from histopipe.store.store import Store
from histopipe.store.writer import StoreWriter
from histopipe.system.arrays import aligned_empty
from histopipe.tiling.spec import TilingSpec

TOOLS = Path(__file__).parent
COMMAND = str(Path(sys.executable).with_name("histopipe"))
BATCH, SIDE, REPEATS, WARM_UP = 64, 256, 15, 8
CORES = len(os.sched_getaffinity(0))
SIZE = "35520x35604"  # 1.26 gigapixels, about 7,000 patches
COHORT = 4
CALLS_QUALITIES = {"large-patches": 78, "small-patches": 10}
TINY = 8
LEAST_MEMORY = 700 << 20
SCALES = {10**4: 2, 10**6: 200, 10**8: 10_000}
"""Numbers of patches, and of slides that contain them."""

Reader = Callable[[int], float]


def say(text: str) -> None:
    """Print a line of the result."""
    print(text, flush=True)


def compare(readers: Mapping[str, Reader], steps: int, repeats: int = REPEATS) -> dict[str, float]:
    """Return median patches/s of each reader, measured in turns in short rounds, since the machine's speed drifts."""
    rates: dict[str, list[float]] = {name: [] for name in readers}
    for _ in range(repeats):
        for name, reader in readers.items():
            rates[name].append(reader(steps))
            gc.collect()
    return {name: statistics.median(measured) for name, measured in rates.items()}


def rate(batches: Iterator[Any], steps: int) -> float:
    """Return patches/s of an iterator of batches after the warm-up."""
    for _ in range(WARM_UP):
        next(batches)
    started = time.perf_counter()
    for _ in range(steps):
        next(batches)
    return steps * BATCH / (time.perf_counter() - started)


# --- input files -----------------------------------------------------------------------------------------------------------


class Inputs:
    """Stores and other formats of the same patches, created once in a folder."""

    def __init__(self, folder: Path, texture: Path | None) -> None:
        self.folder, self.texture = folder, texture
        folder.mkdir(parents=True, exist_ok=True)

    def store(self, name: str, slides: int, quality: int = 80) -> Path:
        """Return a store of synthetic slides with a JPEG quality, created if missing."""
        path = self.folder / f"{name}.lmdb"
        if not path.exists():
            pictures = self.folder / f"slides-{slides}-{quality}"
            if not pictures.exists():
                make = [sys.executable, str(TOOLS / "make_slides.py"), str(pictures)]
                texture = ["--texture", str(self.texture)] if self.texture else []
                run(
                    [
                        *make,
                        "--size",
                        SIZE,
                        "--count",
                        str(slides),
                        "--quality",
                        str(quality),
                        *texture,
                    ]
                )
            run([COMMAND, "ingest", str(pictures), "--out", str(path)])
        return path

    def made(self, name: str, make: Callable[[Path], None]) -> Path:
        """Return a file or folder, created if missing by a function that writes it."""
        path = self.folder / name
        if not path.exists():
            part = self.folder / f"part-{name}"
            make(part)
            part.rename(path)
        return path


def run(command: list[str]) -> None:
    """Run a command that must succeed."""
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def values_of(path: Path) -> list[bytes]:
    """Return every value of a store."""
    with Store(path) as store:
        return [store.value(n, row) for n, r in store.complete.items() for row in range(r.planned)]


def write_tfrecord(values: list[bytes], path: Path) -> None:
    """Write one record per patch, with image and label."""
    with tf.io.TFRecordWriter(str(path)) as writer:
        for value in values:
            feature = {
                "image_raw": tf.train.Feature(bytes_list=tf.train.BytesList(value=[value])),
                "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[0])),
            }
            example = tf.train.Example(features=tf.train.Features(feature=feature))
            writer.write(example.SerializeToString())


def write_hdf5(values: list[bytes], path: Path) -> None:
    """Write pixels with one chunk per patch, like the older patch files of CLAM."""
    with h5py.File(path, "w") as file:
        shape = (len(values), SIDE, SIDE, 3)
        images = file.create_dataset("imgs", shape, "u1", chunks=(1, SIDE, SIDE, 3))
        for i, value in enumerate(values):
            images[i] = simplejpeg.decode_jpeg(value)


def write_folder(values: list[bytes], path: Path) -> None:
    """Write a file per patch, in two classes."""
    for label in "ab":
        (path / label).mkdir(parents=True)
    for i, value in enumerate(values):
        (path / "ab"[i % 2] / f"{i:06d}.jpg").write_bytes(value)


def write_tar(values: list[bytes], path: Path) -> None:
    """Write a tar with the members of a WebDataset shard."""
    with tarfile.open(path, "w") as tar:
        for i, value in enumerate(values):
            member = tarfile.TarInfo(f"{i:06d}.jpg")
            member.size = len(value)
            tar.addfile(member, io.BytesIO(value))


# --- readers ---------------------------------------------------------------------------------------------------------------


def ceiling(values: list[bytes], steps: int) -> float:
    """Return patches/s of simplejpeg alone on all cores, with one reused buffer per thread."""

    def work(first: int) -> None:
        buffer = np.empty((SIDE, SIDE, 3), np.uint8)
        for i in range(first, steps * BATCH, CORES):
            simplejpeg.decode_jpeg(values[i % len(values)], buffer=buffer)

    return by_threads(work, steps)


def by_threads(work: Callable[[int], None], steps: int) -> float:
    """Return patches/s of a function that one thread per core calls with the thread number."""
    threads = [threading.Thread(target=work, args=(n,)) for n in range(CORES)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return steps * BATCH / (time.perf_counter() - started)


def batches_of(store: Store, order: Order | None = None, **settings: Any) -> PatchBatches:
    """Return batches of all patches of a store, shuffled by default."""
    table = SampleTable(select([store]))
    order = order or Order(len(table), 1)
    return PatchBatches([store], table, batch_size=BATCH, order=order, **settings)


def ours(batches: PatchBatches, steps: int, **settings: Any) -> float:
    """Return patches/s of the reader, as used by `load_dataset` and training."""
    for name, value in settings.items():
        setattr(batches, name, value)
    source = BatchFeed(batches)
    try:
        return rate(iter(source.dataset(0, 1 << 40)), steps)
    finally:
        source.settle()


def tfrecord(path: Path, shuffle: int, steps: int) -> float:
    """Return patches/s of a TFRecord file by tf.data with autotuning."""
    features = {
        "image_raw": tf.io.FixedLenFeature([], tf.string),
        "label": tf.io.FixedLenFeature([], tf.int64),
    }

    def decode(record: tf.Tensor) -> Any:
        example = tf.io.parse_single_example(record, features)
        image = tf.io.decode_jpeg(example["image_raw"], channels=3)
        return tf.ensure_shape(image, (SIDE, SIDE, 3)), example["label"]

    dataset = tf.data.TFRecordDataset(str(path)).repeat()
    if shuffle:
        dataset = dataset.shuffle(shuffle, seed=1)
    dataset = dataset.map(decode, num_parallel_calls=tf.data.AUTOTUNE)
    return rate(iter(dataset.batch(BATCH).prefetch(tf.data.AUTOTUNE)), steps)


def hdf5(path: Path, steps: int) -> float:
    """Return patches/s of shuffled rows of an HDF5 file. h5py has one lock for all threads."""
    with h5py.File(path) as file:
        images = file["imgs"]
        order = Order(len(images), 1)

        def load(step: Any) -> Any:
            batch = aligned_empty((BATCH, SIDE, SIDE, 3))
            places = (int(step) * BATCH + np.arange(BATCH)) % len(images)
            for i, row in enumerate(order(0, places)):
                images.read_direct(batch, np.s_[row : row + 1], np.s_[i : i + 1])
            return batch

        dataset = tf.data.Dataset.range(1 << 40).map(
            lambda step: tf.numpy_function(load, [step], tf.uint8, stateful=False),
            num_parallel_calls=CORES,
        )
        steps_read = iter(dataset.prefetch(2))
        try:
            return rate(steps_read, steps)
        finally:
            del steps_read
            gc.collect()
            time.sleep(0.5)  # wait for reads in progress


def folder(path: Path, steps: int) -> float:
    """Return patches/s of a folder of JPEGs by Keras."""
    dataset = tf.keras.utils.image_dataset_from_directory(
        path, batch_size=BATCH, image_size=(SIDE, SIDE), shuffle=True, seed=1, verbose=False
    )
    return rate(iter(dataset.repeat().prefetch(tf.data.AUTOTUNE)), steps)


def tar(path: Path, steps: int) -> float:
    """Return patches/s of a tar in stored order, decoded by tf.data."""

    def members() -> Iterator[bytes]:
        while True:
            with tarfile.open(path, "r|") as shard:
                for member in shard:
                    file = shard.extractfile(member)
                    yield file.read() if file else b""

    dataset = tf.data.Dataset.from_generator(members, output_signature=tf.TensorSpec([], tf.string))
    dataset = dataset.map(
        lambda value: tf.ensure_shape(tf.io.decode_jpeg(value, channels=3), (SIDE, SIDE, 3)),
        num_parallel_calls=tf.data.AUTOTUNE,
    )
    return rate(iter(dataset.batch(BATCH).prefetch(tf.data.AUTOTUNE)), steps)


# --- benchmarks ------------------------------------------------------------------------------------------------------------


def bench_speed(inputs: Inputs) -> None:
    """Compare the speed of all readers with a warm page cache."""
    path = inputs.store("one", 1)
    values = values_of(path)
    say(f"  {len(values)} patches of {statistics.mean(map(len, values)) / 1e3:.1f} kB")
    record = inputs.made("one.tfrecord", functools.partial(write_tfrecord, values))
    pixels = inputs.made("one.h5", functools.partial(write_hdf5, values))
    files = inputs.made("one-folder", functools.partial(write_folder, values))
    shard = inputs.made("one.tar", functools.partial(write_tar, values))
    with Store(path) as store:
        readers: dict[str, Reader] = {
            "decode ceiling": functools.partial(ceiling, values),
            "histopipe": functools.partial(ours, batches_of(store)),
            "histopipe, no CRC": functools.partial(ours, batches_of(store, check=False)),
            "TFRecord, shuffle(2048)": functools.partial(tfrecord, record, 2048),
            "TFRecord, sequential": functools.partial(tfrecord, record, 0),
            "HDF5, shuffled": functools.partial(hdf5, pixels),
            "JPEG folder, Keras": functools.partial(folder, files),
            "tar, sequential": functools.partial(tar, shard),
        }
        rates = compare(readers, 60)
    for what, speed in rates.items():
        say(
            f"  {what:<26}{speed:9,.0f}/s  {speed / rates['decode ceiling']:.2f} of the ceiling; "
            f"histopipe is {rates['histopipe'] / speed:.2f}×"
        )


def bench_rest(inputs: Inputs) -> None:
    """Measure the stages between the ceiling and the reader."""
    path = inputs.store("one", 1)
    values = values_of(path)

    def arrays(steps: int) -> float:
        """Return patches/s like `ceiling`, but with a new array per batch."""

        def work(first: int) -> None:
            for step in range(first, steps, CORES):
                batch = aligned_empty((BATCH, SIDE, SIDE, 3))
                for i in range(BATCH):
                    value = values[(step * BATCH + i) % len(values)]
                    simplejpeg.decode_jpeg(value, buffer=batch[i], strict=False)

        return by_threads(work, steps)

    def loads(batches: PatchBatches, steps: int) -> float:
        """Return patches/s of `PatchBatches.load` without TensorFlow."""

        def work(first: int) -> None:
            for step in range(first, steps, CORES):
                batches.load(step)

        return by_threads(work, steps)

    with Store(path) as store:
        rates = compare(
            {
                "decode ceiling": functools.partial(ceiling, values),
                "new array per batch": arrays,
                "values from LMDB, no CRC": functools.partial(
                    loads, batches_of(store, check=False)
                ),
                "with CRC": functools.partial(loads, batches_of(store)),
                "through tf.data": functools.partial(ours, batches_of(store)),
            },
            60,
        )
    show_rates(rates)


def bench_calls(inputs: Inputs) -> None:
    """Compare numbers of parallel calls, and memory that is used again with new memory."""
    numbers = (CORES, CORES + 1, 2 * CORES, 3 * CORES)
    for name, quality in CALLS_QUALITIES.items():
        path = inputs.store(name, 1, quality)
        values = values_of(path)
        say(f"  {len(values)} patches of {statistics.mean(map(len, values)) / 1e3:.1f} kB")
        with Store(path) as store:
            again, new = batches_of(store), batches_of(store)
            new._memory.empty = aligned_empty  # type: ignore[method-assign]
            started, cpu = time.perf_counter(), time.process_time()
            ours(again, 200, parallel_calls=1)
            busy = (time.process_time() - cpu) / (time.perf_counter() - started)
            say(f"  one call alone keeps {busy:.2f} cores busy")
            readers: dict[str, Reader] = {"decode ceiling": functools.partial(ceiling, values)}
            for calls in numbers:
                readers[f"{calls} calls, new memory"] = functools.partial(
                    ours, new, parallel_calls=calls
                )
                readers[f"{calls} calls, reused memory"] = functools.partial(
                    ours, again, parallel_calls=calls
                )
            show_rates(compare(readers, 60))
        cold = {
            f"{calls} calls, cold": functools.partial(
                in_process, path, "shuffled", None, calls=calls
            )
            for calls in numbers
        }
        for what, speed in compare(cold, 40, repeats=5).items():
            say(f"  {what:<28}{speed:9,.0f}/s")


def bench_delivery(inputs: Inputs) -> None:
    """Measure how the time of a batch varies, and simulate calls on more cores from it."""
    with Store(inputs.store("large-patches", 1, CALLS_QUALITIES["large-patches"])) as store:
        batches, seconds = batches_of(store), list[float]()

        def work(first: int) -> None:
            for step in range(first, 300, CORES):
                started = time.perf_counter()
                batches.load(step)
                seconds.append(time.perf_counter() - started)

        by_threads(work, 300)
        seconds.clear()  # these were the first batches: of a cold file, with new memory
        by_threads(work, 300)
    spread = statistics.stdev(seconds) / statistics.mean(seconds)
    say(f"  standard deviation of a batch's time, {CORES} threads: {spread:.2f} of its mean")
    say("  cores kept busy, simulated, by calls per core:")
    for spread, waiting in itertools.product((0.05, 0.1, 0.2), (0.0, 0.3)):
        for cores in (2, 4, 8, 16):
            numbers = (1, 1.25, 1.5, 2, 3)
            shares = [simulated(cores, int(n * cores), spread, waiting) for n in numbers]
            text = ", ".join(
                f"{n:g}: {share:.2f}" for n, share in zip(numbers, shares, strict=True)
            )
            say(f"  {cores:>2} cores, deviation {spread:.2f}, waiting {waiting:.1f}: {text}")


def simulated(cores: int, calls: int, spread: float, waiting: float = 0.0) -> float:
    """Return the share of time in which cores are busy, for batches of varying duration.

    tf.data delivers batches in order, and a call begins the next batch only when its last one is delivered. `spread` is
    the standard deviation of the time of a batch relative to its mean; `waiting` is the share of a batch's time in which
    it waits for the disk and leaves its core to another call.
    """
    random = np.random.default_rng(0)
    work = random.gamma(1 / spread**2, spread**2, 20_000)
    wait = (
        random.exponential(waiting / (1 - waiting), len(work)) if waiting else np.zeros(len(work))
    )
    free = [0.0] * cores
    delivered = np.zeros(len(work))
    for i, seconds in enumerate(work):
        begun = delivered[i - calls] if i >= calls else 0.0
        ended = max(begun + wait[i], heapq.heappop(free)) + seconds
        heapq.heappush(free, ended)
        delivered[i] = max(ended, delivered[i - 1] if i else 0.0)
    return float(work.sum() / cores / delivered[-1])


def show_rates(rates: Mapping[str, float]) -> None:
    """Print rates and their ratios to the ceiling."""
    for what, speed in rates.items():
        say(f"  {what:<28}{speed:9,.0f}/s  {speed / rates['decode ceiling']:.3f}")


def bench_orders(inputs: Inputs) -> None:
    """Compare orders, and measure the time to compute the sample numbers of a step."""
    with Store(inputs.store("four", COHORT)) as store:
        table = SampleTable(select([store]))
        capped = SampleTable(select([store]), max_per_slide=5000, seed=1)
        orders: dict[str, tuple[SampleTable, Order]] = {
            "shuffled": (table, Order(len(table), 1)),
            "sequential": (table, Order(len(table))),
            "balance=slide": (table, make_order(table, seed=1, balance="slide")),
            "shuffle_block=256": (table, make_order(table, seed=1, shuffle_block=256)),
            "max_per_slide=5000": (capped, Order(len(capped), 1)),
        }
        readers = {
            name: functools.partial(ours, PatchBatches([store], t, batch_size=BATCH, order=order))
            for name, (t, order) in orders.items()
        }
        rates = compare(readers, 60)
        for name, speed in rates.items():
            t, order = orders[name]
            batches = PatchBatches([store], t, batch_size=BATCH, order=order)
            say(
                f"  {name:<20}{speed:9,.0f}/s  sample numbers of a step {1e6 * locate_seconds(batches):.0f} µs"
            )


def locate_seconds(batches: PatchBatches, steps: int = 200) -> float:
    """Return median seconds to compute the sample numbers of a step."""
    seconds = []
    for step in np.linspace(0, batches.steps_per_epoch - 1, steps).astype(int).tolist():
        started = time.perf_counter()
        batches.locate(step)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def drop_caches() -> None:
    """Empty the page cache; root only."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


def in_process(
    store: Path,
    order: str,
    read_ahead: int | None,
    steps: int,
    *,
    cold: bool = True,
    calls: int | None = None,
) -> float:
    """Return patches/s of the reader in a new process, with an empty page cache or a full one.

    The process must be new: pages that a process maps stay in the page cache when it is dropped.
    """
    if cold:
        drop_caches()
    else:
        (store / "data.mdb").read_bytes()
    return cold_reader([], store, order, read_ahead, steps, calls)


def cold_reader(
    before: list[str],
    store: Path,
    order: str,
    read_ahead: int | None,
    steps: int,
    calls: int | None = None,
) -> float:
    """Return patches/s of `cold_child`, started by the command `before`."""
    ahead = str(-1 if read_ahead is None else read_ahead)
    arguments = [str(store), order, ahead, str(steps), str(calls or 0)]
    command = [*before, sys.executable, __file__, "--cold", *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return float(done.stdout)


def cold_child(path: str, name: str, read_ahead: str, steps: str, calls: str) -> None:
    """Print patches/s."""
    with Store(Path(path)) as store:
        table = SampleTable(select([store]))
        orders: dict[str, Order] = {
            "shuffled": Order(len(table), 1),
            "sequential": Order(len(table)),
            "blocks": make_order(table, seed=1, shuffle_block=256),
        }
        batches = PatchBatches([store], table, batch_size=BATCH, order=orders[name])
        batches.read_ahead = None if read_ahead == "-1" else int(read_ahead)
        batches.parallel_calls = int(calls)
        source = BatchFeed(batches)
        iterator = iter(source.dataset(0, int(steps)))
        started = time.perf_counter()
        for _ in iterator:
            pass
        print(int(steps) * BATCH / (time.perf_counter() - started))
        source.settle()


def bench_cold(inputs: Inputs) -> None:
    """Measure reading from the disk."""
    path = inputs.store("four", COHORT)
    drop_caches()
    say(f"  one thread, values only: {read_values(path, advise=False):,.0f}/s")
    drop_caches()
    say(f"  the same, each 64 requested in advance: {read_values(path, advise=True):,.0f}/s")
    readers: dict[str, Reader] = {}
    for order in ("shuffled", "blocks", "sequential"):
        readers[f"{order}, warm"] = functools.partial(in_process, path, order, None, cold=False)
        for name, ahead in (("none", 0), ("default", None), ("64", 64)):
            readers[f"{order}, read-ahead {name}"] = functools.partial(
                in_process, path, order, ahead
            )
    rates = compare(readers, 150, repeats=5)
    for what, speed in rates.items():
        order = what.split(",")[0]
        without, warm = rates[f"{order}, read-ahead none"], rates[f"{order}, warm"]
        say(
            f"  {what:<32}{speed:9,.0f}/s  {speed / without:.2f}× without read-ahead, {speed / warm:.2f}× warm"
        )


def read_values(path: Path, *, advise: bool) -> float:
    """Return values/s that one thread reads from the disk in shuffled batches of 64, without decoding."""
    with Store(path) as store:
        batches = batches_of(store)
        started = time.perf_counter()
        for step in range(40):
            if advise:
                batches.advise(range(step, step + 1), [0])
            keys = np.sort(batches.locate(step)[0].keys).tolist()
            with store.reading() as reading:
                for key in keys:
                    reading.value(key >> 32 & 0xFFFFFF, key & 0xFFFFFFFF)
        return 40 * BATCH / (time.perf_counter() - started)


def anonymous_kilobytes() -> int:
    """Return RssAnon of this process."""
    match = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(match[1]) if match else 0


def bench_leak(inputs: Inputs) -> None:
    """Print anonymous memory after 5, 10 and 20 epochs."""
    with Store(inputs.store("one", 1)) as store:
        for leaking in (False, True):
            kept: list[Any] = []
            memory = []
            for epoch in range(20):
                batches = batches_of(store)
                source = BatchFeed(batches)
                steps = batches.steps_per_epoch
                for batch in source.dataset(epoch * steps, (epoch + 1) * steps):
                    if leaking and len(kept) <= epoch:
                        kept.append(batch)  # one batch of 12.6 MB per epoch
                source.settle()
                memory.append(anonymous_kilobytes() / 1024)
            say(
                f"  {'leaking one batch per epoch' if leaking else 'the reader'}: {memory[4]:.0f} MB after 5 epochs, "
                f"{memory[9]:.0f} after 10, {memory[19]:.0f} after 20"
            )


def bench_cgroup(inputs: Inputs) -> None:
    """Measure a store that is larger than the memory limit of its reader."""
    path = inputs.store("four", COHORT)
    size = (path / "data.mdb").stat().st_size
    if size < LEAST_MEMORY:
        say(
            f"  store of {size / 1e6:.0f} MB is too small: TensorFlow alone needs {LEAST_MEMORY / 1e6:.0f} MB"
        )
        return
    for limit in (0, max(LEAST_MEMORY, 7 * size // 8)):
        for order in ("shuffled", "sequential"):
            speeds = []
            for _ in range(3):
                drop_caches()
                speeds.append(in_cgroup(limit, path, order))
            what = f"{limit / 1e6:.0f} MB of memory" if limit else "no limit"
            say(
                f"  store of {size / 1e6:.0f} MB, {what}, {order}: {statistics.median(speeds):,.0f}/s over two epochs"
            )


def in_cgroup(limit: int, path: Path, order: str) -> float:
    """Return patches/s over two epochs in a separate memory cgroup (version 1 or 2)."""
    root = Path("/sys/fs/cgroup")
    first = (root / "memory").is_dir()
    group = (root / "memory" if first else root) / f"bench-reader-{os.getpid()}"
    group.mkdir()
    try:
        if limit:
            name = "memory.limit_in_bytes" if first else "memory.max"
            (group / name).write_text(str(limit))
        with Store(path) as store:
            steps = 2 * -(-len(store) // BATCH)
        enter = f'echo $$ > {group}/cgroup.procs && exec "$@"'
        return cold_reader(["/bin/sh", "-c", enter, "sh"], path, order, None, steps)
    finally:
        time.sleep(0.2)
        group.rmdir()


def tiny_store(path: Path, patches: int, slides: int) -> None:
    """Write a store with the given number of patches of 8² pixels."""
    spec = TilingSpec(mpp=Mpp(0.5), patch_size=TINY, codec="png")
    value = encode(np.full((TINY, TINY, 3), 200, np.uint8), spec)
    rows = patches // slides
    columns = {name: np.zeros(rows) for name in INDEX_COLUMNS} | {
        "length": np.full(rows, len(value))
    }
    with StoreWriter(path, spec) as writer:
        record = functools.partial(
            SlideRecord,
            path="/scans/of/the/lab.svs",
            resolved_path="/scans/of/the/lab.svs",
            planned=rows,
            stored=rows,
            stored_bytes=rows * len(value),
            quickhash="0" * 64,
        )
        records = [
            record(id=f"slide-{i:05d}", patient=f"p{i // 2}", label="ab"[i % 2])
            for i in range(slides)
        ]
        numbers = writer.register(records)
        for each in records:
            crc = writer.put_patches(numbers[each.id], range(rows), [value] * rows)
            writer.complete(numbers[each.id], each, columns | {"crc": crc}, {})


def scale_child(path: str) -> None:
    """Open a store, read 300 steps, and print times and memory as JSON."""
    before = anonymous_kilobytes()
    started = time.perf_counter()
    store = Store(Path(path))
    opened = time.perf_counter() - started
    after = anonymous_kilobytes()
    table = SampleTable(select([store]))
    batches = PatchBatches([store], table, batch_size=BATCH, order=Order(len(table), 1))
    balanced = make_order(table, seed=1, balance="patient")
    located = (
        locate_seconds(batches),
        locate_seconds(PatchBatches([store], table, batch_size=BATCH, order=balanced)),
    )
    ready = anonymous_kilobytes()
    steps = np.linspace(0, batches.steps_per_epoch - 1, 300).astype(int).tolist()
    seconds: list[float] = []
    for step in (*steps, *steps):  # the second pass reads from the page cache
        if len(seconds) == len(steps):
            seconds.clear()
        started = time.perf_counter()
        batches.load(step)
        seconds.append(time.perf_counter() - started)
    print(
        json.dumps(
            {
                "open_s": opened,
                "open_mb": (after - before) / 1024,
                "table_mb": (ready - after) / 1024,
                "locate_us": 1e6 * located[0],
                "balanced_us": 1e6 * located[1],
                "step_us": 1e6 * statistics.median(seconds),
                "read_mb": (anonymous_kilobytes() - ready) / 1024,
                "slides": len(store.complete),
            }
        )
    )


def bench_scale(inputs: Inputs) -> None:
    """Measure time and memory for increasing numbers of patches."""
    for patches, slides in SCALES.items():
        path = inputs.made(f"tiny-{patches}.lmdb", lambda p: tiny_store(p, patches, slides))  # noqa: B023
        done = subprocess.run(
            [sys.executable, __file__, "--scale", str(path)],
            check=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        values = json.loads(done.stdout)
        say(
            f"  {patches:>11,} patches of {values['slides']:,} slides: open {values['open_s']:.2f} s and {values['open_mb']:.0f} MB, "
            f"table {values['table_mb']:.0f} MB, reading 300 steps {values['read_mb']:.0f} MB; sample numbers of a step "
            f"{values['locate_us']:.0f} µs ({values['balanced_us']:.0f} balanced by patient), step of patches of 8² "
            f"{values['step_us']:.0f} µs"
        )


BENCHES: dict[str, Callable[[Inputs], None]] = {
    "speed": bench_speed,
    "rest": bench_rest,
    "calls": bench_calls,
    "delivery": bench_delivery,
    "orders": bench_orders,
    "cold": bench_cold,
    "leak": bench_leak,
    "cgroup": bench_cgroup,
    "scale": bench_scale,
}


def main() -> None:
    """Run the benchmarks and print their results."""
    if sys.argv[1:2] == ["--cold"]:
        return cold_child(*sys.argv[2:])
    if sys.argv[1:2] == ["--scale"]:
        return scale_child(sys.argv[2])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder for stores and files, which are kept")
    parser.add_argument(
        "--texture", type=Path, help="real slide with tissue for the synthetic slides"
    )
    parser.add_argument(
        "which", nargs="*", choices=[*BENCHES, []], help="benchmarks to run; default: all"
    )
    options = parser.parse_args()
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    say(
        f"{CORES} × {cpu[1] if cpu else 'unknown'}, Linux {platform.release()}, Python {platform.python_version()}, "
        f"TensorFlow {tf.__version__}, simplejpeg {simplejpeg.__version__}"
    )
    for which in options.which or BENCHES:
        say(f"{which}:")
        BENCHES[which](Inputs(options.folder, options.texture))
    return None


if __name__ == "__main__":
    main()
