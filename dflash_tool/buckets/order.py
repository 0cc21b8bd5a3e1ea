"""The order of an epoch: shuffled inside each bucket, then merged so that every step is a fair mixture.

**The guarantee.** N samples, of which bucket b has n_b; x_b(t) counts its samples among the first t. For
every b and t, |x_b(t) - t n_b/N| < 1, so any window of the order, and with it every optimizer step of any
size, holds each bucket's share to within 2.

**How.** Take a d > 0. Let bucket b's job c (its sample number c, from 0) be released at slot
ceil((c+d) N/n_b) and due at slot floor((c+1-d) N/n_b) + 1, slots counted from 1. Jobs done inside these
windows are exactly the orders with |x_b(t) - t n_b/N| <= 1-d: a job before its release puts its bucket more
than 1-d ahead, one after its due slot leaves it more than 1-d behind. Serving the released job with the
earliest due slot (EDF) meets all due slots whenever any order does (unit jobs, whole-numbered windows). So
only existence has to be shown:

- *d = 1/(2K-2)*, K buckets: Tijdeman, "The chairman assignment problem" (Discrete Mathematics 32, 1980).
  Used when no bucket is rare; then even |x_b(t) - t n_b/N| <= 1-d.
- *d -> 0*, where the windows become [floor(c N/n_b) + 1, ceil((c+1) N/n_b)], by Hall's theorem: jobs fit
  into slots if no interval encloses more windows than it has slots to give. Window c lies inside [s, e], L
  slots long, iff (s-1) n_b/N <= c and c+1 <= e n_b/N, which holds for at most L n_b/N of one bucket; so
  buckets with M samples together want at most floor(L M/N) slots.

**Rare buckets.** With d = 1/(2K-2) a bucket of one sample can hardly move (with K = 2 it must sit exactly in
the middle), so in every epoch the same step would hold it: the chairman's promise and that of moving exclude
each other. Rare buckets (at most sqrt(N) samples) therefore get slots of their own: with P rare samples in
all, slot floor((r N + phase)/P) + 1 for r = 0..P-1 and a random phase in [0, N). Any interval of L slots then
holds at least floor(L P/N) of these, enough for the rare jobs, and at most ceil(L P/N), which leaves
L - ceil(L P/N) = floor(L (N-P)/N), enough for the others: both sides have an order with d -> 0.
Buckets of one sample may have any of the rare slots: they draw them (again from a random phase), and if the
other rare buckets can't make do with what is left, draw anew. After a few draws in vain, all buckets of one
sample count as one bucket, with the due slots of one, which always works, and draw lots for its slots. Half
of the epochs run such an order backwards, which changes nothing in the bound.

Everything is whole numbers; a million samples take about half a second.
"""

import heapq
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from dflash_tool.buckets.keys import hash_words, sample_keys

Int64s = NDArray[np.int64]

_DRAWS = 8
_LOTS, _PHASE, _DRAW, _BACKWARDS = 1, 2, 3, 4  # what a hash is for: two uses never see the same bits


def interleave(counts: Int64s, *, seed: int, epoch: int) -> Int64s:
    """Say which bucket each place of the order belongs to; guarantee and proof: the top of this file.

    Args:
        counts: int64 `[K]`, samples of each bucket; empty buckets are fine.
        seed: of the run.
        epoch: counted from 0; ties and the places of rare buckets change with it.

    Returns:
        int64 `[N]` with N = `counts.sum()`; bucket b occurs `counts[b]` times.

    Raises:
        ValueError: a count is negative, or there are so many samples that 64-bit numbers don't suffice
            (above 5e8 with 16 buckets).
    """
    counts = np.asarray(counts, dtype=np.int64)
    if counts.ndim != 1 or (counts < 0).any():
        raise ValueError(f"counts of the buckets: got {counts.tolist()}, expected one number >= 0 for each")
    total = int(counts.sum())
    if total * total * 2 * counts.size >= 1 << 63:
        raise ValueError(f"interleave: {total} samples in {counts.size} buckets overflow 64-bit arithmetic")
    lots = sorted(np.flatnonzero(counts).tolist(), key=lambda bucket: hash_words(seed, epoch, _LOTS, bucket))
    filled = np.array(lots, dtype=np.int64)
    sizes = counts[filled]
    rare = sizes * sizes <= total
    slots = np.arange(1, total + 1, dtype=np.int64)
    if not rare.any():
        return filled[_must(_earliest_due(sizes, slots, total, 2 * filled.size - 2))]

    rare_total = int(sizes[rare].sum())
    is_rare = _spread(rare_total, total, hash_words(seed, epoch, _PHASE))
    places = np.empty(total, dtype=np.int64)
    places[~is_rare] = filled[~rare][_must(_earliest_due(sizes[~rare], slots[~is_rare], total, 0))]
    draws = (hash_words(seed, epoch, _DRAW, draw) for draw in range(_DRAWS))
    places[is_rare] = _rare_places(filled[rare], sizes[rare], slots[is_rare], total, draws)
    backwards = hash_words(seed, epoch, _BACKWARDS) % 2
    return places[::-1].copy() if backwards else places


