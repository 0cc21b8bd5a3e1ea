"""Whether vLLM serves a drafter of ours as `dflash eval` measured it: `make serve-check`.

    python benchmarks/serve_check.py --work smollm2 --vllm .venv-vllm/bin/python

`--work` is the folder that `examples/train_smollm2.sh` made. On its held-out questions, greedily and in float32:

1. `dflash eval` generates here, with transformers and with our own decode.
2. vLLM answers the same token ids, alone and with the exported folder as its drafter.
3. vLLM's answers must be plain greedy decoding's: the same with and without the drafter, and every token the likeliest
   one in a forward of transformers, but for near-ties that rounding decides.
4. vLLM's mean acceptance must be that of `eval` to within 10 %. Both count alike: of all blocks that the target
   verified, the share of which slot k was accepted, also where the answer's end cut the block's tokens off.

It exits with 1 if any of that fails. Everything that is compared goes to WORK/serve-check.json too.
"""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from smollm2 import smollm2

from dflash_tool.drafter.files import read_drafter_config
from dflash_tool.evaluate.answers import NEAR_TIE, parting
from dflash_tool.evaluate.prompts import Prompt, read_prompts
from dflash_tool.prompts import PrepareOptions, load_tokenizer
from dflash_tool.target import load_whole, open_target

AGREEMENT = 0.10  # of eval's mean acceptance
DTYPE = torch.float32


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is served: target, drafter and prompts. slots: drafts a block."""

    target: Path
    drafter: Path
    store: Path
    held_out: Path
    prompts: list[Prompt]
    slots: int
    max_new_tokens: int


def open_job(work: Path, target: Path, limit: int, max_new_tokens: int) -> Job:
    """Read the same prompts as `dflash eval` reads."""
    settings, folder = read_drafter_config(work / "drafter"), open_target(str(target))
    options = PrepareOptions(vocab_size=folder.vocab_size, mask_token_id=settings.mask_token_id)
    held_out = work / "held-out.jsonl"
    found = read_prompts([held_out], load_tokenizer(target), options, limit=limit, longest=None)
    return Job(
        target=target,
        drafter=work / "drafter",
        store=work / "store",
        held_out=held_out,
        prompts=found.prompts,
        slots=settings.block_size - 1,
        max_new_tokens=max_new_tokens,
    )


def run_eval(job: Job) -> dict[str, Any]:
    """Run `dflash eval`; its document, with the wall seconds."""
    words = {
        "--drafter": job.drafter, "--store": job.store, "--target": job.target, "--data": job.held_out,
        "--limit": len(job.prompts), "--max-new-tokens": job.max_new_tokens,
    }  # fmt: skip
    since = time.perf_counter()
    command = [sys.executable, "-m", "dflash_tool", "eval", *(str(word) for pair in words.items() for word in pair)]
    done = subprocess.run([*command, "--json"], stdout=subprocess.PIPE, text=True, check=False)
    if not done.stdout:
        raise SystemExit("dflash eval failed; what it said is above")
    return {**json.loads(done.stdout), "seconds": time.perf_counter() - since}


def run_vllm(job: Job, python: Path, folder: Path, *, drafted: bool) -> dict[str, Any]:
    """Serve in vLLM's environment; what `serve_vllm.py` tells, with the wall seconds. Its log is beside the result."""
    name = "vllm-drafted" if drafted else "vllm-plain"
    asked, answered, log = (folder / f"{name}{end}" for end in (".request.json", ".json", ".log"))
    request = {
        "target": str(job.target),
        "drafter": str(job.drafter.resolve()) if drafted else None,
        "slots": job.slots,
        "prompts": [prompt.tokens.tolist() for prompt in job.prompts],
        "max_new_tokens": job.max_new_tokens,
    }
    asked.write_text(json.dumps(request))
    answered.unlink(missing_ok=True)
    since = time.perf_counter()
    script = Path(__file__).with_name("serve_vllm.py")
    with log.open("w") as file:
        done = subprocess.run([python, script, asked, answered], stdout=file, stderr=subprocess.STDOUT, check=False)
    if done.returncode or not answered.exists():
        raise SystemExit(f"vLLM failed ({name}):\n" + "\n".join(log.read_text().splitlines()[-15:]) + f"\nall: {log}")
    return {**json.loads(answered.read_text()), "wall": time.perf_counter() - since}


@torch.inference_mode()
def misses(model: Any, prompt: Prompt, answer: list[int]) -> list[tuple[int, float, bool]]:
    """Tokens that are not the likeliest in one forward over the whole: (position, gap between logits, near-tie)."""
    ids = torch.tensor([[*prompt.tokens.tolist(), *answer]])
    logits = model(ids[:, :-1], use_cache=False).logits[0, len(prompt.tokens) - 1 :].float()
    given = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    gap, largest = logits.max(1).values - given, logits.abs().max(1).values
    tie = gap <= NEAR_TIE[model.dtype] * largest
    return [(at, float(gap[at]), bool(tie[at])) for at in gap.nonzero()[:, 0].tolist()]


