"""A command's help as a page, and what a mistyped option is told."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

EXIT_CODES = (
    "Exit codes: 0 done, 1 could not be done (the message says why), 2 wrong options, 130 and 143 stopped by Ctrl-C "
    "and SIGTERM with everything in order."
)


class Page(TyperCommand):
    """A command: its text fills the line at any width, switches show no type, `--help` comes last."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        paragraphs = inspect.cleandoc(self.help or "").split("\n\n")
        self.help = "\n\n".join(" ".join(each.split()) for each in paragraphs)

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters; `--help` stands in the panel of the one before it, not in one of its own at the top."""
        params: list[Any] = list(super().get_params(ctx))
        params[-1].rich_help_panel = getattr(params[-2], "rich_help_panel", None)
        return _switches(params)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take the arguments in; one that isn't known is told which was meant. An empty one is refused."""
        _refuse_empty(args, ctx)
        with _suggesting():
            return super().parse_args(ctx, args)


class Cover(TyperGroup):
    """`dflash` itself: the same for its few options."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters."""
        return _switches(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take the arguments in; one that isn't known is told which was meant."""
        with _suggesting():
            return super().parse_args(ctx, args)


def _switches(params: list[Any]) -> list[Any]:
    """A switch takes no value, so it shows none."""
    for each in params:
        if getattr(each, "is_flag", False):
            each.metavar = ""
    return params


def _refuse_empty(args: list[str], ctx: Any) -> None:
    """An empty value, as a shell variable that isn't set gives, would mean the current folder."""
    for before, arg in pairwise(["", *args]):
        name, equals, value = arg.partition("=")
        if not arg or (name.startswith("--") and equals and not value):
            option = name if equals else before if before.startswith("-") else "an argument"
            raise typer.BadParameter(f"{option}: got an empty value (of a variable that isn't set?)", ctx)


@contextmanager
def _suggesting() -> Iterator[None]:
    """Of the options that look like what was typed, name the one most alike."""
    try:
        yield
    except typer.TyperException as error:
        error.message = error.message.removeprefix("Value error, ")
        alike, error.possibilities = getattr(error, "possibilities", None), None  # type: ignore[attr-defined]
        if alike:
            error.message += f". Did you mean {alike[0]}?"
        raise
