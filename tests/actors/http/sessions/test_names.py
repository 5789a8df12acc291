"""The session of a request: bodies and headers of many clients, and what each becomes."""

import pytest
from starlette.datastructures import Headers

from mallee.actors.http.schemas import AnyRequest, Extras
from mallee.actors.http.sessions.names import MAX_SESSION, SessionNames, read_session
from mallee.protocol.errors import InvalidParameter

LONG = "s" * (MAX_SESSION + 1)
PLAIN = AnyRequest()


def read(headers: dict[str, str], request: AnyRequest = PLAIN) -> SessionNames:
    return read_session(request, Headers(headers))


@pytest.mark.parametrize(
    ("headers", "session", "parent"),
    [
        ({"X-Dynamo-Session-ID": "d"}, "d", ""),
        ({"x-dynamo-session-id": "d", "x-dynamo-parent-session-id": "p"}, "d", "p"),
        ({"x-claude-code-session-id": "c"}, "c", ""),
        ({"x-claude-code-session-id": "c", "x-claude-code-agent-id": "a"}, "c:a", "c"),
        (
            {
                "x-claude-code-session-id": "c",
                "x-claude-code-agent-id": "b",
                "x-claude-code-parent-agent-id": "a",
            },
            "c:b",
            "c:a",
        ),
        ({"thread-id": "t", "x-codex-parent-thread-id": "u"}, "t", "u"),
        ({"x-session-id": "o", "x-parent-session-id": "q"}, "o", "q"),
        ({"session-id": "l"}, "l", ""),
        ({"session_id": "l"}, "l", ""),
        ({"x-session-affinity": "l"}, "l", ""),
        ({"X-SMG-Routing-Key": "k"}, "k", ""),
        ({"x-correlation-id": "one of many requests"}, "", ""),
        ({"x-dynamo-parent-session-id": "p", "x-session-id": "o"}, "o", ""),
        ({"x-dynamo-session-id": "d", "x-dynamo-parent-session-id": "d"}, "d", ""),
        ({"x-dynamo-session-id": " d "}, "d", ""),
    ],
)
def test_each_client_s_headers_name_its_session(
    headers: dict[str, str], session: str, parent: str
) -> None:
    """F31, part: the sessions of agents, as their clients name them."""
    assert read(headers) == (session, parent, False)


def test_the_body_comes_first_and_headers_in_the_order_of_the_table() -> None:
    headers = {
        "x-smg-routing-key": "k",
        "x-session-affinity": "f",
        "session_id": "e",
        "x-session-id": "o",
        "thread-id": "t",
        "x-claude-code-session-id": "c",
        "x-dynamo-session-id": "d",
        "x-dynamo-parent-session-id": "p",
    }
    both = AnyRequest(session_id="v", mallee=Extras(session="m"))
    assert read(headers, both).session == "m"
    assert read(headers, AnyRequest(session_id="v")) == ("v", "", False)
    for name in ("d", "c", "t", "o", "e", "f", "k"):
        assert read(headers).session == name
        headers = {key: each for key, each in headers.items() if each != name}
    assert read(headers) == ("", "", False)


@pytest.mark.parametrize("bad", [LONG, "a\x07b", "", "a/fork", "a/record"])
def test_a_header_that_is_no_name_is_none_and_fails_no_request(bad: str) -> None:
    headers = {"x-dynamo-session-id": bad, "x-session-id": "o"}
    assert read(headers).session == "o"
    twice = Headers(raw=[(b"x-session-id", b"a"), (b"x-session-id", b"b")])
    assert read_session(PLAIN, twice).session == ""


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (AnyRequest(mallee=Extras(session=LONG)), "mallee.session"),
        (AnyRequest(mallee=Extras(session="a\nb")), "mallee.session"),
        (AnyRequest(session_id=LONG), "session_id"),
        (AnyRequest(session_id="a/fork"), "session_id"),
        (AnyRequest(mallee=Extras(session="a", parent_session=LONG)), "mallee.parent_session"),
        (AnyRequest(mallee=Extras(parent_session="p")), "mallee.parent_session"),
    ],
)
def test_a_body_that_names_it_wrongly_is_refused(request_: AnyRequest, param: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        read({}, request_)
    assert caught.value.fields["param"] == param


def test_the_last_request_of_a_session_says_so() -> None:
    for value, is_final in (("true", True), ("True", True), ("1", True), ("false", False)):
        given = {"x-dynamo-session-id": "d", "x-dynamo-session-final": value}
        assert read(given).is_final == is_final
    assert not read({"x-dynamo-session-final": "true"}).is_final
    assert read({}, AnyRequest(mallee=Extras(session="m", session_final=True))).is_final
