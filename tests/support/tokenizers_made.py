"""Small tokenizers of two kinds, made in no time."""

from collections.abc import Sequence

import tokenizers


def byte_level(
    texts: Sequence[str] = ("the tree and the root of the tree, the leaf",) * 4,
    vocab_size: int = 320,
    special_tokens: Sequence[str] = ("<|im_start|>", "<|im_end|>"),
) -> tokenizers.Tokenizer:
    """A byte-level BPE like those of today's models, but small."""
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    return inner


def metaspace() -> tokenizers.Tokenizer:
    pieces = ["<unk>", "</s>", *"abc", "\u2581", "\u2581a", "\u2581bc", "ab"]
    inner = tokenizers.Tokenizer(
        tokenizers.models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>")
    )
    inner.add_special_tokens(["</s>"])
    decoders = tokenizers.decoders
    inner.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return inner
