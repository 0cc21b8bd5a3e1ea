"""Bucket edges: where to split lengths so that padding every sample up to its edge costs least.

Bucket b holds the lengths in (edges[b-1], edges[b]]. With the D distinct lengths v[0] < v[1] < ... and
P[j] = samples no longer than v[j], the fewest slots that r buckets need for the lengths up to v[j] are

    f_1[j] = v[j] * P[j]
    f_r[j] = min over i <= j of  f_{r-1}[i] + v[j] * (P[j] - P[i])        (i = j: the last bucket is not used)

The second term is a product of something that grows with j and something that falls with i, so it has the
Monge property and the best i never decreases with j. Each row r is therefore found by divide and conquer:
the best i of the middle j bounds both halves. All the middles of one depth are computed in one numpy
operation, which makes a row cost O(D log D) and the whole O(k D log D), exact, with no loop over lengths.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dflash_tool.errors import ConfigError, DataError
from dflash_tool.wording import counted, verb

Int64s = NDArray[np.int64]


def choose_edges(lengths: Int64s, k: int) -> tuple[int, ...]:
    """Choose the at most `k` edges that minimise padded tokens, the sum over samples of (edge - length).

    Args:
        lengths: int64 `[N]`, tokens of each sample.
        k: the most buckets wanted. Fewer come back only when there are fewer distinct lengths.

    Returns:
        Ascending inclusive upper edges in tokens. Each is the length of some sample, the last the longest.

    Raises:
        ConfigError: `k` is below 1.
        DataError: there is no sample, or a length is below 1.
    """
    if k < 1:
        raise ConfigError(f"number of buckets: got {k}, allowed 1 or more; the default is 6")
    lengths = _checked(lengths)
    if not lengths.size:
        raise DataError("bucket edges: there is no sample to choose them from; check the data files")
    values, counts = np.unique(lengths, return_counts=True)
    if values.size <= k:
        return tuple(values.tolist())
    samples = np.cumsum(counts, dtype=np.int64)
    slots = values * samples
    rows: list[Int64s] = []
    for _ in range(k - 1):
        slots, split = _with_one_more(slots, values, samples)
        rows.append(split)
    last = values.size - 1
    chosen = {last}
    for split in reversed(rows):
        last = int(split[last])
        chosen.add(last)
    return tuple(values[sorted(chosen)].tolist())


def fewest_slots(lengths: Int64s, most: int) -> Int64s:
    """int64 `[most]`: the tokens, padding included, that the best edges of at most 1, 2, ..., `most` buckets need.

    Args:
        lengths: int64 `[N]`, tokens of each sample, at least one.
        most: buckets.
    """
    values, counts = np.unique(_checked(lengths), return_counts=True)
    samples = np.cumsum(counts, dtype=np.int64)
    slots = values * samples
    found = [slots[-1]]
    while len(found) < most:
        slots, _ = _with_one_more(slots, values, samples)
        found.append(slots[-1])
    return np.array(found, np.int64)


def _with_one_more(slots: Int64s, values: Int64s, samples: Int64s) -> tuple[Int64s, Int64s]:
    """Compute the next row: `f_r` and the leftmost best `i` for every `j`, both int64 `[D]`."""
    size = values.size
    root = 1 << size.bit_length()
    best = np.full(root + 1, size - 1, dtype=np.int64)  # best[j + 1]; the ends bound the first middles
    best[0] = 0
    row = np.empty_like(slots)
    step = root // 2
    while step:
        nodes = np.arange(step, size + 1, 2 * step)
        j = nodes - 1
        low = best[nodes - step]
        widths = np.minimum(best[nodes + step], j) - low + 1
        ends = np.cumsum(widths)
        starts = ends - widths
        owner = np.repeat(np.arange(nodes.size), widths)
        i = np.arange(ends[-1]) + (low - starts)[owner]
        cost = slots[i] + values[j][owner] * (samples[j][owner] - samples[i])
        row[j] = np.minimum.reduceat(cost, starts)
        hits = np.flatnonzero(cost == row[j][owner])[::-1]  # reversed: the leftmost is written last and stays
        best[nodes[owner[hits]]] = i[hits]
        step //= 2
    return row, best[1 : size + 1]


def check_edges(edges: Sequence[int]) -> tuple[int, ...]:
    """Check edges that a user gave and return them as a tuple of ints.

    Raises:
        ConfigError: none given, one below 1 or not a whole number, or not strictly ascending.
    """
    remedy = "give ascending whole numbers of tokens, for example 256,512,1024"
    if not len(edges):
        raise ConfigError(f"--buckets: got no edges, at least one is needed; {remedy}")
    for place, edge in enumerate(edges):
        if edge != int(edge) or edge < 1:
            raise ConfigError(f"--buckets: edge number {place + 1} is {edge}, allowed 1 or more; {remedy}")
        if place and edge <= edges[place - 1]:
            raise ConfigError(
                f"--buckets: edge number {place + 1} is {edge}, but number {place} is {edges[place - 1]}; {remedy}"
            )
    return tuple(int(edge) for edge in edges)


def assign_buckets(lengths: Int64s, edges: Sequence[int]) -> Int64s:
    """Give each sample the first bucket whose edge is not below its length.

    Args:
        lengths: int64 `[N]`, tokens.
        edges: ascending inclusive upper edges in tokens.

    Returns:
        int64 `[N]`, in [0, len(edges)).

    Raises:
        ConfigError: the edges are wrong by themselves, or a sample is longer than the last one.
        DataError: a length is below 1.
    """
    checked = np.array(check_edges(edges), dtype=np.int64)
    lengths = _checked(lengths)
    buckets: Int64s = np.searchsorted(checked, lengths).astype(np.int64)
    over = np.flatnonzero(buckets == checked.size)
    if over.size:
        raise ConfigError(
            f"bucket edges: the last one is {checked[-1]} tokens, but {over.size} of {counted(lengths.size, 'sample')} "
            f"{verb(over.size, 'is', 'are')} longer (the longest has {lengths.max()}, the first is sample {over[0]}, "
            f"counted from 0, with {lengths[over[0]]}); raise the last edge to {lengths.max()}, or set a maximum "
            f"length of {checked[-1]}"
        )
    return buckets


def _checked(lengths: Int64s) -> Int64s:
    lengths = np.asarray(lengths, dtype=np.int64)
    if lengths.ndim != 1:
        raise ValueError(f"lengths: got shape {list(lengths.shape)}, expected [N]")
    if lengths.size and lengths.min() < 1:
        row = int(lengths.argmin())
        raise DataError(
            f"sample {row} (counted from 0) has a length of {lengths[row]} tokens, at least 1 is needed; "
            "drop empty samples"
        )
    return lengths
