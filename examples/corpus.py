"""Three free text sources, all put in chat form: the corpus of the tiny target.

* ``docs``: the pages of Debian's ``python3.11-doc``. Every section, and every documented function or class,
  is an answer to a question about its title.
* ``stdlib``: the standard library's sources. Every function and class is an answer to "show me ..." or
  "complete ...".
* ``chitchat``: the two-person chats of the PyPI package ``chitchat-dataset``; the first speaker is the user.

A chat is one document with an identity (page, file or conversation); the *identity* is hashed to decide
whether it is held out, so no document is on both sides. Everything else that looks random (which phrasing,
which neighbours are joined into one chat of several turns) is a hash too: the same folders give the same
corpus, in the same order.

All text is reduced to ASCII (typographic quotes and dashes are replaced, the rest is dropped): a tiny model
is to spend its capacity on language.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from docpages import read_page

Message = dict[str, str]
SOURCES = ("docs", "stdlib", "chitchat")
PART_CHARS = 4200  # longer answers are cut at line ends: about 1,500 tokens
HELD_OUT_SHARE = 0.03

_ASCII = str.maketrans(
    {
        "\u2019": "'",
        "\u2018": "'",
        "\u201c": '"',
        "\u201d": '"',
        "\u2014": "-",
        "\u2013": "-",
        "\u2026": "...",
        "\u00b6": None,
        "\u00a0": " ",
        "\u2192": "->",
        "\u00d7": "x",
    }
)
_SECTION_ASKS = ("Tell me about {t}.", "What is {t}?", "Explain {t}.", "Write a section about {t}.", "{t}?")
_API_ASKS = ("What does {t} do?", "How do I use {t}?", "Document {t}.", "Explain {t} to me.")
_CODE_ASKS = (
    "Show me the source of {t}.",
    "Write {t}.",
    "How is {t} implemented?",
    "Show the code of {t}, please.",
)
_SKIP_PAGES = re.compile(r"^(genindex.*|changelog|contents|search|copyright|download|about|py-modindex)\.html$")
_SKIP_PARTS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "pydoc_data"}


@dataclass(frozen=True, kw_only=True)
class Chat:
    """One training document: ``messages`` alternate user and assistant, perhaps after a system message."""

    source: str
    key: str
    held_out: bool
    messages: list[Message]


def draw(*words: object) -> float:
    """Give a number in [0, 1) that is a pure function of ``words``."""
    digest = hashlib.blake2b("\0".join(map(str, words)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def pick(options: Sequence[str], *words: object) -> str:
    """Choose one of ``options``, a pure function of ``words``."""
    return options[int(draw("pick", *words) * len(options))]


def plain(text: str) -> str:
    """Reduce ``text`` to ASCII, without trailing blanks on its lines."""
    text = text.translate(_ASCII).encode("ascii", "ignore").decode()
    return re.sub(r"[ \t]+\n", "\n", text).strip("\n")


def parts(text: str, limit: int = PART_CHARS) -> Iterator[str]:
    """Cut ``text`` into pieces of at most ``limit`` characters, at an empty line or else a line end."""
    while len(text) > limit:
        cut = text.rfind("\n\n", limit // 3, limit)
        cut = text.rfind("\n", 1, limit) if cut < 0 else cut
        cut = limit if cut < 0 else cut
        yield text[:cut].rstrip()
        text = text[cut:].lstrip("\n")
    yield text


def turn(user: str, assistant: str) -> list[Message]:
    """Pair a question with its answer."""
    return [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]


def join_neighbours(source: str, key: str, turns: list[list[Message]]) -> Iterator[Chat]:
    """Make chats of one to three of a document's turns: two thirds alone, others joined to what follows."""
    held_out = draw("held-out", source, key) < HELD_OUT_SHARE
    at = 0
    while at < len(turns):
        luck = draw("join", source, key, at)
        count = 1 if luck < 0.67 else 2 if luck < 0.87 else 3
        messages = [message for one in turns[at : at + count] for message in one]
        if draw("system", source, key, at) < 0.1:
            messages.insert(0, {"role": "system", "content": "You are a helpful assistant who knows Python."})
        yield Chat(source=source, key=key, held_out=held_out, messages=messages)
        at += count


def doc_chats(folder: Path) -> Iterator[Chat]:
    """Ask for the sections and definitions of every page under ``folder`` (symlinked pages once)."""
    pages = {path.resolve() for path in folder.rglob("*.html") if not _SKIP_PAGES.match(path.name)}
    for path in sorted(pages):
        page = read_page(path.read_text(encoding="utf-8"))
        inside = path.is_relative_to(folder.resolve())
        key = path.relative_to(folder.resolve()).as_posix() if inside else path.name
        turns: list[list[Message]] = []
        for title, text in page.sections:
            name = plain(title)
            if draw("where", key, title) < 0.4 and name != plain(page.title):
                name = f"{name} ({plain(page.title)})"
            turns += _answers(pick(_SECTION_ASKS, key, title).format(t=name), plain(text))
        definitions: list[list[Message]] = []
        for signature, text in page.definitions:
            name = plain(signature)
            if draw("bare", key, signature) < 0.7:
                name = name.split("(")[0].removeprefix("class ").removeprefix("exception ")
            definitions += _answers(pick(_API_ASKS, key, signature).format(t=name), plain(text))
        yield from join_neighbours("docs", key, turns)
        yield from join_neighbours("docs", key, definitions)


