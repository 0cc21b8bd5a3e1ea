"""A drafter's shape, from its target's config, and the flat `config.json` that serving engines read.

Sizes, eps and rope are the target's (`drafter_config`); the file is a Qwen3 config with a few keys more (z-lab's
layout, `as_json`), and `qwen3` is the same as the object that transformers' DFlash generation wants to see.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_tool.errors import ConfigError

ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "yarn": (
        "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
        "mscale_all_dim", "truncate",
    ),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}  # fmt: skip
_ROPE_NEEDS = {"linear": ROPE_KEYS["linear"], "yarn": ("factor",), "llama3": ROPE_KEYS["llama3"]}
_EPS_NAMES = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """What a drafter is. Frozen: what is trained is what is written.

    rope: `rope_type`, `rope_theta` and what that type of scaling needs (`ROPE_KEYS`); never a partial factor.
    target_layer_ids: 0-based, the output of decoder layer k; ascending, without the last layer. vocab_size: rows of
    the target's embedding.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Mapping[str, Any]
    max_position_embeddings: int
    vocab_size: int
    initializer_range: float
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    block_size: int
    mask_token_id: int

    def __post_init__(self) -> None:
        check_target_layers(self.target_layer_ids, self.num_target_layers)
        if self.block_size < 2:
            raise ConfigError(
                f"--block-size {self.block_size}: a block is the anchor and at least one draft: 2 or more, 16 is usual"
            )
        if self.num_layers < 1:
            raise ConfigError(f"--draft-layers {self.num_layers}: a drafter has at least one layer; 5 are usual")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ConfigError(
                f"--mask-token-id {self.mask_token_id}: the target's embedding has rows 0..{self.vocab_size - 1}; "
                "name one that no token of the data uses"
            )
        if self.num_heads % self.num_kv_heads or self.head_dim % 2:
            raise ConfigError(
                f"{self.num_heads} query heads, {self.num_kv_heads} KV heads of {self.head_dim}: query heads must be a "
                "multiple of KV heads, and rope needs an even head"
            )
        if (kind := self.rope.get("rope_type")) not in ROPE_KEYS:
            raise ConfigError(f"rope_type {kind!r}: a drafter can be served with {', '.join(ROPE_KEYS)} alone")
        if lacking := [key for key in _ROPE_NEEDS.get(kind, ()) if key not in self.rope]:
            raise ConfigError(f"rope_type {kind!r} lacks {', '.join(lacking)} in rope_parameters")
        numbers = {key: value for key, value in self.rope.items() if key != "rope_type"}
        if odd := [f"{key} = {value!r}" for key, value in numbers.items() if not isinstance(value, int | float)]:
            raise ConfigError(f"rope_parameters say {', '.join(odd)}: expected numbers")
        if self.rope["rope_theta"] <= 0:
            raise ConfigError(f"rope_theta {self.rope['rope_theta']:g}: expected a number above 0")

    def as_json(self, dtype: str = "float32") -> dict[str, Any]:
        """The `config.json` of a servable folder: a flat Qwen3 config, and DFlash's own keys in both usual places."""
        dflash = {
            "block_size": self.block_size,
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": list(self.target_layer_ids),
        }
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope["rope_theta"],
            "rope_parameters": dict(self.rope),
            "max_position_embeddings": self.max_position_embeddings,
            "vocab_size": self.vocab_size,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": self.initializer_range,
            "layer_types": ["full_attention"] * self.num_layers,
            "max_window_layers": self.num_layers,
            "sliding_window": None,
            "use_sliding_window": False,
            "tie_word_embeddings": False,
            "dtype": dtype,
            "num_target_layers": self.num_target_layers,
            **dflash,
            "dflash_config": dflash,
        }

    def qwen3(self) -> Any:
        """A transformers `Qwen3Config` with `target_layer_ids`, `block_size` and `mask_token_id` at its top level."""
        from transformers import Qwen3Config  # noqa: PLC0415 - slow to import

        return Qwen3Config.from_dict(self.as_json())


