"""The commands and their help. Light on purpose: torch and transformers are imported once a command runs."""

import typer

from dflash_tool import __version__
from dflash_tool.commands.eval import eval_
from dflash_tool.commands.export import export
from dflash_tool.commands.extract import extract
from dflash_tool.commands.live import live
from dflash_tool.commands.report import report
from dflash_tool.commands.stats import stats
from dflash_tool.commands.train import train

app = typer.Typer(
    name="dflash",
    help="Train DFlash drafters (block-diffusion draft models for speculative decoding) for an LLM of your own.",
    epilog="Exit codes: 0 done, 1 could not be done (the message says why), 2 wrong options, 130/143 stopped by "
    "Ctrl-C/SIGTERM with everything in order.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command()(extract)
app.command()(train)
app.command()(live)
app.command()(stats)
app.command()(report)
app.command("eval")(eval_)
app.command()(export)


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
