"""Bodies that begin as an earlier one: clients of agents send all messages again, with a few more at the end.

Two bodies with the same bytes up to the end of a message have the same messages up to there. So of a body
that is known up to message k only the rest is decoded: as the same JSON with one mark instead of those k,
which are taken from before. They are the same objects, on which readers leave what they made of them
(`Known`). In doubt (another list of that name, another salt, JSON that is refused) a body is decoded whole.
"""

import re
import secrets
import threading
from collections import OrderedDict
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import xxhash

from mallee.api.entry.decoding import decode, may_have_long_number, num_values
from mallee.api.text.conversation import Known
from mallee.api.text.scoped_memory import ScopedMemory, nbytes_of
from mallee.protocol.api.shared import AnyBody
from mallee.protocol.errors import MalleeError

MAX_NBYTES: Final = 128 << 20
LEAST_BYTES: Final = 16 << 10  # of a body to be kept: shorter ones are decoded in no time
HEAD: Final = 4096  # bytes, by which bodies are found
MAX_ALIKE: Final = 16  # bodies with one head
MAX_COMPARED: Final = 4  # of them that are compared to the first difference
CHUNK: Final = 1 << 16
MADE_NBYTES: Final = 500  # of what readers make of a message beside its texts, about
_SPACE: Final = re.compile(rb"[ \t\n\r]*")


class _Begun(NamedTuple):
    """The beginning of a body, up to the end of its last message."""

    raw: bytes
    salt: Any  # of the body
    start: int  # of the first message
    ends: list[int]  # of the messages, in bytes
    values: list[Any]
    sizes: list[int]  # bytes of all messages up to each
    num_values: int  # at most, of JSON


class _Key(NamedTuple):
    owner: str
    field: str
    head: int


class _Body:
    """One body, known by identity."""

    __slots__ = ("begun", "key")

    def __init__(self, key: _Key, begun: _Begun) -> None:
        self.key = key
        self.begun = begun


