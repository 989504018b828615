"""Orders: properties for every size and seed, randomness, and golden values."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2

from helpers.examples import examples
from histopipe.dataset.sampling import BlockShuffled, Order, make_order
from histopipe.dataset.selection import SampleRows, SampleTable
from histopipe.errors import UsageError
from histopipe.system.hashing import SMALL, combine, permuted
from histopipe.tasks.choices import Balance

SIZES = st.one_of(st.integers(1, 3 * SMALL), st.integers(SMALL, 20_000))
SEEDS = st.integers(0, 2**63)
BALANCES: list[Balance] = ["class", "slide", "patient"]


def epoch(order: Order, number: int = 0) -> list[int]:
    return list(order(number, np.arange(len(order))).tolist())


def accepted(counts: np.ndarray) -> bool:
    """Return whether a chi-square test accepts counts as draws from a uniform distribution."""
    expected = counts.sum() / counts.size
    return bool(chi2.sf(((counts - expected) ** 2 / expected).sum(), counts.size - 1) > 1e-4)


def table_of(counts: list[int], labels: list[int], patients: Iterable[str] = "") -> SampleTable:
    """Return a table of slides, each of which is one patient if none are given."""
    names = list(patients) or map(str, range(len(counts)))
    slides = zip(counts, labels, names, strict=True)
    return SampleTable(
        [SampleRows(i % 2, i, c, label, patient=name) for i, (c, label, name) in enumerate(slides)]
    )


@given(SIZES, SEEDS, st.integers(0, 100), st.data())
def test_permutation_has_every_number_once(
    n: int, seed: int, epoch_number: int, data: st.DataObject
) -> None:
    """Also of more samples than could be permuted as a whole."""
    numbers = permuted(np.arange(n), n, combine(seed, epoch_number))
    assert sorted(numbers.tolist()) == list(range(n))
    n = data.draw(st.integers(SMALL + 1, 2**40))
    places = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=50, unique=True))
    assert len(set(permuted(np.array(places), n, combine(seed)).tolist())) == len(places)


@given(
    st.lists(
        st.tuples(SIZES | st.integers(SMALL + 1, 2**40), SEEDS, st.floats(0, 1, exclude_max=True)),
        min_size=1,
        max_size=20,
    )
)
def test_vectorized_permutations_equal_single_ones(which: list[tuple[int, int, float]]) -> None:
    """Compare the vectorized result with one permutation at a time."""
    places = np.array([int(n * part) for n, _, part in which])
    keys = np.array([combine(seed) for _, seed, _ in which], np.uint64)
    assert permuted(places, np.array([n for n, _, _ in which]), keys).tolist() == [
        int(permuted(places[i : i + 1], n, combine(seed))[0])
        for i, (n, seed, _) in enumerate(which)
    ]


@pytest.mark.parametrize("n", [3, 4, 5])
def test_all_permutations_of_few_samples_are_equally_likely(n: int) -> None:
    counts = Counter(tuple(epoch(Order(n, s), 7)) for s in range(40 * math.factorial(n)))
    assert accepted(np.array([counts[order] for order in itertools.permutations(range(n))]))


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
    order, pairs = Order(n, 5), np.zeros((12, 12))
    for number in range(60):
        bins = order(number, np.arange(1000)) * 12 // n
        np.add.at(pairs, (bins[:-1], bins[1:]), 1)
    assert accepted(pairs)


def test_orders_equal_golden_values() -> None:
    """A change here would silently reorder every resumed training."""
    assert epoch(Order(10, 1)) == [7, 8, 9, 1, 0, 3, 5, 6, 4, 2]
    table = table_of([3, 5, 2000], [0, 1, 1])
    for order, number, expected in (
        (Order(10**6, 1), 0, [555696, 407648, 551786, 857272, 767134]),
        (Order(10**9, 2), 3, [853735704, 609326557, 666574160, 382560544, 151141390]),
        (make_order(table, seed=1, balance="class"), 2, [0, 696, 5, 1, 349]),
        (make_order(table, seed=1, balance="slide"), 2, [2, 697, 3, 1529, 6]),
        (BlockShuffled(10_000, 1, 64), 2, [5206, 9991, 9983, 1589, 3566]),
    ):
        assert order(number, np.arange(5)).tolist() == expected
    capped = SampleTable(table.slides, max_per_slide=2, seed=1)
    assert capped.locate(np.arange(6), 2).rows.tolist() == [1, 0, 2, 1, 347, 1319]


@given(SIZES, SEEDS, st.integers(0, 5), st.integers(1, 700))
@examples(60)
def test_block_shuffle_has_every_sample_once(n: int, seed: int, number: int, block: int) -> None:
    order = BlockShuffled(n, seed, block)
    samples = epoch(order, number)
    assert sorted(samples) == list(range(n))
    # A window has 16 blocks, and samples that remain at the end. Samples of a block are neighbours.
    gaps = np.diff(np.sort(samples[: order.window])) > 1
    assert gaps.sum() <= 16 + 1


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
    order = make_order(table_of(counts, labels, patients), seed=seed, balance=balance)
    of_slide = {"class": labels, "slide": range(len(counts)), "patient": patients}[balance]
    of_patch = np.repeat(np.array(of_slide), counts)
    groups, seen = np.unique(of_patch), np.zeros(len(of_patch), int)
    assert len(order) == -(-len(of_patch) // len(groups)) * len(groups)
    for number in range(3):
        samples = epoch(order, number)
        drawn = Counter(of_patch[samples].tolist())
        assert [drawn[group] for group in groups] == [len(order) // len(groups)] * len(groups)
        np.add.at(seen, samples, 1)
        for group in groups:  # none is repeated before all have been drawn
            assert np.ptp(seen[of_patch == group]) <= 1


@given(st.lists(st.integers(1, 60), min_size=2, max_size=8), st.integers(1, 30), SEEDS, st.data())
def test_balance_with_max_per_slide(
    counts: list[int], cap: int, seed: int, data: st.DataObject
) -> None:
    """In an epoch, groups are equal, the cap limits the patches of a slide, and none repeats before all are drawn."""
    labels = np.array([data.draw(st.integers(0, 1)) for _ in counts])
    table = SampleTable(table_of(counts, labels.tolist()).slides, max_per_slide=cap, seed=seed)
    order, capped = make_order(table, seed=seed, balance="class"), np.minimum(counts, cap)
    share = len(order) // len(set(labels.tolist()))
    for number in (0, 1, 5):
        located = table.locate(order(number, np.arange(len(order))), number)
        places, times = np.unique([located.slides, located.rows], axis=1, return_counts=True)
        for label in set(labels.tolist()):
            drawn = times[labels[places[0]] == label]
            assert drawn.sum() == share
            assert np.ptp(drawn) <= 1
            assert len(drawn) == min(capped[labels == label].sum(), share)
        assert (np.bincount(places[0], minlength=len(counts)) <= capped).all()


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
    table = SampleTable(table_of(counts, [0] * len(counts)).slides, max_per_slide=cap, seed=seed)
    assert table.counts.tolist() == [min(c, cap) for c in counts]
    seen: list[set[tuple[int, int]]] = []
    for number in range(130):
        located = table.locate(np.arange(len(table)), number)
        seen.append(set(zip(located.slides.tolist(), located.rows.tolist(), strict=True)))
        assert len(seen[-1]) == len(table)  # no repetition in an epoch
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
    for message, settings in (
        ("shuffle is off", {"seed": None, "balance": "slide"}),
        ("shuffle is off", {"seed": None, "shuffle_block": 4}),
        ("use only one of the two", {"seed": 1, "balance": "slide", "shuffle_block": 4}),
        ("found 1 slide without a label", {"seed": 1, "balance": "class"}),
    ):
        with pytest.raises(UsageError, match=message):
            make_order(table_of([3, 4], [0, -1]), **settings)


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
    epochs = [table.locate(order(e, np.arange(len(order))), e).slides for e in range(60)]
    drawn = np.bincount(np.concatenate(epochs), minlength=len(counts))
    assert order.draws(table).sum() == pytest.approx(len(order))
    # Without a cap, an incomplete last round is the only difference.
    least = table.counts.max() / 60 if cap is None else 1.0
    np.testing.assert_allclose(order.draws(table), drawn / 60, rtol=0.25, atol=least)
