"""A model's folder for services with mocked engines."""

import json
from pathlib import Path

import pytest

from support.mock_scene import make_folder

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its tokenizer can chat."""
    made = make_folder(tmp_path_factory.mktemp("tiny"))
    (made / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    return made
