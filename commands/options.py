"""From options and a YAML file to one validated config: flags win over the file, the file over the defaults."""

import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from dflash_tool.errors import ConfigError

if TYPE_CHECKING:
    from pydantic import BaseModel

# pydantic and yaml take a third of the time of `dflash --help`, which needs neither
Config = TypeVar("Config", bound="BaseModel")


Html = Annotated[
    Path | None, typer.Option("--html", help="Write a page with pictures, which needs nothing else.", metavar="FILE")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]


def option(panel: str, text: str, default: str | None = None, *, flag: str | None = None, **settings: Any) -> Any:
    """A typer option that shows what happens without it.

    Defaults live in the configs alone, so an option that wasn't given stays None; `default` says it in words. `flag`
    names a switch that has no --no-... form.
    """
    said = f"{text}  [dim]\\[default: {default}][/dim]" if default else text
    return typer.Option(*([flag] if flag else []), help=said, rich_help_panel=panel, **settings)


def load_config(model: type[Config], file: Path | None, flags: dict[str, Any]) -> Config:
    """Validate `flags` (None and empty lists: not given) over the settings in `file`.

    Raises ConfigError naming the option or the key in the file, what it got and what is allowed.
    """
    from pydantic import ValidationError

    from_file = _read_yaml(file, set(model.model_fields)) if file is not None else {}
    given = {name: value for name, value in flags.items() if value is not None and value not in ([], {})}
    try:
        return model.model_validate({**from_file, **given})
    except ValidationError as error:
        lines = {detail["loc"][:1]: _explain(detail, given, file) for detail in reversed(error.errors())}
        raise ConfigError("\n".join(reversed(lines.values()))) from error  # of each setting what is wrong first


def _read_yaml(file: Path, known: set[str]) -> dict[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config: can't read {file}: {getattr(error, 'strerror', error)}") from error
    except yaml.YAMLError as error:
        where = f" line {mark.line + 1}:" if (mark := getattr(error, "problem_mark", None)) else ""
        raise ConfigError(f"--config: {file} is not YAML:{where} {getattr(error, 'problem', error)}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config: {file} must hold `option: value` lines, got a {type(content).__name__}")
    settings = {str(key).replace("-", "_"): value for key, value in content.items()}
    for key in settings.keys() - known:
        close = difflib.get_close_matches(key, known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(sorted(known))}"
        raise ConfigError(f"--config: {file} has an unknown setting {key!r}; {hint}")
    return settings


def _explain(detail: Any, given: dict[str, Any], file: Path | None) -> str:
    name = str(detail["loc"][0]) if detail["loc"] else ""
    option = "--" + name.replace("_", "-")
    if detail["type"] == "missing":
        return f"{option} is needed: give the option, or set {name} in a --config file"
    where = option if name in given or file is None else f"{name} in {file}"
    what = detail["msg"].removeprefix("Value error, ")
    return f"{where}: got {detail['input']!r}: {what[0].lower()}{what[1:]}"
