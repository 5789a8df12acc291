"""Chat templates of our own, by family of models, for checkpoints that have none."""

from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

FOLDER: Final = Path(__file__).parent / "templates"


class Family(NamedTuple):
    """A family, known by the special tokens of its chats; the first that fits counts."""

    name: str
    tokens: tuple[str, ...]
    model_types: tuple[str, ...]  # with which those of config.json begin; none: any
    end_of_turn: str

    @property
    def template(self) -> str:
        return _read(self.name)


FAMILIES: Final = (
    Family("llama3", ("<|start_header_id|>", "<|eot_id|>"), (), "<|eot_id|>"),
    Family("gemma3", ("<start_of_turn>", "<end_of_turn>"), (), "<end_of_turn>"),
    Family("qwen3", ("<|im_start|>", "<|im_end|>"), ("qwen3",), "<|im_end|>"),
    Family("chatml", ("<|im_start|>", "<|im_end|>"), (), "<|im_end|>"),
)


def family_of(model_type: str, special_tokens: Collection[str]) -> Family | None:
    """The family of a checkpoint; None if it is unknown."""
    for family in FAMILIES:
        is_of_type = not family.model_types or model_type.startswith(family.model_types)
        if is_of_type and all(token in special_tokens for token in family.tokens):
            return family
    return None


@cache
def _read(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
