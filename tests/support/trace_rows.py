"""Lines of traces in the forms of Mooncake and Bailian, and files of them."""

import json
from pathlib import Path
from typing import Any


def row(
    timestamp: float = 0, tokens: int = 1000, ids: tuple[int, ...] = (0, 1), **more: Any
) -> str:
    """A request of Mooncake's form."""
    fields = {"timestamp": timestamp, "input_length": tokens, "output_length": 4, "hash_ids": ids}
    return json.dumps({**fields, **more})


def chat(chat_id: int, parent: int = -1, at: float = 0.0, **more: Any) -> str:
    """A request of Bailian's form."""
    fields = {"chat_id": chat_id, "parent_chat_id": parent, "timestamp": at, "type": "text"}
    lengths = {"input_length": 40, "output_length": 4, "turn": 1, "hash_ids": [1, 2, 3]}
    return json.dumps({**fields, **lengths, **more})


def write(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(line + "\n" for line in lines))
    return path
