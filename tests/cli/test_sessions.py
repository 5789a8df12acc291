"""`mallee replay-session` and `mallee export-episode`, as users call them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from bench.doubles.random_model import random_model
from mallee.actors.build import make_engine
from mallee.cli.main import cli
from mallee.protocol.errors import CodecError, ConfigError, IncompatibleCapsule
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.protocol.messages import Fork, Generate, Grammar, Limits, Sampling, pack_tokens
from mallee.protocol.model import WeightVersion
from mallee.runtime.config import AppConfig
from mallee.sessions.record import Asked, Stopped, frame, read
from mallee.worker.model.loading.checkpoint import weights_digest
from mallee.worker.model.runner import load
from support.mock_scene import make_folder
from support.session_driver import SessionDriver

SMALL = ("--kv-gib", 0.05, "--threads", 1)
HOT = Sampling(temperature=1.0, seed=7, frequency_penalty=0.3)


def run(*args: object) -> tuple[int, dict[str, Any], str, Exception | None]:
    """Exit status, the JSON line, stderr, and an error of ours."""
    done = CliRunner().invoke(cli, list(map(str, args)))
    error = done.exception if isinstance(done.exception, Exception) else None
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return done.exit_code, json.loads(lines[-1]) if lines else {}, done.stderr, error


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    random_model("llama", 3, vocab_size=340).save(folder)
    make_tokenizer(folder)
    return folder


def make_tokenizer(folder: Path) -> None:
    config = (folder / "config.json").read_text()
    make_folder(folder)
    (folder / "config.json").write_text(config)


@pytest.fixture(scope="module")
def record(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A session on the model: a grammar, forks, a cut, a capture, a cancel."""
    forward = load(model, num_blocks=256, block_size=16, dtype="float32", threads=1)
    config = AppConfig(model=str(model))
    engine = make_engine(config, forward, WorkerId("w0"), Incarnation(0))
    driver = SessionDriver(engine, forward.spec)
    form = Grammar("json_schema", '{"type": "object", "properties": {"n": {"type": "integer"}}}')
    prompt = pack_tokens(range(40, 75))
    driver.ask(Generate("json", prompt, Limits(30), HOT, 3, grammar=form))
    driver.ask(Generate("plain", prompt, Limits(40, ignore_eos=True), HOT, 2))
    for _ in range(12):
        driver.step()
    driver.capture(driver.running["plain", 1])
    driver.step()
    driver.cut(driver.running["plain", 0], 2, [50])
    driver.run()
    for i, capsule in enumerate(sorted(driver.capsules)):
        driver.ask(Fork(f"on-{i}", capsule, (b"", pack_tokens([44])), Limits(9), HOT))
    driver.step()
    driver.step()
    driver.cancel(driver.running["on-0", 1])
    driver.run()
    engine.close()
    file = tmp_path_factory.mktemp("records") / "s.session"
    file.write_bytes(driver.raw)
    return file


def test_a_session_is_replayed_and_exported(record: Path, model: Path, tmp_path: Path) -> None:
    """F21, F25: the model is loaded anew; the dtype follows from the record; episodes replay, too."""
    episode = tmp_path / "s.npz"
    code, found, _, error = run(
        *("replay-session", record, "--model", model, *SMALL, "--npz", episode, "--json")
    )
    assert (code, error) == (0, None)
    assert found["equal"] == found["requests"] >= 5
    assert found["tokens_equal"] == found["tokens"] > 100
    assert found["first_divergence"] is None
    with np.load(episode, allow_pickle=False) as arrays:
        assert len(arrays["tokens"]) == found["tokens"]
    other = tmp_path / "other.npz"
    code, body, _, _ = run("export-episode", record, "--out", other, "--json")
    assert (code, body["file"], body["bytes"]) == (0, str(other), other.stat().st_size)
    assert (body["session"], body["tokens"]) == (found["session"], found["tokens"])
    code, again, _, _ = run("replay-session", other, "--model", model, *SMALL, "--json")
    assert (code, again) == (0, found)


