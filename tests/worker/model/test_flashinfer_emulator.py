"""The emulation of FlashInfer has the signatures of the package."""

import ast
import inspect
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from support import flashinfer_emulator as emulator

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / ".venv" / "flashinfer"


EMULATED = {
    "decode.py": {
        "BatchDecodeWithPagedKVCacheWrapper": (
            *("__init__", "plan", "_plan_impl", "workspace_size", "run"),
            "reset_workspace_buffer",
        )
    },
    "prefill.py": {"BatchPrefillWithPagedKVCacheWrapper": ("__init__", "plan", "run")},
    "cascade.py": {"merge_state_in_place": ()},
}


def package_source(module: str) -> ast.Module:
    """A module of FlashInfer: of the installed package, or of the wheel that `make flashinfer` fetched."""
    spec = find_spec("flashinfer")
    if spec is not None and spec.origin is not None:
        return ast.parse((Path(spec.origin).parent / module).read_text())
    wheels = sorted(FOLDER.glob("flashinfer_python-*.whl"))
    if not wheels:
        pytest.skip(f"no FlashInfer in {FOLDER}: `make flashinfer` fetches it where it can")
    with zipfile.ZipFile(wheels[-1]) as wheel:
        return ast.parse(wheel.read(f"flashinfer/{module}"))


def declared(nodes: list[ast.stmt], name: str) -> Any:
    """The last definition of `name`: those before it are overloads."""
    found = [
        node
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name
    ]
    assert found, f"the package has no {name}"
    return found[-1]


def parameters(function: ast.FunctionDef) -> list[tuple[str, str, object]]:
    """Name, kind and default of each, as `inspect` would say them."""
    args = function.args
    positional = [*args.posonlyargs, *args.args]
    missing: list[ast.expr | None] = [None] * (len(positional) - len(args.defaults))
    found = [
        (arg.arg, "POSITIONAL_OR_KEYWORD", _default(default))
        for arg, default in zip(positional, [*missing, *args.defaults], strict=True)
    ]
    if args.vararg is not None:
        found.append((args.vararg.arg, "VAR_POSITIONAL", inspect.Parameter.empty))
    found += [
        (arg.arg, "KEYWORD_ONLY", _default(default))
        for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)
    ]
    if args.kwarg is not None:
        found.append((args.kwarg.arg, "VAR_KEYWORD", inspect.Parameter.empty))
    return found


def _default(node: ast.expr | None) -> object:
    return inspect.Parameter.empty if node is None else ast.literal_eval(node)


def test_signatures_are_the_package_s() -> None:
    """D8, part: names, kinds and defaults of all parameters, read from the package's source."""
    for module, names in EMULATED.items():
        source = package_source(module).body
        for name, methods in names.items():
            theirs, ours = declared(source, name), getattr(emulator, name)
            pairs = [(declared(theirs.body, m), getattr(ours, m)) for m in methods]
            for node, function in pairs or [(theirs, ours)]:
                own = [
                    (each.name, each.kind.name, each.default)
                    for each in inspect.signature(function).parameters.values()
                ]
                assert own == parameters(node), f"{name}.{node.name} of {module}"


def test_the_package_is_of_the_version_that_we_ask_for() -> None:
    spec = find_spec("flashinfer")
    if spec is not None:
        pytest.skip("FlashInfer is installed: its version is checked where it is found")
    wheels = sorted(FOLDER.glob("flashinfer_python-*.whl"))
    if not wheels:
        pytest.skip(f"no FlashInfer in {FOLDER}: `make flashinfer` fetches it where it can")
    assert wheels[-1].name.startswith("flashinfer_python-0.7.")
