"""A tree of text from one prompt, grown in this process."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Raw
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from typer.testing import CliRunner

from bench.doubles.random_model import random_model
from mallee.cli.main import cli
from mallee.cli.tree import grow
from mallee.protocol.errors import InvalidParameter

pytestmark = pytest.mark.usefixtures("one_thread")

GOLDEN = Path(__file__).with_name("golden_text_tree.txt")
PROMPT = "Once upon a time"
MODEL = random_model("llama", 5, vocab_size=256, eos_token_id=None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, whose tokens are bytes."""
    alphabet = sorted(ByteLevel.alphabet())
    raw = Raw(BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    raw.pre_tokenizer = ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    raw.decoder = ByteLevelDecoder()  # type: ignore[assignment]
    made = tmp_path_factory.mktemp("model")
    raw.save(str(made / "tokenizer.json"))
    MODEL.save(made)
    return made


def test_the_command_prints_a_tree(folder: Path) -> None:
    """D28, D13: from a checkpoint on disk, as a user runs it; or as an object with the number of each parent.

    Three continuations, two below each; nothing shared is computed twice.
    """
    options = ["--width", "3", "--depth", "2", "--tokens", "6", "--seed", "7", "--dtype", "float32"]
    command = ["tree", PROMPT, "--model", str(folder), *options]
    answer = CliRunner(env={"COLUMNS": "100"}).invoke(cli, command)
    assert answer.exit_code == 0, answer.output
    *tree, figures = answer.stdout.splitlines(keepends=True)
    assert "".join(tree) == GOLDEN.read_text()
    assert figures.startswith(f"72 tokens drawn, {len(PROMPT) + 3} computed for prompts, ")
    told = json.loads(CliRunner().invoke(cli, [*command, "--json"]).stdout.splitlines()[-1])
    assert told["texts"][0] == {"number": 0, "parent": None, "text": PROMPT, "tokens": len(PROMPT)}
    parents = [0, 1, 1, 1, 0, 5, 5, 5, 0, 9, 9, 9]
    assert [(each["parent"], each["tokens"]) for each in told["texts"][1:]] == [
        (parent, 6) for parent in parents
    ]
    assert (told["output_tokens"], told["prefill_tokens"]) == (72, len(PROMPT) + 3)


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("width", {"width": 0}),
        ("depth", {"depth": 0}),
        ("depth", {"width": 70, "depth": 2}),
        ("tokens", {"tokens": 0}),
    ],
)
def test_a_tree_that_cannot_be_is_refused_by_name(field: str, options: dict[str, int]) -> None:
    forward = random_model("llama", 5, vocab_size=256).forward(num_blocks=16)
    with pytest.raises(InvalidParameter) as caught:
        grow(forward, [1, 2], **{"width": 2, "depth": 2, "tokens": 2, "seed": 0, **options})
    assert caught.value.fields["param"] == field
