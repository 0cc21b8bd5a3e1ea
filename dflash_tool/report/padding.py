"""What other schemes would pad, told from the lengths alone, and whether more buckets would pay.

Shares are of the tokens that a target computes. A scheme pads every sample up to something; no length is changed.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dflash_tool.buckets import fewest_slots
from dflash_tool.wording import counted

DATASET_BATCH = 8
MOST_BUCKETS = 16
Int64s = NDArray[np.int64]


def padding_by_scheme(lengths: Int64s, edges: Sequence[int], planned: float) -> list[tuple[str, float]]:
    """(scheme, share of padding); lengths `[N]` in the order of the data. planned: what the real plan pads."""
    tokens = int(lengths.sum())
    places = np.arange(0, len(lengths), DATASET_BATCH)
    sizes = np.diff([*places, len(lengths)])
    in_order = int((np.maximum.reduceat(lengths, places) * sizes).sum())
    upper = np.asarray(edges, np.int64)
    to_edge = int(upper[np.searchsorted(upper, lengths)].sum())
    return [
        (f"data's order, batches of {DATASET_BATCH}", 1 - tokens / in_order),
        ("one bucket, to the longest", 1 - tokens / (len(lengths) * int(lengths.max()))),
        (f"these {counted(len(edges), 'bucket')}, to the edge", 1 - tokens / to_edge),
        ("this store's plan", planned),
    ]


def padding_by_buckets(lengths: Int64s) -> list[float]:
    """Share of padding with the best edges of K = 1..`MOST_BUCKETS` buckets, every sample padded to its edge."""
    shares: NDArray[np.float64] = 1 - int(lengths.sum()) / fewest_slots(lengths, MOST_BUCKETS)
    return [float(share) for share in shares]
