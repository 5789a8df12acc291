"""The site of the documentation, as `make docs` builds it."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.smoke

ROOT = Path(__file__).resolve().parents[2]


def test_the_site_is_built_without_a_broken_link_or_anchor(tmp_path: Path) -> None:
    if find_spec("mkdocs") is None or find_spec("material") is None:
        pytest.skip("needs the extra docs: pip install '.[docs]'")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "--quiet",
        "build",
        *("--config-file", "mkdocs.yml", "--site-dir", str(tmp_path / "site")),
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    for page in sorted((ROOT / "docs").rglob("*.md")):
        made = (tmp_path / "site" / page.relative_to(ROOT / "docs")).with_suffix(".html")
        assert made.exists(), made
