"""Fields of requests beyond their types: shapes of those that handlers read themselves, ranges, meanings.

By name, or by a type's and its name.
"""

from collections.abc import Mapping
from typing import Any, Final

_STRING: Final = {"type": "string"}
_IDS: Final = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_OBJECT: Final = {"type": "object"}
_MESSAGES: Final = {"type": "array", "minItems": 1, "items": _OBJECT}
_OBJECTS: Final = {"type": "array", "items": _OBJECT}
_TTL: Final = {"type": "number", "minimum": 0}

FIELDS: Final[Mapping[str, Mapping[str, Any]]] = {
    "prompt": {
        "description": "Text, token ids, or (of completions) several of either.",
        "anyOf": [
            _STRING,
            {"type": "array", "items": _STRING},
            _IDS,
            {"type": "array", "items": _IDS},
        ],
    },
    "CapsuleRequest.prompt": {"description": "Text or token ids.", "anyOf": [_STRING, _IDS]},
    "TokenizeRequest.prompt": _STRING,
    "messages": {"description": "A conversation, for the model's own template.", **_MESSAGES},
    "input": {
        "description": "A text, or items: messages, calls, their results, reasoning.",
        "anyOf": [_STRING, {"type": "array", "minItems": 1, "items": _OBJECT}],
    },
    "text": {"description": "`format`: text, json_object or json_schema.", **_OBJECT},
    "reasoning": {"description": "`effort`, where the template knows it.", **_OBJECT},
    "metadata": {"description": "Up to 16 texts by name.", **_OBJECT},
    "conversation": {
        "description": "A conversation to go on from, which the answer is added to.",
        "anyOf": [_STRING, {**_OBJECT, "required": ["id"], "properties": {"id": _STRING}}],
    },
    "items": {"description": "Up to 20, as `input`.", "maxItems": 20, **_OBJECTS},
    "include": {"items": {"enum": ["message.output_text.logprobs", "reasoning.encrypted_content"]}},
    "truncation": {"enum": ["disabled", None]},
    "max_output_tokens": {"description": "Of reasoning and answer.", "minimum": 1},
    "tools": {
        "description": "Functions that may be called, as OpenAI's.",
        "type": "array",
        "maxItems": 512,
        "items": _OBJECT,
    },
    "tool_choice": {
        "description": "Whether some must be called, and which.",
        "anyOf": [{"enum": ["none", "auto", "required"]}, _OBJECT],
    },
    "parallel_tool_calls": {"description": "false: at most one call."},
    "chat_template_kwargs": {"description": "Variables that the template reads.", **_OBJECT},
    "reasoning_effort": {
        "description": "Where the template knows it.",
        "enum": ["none", "minimal", "low", "medium", "high", "xhigh", "max", None],
    },
    "thinking_token_budget": {
        "description": "At most so many tokens of reasoning: then its end is the next token.",
        "minimum": 0,
    },
    "MessagesRequest.messages": {"description": "Anthropic's.", **_MESSAGES},
    "CountRequest.messages": {"description": "Anthropic's.", **_MESSAGES},
    "MessagesRequest.tools": {"description": "Anthropic's, of the client.", **_OBJECTS},
    "CountRequest.tools": {"description": "Anthropic's, of the client.", **_OBJECTS},
    "MessagesRequest.tool_choice": {"description": "Anthropic's.", **_OBJECT},
    "CountRequest.tool_choice": {"description": "Anthropic's.", **_OBJECT},
    "MessagesRequest.temperature": {"minimum": 0, "maximum": 1},
    "MessagesRequest.top_k": {"description": "0: off.", "minimum": 0},
    "system": {"description": "Text, or text blocks.", "anyOf": [_STRING, _OBJECTS]},
    "thinking": {"description": "Anthropic's: enabled, adaptive or disabled.", **_OBJECT},
    "output_config": {"description": "Anthropic's `effort` and `format`.", **_OBJECT},
    "output_format": {"description": "As `output_config.format`.", **_OBJECT},
    "context_management": {"description": "Edits that keep all are accepted.", **_OBJECT},
    "MessagesRequest.metadata": {"description": "`user_id`: a tenant.", **_OBJECT},
    "CountRequest.metadata": {"description": "Changes nothing here.", **_OBJECT},
    "mcp_servers": {"description": "Not supported.", "maxItems": 0, **_OBJECTS},
    "betas": {"description": "Change nothing.", "type": "array", "items": _STRING},
    "diagnostics": {"description": "Ask for the reason of a miss.", **_OBJECT},
    "container": {"description": "Not supported.", "enum": [None]},
    "stop_sequences": {"description": "Up to 16 texts that end an answer.", "maxItems": 16},
    "suffixes": {
        "description": "One for each branch: text, token ids, or messages that go on.",
        "type": "array",
        "items": {
            "anyOf": [
                _STRING,
                _IDS,
                {**_OBJECT, "required": ["messages"], "properties": {"messages": _MESSAGES}},
            ]
        },
    },
    "policy": {
        "description": "`type` names it, its own fields beside: docs/api/search.md.",
        "required": ["type"],
        "properties": {"type": _STRING},
        **_OBJECT,
    },
    "score": {
        "description": "By log-probability, a verifier that asks the model, or a gateway by its URL.",
        "anyOf": [
            {"enum": ["mean_logprob", "sum_logprob"]},
            {**_OBJECT, "required": ["prompt", "answers"]},
            {**_OBJECT, "required": ["url"]},
        ],
    },
    "ends": {"description": "A step with one of these texts ends an answer.", "maxItems": 16},
    "SearchRequest.capsule": {"description": "Where it begins, instead of a prompt."},
    "SearchRequest.prompt": {"description": "Text or token ids.", "anyOf": [_STRING, _IDS]},
    "suffix": {
        "description": "Text, token ids, or messages that go on.",
        "anyOf": [
            _STRING,
            _IDS,
            {**_OBJECT, "required": ["messages"], "properties": {"messages": _MESSAGES}},
        ],
    },
    "branches": {
        "description": "Indices; all, if left out.",
        "type": ["array", "null"],
        "items": {"type": "integer", "minimum": 0},
    },
    "mode": {
        "description": "Behind what waits already, or instead of it.",
        "enum": ["append", "replace"],
    },
    "model": {"description": "May be left out: there is one."},
    "user": {"description": "The tenant, unless a key or a header names one."},
    "safety_identifier": {"description": "The tenant, before `user`."},
    "cache_salt": {
        "description": "Requests with different salts share no cache.",
        "maxLength": 256,
    },
    "prompt_cache_key": {"description": "Of prompts with much in common.", "maxLength": 256},
    "prompt_cache_options": {"description": "OpenAI's: `mode` and `ttl`.", **_OBJECT},
    "cache_control": {"description": 'Anthropic\'s: {"type": "ephemeral", "ttl"}.', **_OBJECT},
    "kv_hints": {"description": "`actions` of retention.", **_OBJECT},
    "nvext": {"description": "NVIDIA Dynamo's `agent_hints`.", **_OBJECT},
    "n": {"description": "Branches of each prompt.", "minimum": 1},
    "max_tokens": {"description": "At most so many tokens of an answer.", "minimum": 1},
    "max_completion_tokens": {"description": "As `max_tokens`.", "minimum": 1},
    "min_tokens": {"minimum": 0},
    "temperature": {"minimum": 0, "maximum": 2},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"description": "0 and -1: off.", "minimum": -1},
    "min_p": {"minimum": 0, "maximum": 1},
    "repetition_penalty": {"exclusiveMinimum": 0},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "logit_bias": {"description": "-100 to 100 by token id."},
    "seed": {"minimum": -(1 << 63), "maximum": (1 << 63) - 1},
    "stop": {"description": "Text that ends an answer, or up to 16 of them."},
    "stop_token_ids": {"description": "Ids that end an answer.", "maxItems": 1024},
    "top_logprobs": {"minimum": 0, "maximum": 20},
    "response_format": {"description": "OpenAI's.", **_OBJECT},
    "structured_outputs": {"description": "vLLM's.", **_OBJECT},
    "guided_json": {"description": "A JSON schema.", "anyOf": [_OBJECT, _STRING]},
    "guided_regex": {"description": "A regular expression.", **_STRING},
    "guided_choice": {"description": "Texts.", "type": "array", "items": _STRING},
    "guided_grammar": {"description": "Lark or GBNF.", **_STRING},
    "stream": {"description": "Server-sent events instead of one body."},
    "at": {"description": "Only the capsule's first so many tokens.", "minimum": 1},
    "to": {"description": "The tokens that are left.", "minimum": 1},
    "ttl_s": {"description": "Seconds without use until it ends.", **_TTL},
    "wait": {"description": "False: answered at once, before the capsule is there."},
    "branch": {"minimum": 0},
    "tier": {"enum": ["host", "disk", None]},
    "tokens": {"description": "Token ids.", **_IDS},
    "version": {"description": "A label.", "minLength": 1, "maxLength": 128},
    "drain_s": {"minimum": 0, "maximum": 3600},
    "wait_s": {"minimum": 0, "maximum": 3600},
    "session": {"description": "The name of a session.", "maxLength": 128},
    "session_id": {"description": "The session, as vLLM and SGLang name it.", "maxLength": 128},
    "SessionForkRequest.capsule": {"description": "One of its capsules."},
    "parent": {"description": "The session that a new one is below.", "maxLength": 128},
    "mallee": {"description": "Fields of Mallee's own."},
}