def drafter_config(
    target: Any,
    *,
    target_layer_ids: Sequence[int],
    mask_token_id: int,
    block_size: int = 16,
    num_layers: int = 5,
    vocab_size: int | None = None,
) -> tuple[DrafterConfig, tuple[str, ...]]:
    """Choose a drafter's shape for a target.

    Args:
        target: the target's transformers config; of a nested one the text part is used.
        target_layer_ids: 0-based ids of the aux layers.
        mask_token_id: the token in slots 1..B-1.
        block_size: B, the anchor included.
        num_layers: of the drafter.
        vocab_size: rows of the target's embedding, where they differ from what its config says.

    Returns:
        The config, and what of the target was left out, in sentences for the user.

    Raises:
        ConfigError: an option is out of range; the message names it.
    """
    text = target.get_text_config(decoder=True)
    hidden = int(text.hidden_size)
    head_dim = _int(text, "head_dim")
    heads = _int(text, "num_attention_heads")
    if head_dim is None and heads is not None and hidden % heads == 0:
        head_dim = hidden // heads
    if head_dim is None or head_dim % 2:
        head_dim = 64
    heads = heads or max(1, hidden // head_dim)
    kv_heads = _int(text, "num_key_value_heads") or heads
    rope, notes = drafter_rope(text)
    eps = next((float(value) for name in _EPS_NAMES if isinstance(value := getattr(text, name, None), float)), 1e-6)
    config = DrafterConfig(
        hidden_size=hidden,
        intermediate_size=_int(text, "intermediate_size") or 4 * hidden,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads if heads % kv_heads == 0 else heads,
        head_dim=head_dim,
        rms_norm_eps=eps,
        rope=rope,
        max_position_embeddings=_int(text, "max_position_embeddings") or 32_768,
        vocab_size=int(text.vocab_size) if vocab_size is None else vocab_size,
        initializer_range=float(getattr(text, "initializer_range", None) or getattr(text, "init_std", None) or 0.02),
        num_target_layers=int(text.num_hidden_layers),
        target_layer_ids=tuple(target_layer_ids),
        block_size=block_size,
        mask_token_id=mask_token_id,
    )
    return config, notes


def drafter_rope(text: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The drafter's rope from the target's (text) config, and what had to be left out, in sentences.

    Theta and scaling are copied. Left out are a partial rotary factor (Qwen3's code ignores it) and scalings
    that depend on the length of each forward (dynamic, longrope): cached keys would be rotated differently.
    Without any rope: theta 1e6. Layers of different rope: that of the full-attention layers.
    """
    given = dict(getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {})
    nested = [value for value in given.values() if isinstance(value, Mapping)]
    if nested:
        given = dict(given.get("full_attention") or nested[0])
    theta = given.get("rope_theta") or getattr(text, "rope_theta", None)
    if theta is None:
        theta = getattr(text, "default_theta", 1e6) if given else 1e6
    kind = given.get("rope_type") or given.get("type") or "default"
    notes = []
    partial = given.get("partial_rotary_factor") or getattr(text, "partial_rotary_factor", None) or 1.0
    if partial != 1.0:
        notes.append(
            f"the target rotates {partial:g} of each head; the drafter rotates whole heads, as Qwen3's code always does"
        )
    if kind not in ROPE_KEYS:
        notes.append(
            f"the target's rope scaling {kind!r} is not copied: serving engines can't give it to a drafter; the "
            f"drafter has plain rope with the same theta {theta:g}"
        )
        kind = "default"
    rope = {"rope_type": kind, "rope_theta": float(theta)}
    rope |= {key: given[key] for key in ROPE_KEYS[kind] if given.get(key) is not None}
    if kind in {"yarn", "llama3"}:  # transformers' own fallback, made explicit so that every engine reads the same
        rope.setdefault("original_max_position_embeddings", _int(text, "max_position_embeddings"))
    return rope, tuple(notes)


def check_target_layers(layers: Sequence[int], num_target_layers: int) -> None:
    """Raise ConfigError unless these are ascending ids of layers whose output generation hands over unnormed."""
    last = num_target_layers - 1
    if not layers:
        raise ConfigError("--aux-layers: name at least one layer")
    for layer in layers:
        if layer == last:
            raise ConfigError(
                f"--aux-layers: {layer} is the last layer, which generation hands over after the final norm: a drafter "
                f"can't use it; allowed are 0..{last - 1}"
            )
        if not 0 <= layer < last:
            raise ConfigError(f"--aux-layers: {layer} is out of range; a drafter for this target may use 0..{last - 1}")
    if list(layers) != sorted(set(layers)):
        raise ConfigError(f"--aux-layers: {', '.join(map(str, layers))}: name each layer once, in ascending order")


def other_target(settings: DrafterConfig, target: Any) -> list[str]:
    """In what a drafter doesn't fit a target (its transformers config), in words; empty if it does."""
    text = target.get_text_config(decoder=True)
    pairs = [
        ("hidden size", settings.hidden_size, text.hidden_size),
        ("vocabulary", settings.vocab_size, text.vocab_size),
        ("number of target layers", settings.num_target_layers, text.num_hidden_layers),
    ]
    wrong = [f"{name}: the drafter says {ours}, the target {theirs}" for name, ours, theirs in pairs if ours != theirs]
    last = text.num_hidden_layers - 1
    if beyond := [layer for layer in settings.target_layer_ids if layer >= last]:
        wrong.append(f"target_layer_ids: {', '.join(map(str, beyond))} out of range, the target allows 0..{last - 1}")
    return wrong


def _int(config: Any, name: str) -> int | None:
    """A whole positive number of a config; None for anything else (some families keep a list, one a layer)."""
    value = getattr(config, name, None)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
