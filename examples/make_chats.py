r"""Let the tiny target answer prompts: ``examples/chats.jsonl``, and the report that ``README.md`` quotes.

    python examples/make_chats.py generate --docs ... --stdlib ... --chitchat ... \
        --target examples/tiny-target --out examples/chats.jsonl
    python examples/make_chats.py report --target examples/tiny-target --chats examples/chats.jsonl

``generate`` draws for every conversation: a source, one to three user turns of one of its documents (a
quarter from held-out ones), perhaps a system message, greedy or sampled decoding, and a length cap
(log-normal: heavy-tailed). Turn by turn, the target answers all conversations in batches. An answer ends at
the target's own end of turn; or it is cut, where the cap leaves no more room for it or where it would begin to
loop. A conversation is dropped if an answer is empty, has few distinct 4-grams or repeats an earlier answer, and
a greedy one also if it does not re-tokenise through the chat template to exactly the generated ids. Each line is

    {"id": "docs-00007", "decoding": "greedy", "temperature": 0.0, "capped": 0, "messages": [...]}

with ``capped`` the number of answers that were cut. The file is a pure function of the arguments (and the torch
build).
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from corpus import SOURCES, Chat, Message, read_corpus
from sampler import Answer, Request, Sampler, distinct_share
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

SOURCE_SHARES = (0.48, 0.34, 0.18)
TEMPERATURES = (0.6, 0.7, 0.8, 0.9)
TOP_P = 0.95
LOOP_SHARE = 0.5  # of distinct 4-grams: an answer below is dropped
SHORTEST, LONGEST = 16, 1500  # tokens of a conversation


@dataclass(kw_only=True)
class Conversation:
    """One conversation in the making: what the user will say, and what has been said."""

    source: str
    asks: list[str]
    temperature: float
    cap: int
    messages: list[Message] = field(default_factory=list)
    written: list[list[int]] = field(default_factory=list)
    capped: int = 0
    canonical: bool = True  # the text re-tokenises to what was generated
    fault: str = ""


def user_turns(chats: list[Chat]) -> dict[tuple[str, bool], list[list[str]]]:
    """Collect, for each (source, held out), the user turns of every document, in order."""
    turns: defaultdict[tuple[str, bool, str], list[str]] = defaultdict(list)
    for chat in chats:
        said = [message["content"] for message in chat.messages if message["role"] == "user"]
        turns[chat.source, chat.held_out, chat.key] += said
    found: defaultdict[tuple[str, bool], list[list[str]]] = defaultdict(list)
    for (source, held_out, _), asks in turns.items():
        found[source, held_out].append(asks)
    return dict(found)


def plan(chats: list[Chat], tokenizer: PreTrainedTokenizerFast, options: argparse.Namespace) -> list[Conversation]:
    """Draw what to ask, how to decode and how long to go on from ``options.seed``."""
    rng = np.random.default_rng(options.seed)
    asks_of = user_turns(chats)
    topics = [chat.messages[0]["content"] for chat in chats if chat.messages[0]["role"] == "system"]
    conversations: list[Conversation] = []
    while len(conversations) < options.candidates:
        source = str(rng.choice(SOURCES, p=SOURCE_SHARES))
        cap = int(np.clip(rng.lognormal(np.log(options.median_cap), options.sigma_cap), SHORTEST, LONGEST))
        documents = asks_of[source, bool(rng.random() < 0.25)]
        asks = documents[rng.integers(len(documents))]
        count = min(int(rng.choice((1, 2, 3), p=(0.6, 0.25, 0.15))), len(asks))
        first = 0 if source == "chitchat" else int(rng.integers(len(asks) - count + 1))
        conversation = Conversation(
            source=source,
            asks=asks[first : first + count],
            temperature=0.0 if rng.random() < options.greedy_share else float(rng.choice(TEMPERATURES)),
            cap=cap,
        )
        if rng.random() < 0.15:
            topic = "You are a helpful assistant who knows Python."
            if source == "chitchat":
                topic = topics[rng.integers(len(topics))]
            conversation.messages.append({"role": "system", "content": topic})
        asked = [{"role": "user", "content": ask} for ask in conversation.asks]
        spent = len(prompt_of(conversation.messages + asked, tokenizer))
        if spent + 6 * count < cap:
            conversations.append(conversation)
    return conversations


def prompt_of(messages: list[Message], tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Tokenise ``messages`` and the generation prompt."""
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


