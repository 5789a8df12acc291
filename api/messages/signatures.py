"""Signatures of reasoning: a mark of the text that clients see, or, where they see none, the text itself.

They prove nothing: whoever sends a history may write in it anything at all.
"""

import base64
import binascii
from typing import Final

import xxhash

_SHOWN: Final = "mallee.shown."
_HIDDEN: Final = "mallee.text."


def signature_of(text: str, *, is_shown: bool) -> str:
    """The signature of a thinking block."""
    raw = text.encode(errors="replace")
    if is_shown:
        return _SHOWN + xxhash.xxh3_128_hexdigest(raw)
    return _HIDDEN + base64.b64encode(raw).decode()


def hidden_text(signature: str) -> str:
    """The reasoning that a client was not shown; none in a signature of any other origin."""
    if not signature.startswith(_HIDDEN):
        return ""
    try:
        return base64.b64decode(signature[len(_HIDDEN) :], validate=True).decode()
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return ""
