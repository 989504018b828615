"""Orders: properties for every size and seed, randomness, and golden values."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2

from helpers.examples import examples
from histopipe.dataset.options import Balance
from histopipe.dataset.sampling import BlockShuffled, Order, make_order
from histopipe.dataset.selection import SampleRows, SampleTable
from histopipe.errors import UsageError
from histopipe.system.hashing import SMALL, combine, permuted

SIZES = st.one_of(st.integers(1, 3 * SMALL), st.integers(SMALL, 20_000))
SEEDS = st.integers(0, 2**63)
BALANCES: list[Balance] = ["class", "slide", "patient"]


def epoch(order: Order, number: int = 0) -> list[int]:
    return list(order(number, np.arange(len(order))).tolist())


def accepted(counts: np.ndarray) -> bool:
    """Return whether a chi-square test accepts counts as draws from a uniform distribution."""
    expected = counts.sum() / counts.size
    return bool(chi2.sf(((counts - expected) ** 2 / expected).sum(), counts.size - 1) > 1e-4)


def table_of(
    counts: list[int], labels: list[int], patients: list[str] | None = None
) -> SampleTable:
    names = patients or [str(i) for i in range(len(counts))]
    return SampleTable(
        [
            SampleRows(i % 2, i, c, label, patient=name)
            for i, (c, label, name) in enumerate(zip(counts, labels, names, strict=True))
        ]
    )


@given(SIZES, SEEDS, st.integers(0, 100), st.data())
def test_permutation_has_every_number_once(
    n: int, seed: int, epoch_number: int, data: st.DataObject
) -> None:
    """Also computed for single positions of more samples than could be permuted as a whole."""
    numbers = permuted(np.arange(n), n, combine(seed, epoch_number))
    assert sorted(numbers.tolist()) == list(range(n))
    n = data.draw(st.integers(SMALL + 1, 2**40))
    places = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=50, unique=True))
    joined = permuted(np.array(places), n, combine(seed)).tolist()
    assert [int(permuted(np.array([p]), n, combine(seed))[0]) for p in places] == joined
    assert len(set(joined)) == len(places)


@given(st.lists(st.tuples(SIZES, SEEDS), min_size=1, max_size=20), st.data())
def test_vectorized_permutations_equal_single_ones(
    which: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Compare the vectorized result with one permutation at a time."""
    places = [data.draw(st.integers(0, n - 1)) for n, _ in which]
    sizes = np.array([n for n, _ in which])
    keys = np.array([combine(seed) for _, seed in which], np.uint64)
    expected = [
        int(permuted(np.array([p]), n, combine(seed))[0])
        for p, (n, seed) in zip(places, which, strict=True)
    ]
    assert permuted(np.array(places), sizes, keys).tolist() == expected


@pytest.mark.parametrize("n", [3, 4, 5])
def test_all_permutations_of_few_samples_are_equally_likely(n: int) -> None:
    trials = 40 * math.factorial(n)
    counts = Counter(tuple(epoch(Order(n, s), 7)) for s in range(trials))
    every = np.zeros(math.factorial(n))
    every[: len(counts)] = list(counts.values())
    assert accepted(every)