def compare_texts(job: Job, plain: dict[str, Any], drafted: dict[str, Any]) -> list[str]:
    """Print how vLLM's answers stand to plain greedy decoding; what no near-tie explains, in sentences."""
    model, wrong = load_whole(open_target(str(job.target)), torch.device("cpu"), DTYPE), []
    for name, answers in (("alone", plain["answers"]), ("with the drafter", drafted["answers"])):
        found = [miss for pair in zip(job.prompts, answers, strict=True) for miss in misses(model, *pair)]
        tokens, ties = sum(map(len, answers)), sum(tie for *_, tie in found)
        print(f"vLLM {name}: {tokens - len(found)} of {tokens} tokens are the likeliest in a forward of transformers,")
        print(f"  {ties} are within a near-tie of it, {len(found) - ties} are neither")
        if len(found) > ties:
            wrong.append(f"{len(found) - ties} tokens of vLLM {name} are not greedy decoding's")
    pairs = list(zip(job.prompts, plain["answers"], drafted["answers"], strict=True))
    print(
        f"{sum(one == other for _, one, other in pairs)} of {len(pairs)} answers are equal with and without the drafter"
    )
    for prompt, one, other in pairs:
        ids = (torch.from_numpy(prompt.tokens), torch.tensor(one), torch.tensor(other))
        if (found := parting(model, *ids, prompt.source)) is None:
            continue
        kind = "a near-tie" if found.near_tie else "no near-tie"
        print(
            f"  {Path(prompt.source).name}: token {found.position} is {found.plain} without, {found.drafted} with it; "
            f"their logits are {found.gap:.2g} apart, the largest is {found.largest:.3g}: {kind}"
        )
        if not found.near_tie:
            wrong.append(f"{prompt.source}: the answer with the drafter is another one, and no near-tie explains it")
    return wrong


def compare_acceptance(job: Job, evaluated: dict[str, Any], drafted: dict[str, Any]) -> list[str]:
    """Print acceptance by position side by side; what is too far apart, in sentences."""
    ours = evaluated["generation"]
    theirs = [count / drafted["drafts"] for count in drafted["accepted"]]
    print("\nslot   dflash eval   vLLM")
    for slot, (one, other) in enumerate(zip(ours["accepted_by_slot"], theirs, strict=True), 1):
        print(f"{slot:4}   {one:11.4f}   {other:.4f}")
    one, other = 1 + sum(ours["accepted_by_slot"]), 1 + sum(theirs)
    off = other / one - 1
    print(f"mean   {one:11.4f}   {other:.4f}   {off:+.2%}   (1 + the sum: tokens a verified block)")
    print(f"blocks {ours['blocks']:11}   {drafted['drafts']:.0f}")
    tokens = sum(map(len, drafted["answers"])) - len(job.prompts)
    print(
        f"tau    {ours['our_decode_tau']:11.4f}   {tokens / drafted['drafts']:.4f}   (less what the answers' ends cut)"
    )
    print(f"tau in transformers' generation {ours['greedy']['tau']:.4f}, walked {ours['walk_tau']:.4f}")
    if abs(off) <= AGREEMENT:
        return []
    return [f"vLLM's mean acceptance is {other:.3f}, eval's {one:.3f}: {off:+.1%}, more than {AGREEMENT:.0%} apart"]


def main() -> None:
    """Run all four steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("smollm2"), help="folder of examples/train_smollm2.sh")
    parser.add_argument("--vllm", type=Path, default=Path(".venv-vllm/bin/python"), help="Python that has vLLM")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    options = parser.parse_args()

    job = open_job(options.work, smollm2(), options.prompts, options.max_new_tokens)
    print(f"{len(job.prompts)} held-out prompts, at most {job.max_new_tokens} new tokens, blocks of {job.slots + 1}")
    evaluated = run_eval(job)
    print(f"dflash eval: {evaluated['seconds']:.0f} s", flush=True)
    if (seen := evaluated["generation"]["prompts"]) != len(job.prompts):
        raise SystemExit(f"dflash eval took {seen} of these prompts: the drafter was trained on the others")
    served = {}
    for drafted in (False, True):
        found = served[drafted] = run_vllm(job, options.vllm, options.work, drafted=drafted)
        rate = sum(map(len, found["answers"])) / found["seconds"]["generate"]
        name = "with the drafter" if drafted else "alone"
        print(f"vLLM {name}: {found['wall']:.0f} s, {rate:.0f} tokens/s while generating", flush=True)
    print("versions: " + ", ".join(f"{name} {version}" for name, version in served[True]["versions"].items()) + "\n")

    wrong = list(evaluated["failures"])
    wrong += compare_texts(job, served[False], served[True])
    wrong += compare_acceptance(job, evaluated, served[True])
    (options.work / "serve-check.json").write_text(
        json.dumps({"eval": evaluated, "vllm_plain": served[False], "vllm_drafted": served[True], "wrong": wrong})
    )
    print("\n" + ("\n".join(f"Wrong: {each}" for each in wrong) or "All as it should be."))
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