class Bodies:
    """Beginnings of bodies, of at most `max_nbytes`, by owner. Safe to use from several threads."""

    def __init__(self, *, max_nbytes: int = MAX_NBYTES) -> None:
        self._mark = secrets.token_hex(16)  # that no client can guess
        self._lock = threading.Lock()
        self.memory: ScopedMemory[_Body] = ScopedMemory(max_nbytes)
        self._alike: dict[_Key, OrderedDict[_Body, None]] = {}  # the youngest at the end
        self.num_known = 0  # bodies that were not decoded whole

    def decode(
        self, raw: bytes, kind: type[AnyBody], owner: str, max_values: int
    ) -> dict[str, Any]:
        """As `decoding.decode`, for a kind with a history; only bodies of one kind and owner are compared."""
        field = kind.history
        key = _Key(owner, f"{kind.__name__}.{field}", xxhash.xxh3_64_intdigest(raw[:HEAD]))
        found, num = self._find(key, raw)
        body = None if found is None else self._rest(raw, found.begun, num, field, max_values)
        if body is None:
            found, num, body = None, 0, decode(raw, max_values)
        else:
            self.num_known += 1
        self._keep(key, raw, body, field, found, num)
        return body

    def _find(self, key: _Key, raw: bytes) -> tuple[_Body | None, int]:
        """The body with most of the messages of `raw` at its beginning, and how many these are."""
        with self._lock:
            alike = list(self._alike.get(key, ()))[::-1]
        found = [body for body in alike if raw.startswith(body.begun.raw)]
        if found:
            best = max(found, key=lambda body: len(body.begun.raw))
            return best, len(best.begun.ends)
        best_num, best_body = 0, None
        for body in alike[:MAX_COMPARED]:
            num_bytes = _num_same(raw, body.begun.raw)
            num = int(np.searchsorted(body.begun.ends, num_bytes, side="right"))
            if num > best_num:
                best_num, best_body = num, body
        return best_body, best_num

    def _rest(
        self, raw: bytes, begun: _Begun, num: int, field: str, max_values: int
    ) -> dict[str, Any] | None:
        """The body, decoded behind `num` messages that are known; None: decode it whole."""
        space = _SPACE.match(raw, begun.ends[num - 1])
        assert space is not None, "it matches nothing as well"
        at = space.end()
        mark = f'"{self._mark}"'.encode()
        rest = raw[: begun.start] + mark + raw[at:]
        if begun.num_values + num_values(rest) > max_values or may_have_long_number(rest):
            return None
        try:
            body = decode(rest, max_values)
        except MalleeError:
            return None
        found = body.get(field)
        if not isinstance(found, list) or not found or found[0] != self._mark:
            return None
        if body.get("cache_salt") != begun.salt:
            return None
        body[field] = begun.values[:num] + found[1:]
        return body

    def _keep(
        self,
        key: _Key,
        raw: bytes,
        body: dict[str, Any],
        field: str,
        found: _Body | None,
        num: int,
    ) -> None:
        values = body[field] if isinstance(body.get(field), list) else []
        if len(values) == num:
            if found is not None:
                self._used(found)
            return
        start, ends, sizes, rest, most = 0, [0], [0], raw, 0
        if found is not None:
            start, ends, most = found.begun.start, found.begun.ends[:num], found.begun.num_values
            sizes = found.begun.sizes[:num]
            rest = raw[:start] + b"0" + raw[ends[-1] :]  # one value for those that are known
        new = _spans(rest, field)
        if new is None or len(new) != len(values) - num + (found is not None):
            return
        shift = len(raw) - len(rest)
        beginning = raw[: new[-1][1] + shift]
        most += num_values(beginning[ends[-1] :])
        for each in values[num:]:
            sizes.append(sizes[-1] + MADE_NBYTES + nbytes_of(each))
        if found is None:
            start, ends, sizes = new[0][0], [], sizes[1:]
        else:
            new = new[1:]
        ends += [end + shift for _, end in new]
        values[num:] = [Known(each) if type(each) is dict else each for each in values[num:]]
        made = _Begun(
            raw=beginning,
            salt=body.get("cache_salt"),
            start=start,
            ends=ends,
            values=list(values),
            sizes=sizes,
            num_values=most,
        )
        nbytes = len(beginning) + sizes[-1]
        if nbytes > self.memory.max_nbytes // 2:
            return
        with self._lock:
            is_longer = found is not None and num == len(found.begun.ends)
            if found is not None and is_longer and self.memory.has(key.owner, found):
                one = found
                one.begun = made
            else:
                one = _Body(key, made)
            alike = self._alike.setdefault(key, OrderedDict())
            alike[one] = None
            alike.move_to_end(one)
            dropped = self.memory.put(key.owner, one, nbytes)
            if len(alike) > MAX_ALIKE and (oldest := next(iter(alike))) not in dropped:
                self.memory.drop(key.owner, oldest)
                dropped.append(oldest)
            for each in dropped:
                del self._alike[each.key][each]
                if not self._alike[each.key]:
                    del self._alike[each.key]

    def _used(self, body: _Body) -> None:
        with self._lock:
            self.memory.use(body.key.owner, body)
            if body in self._alike.get(body.key, ()):
                self._alike[body.key].move_to_end(body)

    def check(self) -> None:
        """Raises AssertionError if bytes or keys don't add up."""
        self.memory.check()
        for key, alike in self._alike.items():
            assert 0 < len(alike) <= MAX_ALIKE
            assert all(self.memory.has(key.owner, body) and body.key == key for body in alike)


def _spans(raw: bytes, field: str) -> list[tuple[int, int]] | None:
    """Begin and end of each value of the list `field`; None: there is no such list."""
    try:
        found = msgspec.json.decode(raw, type=dict[str, msgspec.Raw]).get(field)
        parts = [] if found is None else msgspec.json.decode(found, type=list[msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        return None
    base = _address(raw)
    spans = [(_address(part) - base, len(memoryview(part))) for part in parts]
    if not spans or any(not 0 <= at < len(raw) for at, _ in spans):
        return None
    return [(at, at + length) for at, length in spans]


def _address(given: Any) -> int:
    found: int = np.frombuffer(given, np.uint8).__array_interface__["data"][0]
    return found


def _num_same(one: bytes, other: bytes) -> int:
    """Bytes up to the first difference."""
    num = min(len(one), len(other))
    for begin in range(0, num, CHUNK):
        end = min(begin + CHUNK, num)
        if one[begin:end] != other[begin:end]:
            a, b = (np.frombuffer(each[begin:end], np.uint8) for each in (one, other))
            return begin + int(np.argmax(a != b))
    return num
