r"""Train the tiny target: a Qwen3 model of 2.7 M parameters with its own tokenizer, on one CPU thread.

    python examples/train_tiny_target.py --docs /usr/share/doc/python3.11/html --stdlib /usr/lib/python3.11 \
        --chitchat chitchat_dataset/dataset.json --out examples/tiny-target --work /tmp/tiny-work

1. Read the corpus (``corpus.py``) and learn the tokenizer (``tiny_tokenizer.py``) from what is not held out.
2. Pack the rendered chats into rows. Every row begins where a chat (or a piece of a long one) begins and is
   filled up with whole others, best fit first. There are rows of 320 tokens and rows of 1,536, so that long
   answers stay language. Rows are shuffled; both shapes occur all along the run.
3. Muon for the matrices (a third of the tokens that AdamW needs to get as far), AdamW for embedding and norms;
   warm-up and cosine, gradient clipped at 1, next-token loss on every token. Weights are fp32; ``--compile``
   also runs the forward in bf16 autocast, which is faster.
4. Measure held-out bits per byte by source, write the model in bf16 to a folder beside ``--out``, rename it.

``--work`` gets the same model folder every few minutes (``latest/``), so a run can be stopped at any moment.
``--tokens 0`` writes an untrained model at once: right tokenizer and shapes, to develop against.
Same folders, seed and torch build: same run, unless ``--max-minutes`` (which hurries the schedule on a slow
machine) cuts it short.
"""

# Shapes: B rows, T positions, H hidden size.
# ruff: noqa: N803, N806

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from corpus import SOURCES, Chat, draw, read_corpus
from numpy.typing import NDArray
from tiny_tokenizer import VOCAB_SIZE, train_tokenizer
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

ROW_SHAPES = ((320, 8), (1536, 2))  # tokens a row, rows a step
MAX_POSITIONS = 2048
Tokens = NDArray[np.int64]


def new_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """Initialise a target, fp32; every block starts as the identity."""
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB_SIZE,
            hidden_size=160,
            intermediate_size=448,
            num_hidden_layers=8,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=MAX_POSITIONS,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return model