def converse(
    conversations: list[Conversation], sampler: Sampler, tokenizer: PreTrainedTokenizerFast, positions: int
) -> None:
    """Fill in the answers, turn by turn over all conversations that are still sound."""
    for turn in range(max(len(c.asks) for c in conversations)):
        active = [c for c in conversations if not c.fault and len(c.asks) > turn]
        requests: list[Request] = []
        for c in active:
            c.messages.append({"role": "user", "content": c.asks[turn]})
            prompt = prompt_of(c.messages, tokenizer)
            later = sum(len(tokenizer.encode(ask)) + 8 for ask in c.asks[turn + 1 :])
            room = (min(c.cap, positions) - len(prompt) - later) // (len(c.asks) - turn) - 2
            requests.append(Request(prompt=prompt, limit=max(room, 4), temperature=c.temperature))
        print(f"turn {turn + 1} of {len(active)} conversations", flush=True)
        answers = sampler.answer(requests, lambda done: print(f"  {done} answered", flush=True))
        for c, answer in zip(active, answers, strict=True):
            _append(c, answer, tokenizer)


def _append(conversation: Conversation, answer: Answer, tokenizer: PreTrainedTokenizerFast) -> None:
    text = tokenizer.decode(answer.ids)
    conversation.messages.append({"role": "assistant", "content": text})
    conversation.capped += not answer.ended
    if not text.strip():
        conversation.fault = "empty"
    elif (answer.looped and len(answer.ids) < 16) or distinct_share(answer.ids) < LOOP_SHARE:
        conversation.fault = "loop"
    elif answer.ids in conversation.written:
        conversation.fault = "repeats an answer"
    elif "\ufffd" in text:
        conversation.fault = "half a character"
    conversation.written.append(answer.ids)
    conversation.canonical = answer_ids(conversation.messages, tokenizer) == conversation.written
    if not conversation.fault and not conversation.canonical and conversation.temperature == 0:
        conversation.fault = "does not re-tokenise"


