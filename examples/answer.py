"""Let a target answer the last question of each chat, greedily, in batches; go on where an earlier call stopped.

    python examples/answer.py --target ./SmolLM2 --chats questions.jsonl --out chats.jsonl --max-new-tokens 128

A drafter learns what its target would say, so it trains on answers of the target's own: plain greedy decoding here.
Input are JSON lines ``{"id": ..., "messages": [...]}``; each comes out with the answer as one more message. Batches
hold prompts of about the same length and are appended as they are done.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer


def answered(path: Path) -> set[str]:
    """Ids that `path` has; a last line that a kill cut short is removed."""
    if not path.exists():
        return set()
    text = path.read_bytes()
    whole = text[: text.rfind(b"\n") + 1]
    if len(whole) < len(text):
        path.write_bytes(whole)
    return {json.loads(line)["id"] for line in whole.splitlines()}


def main() -> None:
    """Read the command line, answer what is not answered yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder or hub name of the model that answers")
    parser.add_argument(
        "--chats", type=Path, required=True, help="JSON lines with id and messages; the user speaks last"
    )
    parser.add_argument("--out", type=Path, required=True, help="where the answered chats go")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    options = parser.parse_args()

    done = answered(options.out)
    rows = [json.loads(line) for line in options.chats.read_text(encoding="utf-8").splitlines()]
    missing = [row for row in rows if row["id"] not in done]
    print(f"{len(rows)} chats, {len(rows) - len(missing)} answered before", flush=True)
    if not missing:
        return
    tokenizer = AutoTokenizer.from_pretrained(options.target, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(options.target, dtype=options.dtype).eval()

    texts = {
        row["id"]: tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, tokenize=False)
        for row in missing
    }
    missing.sort(key=lambda row: len(tokenizer(texts[row["id"]]).input_ids))
    since, tokens = time.perf_counter(), 0
    for at in range(0, len(missing), options.batch_size):
        batch = missing[at : at + options.batch_size]
        prompts = [texts[row["id"]] for row in batch]
        inputs = tokenizer(prompts, add_special_tokens=False, padding=True, return_tensors="pt")
        out = model.generate(**inputs, do_sample=False, max_new_tokens=options.max_new_tokens)
        made = out[:, inputs.input_ids.shape[1] :]
        with options.out.open("a", encoding="utf-8") as file:
            for row, said in zip(batch, tokenizer.batch_decode(made, skip_special_tokens=True), strict=True):
                answer = {"role": "assistant", "content": said}
                file.write(json.dumps({**row, "messages": [*row["messages"], answer]}, ensure_ascii=False) + "\n")
        tokens += int((made != tokenizer.pad_token_id).sum())
        rate = tokens / (time.perf_counter() - since)
        print(f"{at + len(batch)} of {len(missing)} answered, {tokens} tokens, {rate:.0f} tokens/s", flush=True)


if __name__ == "__main__":
    main()
