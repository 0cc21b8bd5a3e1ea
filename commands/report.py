"""`dflash report`: how training runs went, in a terminal or as a page of pictures."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dflash_tool.commands.options import AsJson, Html
from dflash_tool.commands.report_tables import runs_text, write_page


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="A run of `dflash train` or `dflash live`, finished or not. Several are compared.",
            metavar="RUN",
            show_default=False,
        ),
    ],
    html: Html = None,
    as_json: AsJson = False,
) -> None:
    """Show how training runs went: loss, tau by slot and by bucket, speed, who waited for whom.

    It reads what a run writes as it goes, so it also works on one that is at
    work, or that was killed. Of several runs it says what differs.

    Example: dflash report ./run

    Example: dflash report ./run ./other-run --html runs.html
    """
    from dflash_tool.report.runs import read_run
    from dflash_tool.report.summary import runs_json

    found = [read_run(folder) for folder in runs]
    if html is not None:
        from dflash_tool.report.run_page import run_page

        write_page(html, run_page(found))
    if as_json:
        print(json.dumps(runs_json(found), indent=2))  # noqa: T201 - the one document on stdout
    elif html is not None:
        Console().print(f"Wrote {html}", soft_wrap=True, markup=False, highlight=False)
    else:
        Console().print(runs_text(found))
