"""Does a padded batch need an attention mask? Asked of the loaded model itself, not of its name or config.

Under causal attention a real row can't see the padding on its right, so no mask is passed: that keeps the fast
kernels. The same holds for sliding windows, ALiBi, learned positions, mixtures of experts without capacity and
recurrent layers. It does not hold for bidirectional or prefix attention, or where tokens of a batch compete for
something. What decides is the property itself: two forwards of the same real tokens, padded with other ids.

- the last real rows are equal: no mask;
- they differ, and with the 2-D mask (1 = real) they are equal: every batch gets the mask;
- they differ still: refused.

"Equal": the median over the rows of |a - b| / |b| is within a quarter of the square root of the dtype's precision.
Dense causal models give 0; experts see other groups of tokens and so round otherwise; attention to the padding gives
far more.
"""

import math

import torch
from torch import Tensor, nn

from dflash_tool.errors import TargetError
from dflash_tool.target.decoder import layer_output

_ROWS, _REAL, _PADDED = 8, 8, 16


@torch.inference_mode()
def needs_mask(decoder: nn.Module, layer: nn.Module, *, vocab_size: int, device: torch.device) -> bool:
    """Whether padded batches need the 2-D attention mask. `layer`: the deepest one, whose output is compared.

    Raises TargetError if padding changes the real rows' states whether there is a mask or not.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab_size, (2, _ROWS, _PADDED), generator=generator).to(device)
    ids[1, :, :_REAL] = ids[0, :, :_REAL]
    mask = torch.ones(_ROWS, _PADDED, dtype=torch.long, device=device)
    mask[:, _REAL:] = 0
    if _difference(decoder, layer, ids, None) <= _tolerance(decoder):
        return False
    left = _difference(decoder, layer, ids, mask)
    if left <= _tolerance(decoder):
        return True
    raise TargetError(
        f"{type(decoder).__name__}: what pads a batch changes the real tokens' states, by {left:.2g} even with an "
        "attention mask; this architecture can't be run in padded batches"
    )


def _tolerance(decoder: nn.Module) -> float:
    return 0.25 * math.sqrt(torch.finfo(next(decoder.parameters()).dtype).eps)


def _difference(decoder: nn.Module, layer: nn.Module, ids: Tensor, mask: Tensor | None) -> float:
    """Median relative difference between the last real rows under two paddings; NaN (which passes no test) is 0."""
    seen: list[Tensor] = []
    hook = layer.register_forward_hook(lambda module, _inputs, output: seen.append(layer_output(module, output)))
    try:
        for padded in ids:
            decoder(input_ids=padded, attention_mask=mask, use_cache=False)
    finally:
        hook.remove()
    first, second = (states[:, _REAL - 1].float() for states in seen)
    relative = (first - second).norm(dim=-1) / second.norm(dim=-1)
    return float(relative.nan_to_num(0).median())
