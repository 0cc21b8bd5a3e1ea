"""The decoder inside a transformers model, found by what it is and does, never by a family's names."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dflash_tool.errors import TargetError


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """The text decoder: `module(input_ids=...)` runs it; its `layers` are `parent`'s child `name`."""

    module: nn.Module
    parent: nn.Module
    name: str

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers that are left."""
        layers: nn.ModuleList = getattr(self.parent, self.name)
        return layers

    def truncate(self, deepest: int) -> None:
        """Drop the layers beyond `deepest`.

        The config keeps its number of layers, its layer types, windows and the like: decoders run the layers that are
        in the list, and what they compute for each of them (Gemma's per-layer inputs) must keep its shape.
        """
        del self.layers[deepest + 1 :]


def find_decoder(model: Any) -> Decoder:
    """The smallest module that holds both the input embedding and a list of `num_hidden_layers` layers.

    (`get_decoder()` is not it in every family: for Llama 4 it is the whole model, for ModernBERT the head.)
    Raises TargetError for an architecture that has no such thing, or more than one list of that length there.
    """
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    modules = dict(model.named_modules())
    embedding = model.get_input_embeddings()
    path = next(name for name, module in modules.items() if module is embedding)
    while path:
        path = path.rpartition(".")[0]
        lists = _layer_lists(modules[path], count)
        if len(lists) == 1:
            parent, name = lists[0]
            return Decoder(module=modules[path], parent=parent, name=name)
        if lists:
            break
    raise TargetError(
        f"{type(model).__name__}: expected one list of {count} decoder layers beside its embedding, found "
        f"{len(lists)}; this architecture is not supported"
    )


def _layer_lists(module: nn.Module, count: int) -> list[tuple[nn.Module, str]]:
    """(parent, name) of every ModuleList of `count` modules that lies in no other list."""
    found: list[tuple[nn.Module, str]] = []
    for name, child in module.named_children():
        if not isinstance(child, nn.ModuleList):
            found += _layer_lists(child, count)
        elif len(child) == count:
            found.append((module, name))
    return found


def layer_output(module: nn.Module, output: Any) -> Tensor:
    """The residual stream [B, S, H] that a decoder layer puts out, alone or first of several values."""
    states = output[0] if isinstance(output, (tuple, list)) else output
    if not isinstance(states, Tensor) or states.ndim != 3:
        shape = tuple(states.shape) if isinstance(states, Tensor) else type(states).__name__
        raise TargetError(
            f"{type(module).__name__} puts out {shape}, not one residual stream [batch, length, hidden]; this "
            "architecture is not supported"
        )
    return states


def final_norm(decoder: Decoder) -> nn.Module | None:
    """The module that the last layer's output passes through at the end; None where there is none.

    It is the first one outside the layers whose output *is* the decoder's, seen in a forward of two tokens through
    the first layer alone.
    """
    outputs: list[tuple[nn.Module, Tensor]] = []

    def note(module: nn.Module, _inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            outputs.append((module, output))  # kept alive, so that no other tensor gets its memory

    inside = set(decoder.layers.modules())
    hooks = [module.register_forward_hook(note) for module in decoder.module.modules() if module not in inside]
    try:
        with _first_layer_alone(decoder), torch.inference_mode():
            ids = torch.tensor([[1, 2]], device=next(decoder.module.parameters()).device)
            last: Tensor = decoder.module(input_ids=ids, use_cache=False).last_hidden_state
    finally:
        for hook in hooks:
            hook.remove()
    return next((module for module, output in outputs if output.data_ptr() == last.data_ptr()), None)


@contextmanager
def _first_layer_alone(decoder: Decoder) -> Iterator[None]:
    layers = decoder.layers
    setattr(decoder.parent, decoder.name, nn.ModuleList([layers[0]]))
    try:
        yield
    finally:
        setattr(decoder.parent, decoder.name, layers)
