"""Writes the synchronous client, `client/sync.py`, from the asynchronous one: `make generate`.

Awaiting is left out, names lose their `Async`, and a `PendingCapsule`, to be awaited, becomes a `Capsule`.
Functions of anyio become the blocking ones. Methods that are no twins belong into classes of other modules.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable
from typing import Final, TypeVar

from support.imports import ROOT

SOURCE: Final = ROOT / "client/aio.py"
TARGET: Final = ROOT / "client/sync.py"
HEAD: Final = """\
# Generated from client/aio.py by `make generate`: don't edit.
# ruff: noqa: E501 (texts in one piece)
"""
DOCUMENT: Final = "The synchronous client: sends, waits and closes. Its twin is `aio`."

NAMES: Final = {
    "anext": "next",
    "aread": "read",
    "aclose": "close",
    "aiter_raw": "iter_raw",
    "PendingCapsule": "Capsule",
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__aiter__": "__iter__",
    "mallee.client.graphs.running": "mallee.client.graphs.blocking",
}
LEFT_OUT: Final = {"PendingCapsule", "__await__"}  # definitions
OF_TASKS: Final = {"move_on_after", "run_sync"}  # functions of anyio without a counterpart
# Asynchronously it is awaited, iterated or entered, which sends it; here it is sent at once.
OTHER_BODIES: Final = {"_open": "return Branches(self, call).__enter__()"}

_RENAMED: Final = re.compile(r"\bAsync(?=[A-Z])|(?<=[a-z])_async\b")
T = TypeVar("T", bound=ast.AST)


def renamed(name: str) -> str:
    return NAMES.get(name) or _RENAMED.sub("", name)


class Blocking(ast.NodeTransformer):
    """Makes a module of coroutines one that blocks."""

    def visit_Await(self, node: ast.Await) -> ast.AST:
        return self.visit(node.value)  # type: ignore[no-any-return]

    def visit_AsyncFor(self, node: ast.AsyncFor) -> ast.AST:
        return self.generic_visit(_as(ast.For, node))

    def visit_AsyncWith(self, node: ast.AsyncWith) -> "ast.AST | list[ast.stmt]":
        return self.visit_With(_as(ast.With, node))

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST | None:
        return self.visit_FunctionDef(_as(ast.FunctionDef, node))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST | None:
        if node.name in LEFT_OUT:
            return None
        if node.name in OTHER_BODIES:
            node.body = ast.parse(f"def f():\n {OTHER_BODIES[node.name]}").body[0].body  # type: ignore[attr-defined]
        node.name = renamed(node.name)
        return self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST | None:
        if node.name in LEFT_OUT:
            return None
        node.name = renamed(node.name)
        return self.generic_visit(node)

    def visit_With(self, node: ast.With) -> "ast.AST | list[ast.stmt]":
        node.items = [item for item in node.items if _called(item.context_expr) not in OF_TASKS]
        self.generic_visit(node)
        return node if node.items else node.body

    def visit_Call(self, node: ast.Call) -> ast.AST:
        match _called(node):
            case "PendingCapsule":
                return self.visit(node.args[0])  # type: ignore[no-any-return]
            case "run_sync":
                node.func, *node.args = node.args
        return self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        if isinstance(node.value, ast.Name) and node.value.id == "AsyncGenerator":
            node.slice.elts.append(ast.Constant(None))  # type: ignore[attr-defined]
        return self.generic_visit(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | None:
        node.module = renamed(node.module or "")
        names = dict.fromkeys(
            (renamed(each.name), each.asname) for each in node.names if each.name not in OF_TASKS
        )
        node.names = [ast.alias(*name) for name in names]
        if node.module == "anyio":
            node.module = "time"  # of `sleep`
        return node if names else None

    def visit_Name(self, node: ast.Name) -> ast.AST:
        node.id = renamed(node.id)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        node.attr = renamed(node.attr)
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        """Docstrings, and annotations that are texts."""
        if isinstance(node.value, str):
            node.value = _RENAMED.sub("", node.value.replace("PendingCapsule", "Capsule"))
        return node


def _as(kind: type[T], node: ast.AST) -> T:
    """The node without its `async`."""
    return ast.copy_location(kind(**dict(ast.iter_fields(node))), node)


def _called(node: ast.AST) -> str:
    """The name that an expression calls, if it is a plain one."""
    is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    return node.func.id if is_call else ""  # type: ignore[attr-defined]


def generated() -> str:
    """The text of `client/sync.py`."""
    tree = Blocking().visit(ast.parse(SOURCE.read_text()))
    tree.body[0].value.value = DOCUMENT
    text = HEAD + ast.unparse(ast.fix_missing_locations(tree)) + "\n"
    tidied = _ruff(["check", "--fix-only", "--unsafe-fixes"], text)
    return _ruff(["format"], tidied)


def _ruff(command: Iterable[str], text: str) -> str:
    ruff = f"{sys.prefix}/bin/ruff"
    done = subprocess.run(
        [ruff, *command, "--quiet", "--stdin-filename", str(TARGET), "-"],
        input=text,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


if __name__ == "__main__":
    TARGET.write_text(generated())
