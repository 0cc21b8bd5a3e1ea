# ruff: noqa: N803 - tensor names carry their shape
"""The `flex` back-end: PyTorch's flex_attention under a block mask that is built from the anchors directly.

All blocks of a microbatch are one row of queries; the keys are each sample's context, padded to whole tiles, and then
the blocks' own slots. The tiles are counted from the anchors, so no `[slots, context + slots]` mask is ever made.

Legend: N blocks, B slots, R samples, S context positions, A query heads, K KV heads, D head size.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import pad

from dflash_tool.drafter.anchors import Anchors

TILE = 128
_compiled: Callable[..., Any] | None = None


def flex_mask(anchors: Anchors, *, samples: int, context: int, block_size: int, device: torch.device) -> BlockMask:
    """The mask of all blocks over [context of sample 0, of sample 1, ..., own slots], in tiles of 128 x 128.

    A tile is full where all blocks of its queries see all its keys (only context can be), partial where some do.
    """
    if block_size > TILE:  # then a block may reach over more tiles than its first and its last
        raise ValueError(f"blocks of {block_size} slots: the flex back-end takes up to {TILE}")
    tiles_each = -(-context // TILE)
    query_tiles = max(1, -(-len(anchors) * block_size // TILE))
    slots = np.arange(query_tiles * TILE)
    block = slots // block_size  # slots behind the last block make up blocks that see themselves alone
    spare = block[-1] + 1 - len(anchors)
    sample = np.pad(anchors.sample, (0, spare))
    position = np.pad(anchors.position, (0, spare))

    # How many blocks of each query tile see some, and all, keys of each tile: +1 where that begins, -1 where it ends.
    tile, of = np.unique(np.stack((slots // TILE, block)), axis=1)
    shape = (query_tiles, samples * tiles_each + query_tiles + 1)
    some, whole = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    first = sample[of] * tiles_each
    for counts, reach in ((some, -(-position // TILE)), (whole, position // TILE)):
        np.add.at(counts, (tile, first), 1)
        np.add.at(counts, (tile, first + reach[of]), -1)
    some, whole = some.cumsum(1)[:, :-1], whole.cumsum(1)[:, :-1]
    full = whole == np.bincount(tile)[:, None]
    partial = (some > 0) & ~full
    for own in (of * block_size // TILE, np.minimum((of + 1) * block_size - 1, slots[-1]) // TILE):
        partial[tile, samples * tiles_each + own] = True

    place = np.arange(tiles_each * TILE)
    key_group = np.concatenate((np.repeat(np.arange(samples), len(place)), samples + block))
    key_place = np.concatenate((np.tile(place, samples), np.full(len(slots), -1)))
    groups, places = _on(key_group, device), _on(key_place, device)
    from_sample, until, itself = (_on(x, device) for x in (sample[block], position[block], samples + block))

    def visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        before = (groups[key] == from_sample[query]) & (places[key] < until[query])
        return before | (groups[key] == itself[query])

    return BlockMask.from_kv_blocks(
        *_listed(partial, device), *_listed(full, device), BLOCK_SIZE=TILE, mask_mod=visible
    )


def flex_blocks(
    q_NBAD: Tensor, k_NBKD: Tensor, v_NBKD: Tensor, k_RSKD: Tensor, v_RSKD: Tensor, mask: BlockMask
) -> Tensor:
    """`attention.block_attention` through flex_attention; compiled on CUDA."""
    dtype = v_NBKD.dtype
    slots = q_NBAD.shape[0] * q_NBAD.shape[1]
    length, _ = mask.seq_lengths
    context = k_RSKD.shape[1]

    def queries(x: Tensor) -> Tensor:  # [1, heads, slots in whole tiles, D]
        return pad(x.to(dtype).flatten(0, 1), (0, 0, 0, 0, 0, length - slots)).transpose(0, 1)[None]

    def keys(seen: Tensor, own: Tensor) -> Tensor:
        padded = pad(seen.to(dtype), (0, 0, 0, 0, 0, -context % TILE))
        return torch.cat((padded.flatten(0, 1).transpose(0, 1)[None], queries(own)), 2)

    attention: Any = _compile() if q_NBAD.is_cuda else flex_attention
    out: Tensor = attention(
        queries(q_NBAD), keys(k_RSKD, k_NBKD), keys(v_RSKD, v_NBKD), block_mask=mask, enable_gqa=True
    )
    return out[0, :, :slots].transpose(0, 1).reshape(q_NBAD.shape)


def _compile() -> Callable[..., Any]:
    global _compiled  # noqa: PLW0603 - compiled at the first use, once a process
    if _compiled is None:
        _compiled = torch.compile(flex_attention)
    return _compiled


def _on(values: NDArray[Any], device: torch.device) -> Tensor:
    return torch.from_numpy(values.astype(np.int32)).to(device)


def _listed(tiles: NDArray[np.bool_], device: torch.device) -> tuple[Tensor, Tensor]:
    """For each row of tiles, how many are set and which, those first: int32 [1, 1, rows], [1, 1, rows, columns]."""
    order = np.argsort(~tiles, axis=1, kind="stable")
    return _on(tiles.sum(1), device)[None, None], _on(order, device)[None, None]
