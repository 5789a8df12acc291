"""The forms of calls by name, and the one that a chat template asks for."""

from types import MappingProxyType
from typing import Final

from mallee.api.text.tools.gemma import Gemma
from mallee.api.text.tools.harmony import CHANNEL, Harmony
from mallee.api.text.tools.hermes import Hermes
from mallee.api.text.tools.llama import Llama
from mallee.api.text.tools.mistral import ARGUMENTS, Mistral
from mallee.api.text.tools.mistral import OPEN as MISTRAL_OPEN
from mallee.api.text.tools.parser import ToolFormat
from mallee.api.text.tools.sections import DEEPSEEK, KIMI, Sections
from mallee.api.text.tools.tagged import DSML, GLM45, GLM47, MINIMAX, QWEN_CODER, Tagged

FORMATS: Final = MappingProxyType[str, ToolFormat](
    {
        "hermes": Hermes(),
        "qwen3_coder": Tagged(QWEN_CODER),
        "llama3_json": Llama(),
        "mistral": Mistral(names_first=False),
        "mistral_args": Mistral(names_first=True),
        "deepseek_v3": Sections(DEEPSEEK, is_fenced=True),
        "deepseek_v31": Sections(DEEPSEEK),
        "deepseek_v32": Tagged(DSML),
        "gemma": Gemma(),
        "glm45": Tagged(GLM45),
        "glm47": Tagged(GLM47),
        "kimi_k2": Sections(KIMI),
        "minimax_m2": Tagged(MINIMAX),
        "harmony": Harmony(),
    }
)


def format_of(template: str) -> str | None:
    """The name of the form that a chat template writes calls in; None if none is known."""
    if DSML.marks[0] in template:
        return "deepseek_v32"
    if DEEPSEEK.begin in template:
        return "deepseek_v3" if "```json" in template else "deepseek_v31"
    if MISTRAL_OPEN in template:
        return "mistral_args" if ARGUMENTS in template else "mistral"
    if KIMI.begin in template:
        return "kimi_k2"
    if MINIMAX.block[0] in template:
        return "minimax_m2"
    if GLM45.key[0] in template:
        return "glm45" if "</arg_key>\n" in template else "glm47"
    if "<tool_call>" in template:
        return "qwen3_coder" if "<function=" in template else "hermes"
    if CHANNEL in template:
        return "harmony"
    if "<start_of_turn>" in template:
        return "gemma"
    if "<|start_header_id|>" in template and "parameters" in template:
        return "llama3_json"
    return None
