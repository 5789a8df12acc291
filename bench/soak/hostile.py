"""Requests as no honest client sends them, made by a seed: bodies, paths, methods, headers, lengths."""

import json
import random
from collections.abc import Callable
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from bench.failover.streams import MODEL
from bench.soak.raw import HUNG, NO_ANSWER, Answer
from mallee.protocol.api.capsules import CapsuleRequest
from mallee.protocol.api.generate import ChatRequest, CompletionRequest, ForkRequest
from mallee.protocol.api.shared import OTHERS_NEUTRAL

POSTS: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    ("/v1/completions", CompletionRequest.__struct_fields__),
    ("/v1/chat/completions", ChatRequest.__struct_fields__),
    ("/v1/capsules", CapsuleRequest.__struct_fields__),
    ("/v1/capsules/{id}/fork", ForkRequest.__struct_fields__),
)
GETS: Final = (
    *("/v1/models", "/v1/models/{id}", "/v1/capsules/{id}", "/v1/router/explain?request={id}"),
    *("/v1/router/explain?limit={id}", "/v1/router/workers", "/health", "/metrics", "/{id}"),
)
METHODS: Final = ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "BREW")
SOUND: Final[dict[str, Any]] = {
    "model": MODEL,
    "prompt": "a tree of many trunks",
    "messages": [{"role": "user", "content": "grow"}],
    "max_tokens": 2,
    "ttl_s": 1,
    "n": 1,
}
VALUES: Final[tuple[Any, ...]] = (
    *(None, True, False, 0, -1, 1, 2, 1 << 31, 1 << 63, -(1 << 63) - 1, 1 << 64, 10**400, 1e308),
    *(
        0.5,
        -0.0,
        float("nan"),
        float("inf"),
        -float("inf"),
        "",
        "a",
        "\x00",
        "\ud800",
        "\U0010ffff",
    ),
    *("x" * 5000, [], {}, [[]], [[], []], [{}], [None], ["a", 1], [1, 2, 3], [-1], [1 << 40]),
    *([["a"]], [[1], [2]], {"": ""}, {"a": {"b": [1]}}, [0.5], "null", "1e999", "../../etc/passwd"),
    *({"type": "json_schema"}, {"type": "json_object"}, {"json": {"$ref": "#"}}, {"role": "user"}),
    *([{"role": "user", "content": None}], [{"role": 1, "content": "a"}], [{"content": "{{ x }}"}]),
    *({"priority": 1e9}, {"deadline_s": -1}, {"session": "s" * 300}, {"-1": 1}, {"9" * 30: 1}),
    *([""] * 1, ["\ud800"], [" "] * 200, {"include_usage": 1}, "(" * 500, "a{1000}" * 50),
)


class Request(NamedTuple):
    """`raw` is what is sent. `is_http`: it is one whole request, which a server must answer."""

    what: str
    raw: bytes
    is_http: bool = True

    def __str__(self) -> str:
        return f"{self.what}: {self.raw[:600]!r}"


def request(rng: random.Random) -> Request:
    """One of all kinds."""
    makers: tuple[tuple[int, Callable[[random.Random], Request]], ...] = (
        (50, _wrong_field),
        (10, _two_wrong_fields),
        (8, _not_json),
        (4, _deep),
        (4, _cut_body),
        (8, _odd_path),
        (4, _odd_method),
        (5, _odd_headers),
        (3, _wrong_length),
        (4, _garbage),
    )
    (maker,) = rng.choices([each for _, each in makers], [weight for weight, _ in makers])
    return maker(rng)


def with_key(sent: Request, key: str) -> Request:
    """The same request with an API key, if it has a place for one."""
    head, end, rest = sent.raw.partition(b" HTTP/1.1\r\n")
    given = f"authorization: Bearer {key}\r\n".encode()
    return sent._replace(raw=head + end + given + rest) if end else sent


def problem(sent: Request, found: Answer) -> str:
    """The fault of the answer, if it has one."""
    if found.status == HUNG:
        return "no answer"
    if found.status == NO_ANSWER:
        return "the connection ended without an answer" if sent.is_http else ""
    if found.status >= 500 and found.status != 503:
        return f"{found.status}: {found.body[:300]!r}"
    if b"Traceback" in found.body or b'File "' in found.body:
        return f"it shows code: {found.body[:300]!r}"
    kind = found.headers.get("content-type", "")
    if found.status >= 400 and found.body and kind == "application/json":
        body = json.loads(found.body)
        error = body.get("error", {})
        is_health = found.status == 503 and "status" in body
        if not is_health and not {"message", "type", "param", "code"} <= error.keys():
            return f"not an error of OpenAI's shape: {found.body[:300]!r}"
    return ""