def answer_ids(messages: list[Message], tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    """Re-tokenise each assistant turn, as the template's markers give it; without end-of-turn tokens."""
    rendered = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    found: list[list[int]] = [[]]
    for token, supervised in zip(rendered["input_ids"], rendered["assistant_masks"], strict=True):
        if supervised and token == tokenizer.eos_token_id:
            found.append([])
        elif supervised:
            found[-1].append(token)
    return found[:-1]


def load(target: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Load the target in fp32, and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(target)


def generate(options: argparse.Namespace) -> None:
    """Plan, converse, drop the faulty ones, write the others."""
    start = time.monotonic()
    model, tokenizer = load(options.target)
    chats = read_corpus(options.docs, options.stdlib, options.chitchat)
    conversations = plan(chats, tokenizer, options)
    banned = [i for i in tokenizer.all_special_ids if i != tokenizer.eos_token_id]
    sampler = Sampler(
        model,
        pad=tokenizer.pad_token_id,
        end=tokenizer.eos_token_id,
        banned=banned,
        top_p=TOP_P,
        batch_size=options.batch_size,
        seed=options.seed,
    )
    converse(conversations, sampler, tokenizer, model.config.max_position_embeddings)
    sound = [c for c in conversations if not c.fault]
    lines: list[str] = []
    for number, c in enumerate(sound):
        row = {
            "id": f"{c.source}-{number:05d}",
            "decoding": "sampled" if c.temperature else "greedy",
            "temperature": c.temperature,
            "capped": c.capped,
            "messages": c.messages,
        }
        lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    options.out.write_text("".join(lines), encoding="utf-8")
    dropped = Counter((c.fault, "sampled" if c.temperature else "greedy") for c in conversations if c.fault)
    seconds = time.monotonic() - start
    tokens = sum(len(ids) for c in conversations for ids in c.written)
    canonical = Counter("sampled" if c.temperature else "greedy" for c in sound if c.canonical)
    print(f"{tokens:,} tokens generated; conversations that re-tokenise to what was generated: {dict(canonical)}")
    print(f"{len(lines)} of {len(conversations)} conversations written, {seconds:.0f} s; dropped: {dict(dropped)}")


def report(options: argparse.Namespace) -> None:
    """Print what the folder holds, in numbers."""
    model, tokenizer = load(options.target)
    with options.chats.open(encoding="utf-8") as lines:
        rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
    files = sorted(path for path in options.target.iterdir() if path.is_file())
    parameters, size = sum(p.numel() for p in model.parameters()), sum(f.stat().st_size for f in files)
    print(f"target: {parameters:,} parameters, {size:,} bytes")
    for path in files:
        print(f"  {path.name} {path.stat().st_size:,} bytes")
    print("training:", (options.target / "training.json").read_text(encoding="utf-8").strip())
    lengths = [len(tokenizer.apply_chat_template(row["messages"], return_dict=False)) for row in rows]
    print(f"chats: {len(rows):,} conversations, {sum(lengths):,} tokens, {options.chats.stat().st_size:,} bytes")
    print("  by source:", dict(Counter(row["id"].split("-")[0] for row in rows)))
    print("  by user turns:", dict(Counter(sum(m["role"] == "user" for m in row["messages"]) for row in rows)))
    print("  with a system message:", sum(row["messages"][0]["role"] == "system" for row in rows))
    marks = (0, 1, 5, 25, 50, 75, 90, 95, 99, 100)
    print(
        "  length percentiles:",
        dict(zip(marks, np.percentile(lengths, marks).astype(int).tolist(), strict=True)),
    )
    shares: dict[str, list[float]] = {"overall": [], "greedy": [], "sampled": []}
    argmax, answered = 0, 0
    capped: Counter[str] = Counter()
    for row in rows:
        for ids in answer_ids(row["messages"], tokenizer):
            shares["overall"].append(distinct_share(ids))
            shares[row["decoding"]].append(shares["overall"][-1])
        capped[row["decoding"]] += row["capped"]
        if row["decoding"] == "greedy":
            agreed, seen = confirm(row["messages"], row["capped"], model, tokenizer)
            argmax, answered = argmax + agreed, answered + seen
    for name, values in shares.items():
        mean, low = np.mean(values), np.percentile(values, 5)
        print(f"  distinct 4-grams {name}: mean {mean:.3f}, 5th percentile {low:.3f}, {len(values)} answers")
    print("  conversations:", dict(Counter(row["decoding"] for row in rows)))
    print("  answers cut (cap or loop):", dict(capped))
    print(f"  greedy answer tokens that are the target's argmax: {argmax:,} of {answered:,} ({argmax / answered:.3%})")
    text = json.dumps([row["messages"] for row in rows], ensure_ascii=False)
    empty = sum(not m["content"].strip() for row in rows for m in row["messages"])
    print("  U+FFFD:", text.count("\ufffd"), "empty messages:", empty)
    for name in options.show:
        for row in rows:
            if row["id"] == name:
                print(f"\n{name} ({row['decoding']}, temperature {row['temperature']})")
                print(tokenizer.apply_chat_template(row["messages"], tokenize=False))


def confirm(
    messages: list[Message], capped: int, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> tuple[int, int]:
    """Count the answer tokens that are the model's best guess, and all; no end of turn if one was forced."""
    rendered = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    ids = torch.tensor(rendered["input_ids"])
    mask = torch.tensor(rendered["assistant_masks"], dtype=torch.bool)
    if capped:
        mask &= ids != tokenizer.eos_token_id
    with torch.inference_mode():
        best = model(input_ids=ids[None]).logits[0].argmax(-1)
    return int((best[:-1] == ids[1:])[mask[1:]].sum()), int(mask[1:].sum())


def main() -> None:
    """Run ``generate`` or ``report``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    making = commands.add_parser("generate", help="write the conversations")
    making.add_argument("--docs", type=Path, required=True)
    making.add_argument("--stdlib", type=Path, required=True)
    making.add_argument("--chitchat", type=Path, required=True)
    making.add_argument("--target", type=Path, required=True)
    making.add_argument("--out", type=Path, required=True)
    making.add_argument("--candidates", type=int, default=2200, help="conversations to generate; four of five are kept")
    making.add_argument("--greedy-share", type=float, default=0.55)
    making.add_argument("--median-cap", type=float, default=650, help="of a conversation's length cap, tokens")
    making.add_argument("--sigma-cap", type=float, default=0.9)
    making.add_argument("--batch-size", type=int, default=128)
    making.add_argument("--seed", type=int, default=0)
    making.set_defaults(run=generate)
    reporting = commands.add_parser("report", help="print what README.md quotes")
    reporting.add_argument("--target", type=Path, required=True)
    reporting.add_argument("--chats", type=Path, required=True)
    reporting.add_argument("--show", nargs="*", default=[], metavar="ID", help="print these conversations too")
    reporting.set_defaults(run=report)
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.run(options)


if __name__ == "__main__":
    main()
