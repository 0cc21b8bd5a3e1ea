"""The commands and their help. Light on purpose: torch and transformers are imported once a command runs."""

import typer

from dflash_tool import __version__
from dflash_tool.commands.eval import eval_
from dflash_tool.commands.export import export
from dflash_tool.commands.extract import extract
from dflash_tool.commands.live import live
from dflash_tool.commands.page import EXIT_CODES, Cover, Page
from dflash_tool.commands.report import report
from dflash_tool.commands.stats import stats
from dflash_tool.commands.train import train

app = typer.Typer(
    name="dflash",
    help="Train DFlash drafters (block-diffusion draft models for speculative decoding) for an LLM of your own.",
    epilog=EXIT_CODES,
    cls=Cover,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
for command in (extract, train, live, stats, report, eval_, export):
    app.command(command.__name__.rstrip("_"), cls=Page, epilog=EXIT_CODES)(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dflash {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    """Options that stand before the command."""
    del version
