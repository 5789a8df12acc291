"""Plain Python, unless asked otherwise: MALLEE_COMPILE=1 makes the engine's core a C extension (mypyc).

The same source, the same decisions: a replay's digest does not change. Needs a C compiler and mypy in the
environment that builds (`--no-build-isolation`). For wheels, not for editable installs: a compiled module
would hide later edits of its source.
"""

import os
from pathlib import Path

from setuptools import Extension, setup

ROOT = Path("src/mallee")
COMPILED = ("worker/kv/*.py", "worker/sched/*.py", "worker/*.py", "mocker/*.py")
PLAIN = {
    # Records and protocols: nothing to gain, and mypyc knows no overloads in a protocol.
    *(
        "__init__.py",
        "records.py",
        "forward.py",
        "text.py",
        "policy.py",
        "policies.py",
    ),
    # Arrays and threads.
    *("watch.py",),
}


def extensions() -> list[Extension]:
    """One for each compiled module, and what they share."""
    from mypyc.build import mypycify

    paths = (path for pattern in COMPILED for path in sorted(ROOT.glob(pattern)))
    return mypycify([str(path) for path in paths if path.name not in PLAIN], opt_level="3")


setup(ext_modules=extensions() if os.environ.get("MALLEE_COMPILE") == "1" else [])