def encode(chats: list[Chat], tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    """Render and tokenise the chats."""
    rendered = [tokenizer.apply_chat_template(chat.messages, tokenize=False) for chat in chats]
    return list(tokenizer(rendered, add_special_tokens=False, verbose=False)["input_ids"])


def pack(pieces: list[list[int]], width: int, rng: np.random.Generator, buffer: int = 128) -> Tokens:
    """Lay out rows ``[n, width]`` of whole pieces (at most ``width`` long), best fit first.

    Out of ``buffer`` waiting pieces the longest one that fits is laid down next; where none fits, the
    shortest is cropped to the room that is left, so no row holds padding.
    """
    queue = [pieces[i] for i in rng.permutation(len(pieces))]
    waiting: list[list[int]] = []
    rows: list[list[int]] = []
    row: list[int] = []
    while queue or waiting:
        while queue and len(waiting) < buffer:
            waiting.append(queue.pop())
        room = width - len(row)
        fitting = [piece for piece in waiting if len(piece) <= room]
        best = waiting[0] if not row else max(fitting, key=len) if fitting else min(waiting, key=len)
        waiting.remove(best)
        row += best[:room]
        if len(row) == width:
            rows.append(row)
            row = []
    return np.array(rows, dtype=np.int64)


def epoch_of_batches(encoded: list[list[int]], seed: int) -> list[Tokens]:
    """Lay out one pass over the corpus as batches ``[rows, width + 1]``, the two shapes in random order.

    Chats of up to 320 tokens go to short rows, and so do, cut in pieces, four of five longer ones; the
    others go to the long rows, cut only where they are longer than these.
    """
    rng = np.random.default_rng(seed)
    (short, _), (long, _) = ROW_SHAPES
    piles: dict[int, list[list[int]]] = {short: [], long: []}
    for number, ids in enumerate(encoded):
        width = short if len(ids) <= short or draw("short", seed, number) < 0.8 else long
        piles[width] += [ids[at : at + width] for at in range(0, len(ids), width)]
    batches: list[Tokens] = []
    for width, count in ROW_SHAPES:
        rows = pack(piles[width], width + 1, rng)
        batches += [rows[at : at + count] for at in range(0, len(rows) - count + 1, count)]
    return [batches[i] for i in rng.permutation(len(batches))]


def endless_batches(encoded: list[list[int]], seed: int) -> Iterator[Tokens]:
    """Go on epoch after epoch, each packed anew."""
    epoch = 0
    while True:
        yield from epoch_of_batches(encoded, seed + epoch)
        epoch += 1


def next_token_loss(model: Qwen3ForCausalLM, x_BT: torch.Tensor) -> torch.Tensor:
    """Average the cross-entropy of every token but the first."""
    hidden_BTH = model.model(input_ids=x_BT[:, :-1], use_cache=False).last_hidden_state
    return cross_entropy(model.lm_head(hidden_BTH).flatten(0, 1), x_BT[:, 1:].flatten())


def held_out_bits_per_byte(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, chats: list[Chat]
) -> dict[str, float]:
    """Measure bits per byte of the held-out assistant turns, by source.

    The bits of every assistant token and of its end-of-turn token, over the UTF-8 bytes of the content alone;
    chats are cut at 1,536 tokens.
    """
    model.eval()
    result: dict[str, float] = {}
    end = tokenizer.eos_token_id
    for source in SOURCES:
        bits, size = 0.0, 0
        for chat in (c for c in chats if c.held_out and c.source == source):
            encoded = tokenizer.apply_chat_template(chat.messages, return_dict=True, return_assistant_tokens_mask=True)
            ids = torch.tensor(encoded["input_ids"][: ROW_SHAPES[-1][0]])[None]
            mask = torch.tensor(encoded["assistant_masks"][: ROW_SHAPES[-1][0]], dtype=torch.bool)[1:]
            with torch.inference_mode():
                logits = model(input_ids=ids[:, :-1], use_cache=False).logits[0].float()
            bits += float(cross_entropy(logits[mask], ids[0, 1:][mask], reduction="sum")) / math.log(2)
            content = [i for i in ids[0, 1:][mask].tolist() if i != end]
            size += len(tokenizer.decode(content).encode())
        result[source] = round(bits / max(size, 1), 4)
    model.train()
    return result


@torch.no_grad()
def settle_unused_rows(model: Qwen3ForCausalLM, used: set[int]) -> None:
    """Give tokens that the training text lacks (the mask token, rare bytes) the mean embedding of the others.

    Training only ever pushes their rows away from the hidden states, to several times the usual norm. A drafter's
    mask slots would start out there. As the mean, a token's logit is the mean logit: it still isn't predicted.
    """
    rows = model.model.embed_tokens.weight
    seen = torch.zeros(len(rows), dtype=torch.bool)
    seen[list(used)] = True
    rows[~seen] = rows[seen].mean(0)


def save_folder(
    folder: Path, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, report: dict[str, object]
) -> None:
    """Write model (bf16), tokenizer and ``training.json`` beside ``folder``, then rename them into place."""
    fresh = folder.with_name(f".{folder.name}.new")
    stale = folder.with_name(f".{folder.name}.old")
    for leftover in (fresh, stale):
        shutil.rmtree(leftover, ignore_errors=True)
    copy = Qwen3ForCausalLM(model.config).to(torch.bfloat16)
    copy.load_state_dict(model.state_dict())
    copy.config.use_cache = True
    copy.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=True,
        temperature=0.8,
        top_p=0.95,
        max_new_tokens=512,
    )
    copy.save_pretrained(fresh)
    tokenizer.save_pretrained(fresh)
    (fresh / "training.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    for path in fresh.iterdir():
        path.chmod(0o644)
    if folder.exists():
        folder.rename(stale)
    fresh.rename(folder)
    shutil.rmtree(stale, ignore_errors=True)


def train(
    model: Qwen3ForCausalLM,
    batches: Iterator[Tokens],
    options: argparse.Namespace,
    checkpoint: Callable[[dict[str, object]], None],
) -> dict[str, object]:
    """Take ``options.tokens`` tokens; returns what was done.

    Warm-up over the first 2 % of the schedule, cosine down to a twentieth of the learning rates.
    """
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2] + [model.model.embed_tokens.weight]
    optimizers = (
        torch.optim.Muon(matrices, lr=options.lr, weight_decay=0.01, momentum=0.95),
        torch.optim.AdamW(others, lr=options.adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    )
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for group in groups:
        group["peak"] = group["lr"]
    loss_of = torch.compile(next_token_loss, dynamic=False) if options.compile else next_token_loss
    limit_seconds = 60 * options.max_minutes
    start = saved = time.monotonic()
    done, step, smooth = 0, 0, math.log(VOCAB_SIZE)
    report: dict[str, object] = {"tokens": 0, "steps": 0}
    while (share := max(done / options.tokens, (time.monotonic() - start) / limit_seconds)) < 1:
        x_BT = torch.from_numpy(next(batches))
        rate = min(1.0, share / 0.02 + 1e-3) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * share)))
        for group in groups:
            group["lr"] = group["peak"] * rate
        with torch.autocast("cpu", torch.bfloat16, enabled=options.compile):
            loss = loss_of(model, x_BT)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()  # type: ignore[no-untyped-call]
            optimizer.zero_grad()
        done += x_BT[:, 1:].numel()
        step += 1
        smooth += 0.02 * (loss.item() - smooth)
        seconds = time.monotonic() - start
        report = {"tokens": done, "steps": step, "seconds": round(seconds), "train_loss": round(smooth, 4)}
        if step % 20 == 0:
            print(f"{step} loss {smooth:.3f} {done / seconds:.0f} tok/s {share:.1%}", flush=True)
        if time.monotonic() - saved > options.checkpoint_seconds:
            checkpoint(report)
            saved = time.monotonic()
    return report


