"""Text: the tokenizer, streams of tokens as text, chat templates.

Knows the `tokenizers` library and checkpoints' files. Must not know requests, HTTP or torch.
"""
