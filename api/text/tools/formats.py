"""The forms of calls by name, and the one that a chat template asks for."""

from types import MappingProxyType
from typing import Final

from mallee.api.text.tools.deepseek import BEGIN, DeepSeek
from mallee.api.text.tools.gemma import Gemma
from mallee.api.text.tools.hermes import Hermes
from mallee.api.text.tools.llama import Llama
from mallee.api.text.tools.mistral import ARGUMENTS, Mistral
from mallee.api.text.tools.mistral import OPEN as MISTRAL_OPEN
from mallee.api.text.tools.parser import ToolFormat
from mallee.api.text.tools.qwen_coder import QwenCoder

FORMATS: Final = MappingProxyType[str, ToolFormat](
    {
        "hermes": Hermes(),
        "qwen3_coder": QwenCoder(),
        "llama3_json": Llama(),
        "mistral": Mistral(names_first=False),
        "mistral_args": Mistral(names_first=True),
        "deepseek_v3": DeepSeek(is_fenced=True),
        "deepseek_v31": DeepSeek(is_fenced=False),
        "gemma": Gemma(),
    }
)


def format_of(template: str) -> str | None:
    """The name of the form that a chat template writes calls in; None if none is known."""
    if BEGIN in template:
        return "deepseek_v3" if "```json" in template else "deepseek_v31"
    if MISTRAL_OPEN in template:
        return "mistral_args" if ARGUMENTS in template else "mistral"
    if "<tool_call>" in template:
        return "qwen3_coder" if "<function=" in template else "hermes"
    if "<start_of_turn>" in template:
        return "gemma"
    if "<|start_header_id|>" in template and "parameters" in template:
        return "llama3_json"
    return None