def main() -> None:
    """Parse, read, train, measure, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", type=Path, required=True, help="folder of Python's HTML documentation")
    parser.add_argument("--stdlib", type=Path, required=True, help="folder of the standard library's sources")
    parser.add_argument("--chitchat", type=Path, required=True, help="dataset.json of chitchat-dataset")
    parser.add_argument("--out", type=Path, required=True, help="model folder to write")
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoints")
    parser.add_argument("--tokens", type=int, default=10_500_000, help="tokens to train on (default: about one epoch)")
    parser.add_argument("--lr", type=float, default=0.02, help="Muon's, for the matrices (default: 0.02)")
    parser.add_argument("--adam-lr", type=float, default=5e-3, help="of embedding and norms (default: 0.005)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action="store_true", help="bf16 autocast and torch.compile (needs a C++ compiler)")
    parser.add_argument("--max-minutes", type=float, default=math.inf, help="hurry the schedule to end by then")
    parser.add_argument("--checkpoint-seconds", type=float, default=240)
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.work.mkdir(parents=True, exist_ok=True)
    chats = read_corpus(options.docs, options.stdlib, options.chitchat)
    training = [chat for chat in chats if not chat.held_out]
    tokenizer = train_tokenizer((m["content"] for chat in training for m in chat.messages), MAX_POSITIONS)
    model = new_model(tokenizer, options.seed)
    parameters = sum(p.numel() for p in model.parameters())
    for source in SOURCES:
        mine = [chat for chat in chats if chat.source == source]
        held_out = sum(chat.held_out for chat in mine)
        documents = len({chat.key for chat in mine})
        print(f"{source}: {documents:,} documents, {len(mine):,} chats, {held_out:,} held out", flush=True)
    report: dict[str, object] = {"tokens": 0, "steps": 0}
    if options.tokens:
        encoded = encode(training, tokenizer)
        batches = endless_batches(encoded, options.seed)
        report = train(model, batches, options, lambda r: save_folder(options.work / "latest", model, tokenizer, r))
        settle_unused_rows(model, {token for chat in encoded for token in chat})
        report["held_out_bits_per_byte"] = held_out_bits_per_byte(model, tokenizer, chats)
    save_folder(options.out, model, tokenizer, {"parameters": parameters, **report})
    print(json.dumps(report))


if __name__ == "__main__":
    main()