def _answers(ask: str, text: str) -> Iterator[list[Message]]:
    for number, part in enumerate(parts(text)):
        if len(part) >= 30:
            yield turn(ask if number == 0 else f"{ask} (part {number + 1})", part)


def stdlib_chats(folder: Path) -> Iterator[Chat]:
    """Ask for the functions and classes of every module under ``folder``, but not of tests or packages."""
    for path in sorted(folder.rglob("*.py")):
        inside = path.relative_to(folder)
        if _SKIP_PARTS & set(inside.parts):
            continue
        try:
            text = path.read_text(encoding="ascii").expandtabs(4)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(text)
        except (UnicodeDecodeError, SyntaxError):
            continue
        module = ".".join(inside.with_suffix("").parts).removesuffix(".__init__")
        lines = text.splitlines()
        turns = [turn for node in tree.body for turn in _code_turns(node, module, "", lines)]
        yield from join_neighbours("stdlib", inside.as_posix(), turns)


def _code_turns(node: ast.stmt, module: str, prefix: str, lines: list[str]) -> Iterator[list[Message]]:
    """Ask for one definition. A class longer than a part is shown by its methods, not as a whole."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.end_lineno is None:
        return
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) - 1
    code = _dedent(lines[first : node.end_lineno])
    name = f"{prefix}{node.name}"
    if isinstance(node, ast.ClassDef) and (len(code) > PART_CHARS or draw("methods", module, name) < 0.5):
        for child in node.body:
            yield from _code_turns(child, module, f"{name}.", lines)
        if len(code) > PART_CHARS:
            return
    if len(code) < 60:
        return
    body_at = node.body[0].lineno - 1 - first
    if draw("complete", module, name) < 0.25 and 0 < body_at < len(code.splitlines()) - 1:
        rows = code.splitlines()
        head, rest = "\n".join(rows[:body_at]), "\n".join(rows[body_at:])
        yield turn(f"Complete this code from {module}:\n```python\n{head}\n```", next(parts(rest)))
        return
    where = f"{module}.{name}" if draw("dotted", module, name) < 0.6 else f"{name} in the module {module}"
    ask = pick(_CODE_ASKS, module, name).format(t=where)
    for number, part in enumerate(parts(code)):
        yield turn(ask if number == 0 else f"{ask} (part {number + 1})", f"```python\n{part}\n```")


def _dedent(rows: list[str]) -> str:
    indent = len(rows[0]) - len(rows[0].lstrip())
    return "\n".join(row[indent:] if not row[:indent].strip() else row for row in rows)


def chitchat_chats(dataset: Path) -> Iterator[Chat]:
    """Take conversations of at least three exchanges and no junk (links, keyboard noise, walls of text)."""
    for key, record in sorted(json.loads(dataset.read_text(encoding="utf-8")).items()):
        said = [" ".join(u["text"].strip() for u in one) for one in record["messages"]]
        said = [plain(text).replace("\n", " ") for text in said]
        said = said[: len(said) // 2 * 2]
        if len(said) < 6 or any(_is_junk(text) for text in said):
            continue
        messages = [
            {"role": "assistant" if number % 2 else "user", "content": text} for number, text in enumerate(said)
        ]
        if record.get("prompt") and draw("topic", key) < 0.5:
            topic = plain(record["prompt"])
            messages.insert(0, {"role": "system", "content": f"Chat with the user. Topic: {topic}"})
        held_out = draw("held-out", "chitchat", key) < HELD_OUT_SHARE
        yield Chat(source="chitchat", key=key, held_out=held_out, messages=messages)


def _is_junk(text: str) -> bool:
    letters = sum(letter.isalpha() or letter == " " for letter in text)
    return (
        not text.strip()
        or len(text) > 800
        or letters < 0.6 * len(text)
        or "http" in text
        or re.search(r"(.)\1{5}|[^\s]{26}|(\b\w+\b)( \2){4}", text) is not None
    )


def read_corpus(docs: Path, stdlib: Path, chitchat: Path) -> list[Chat]:
    """Read all chats of the three sources. Raises ``SystemExit`` naming a source that gave none."""
    readers: dict[str, Iterable[Chat]] = {
        "docs": doc_chats(docs),
        "stdlib": stdlib_chats(stdlib),
        "chitchat": chitchat_chats(chitchat),
    }
    chats: list[Chat] = []
    for source, reader in readers.items():
        found = list(reader)
        if not found:
            sys.exit(f"error: no text found for the source {source!r}: check --{source}")
        chats += found
    return chats