def test_weights_that_were_served_meanwhile_are_named_by_the_one_who_replays(
    model: Path, tmp_path: Path
) -> None:
    """F25, part: a record has their label and digest; where they lie on the server it doesn't tell."""
    folder = tmp_path / "step-2"
    random_model("llama", 9, vocab_size=340).save(folder)
    make_tokenizer(folder)
    forward = load(model, num_blocks=64, block_size=16, dtype="float32", threads=1)
    forward.update(forward.prepare_update(folder, WeightVersion(1, "step-2")))
    config = AppConfig(model=str(model))
    engine = make_engine(config, forward, WorkerId("w0"), Incarnation(0))
    driver = SessionDriver(engine, forward.spec)
    driver.ask(Generate("r", pack_tokens(range(40, 75)), Limits(20, ignore_eos=True), HOT))
    driver.run()
    engine.close()
    shown = replace(forward.spec.weights, path="")
    assert shown.digest
    file = tmp_path / "s.session"
    entries = [
        replace(each, weights=shown) if isinstance(each, Asked) else each for each in driver.entries
    ]
    file.write_bytes(b"".join(map(frame, entries)))
    args = ("replay-session", file, "--model", model, *SMALL, "--json")
    code, found, stderr, _ = run(*args)
    assert (code, found["left_out"]) == (1, 1)
    assert "--weights step-2=FOLDER" in stderr.replace("\n", " ")
    code, found, _, _ = run(*args, "--weights", f"step-2={folder}")
    assert (code, found["tokens_equal"]) == (0, 20)
    code, found, _, _ = run(*args, "--weights", f"step-2={model}")
    assert (code, found["left_out"]) == (1, 1), "another digest"
    assert isinstance(run(*args, "--weights", "step-2")[3], ConfigError)
    # A version of the model's own weights needs no folder.
    back = replace(shown, label="step-3", digest=weights_digest(model))
    entries = [
        replace(each, weights=back) if isinstance(each, Asked) else each for each in driver.entries
    ]
    file.write_bytes(b"".join(map(frame, entries)))
    code, found, _, _ = run(*args)
    assert (code, found["left_out"], found["diverged"]) == (1, 0, 1), "asked of the model's own"


def test_a_divergence_is_the_exit_status_and_a_sentence(
    record: Path, model: Path, tmp_path: Path
) -> None:
    """F25."""
    entries, file = read(record.read_bytes()).entries, tmp_path / "changed.session"

    def other_seed(entry: Any) -> Any:
        if isinstance(entry, Asked) and entry.command.request == "plain":
            command = replace(entry.command, sampling=replace(HOT, seed=8))
            return replace(entry, command=command)
        return entry

    torn = b"".join(frame(other_seed(entry)) for entry in (*entries, Stopped(0.0, "disk"))) + b"ms"
    file.write_bytes(torn)
    code, found, stderr, _ = run(*("replay-session", file, "--model", model, *SMALL, "--json"))
    assert code == 1
    assert found["diverged"] == 1
    assert found["left_out"] >= 1
    first = found["first_divergence"]
    assert (first["request"], first["branch"]) == ("plain", 0)
    assert "2 bytes are torn" in stderr
    assert f"plain, branch 0, step {first['step']} (position {35 + first['step']})" in stderr
    assert "the record ends before its session: disk" in stderr


def test_another_model_is_refused_by_its_fields(record: Path, tmp_path: Path) -> None:
    """F25, F24, part: unless it is forced; then the divergence is named."""
    folder = tmp_path / "other"
    random_model("llama", 4, vocab_size=340).save(folder)
    make_tokenizer(folder)
    code, _, _, error = run("replay-session", record, "--model", folder, *SMALL)
    assert code == 1
    assert isinstance(error, IncompatibleCapsule)
    assert "fingerprint was" in str(error)
    code, found, _, _ = run(
        *("replay-session", record, "--model", folder, *SMALL, "--force", "--json")
    )
    assert (code, found["first_divergence"]["branch"]) == (1, 0)
    wrong = tmp_path / "no.session"
    wrong.write_bytes(b"PK\x03\x04 no record")
    assert isinstance(run("replay-session", wrong)[3], CodecError)
