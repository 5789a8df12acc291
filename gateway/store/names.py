"""Keys of the store: the scope, then the name, in the letters that a broker takes."""

import re
from typing import Final
from urllib.parse import unquote

from mallee.protocol.ids import Scope

_OTHER: Final = re.compile(rb"[^A-Za-z0-9_-]")
_EMPTY: Final = "="


def key_of(scope: Scope, *names: str) -> str:
    """The key of a name, or of one below another; no two have the same one."""
    return ".".join(map(_encoded, (scope, *names)))


def name_of(key: str) -> str:
    """The last name in a key."""
    part = key.rpartition(".")[2]
    return "" if part == _EMPTY else unquote(part.replace("=", "%"), errors="surrogatepass")


def _encoded(name: str) -> str:
    raw = name.encode(errors="surrogatepass")
    return _OTHER.sub(lambda found: b"=%02X" % ord(found[0]), raw).decode() or _EMPTY
