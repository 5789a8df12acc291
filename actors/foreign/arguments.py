"""Checks the arguments of vLLM's engine in settings against vLLM's source, which is read and not run."""

import ast
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from mallee.protocol.errors import nearest

_OURS: Final = {
    "model": "give it as `model`",
    "served_model_name": "give it as `served_model_name`",
    "block_size": "give it as `engine.block_size`, which the router needs, too",
    "max_model_len": "give it as `engine.max_model_len`",
    "kv_events_config": "the worker reads vLLM's events itself",
    "enable_prefix_caching": "the router counts on it; `routing.policy` chooses others",
    "disable_log_stats": "the worker reads vLLM's statistics itself",
    "data_parallel_size": "give `workers`: each is a replica",
}
"""Arguments that other settings decide."""
_PLAIN: Final = {"int": int, "float": float, "str": str, "bool": bool, "None": type(None)}


def known_arguments() -> dict[str, str] | None:
    """The arguments of vLLM's engine, each with its type's text; None: vLLM is not installed here."""
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return None
    source = Path(spec.submodule_search_locations[0], "engine", "arg_utils.py")
    return {
        ast.unparse(field.target): ast.unparse(field.annotation)
        for node in ast.parse(source.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name in ("EngineArgs", "AsyncEngineArgs")
        for field in node.body
        if isinstance(field, ast.AnnAssign)
    }


def argument_faults(given: Mapping[str, Any], known: Mapping[str, str] | None) -> Iterator[str]:
    """A sentence for each argument that is not taken or can't have its value.

    `known`: as `known_arguments` found them. None: names and values are not checked.
    """
    for name, value in given.items():
        if name in _OURS:
            yield f"engine.vllm.{name} is not taken: {_OURS[name]}"
        elif known is not None and name not in known:
            hint = nearest(name, known, "vLLM's documentation has them")
            remedy = next((f": {_OURS[each]}" for each in _OURS if f"`{each}`" in hint), "")
            yield f"`engine.vllm.{name}` is no argument of vLLM's engine; {hint}{remedy}"
        elif known is not None and not _fits(value, known[name]):
            yield f"engine.vllm.{name}={value!r}: vLLM wants {known[name]}"


def _fits(value: object, annotation: str) -> bool:
    """Whether a value has one of the types; types that are not plain are left to vLLM."""
    kinds = [_PLAIN.get(each) for each in annotation.split(" | ")]
    return None in kinds or type(value) in kinds or (type(value) is int and float in kinds)
