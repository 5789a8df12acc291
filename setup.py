"""Plain Python, unless asked otherwise: MALLEE_COMPILE=1 makes the core of engines and replays a C
extension (mypyc).

The same source, the same decisions: a replay's digest does not change. Needs a C compiler and mypy in the
environment that builds (`--no-build-isolation`). For wheels, not for editable installs: a compiled module
would hide later edits of its source.
"""

import ast
import os
from pathlib import Path

from setuptools import Extension, setup

ROOT = Path("src/mallee")
COMPILED = (
    *("worker/kv/*.py", "worker/sched/*.py", "worker/*.py"),
    *("mocker/*.py", "mocker/replay/*.py", "mocker/replay/*/*.py"),
    *("router/dispatch/*.py", "router/sync/*.py"),
)
PLAIN = (
    # Records and protocols: nothing to gain, and mypyc knows no overloads in a protocol.
    *("__init__.py", "worker/records.py", "forward.py", "text.py", "policy.py", "policies.py"),
    "jobs.py",  # dataclasses that inherit: a compiled one loses its fields
    "watch.py",  # arrays and threads
    *("config.py", "result.py", "run.py"),  # once a replay
)


def extensions() -> list[Extension]:
    """One for each compiled module, and what they share."""
    from mypyc.build import mypycify

    paths = (path for pattern in COMPILED for path in sorted(ROOT.glob(pattern)))
    return mypycify([str(path) for path in paths if not is_plain(path)], opt_level="3")


def is_plain(path: Path) -> bool:
    """Whether a module stays Python: also one with options in a class's head, which mypyc drops."""
    classes = (
        each for each in ast.walk(ast.parse(path.read_text())) if isinstance(each, ast.ClassDef)
    )
    return any(path.match(name) for name in PLAIN) or any(each.keywords for each in classes)


setup(ext_modules=extensions() if os.environ.get("MALLEE_COMPILE") == "1" else [])
