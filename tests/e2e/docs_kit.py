"""The documentation as data: its fenced blocks, the commands in them, its links, the texts of the program's strings.

What the words after a block's language mean:

    bash, python        run in a test, in the order of the page
    name=value          the same, with this value for --name (or name=...) where the test needs less
    no-run              commands that need what a test hasn't: their options are held against the real ones
"""

import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import typer

from dflash_tool.commands.app import app

ROOT = Path(__file__).parent.parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "examples" / "README.md")
COMMANDS: Any = typer.main.get_command(app)
_FENCE = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """One fenced block. words: what follows the language."""

    page: Path
    line: int
    language: str
    words: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def smaller(self) -> dict[str, str]:
        """Values that the test needs instead."""
        return dict(word.split("=", 1) for word in self.words if "=" in word)

    def as_tested(self) -> str:
        """The text with those values; each must be there to be replaced."""
        text = self.text
        for name, value in self.smaller.items():
            old = rf"(--{name} )\S+" if self.language == "bash" else rf"(\b{name}=)[\w.]+"
            text, times = re.subn(old, rf"\g<1>{value}", text)
            assert times, f"{self}: no {name} to be replaced"
        return text

    def commands(self) -> Iterator[list[str]]:
        """The words of every command in it, continued lines joined, comments left out."""
        for line in self.as_tested().replace("\\\n", " ").splitlines():
            lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
            lexer.whitespace_split = True  # cuda:0 is one word
            words: list[str] = []
            for word in lexer:
                if word in {"&&", "&", ";", "|"}:
                    yield words
                    words = []
                else:
                    words.append(word)
            if words:
                yield words


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, found.start()) + 1, found[1], tuple(found[2].split()), found[3])
        for found in _FENCE.finditer(text)
    ]


def check(words: list[str]) -> None:
    """Raise if a command names what isn't there: a subcommand, an option or a choice of dflash, a target, a script."""
    words = words[next((place for place, word in enumerate(words) if "=" not in word.partition("/")[0]), 0) :]
    if "dflash_tool" in words[:-1]:
        words = words[words.index("dflash_tool") :]
    if words[0] in {"dflash", "dflash_tool"} and not words[1].startswith("--"):
        COMMANDS.commands[words[1]].make_context(f"dflash {words[1]}", list(words[2:]))
    elif words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert not {word for word in words[1:] if not word.startswith("-")} - {*targets}, f"no such target: {words}"
    for word in words:
        if re.fullmatch(r"(\./)?(benchmarks|examples)/[\w/-]+\.(py|sh)", word):
            assert (ROOT / word).is_file(), f"no such script: {word}"


def options() -> set[str]:
    """Every option of every command."""
    commands = [COMMANDS, *COMMANDS.commands.values()]
    return {"--help", *(name for each in commands for parameter in each.params for name in parameter.opts)}


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    found = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        plain = re.sub(r"[`*]|&[a-z]+;", "", heading).lower()
        found.add(re.sub(r"[^\w\- ]", "", plain).replace(" ", "-"))
    return found


def links(page: Path) -> list[str]:
    """The relative links and pictures of a page."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    found = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|href)="([^"]+)"', text)
    return [link for link in found if not re.match(r"[a-z]+:", link)]


@cache
def program_texts() -> tuple[str, ...]:
    """Every string in the program, with … for each value that is put into it."""
    found = []
    for folder in ("dflash_tool", "commands", "schemas"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    parts = (str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
                    found.append("".join(parts))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return tuple(" ".join(text.split()) for text in found)


def is_printed(message: str) -> bool:
    """Whether the program has this message; … stands for values in it, which may also be written out."""
    message = " ".join(message.split())
    return any(
        (_fixed(message) in text and re.search(_pattern(message), text))
        or (len(_fixed(text)) > 12 and _fixed(text) in message and re.fullmatch(_pattern(text), message))
        for text in program_texts()
    )


def _fixed(message: str) -> str:
    """The longest part of a message that is no value."""
    return max(message.split("…"), key=len)


def _pattern(message: str) -> str:
    return ".*?".join(map(re.escape, message.split("…")))
