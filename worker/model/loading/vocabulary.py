"""The token ids of two checkpoints, compared: a draft model speaks of tokens by the ids of another one."""

from pathlib import Path

import tokenizers

from mallee.protocol.errors import ConfigError, UnsupportedModel
from mallee.worker.model.loading.config_json import read_config

_REMEDY = "choose a draft model with the same tokenizer, as a smaller one of the same family has"


def check_same_tokens(model: Path, draft: Path) -> None:
    """Raises ConfigError unless every token id, and every end of text, is the same in both folders.

    How a text is split is not compared: the draft model reads none. Raises ModelNotFound, UnsupportedModel.
    """
    ours, theirs = _tokens(model), _tokens(draft)
    differing = [i for i in sorted(ours.keys() | theirs.keys()) if ours.get(i) != theirs.get(i)]
    if differing:
        i = differing[0]
        raise ConfigError(
            f"draft_model {draft} has other tokens than {model}: {len(differing)} ids differ, the first of"
            f" them {i}: {_told(theirs, i)} there, {_told(ours, i)} here; {_REMEDY}"
        )
    ends = [read_config(folder).eos_token_ids for folder in (model, draft)]
    if set(ends[0]) != set(ends[1]):
        raise ConfigError(
            f"draft_model {draft} ends its texts with other tokens than {model}: {sorted(ends[1])} there,"
            f" {sorted(ends[0])} here; {_REMEDY}"
        )


def _tokens(folder: Path) -> dict[int, str]:
    """Every token's text by its id, added ones included."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(
            f"{folder} has no tokenizer.json, by which the tokens of a model and of its draft model are"
            " compared"
        )
    try:
        inner = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise UnsupportedModel(f"{file}: {error}", path=str(file)) from error
    vocab: dict[str, int] = inner.get_vocab(with_added_tokens=True)
    return {i: token for token, i in vocab.items()}


def _told(tokens: dict[int, str], i: int) -> str:
    return repr(tokens[i]) if i in tokens else "none"
