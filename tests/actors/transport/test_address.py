"""Addresses in leases: text and back, and the way that a gateway takes."""

import pytest

from mallee.actors.transport.address import Address, parse_address
from mallee.protocol.errors import CodecError, ConfigError


@pytest.mark.parametrize(
    "address",
    [
        Address("n1", "/tmp/m/w0.sock"),
        Address("n1", "/tmp/m/w0.sock", ("10.0.0.3", 4567)),
        Address("", None, ("::1", 1)),
        Address("", "/w.sock"),
    ],
)
def test_an_address_is_its_text(address: Address) -> None:
    assert parse_address(str(address)) == address


def test_the_way_depends_on_the_node() -> None:
    address = Address("n1", "/tmp/w0.sock", ("10.0.0.3", 4567))
    assert address.way_from("n1") == "/tmp/w0.sock"
    assert address.way_from("n2") == ("10.0.0.3", 4567)
    with pytest.raises(ConfigError, match="own node alone"):
        address._replace(tcp=None).way_from("n2")


@pytest.mark.parametrize(
    "text",
    [
        "", "here", "node=n1", "unix:w0.sock", "tcp:host", "tcp::1", "tcp:h:0", "tcp:h:65536",
        "tcp:h:x", "unix:/a;;", "unix:/" + "a" * 107, "node=" + "n" * 2000 + ";tcp:h:1",
    ],
)  # fmt: skip
def test_other_text_is_no_address(text: str) -> None:
    with pytest.raises(CodecError, match="not an address"):
        parse_address(text)
