"""Write questions for a general assistant: templates filled with everyday subjects, short and long, no two alike.

    python examples/questions.py --count 900 --out train.jsonl --held-out 32 --held-out-to held-out.jsonl

Each line is ``{"id": "q-00007", "messages": [{"role": "user", "content": "..."}]}``. The files are a pure function of
the numbers asked for, and no question is in both.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from pathlib import Path

SUBJECTS = {
    "thing": (
        "a bicycle", "a candle", "a compass", "a telescope", "a microscope", "a refrigerator", "a piano", "a guitar",
        "a clock", "a camera", "a bridge", "a library", "a garden", "a kite", "a sailing boat", "an umbrella",
        "a lighthouse", "a windmill", "a battery", "a mirror", "a map", "a dictionary", "a tent", "a steam engine",
    ),
    "nature": (
        "the moon", "a volcano", "a rainbow", "the ocean", "a river", "a desert", "a forest", "an earthquake", "snow",
        "thunder", "photosynthesis", "gravity", "the water cycle", "a coral reef", "the wind", "a glacier",
        "evaporation",
        "the seasons", "a comet", "soil", "an eclipse", "the tides",
    ),
    "animal": (
        "a cat", "a dog", "an elephant", "a honey bee", "a whale", "an owl", "a penguin", "a spider", "a horse",
        "a turtle", "a butterfly", "a wolf", "a dolphin", "a camel", "an ant", "a frog", "a bat", "a parrot",
    ),
    "food": (
        "bread", "rice", "tomato soup", "an apple pie", "pancakes", "a salad", "cheese", "chocolate", "noodles", "tea",
        "an omelette", "lentil curry", "roasted potatoes", "yoghurt", "pizza", "a fruit smoothie",
    ),
    "skill": (
        "learning a language", "saving money", "sleeping well", "writing a letter", "giving a speech",
        "cooking at home",
        "studying for an exam", "starting to run", "making friends", "keeping a diary", "growing vegetables",
        "drawing portraits", "reading more books", "cleaning a kitchen", "planning a trip", "playing chess",
    ),
}  # fmt: skip

TEMPLATES = {
    "thing": (
        "What is {0} used for?", "How does {0} work?", "Who needs {0}, and why?", "Describe {0} to a child.",
        "Write a short story about {0}.", "What are three things to look for when you buy {0}?",
        "Write a poem of four lines about {0}.", "Explain the history of {0} in a few sentences.",
    ),
    "nature": (
        "What is {0}?", "Explain {0} in simple terms.", "Why is {0} important?",
        "Write a poem of four lines about {0}.", "What are three facts about {0}?",
        "How would you explain {0} to a five-year-old child?",
        "I am writing a report for school about {0}. It should be easy to understand, and it should begin with a "
        "sentence that makes people curious. Please write the first paragraph of it.",
    ),
    "animal": (
        "What does {0} eat?", "Where does {0} live?", "Tell me about {0}.", "Write a short story about {0}.",
        "What are three facts about {0}?", "Compare {0} with {1}.", "Suggest five names for {0}.",
        "What is the difference between {0} and {1}?",
    ),
    "food": (
        "How do I make {0}?", "What goes well with {0}?", "Is {0} healthy?", "List the ingredients of {0}.",
        "Write a short description of {0} for a menu.",
        "My friends come for dinner tonight, and one of them eats no meat. I thought of {0} and {1}. What else do I "
        "need, and in which order should I prepare everything?",
    ),
    "skill": (
        "Give me three tips for {0}.", "How do I get better at {0}?", "Why is {0} hard?",
        "Write an email to a friend about {0}.", "Make a plan for one week of {0}.", "What are the benefits of {0}?",
        "I am a beginner. I have about half an hour every day, and I easily lose interest. How should I go about {0}?",
    ),
}  # fmt: skip
LISTS = (
    "Sort these words into groups: {0}.",
    "Write a short story in which all of these appear: {0}.",
    "Which of these is the largest, and which is the smallest? {0}.",
    "I have to explain each of these to my little sister: {0}. Where should I begin, and what should I say?",
)
LIST_SHARE = 0.3
SHORTEST_LIST, LONGEST_LIST = 4, 24


def questions(rng: random.Random) -> list[str]:
    """All template questions, and a share of questions about lists of all lengths, in random order."""
    made = []
    for kind, templates in TEMPLATES.items():
        for template in templates:
            pairs = itertools.permutations(SUBJECTS[kind], 2) if "{1}" in template else [(x,) for x in SUBJECTS[kind]]
            filled = [template.format(*pair) for pair in pairs]
            made += rng.sample(filled, min(len(filled), len(SUBJECTS[kind])))
    subjects = sorted(itertools.chain.from_iterable(SUBJECTS.values()))
    for _ in range(round(len(made) * LIST_SHARE / (1 - LIST_SHARE))):
        words = rng.sample(subjects, rng.randint(SHORTEST_LIST, LONGEST_LIST))
        made.append(rng.choice(LISTS).format(", ".join(words)))
    rng.shuffle(made)
    return made


def write(path: Path, asked: list[str], first: int) -> None:
    """Write `asked` as chats, numbered from `first`."""
    rows = [{"id": f"q-{first + i:05d}", "messages": [{"role": "user", "content": ask}]} for i, ask in enumerate(asked)]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    """Read the command line, write both files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, required=True, help="questions to train on")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--held-out", type=int, required=True, help="questions to measure on")
    parser.add_argument("--held-out-to", type=Path, required=True)
    options = parser.parse_args()
    made = questions(random.Random(0))
    if options.count + options.held_out > len(made):
        parser.error(f"there are {len(made)} questions: ask for fewer than {options.count} + {options.held_out}")
    write(options.held_out_to, made[: options.held_out], 0)
    write(options.out, made[options.held_out :][: options.count], options.held_out)
    print(f"{options.count} questions in {options.out}, {options.held_out} others in {options.held_out_to}")


if __name__ == "__main__":
    main()