def encode(body: object) -> bytes:
    """As JSON, with what JSON has no place for: NaN, lone surrogates."""
    return json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _post(path: str, raw: bytes, what: str, head: str = "", length: object = None) -> Request:
    length = len(raw) if length is None else length
    lines = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{head}"
    return Request(what, f"{lines}content-length: {length}\r\n\r\n".encode("latin-1") + raw)


def _endpoint(rng: random.Random) -> tuple[str, tuple[str, ...]]:
    path, fields = rng.choice(POSTS)
    return path.replace("{id}", _id(rng)), fields


def _id(rng: random.Random) -> str:
    return rng.choice(
        (
            *("req_0.0", "x", "%00", "%2e%2e%2f%2e%2e", "%ff%fe", "%u0041", "a" * 3000, "..", "*"),
            *(quote("𝔘ñï"), "req_" + f"{rng.getrandbits(128):032x}.0", "%0d%0aset-cookie:a=b", "0"),
        )
    )


def _sound(fields: tuple[str, ...], path: str) -> dict[str, Any]:
    body = {name: value for name, value in SOUND.items() if name in fields}
    if path == "/v1/capsules":
        del body["messages"]
    return body


def _wrong_field(rng: random.Random, num: int = 1) -> Request:
    path, fields = _endpoint(rng)
    body = _sound(fields, path)
    names = [rng.choice((*fields, *OTHERS_NEUTRAL, "no_such", "")) for _ in range(num)]
    body |= {name: rng.choice(VALUES) for name in names}
    # What is sound after all must not run for long.
    kinds = {"ttl_s": (int, float, type(None)), "max_tokens": (type(None),)}
    body |= {
        n: SOUND[n] for n, kind in kinds.items() if n in fields and isinstance(body.get(n), kind)
    }
    return _post(path, encode(body), f"fields {names}")


def _two_wrong_fields(rng: random.Random) -> Request:
    return _wrong_field(rng, 2 + rng.randrange(4))


def _not_json(rng: random.Random) -> Request:
    path, fields = _endpoint(rng)
    raw = bytearray(encode(_sound(fields, path)))
    for _ in range(rng.randint(1, 8)):
        raw[rng.randrange(len(raw))] = rng.randrange(256)
    whole = rng.choice(
        (bytes(raw), rng.randbytes(rng.randrange(200)), b"", b"null", b"[]", b'"\xff"')
    )
    return _post(path, whole, "not JSON")


def _deep(rng: random.Random) -> Request:
    path, fields = _endpoint(rng)
    depth = rng.choice((100, 2000, 100_000))
    left, right = rng.choice(((b"[", b"]"), (b'{"a":', b"}")))
    nested = left * depth + b"1" + right * depth
    name = rng.choice(fields).encode()
    return _post(path, b'{"%s": %s}' % (name, nested), f"{depth} deep")


def _cut_body(rng: random.Random) -> Request:
    """Fewer bytes than were promised; the client waits for nothing after them."""
    path, fields = _endpoint(rng)
    raw = encode(_sound(fields, path))
    made = _post(path, raw[: rng.randrange(len(raw))], "cut body", length=len(raw))
    return made._replace(is_http=False)


def _odd_path(rng: random.Random) -> Request:
    path = rng.choice((*GETS, *(path for path, _ in POSTS))).replace("{id}", _id(rng))
    path += rng.choice(("", "", "/", "//", "?" + "a=b&" * 500, "%", "/" + "b" * 9000, "#x", ";x"))
    return Request("odd path", f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode(), path[-1] != "%")


def _odd_method(rng: random.Random) -> Request:
    path = rng.choice((*GETS, *(path for path, _ in POSTS))).replace("{id}", "x")
    method = rng.choice(METHODS)
    raw = f"{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"
    return Request("odd method", raw.encode(), method != "BREW")


def _odd_headers(rng: random.Random) -> Request:
    path, fields = _endpoint(rng)
    value = rng.choice(("x" * 9000, "\xff\xfe", "", "a, b", "1e9", "-1", "\t", "Bearer  ", "null"))
    name = rng.choice(
        ("content-type", "authorization", "x-tenant-id", "expect", "accept", "x-" * 99)
    )
    raw = encode(_sound(fields, path))
    return _post(path, raw, f"header {name}", head=f"{name}: {value}\r\n")


def _wrong_length(rng: random.Random) -> Request:
    path, fields = _endpoint(rng)
    length = rng.choice(("-1", "1e3", "99999999999999999999", "0x10", " ", "1,1", str(1 << 31)))
    made = _post(path, encode(_sound(fields, path)), "wrong length", length=length)
    return made._replace(is_http=False)


def _garbage(rng: random.Random) -> Request:
    raw = rng.choice(
        (
            rng.randbytes(rng.randrange(1, 300)),
            b"GET\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 2000 + b"\r\n",
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        )
    )
    return Request("garbage", raw, is_http=False)
