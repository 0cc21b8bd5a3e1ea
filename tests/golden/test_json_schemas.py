"""The JSON Schemas in `schemas/` are the models'. After a change: `python tests/golden/test_json_schemas.py`."""

import json
from pathlib import Path

import pytest
from pydantic import BaseModel

from dflash_tool.schemas.config import ExtractConfig
from dflash_tool.schemas.manifest import Manifest

FOLDER = Path(__file__).parent.parent.parent / "schemas"
MODELS: dict[str, type[BaseModel]] = {"manifest": Manifest, "extract": ExtractConfig}


def _document(model: type[BaseModel]) -> str:
    return json.dumps(model.model_json_schema(), indent=2) + "\n"


@pytest.mark.parametrize("name", MODELS)
def test_schema_file_is_the_model_s(name: str) -> None:
    assert (FOLDER / f"{name}.schema.json").read_text() == _document(MODELS[name])


if __name__ == "__main__":
    for name, model in MODELS.items():
        (FOLDER / f"{name}.schema.json").write_text(_document(model))
