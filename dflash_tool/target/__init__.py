"""The target LLM: what its folder says, loading and truncating it, capturing hidden states, writing its head.

Nothing here knows a model family by name. `folder`: config, layer ids, fingerprints, hub names. `loading`: devices,
dtypes, weights. `decoder`: where in the model are decoder, layers, final norm? `probe`: does it need an attention mask
in padded batches? `model`: truncate and capture. `head`: what training needs of a target.
"""

from dflash_tool.target.capture import Captured, PaddedStates
from dflash_tool.target.folder import (
    TargetFolder,
    check_layers,
    config_fingerprint,
    default_layers,
    head_bytes,
    open_target,
    weights_fingerprint,
)
from dflash_tool.target.head import head_tensors, write_head
from dflash_tool.target.loading import compute_dtype, load_whole, resolve_device
from dflash_tool.target.model import TargetModel
from dflash_tool.target.transfer import Way, way

__all__ = [
    "Captured",
    "PaddedStates",
    "TargetFolder",
    "TargetModel",
    "Way",
    "check_layers",
    "compute_dtype",
    "config_fingerprint",
    "default_layers",
    "head_bytes",
    "head_tensors",
    "load_whole",
    "open_target",
    "resolve_device",
    "way",
    "weights_fingerprint",
    "write_head",
]
