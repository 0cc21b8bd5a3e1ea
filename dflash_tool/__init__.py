"""dflash: train DFlash drafters (block-diffusion draft models) for an LLM of your own."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflash_tool.drafter.files import load_drafter

__version__ = "0.1.0"
__all__ = ["__version__", "load_drafter"]


def __getattr__(name: str) -> Any:
    """`dflash_tool.load_drafter`, imported when it is asked for: it brings torch along."""
    if name == "load_drafter":
        from dflash_tool.drafter.files import load_drafter  # noqa: PLC0415

        return load_drafter
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