@pytest.mark.parametrize("n", [40, 1000, 1025, 1500, 10_007, 1_000_003])
def test_first_positions_are_uniform(n: int) -> None:
    """Check the first hundred positions of 300 epochs, in 50 bins, and the quarters of first batches over 1,000 seeds."""
    order, places = Order(n, 3), np.arange(min(n, 100))
    samples = np.concatenate([order(number, places) for number in range(300)])
    assert n < 100 or accepted(np.bincount(samples * 50 // n, minlength=50))
    samples = np.concatenate([Order(n, s)(0, np.arange(8)) for s in range(1000)])
    assert accepted(np.bincount(samples * 4 // n, minlength=4))


@pytest.mark.parametrize("n", [2_000, 50_021])
def test_neighbouring_positions_are_independent(n: int) -> None:
    """Check pairs of neighbouring positions, in 12 × 12 bins."""
    order = Order(n, 5)
    places = np.arange(0, 1000)
    pairs = np.zeros((12, 12))
    for number in range(60):
        bins = order(number, places) * 12 // n
        np.add.at(pairs, (bins[:-1], bins[1:]), 1)
    assert accepted(pairs)


def test_orders_equal_golden_values() -> None:
    """A change here would silently reorder every resumed training."""
    assert epoch(Order(10, 1)) == [7, 8, 9, 1, 0, 3, 5, 6, 4, 2]
    five = np.arange(5)
    assert Order(10**6, 1)(0, five).tolist() == [555696, 407648, 551786, 857272, 767134]
    assert Order(10**9, 2)(3, five).tolist() == PINNED_BILLION
    table = table_of([3, 5, 2000], [0, 1, 1])
    assert make_order(table, seed=1, balance="class")(2, five).tolist() == PINNED_CLASS
    assert make_order(table, seed=1, balance="slide")(2, five).tolist() == PINNED_SLIDE
    assert BlockShuffled(10_000, 1, 64)(2, five).tolist() == PINNED_BLOCKS
    capped = SampleTable(table.slides, max_per_slide=2, seed=1)
    assert capped.locate(np.arange(6), 2).rows.tolist() == PINNED_CAP


PINNED_BILLION = [853735704, 609326557, 666574160, 382560544, 151141390]
PINNED_CLASS = [0, 696, 5, 1, 349]
PINNED_SLIDE = [2, 697, 3, 1529, 6]
PINNED_BLOCKS = [5206, 9991, 9983, 1589, 3566]
PINNED_CAP = [1, 0, 2, 1, 347, 1319]


@given(SIZES, SEEDS, st.integers(0, 5), st.integers(1, 700))
@examples(60)
def test_block_shuffle_has_every_sample_once(n: int, seed: int, number: int, block: int) -> None:
    order = BlockShuffled(n, seed, block)
    samples = epoch(order, number)
    assert sorted(samples) == list(range(n))
    # A window has 16 blocks, and samples that remain at the end. Samples of a block are neighbours.
    window = np.sort(samples[: order.window])
    runs = 1 + int((np.diff(window) > 1).sum())
    assert runs <= 16 + 2


def test_blocks_start_at_a_new_position_each_epoch() -> None:
    order = BlockShuffled(10_000, 1, 100)
    starts = {int(np.sort(order(e, np.arange(order.window)))[0]) % 100 for e in range(20)}
    assert len(starts) > 10


@given(st.lists(st.integers(1, 40), min_size=2, max_size=12), SEEDS, st.data())
def test_balance_is_equal_in_an_epoch_and_over_epochs(
    counts: list[int], seed: int, data: st.DataObject
) -> None:
    balance = data.draw(st.sampled_from(BALANCES))
    labels = [data.draw(st.integers(0, 2)) for _ in counts]
    patients = [data.draw(st.sampled_from("abcd")) for _ in counts]
    table = table_of(counts, labels, patients)
    by: dict[str, list[object]] = {
        "class": list(labels),
        "slide": list(range(len(counts))),
        "patient": list(patients),
    }
    groups = by[balance]
    of_patch = np.repeat(np.arange(len(counts)), counts)
    order = make_order(table, seed=seed, balance=balance)
    assert len(order) == -(-sum(counts) // len(set(groups))) * len(set(groups))
    seen: Counter[int] = Counter()
    for number in range(3):
        samples = epoch(order, number)
        drawn = Counter(groups[of_patch[i]] for i in samples)
        assert set(drawn.values()) == {len(order) // len(set(groups))}
        seen.update(samples)
        for group in set(groups):
            times = [seen[i] for i in range(sum(counts)) if groups[of_patch[i]] == group]
            assert max(times) - min(times) <= 1  # none is repeated before all have been drawn


@given(st.lists(st.integers(1, 60), min_size=2, max_size=8), st.integers(1, 30), SEEDS, st.data())
def test_balance_with_max_per_slide(
    counts: list[int], cap: int, seed: int, data: st.DataObject
) -> None:
    """In an epoch, groups are equal, the cap limits the patches of a slide, and none repeats before all are drawn."""
    labels = [data.draw(st.integers(0, 1)) for _ in counts]
    table = SampleTable(table_of(counts, labels).slides, max_per_slide=cap, seed=seed)
    order = make_order(table, seed=seed, balance="class")
    for number in (0, 1, 5):
        located = table.locate(order(number, np.arange(len(order))), number)
        assert len(set(Counter(located.labels.tolist()).values())) == 1
        times = Counter(zip(located.slides.tolist(), located.rows.tolist(), strict=True))
        for label in set(labels):
            drawn = [n for (slide, _), n in times.items() if labels[slide] == label]
            assert max(drawn) - min(drawn) <= 1
            size = sum(
                min(c, cap)
                for c, slide_label in zip(counts, labels, strict=True)
                if slide_label == label
            )
            assert len(drawn) == min(size, len(order) // len(set(labels)))
        for slide, count in enumerate(counts):
            assert sum(1 for s, _ in times if s == slide) <= min(count, cap)


def test_balance_mixes_groups_within_batches() -> None:
    order = make_order(table_of([50] * 8, [0] * 8), seed=4, balance="slide")
    slides = np.array(epoch(order)) // 50
    first = np.concatenate([np.array(epoch(order, e))[:8] // 50 for e in range(200)])
    assert accepted(np.bincount(first, minlength=8))
    assert not all(len(set(slides[i : i + 8])) == 8 for i in range(0, 400, 8))  # no round robin


@given(st.lists(st.integers(1, 60), min_size=1, max_size=8), st.integers(1, 50), SEEDS)
def test_max_per_slide_draws_different_patches_each_epoch(
    counts: list[int], cap: int, seed: int
) -> None:
    slides = table_of(counts, [0] * len(counts)).slides
    table = SampleTable(slides, max_per_slide=cap, seed=seed)
    assert table.counts.tolist() == [min(c, cap) for c in counts]
    seen: list[set[tuple[int, int]]] = []
    for number in range(130):
        located = table.locate(np.arange(len(table)), number)
        pairs = list(zip(located.slides.tolist(), located.rows.tolist(), strict=True))
        assert len(set(pairs)) == len(pairs)  # no repetition in an epoch
        seen.append(set(pairs))
    for slide, count in enumerate(counts):
        span = -(-count // min(count, cap))  # number of epochs that draw all
        for first in range(0, 130 - span, span):
            rows = set().union(*seen[first : first + span])
            assert {row for s, row in rows if s == slide} == set(range(count))


@given(st.integers(1, 1000), st.integers(1, 1000))
def test_max_per_slide_without_seed_is_spread_over_the_slide(count: int, cap: int) -> None:
    rows = SampleTable([SampleRows(0, 0, count, 0)], max_per_slide=cap)
    drawn_rows = rows.locate(np.arange(len(rows))).rows
    assert len(set(drawn_rows.tolist())) == min(count, cap)
    assert np.diff(drawn_rows).max(initial=0) <= -(-count // min(count, cap))


def test_contradictory_settings_are_refused() -> None:
    table = table_of([3, 4], [0, -1])
    for message, given_settings in (
        ("shuffle is off", {"seed": None, "balance": "slide"}),
        ("shuffle is off", {"seed": None, "shuffle_block": 4}),
        ("use only one of the two", {"seed": 1, "balance": "slide", "shuffle_block": 4}),
        ("found 1 slide without a label", {"seed": 1, "balance": "class"}),
    ):
        with pytest.raises(UsageError, match=message):
            make_order(table, **given_settings)
    assert type(make_order(table, seed=None)) is Order


@given(
    st.lists(st.integers(1, 12), min_size=2, max_size=6),
    st.sampled_from([None, 1, 4]),
    st.sampled_from(["none", *BALANCES]),
    SEEDS,
    st.data(),
)
@examples(30)
def test_draws_are_the_mean_of_what_epochs_draw(
    counts: list[int], cap: int | None, balance: Any, seed: int, data: st.DataObject
) -> None:
    labels = [data.draw(st.integers(0, 1)) for _ in counts]
    slides = table_of(counts, labels, [data.draw(st.sampled_from("ab")) for _ in counts]).slides
    table = SampleTable(slides, max_per_slide=cap, seed=seed)
    order = make_order(table, seed=seed, balance=balance)
    epochs = 60
    drawn = sum(
        np.bincount(table.locate(order(e, np.arange(len(order))), e).slides, minlength=len(counts))
        for e in range(epochs)
    )
    assert order.draws(table).sum() == pytest.approx(len(order))
    # Without a cap, an incomplete last round is the only difference.
    least = table.counts.max() / epochs if cap is None else 1.0
    np.testing.assert_allclose(order.draws(table), drawn / epochs, rtol=0.25, atol=least)
