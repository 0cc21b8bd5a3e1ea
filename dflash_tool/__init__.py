"""dflash: train DFlash drafters (block-diffusion draft models) for an LLM of your own."""

__version__ = "0.1.0"