def _spread(chosen: int, total: int, phase: int) -> NDArray[np.bool_]:
    """Mark `chosen` of `total` places as evenly as can be; any phase will do. bool `[total]`."""
    marks = np.zeros(total, dtype=np.bool_)
    marks[(np.arange(chosen, dtype=np.int64) * total + phase % total) // max(chosen, 1)] = True
    return marks


def _rare_places(buckets: Int64s, sizes: Int64s, slots: Int64s, total: int, draws: Iterable[int]) -> Int64s:
    """Fill the rare slots: buckets of one sample, in the order given, where a draw or else EDF puts them."""
    single = sizes == 1
    places = np.empty(slots.size, dtype=np.int64)
    for draw in draws:
        drawn = _spread(int(single.sum()), slots.size, draw)
        others = _earliest_due(sizes[~single], slots[~drawn], total, 0)
        if others is not None:
            places[drawn], places[~drawn] = buckets[single], buckets[~single][others]
            return places
    shared = np.append(sizes[~single], single.sum())  # all buckets of one sample are the last one here
    stream = _must(_earliest_due(shared, slots, total, 0))
    drawn = stream == shared.size - 1
    places[drawn], places[~drawn] = buckets[single], buckets[~single][stream[~drawn]]
    return places


def _must(places: Int64s | None) -> Int64s:
    if places is None:
        raise RuntimeError("interleave: a due slot was missed, which a theorem rules out; please report this")
    return places


def _earliest_due(sizes: Int64s, slots: Int64s, total: int, inverse_d: int) -> Int64s | None:
    """Fill `slots` (ascending, numbered from 1 of `total`), each with the released job that is due first.

    `inverse_d` is 1/d, or 0 for d -> 0. A tie goes to the bucket that comes first in `sizes`.
    Returns the position in `sizes` of each slot's bucket, int64 `[len(slots)]`; None if a due slot is missed.
    """
    if not slots.size:
        return slots
    releases: list[Int64s] = []
    dues: list[Int64s] = []
    for size in sizes.tolist():
        jobs = np.arange(size, dtype=np.int64)
        if inverse_d:
            releases.append(-(-(jobs * inverse_d + 1) * total // (size * inverse_d)))
            dues.append(((jobs + 1) * inverse_d - 1) * total // (size * inverse_d) + 1)
        else:
            releases.append(jobs * total // size + 1)
            dues.append(-(-(jobs + 1) * total // size))
    if sizes.size == 1:
        fits = (releases[0] <= slots).all() and (slots <= dues[0]).all()
        return np.zeros(slots.size, dtype=np.int64) if fits else None
    release = np.concatenate(releases)
    code = np.concatenate(dues) * sizes.size + np.repeat(np.arange(sizes.size), sizes)
    by_release = np.argsort(release, kind="stable")
    release_at = release[by_release].tolist()
    release_at.append(total + 2)  # never reached: ends the inner loop without a test
    code_at = code[by_release].tolist()
    ready: list[int] = []
    served: list[int] = []
    job = 0
    for slot in slots.tolist():
        while release_at[job] <= slot:
            heapq.heappush(ready, code_at[job])
            job += 1
        if not ready:
            return None
        served.append(heapq.heappop(ready))
    due, position = np.divmod(np.array(served, dtype=np.int64), sizes.size)
    return None if (due < slots).any() else position


def merge_buckets(keys: NDArray[np.uint64], buckets: Int64s, *, seed: int, epoch: int) -> Int64s:
    """Sort by key inside each bucket and merge the buckets by `interleave`.

    Args:
        keys: uint64 `[N]`; equal keys keep their order.
        buckets: int64 `[N]`, numbers >= 0.
        seed: of the run.
        epoch: counted from 0.

    Returns:
        int64 `[N]`, the positions 0..N-1 in their new order.
    """
    if not buckets.size:
        return np.empty(0, dtype=np.int64)
    places = interleave(np.bincount(buckets), seed=seed, epoch=epoch)
    order = np.empty(buckets.size, dtype=np.int64)
    order[np.argsort(places, kind="stable")] = np.lexsort((keys, buckets))
    return order


def epoch_order(ids: NDArray[np.uint64], buckets: Int64s, *, seed: int, epoch: int) -> Int64s:
    """Put the rows of all samples in the order of an epoch.

    Args:
        ids: uint64 `[N, 2]`, sample ids.
        buckets: int64 `[N]`, the bucket of each sample.
        seed: of the run.
        epoch: counted from 0.

    Returns:
        int64 `[N]`, each row once; any window holds each bucket's share to within 2 samples.

    Raises:
        ValueError: the arrays differ in length, or a bucket number is negative.
    """
    if buckets.shape != (len(ids),) or (buckets.size and buckets.min() < 0):
        raise ValueError(f"buckets: got {list(buckets.shape)} for {len(ids)} ids, expected a number >= 0 for each")
    return merge_buckets(sample_keys(ids, seed=seed, epoch=epoch), buckets, seed=seed, epoch=epoch)
