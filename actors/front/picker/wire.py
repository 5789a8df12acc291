"""Protobuf of Envoy's external processing and of gRPC's health checks, to and from plain values.

The messages are described here, field by field, and made when this module is loaded: packages with all of
Envoy's messages overwrite files of `googleapis-common-protos` and of OpenTelemetry. Fields that a picker has
no use for are left out; protobuf skips them.
Source: envoyproxy/envoy 1.39 (service/ext_proc/v3, config/core/v3/base, type/v3/http_status,
extensions/filters/http/ext_proc/v3/processing_mode), grpc/grpc-proto grpc/health/v1.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final, get_args

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2
from google.protobuf.message import DecodeError

from mallee.actors.front.picker.messages import (
    DESTINATION,
    LB_NAMESPACE,
    SERVED,
    SUBSET,
    SUBSET_NAMESPACE,
    Body,
    BodyMode,
    Destination,
    Headers,
    Incoming,
    Modes,
    Passed,
    Piece,
    Reply,
    Side,
    Trailers,
)
from mallee.actors.front.placement import Refusal
from mallee.protocol.errors import CodecError

PROCESS: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
HEALTH: Final = "grpc.health.v1.Health"
_PACKAGE: Final = "mallee.epp"
_OVERWRITE: Final = 2  # HeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD

_Field = descriptor_pb2.FieldDescriptorProto
_KINDS: Final = {
    "bool": _Field.TYPE_BOOL,
    "bytes": _Field.TYPE_BYTES,
    "int32": _Field.TYPE_INT32,
    "string": _Field.TYPE_STRING,
    "uint32": _Field.TYPE_UINT32,
}
_Fields = Mapping[str, tuple[int, str]]  # field: (number, type)


def _exchange(first: int, union: str, *, headers: str, body: str, trailers: str) -> _Fields:
    """One field for each part of the request and of the response, by turns, of which one is set."""
    parts = {"headers": headers, "body": body, "trailers": trailers}
    names = [(f"{side}_{part}", kind) for part, kind in parts.items() for side in get_args(Side)]
    return {name: (first + i, f"{kind}|{union}") for i, (name, kind) in enumerate(names)}


# `*` repeats a field; of fields with the same `|name` one is set.
_MESSAGES: Final[Mapping[str, _Fields]] = {
    "HeaderValue": {"key": (1, "string"), "value": (2, "string"), "raw_value": (3, "bytes")},
    "HeaderValueOption": {"header": (1, "HeaderValue"), "append_action": (3, "int32")},
    "HeaderMap": {"headers": (1, "*HeaderValue")},
    "HeaderMutation": {"set_headers": (1, "*HeaderValueOption")},
    "MetadataEntry": {"key": (1, "string"), "value": (2, "Struct")},
    "Metadata": {"filter_metadata": (1, "*MetadataEntry")},
    "HttpHeaders": {"headers": (1, "HeaderMap"), "end_of_stream": (3, "bool")},
    "HttpBody": {"body": (1, "bytes"), "end_of_stream": (2, "bool")},
    "HttpTrailers": {"trailers": (1, "HeaderMap")},
    "ProtocolConfiguration": {
        "request_body_mode": (1, "int32"),
        "response_body_mode": (2, "int32"),
    },
    "ProcessingRequest": {
        **_exchange(2, "request", headers="HttpHeaders", body="HttpBody", trailers="HttpTrailers"),
        "metadata_context": (8, "Metadata"),
        "observability_mode": (10, "bool"),
        "protocol_config": (11, "ProtocolConfiguration"),
    },
    "BodyMutation": {"streamed_response": (3, "HttpBody")},  # StreamedBodyResponse has its fields
    "CommonResponse": {
        "header_mutation": (2, "HeaderMutation"),
        "body_mutation": (3, "BodyMutation"),
        "clear_route_cache": (5, "bool"),
    },
    "Response": {"response": (1, "CommonResponse")},  # of headers and of a body
    "TrailersResponse": {"header_mutation": (1, "HeaderMutation")},
    "HttpStatus": {"code": (1, "int32")},
    "ImmediateResponse": {
        "status": (1, "HttpStatus"),
        "headers": (2, "HeaderMutation"),
        "body": (3, "bytes"),
        "details": (5, "string"),
    },
    "ProcessingResponse": {
        **_exchange(
            1, "response", headers="Response", body="Response", trailers="TrailersResponse"
        ),
        "immediate_response": (7, "ImmediateResponse|response"),
        "dynamic_metadata": (8, "Struct"),
    },
    "HealthCheckRequest": {"service": (1, "string")},
    "HealthCheckResponse": {"status": (1, "int32")},
}


def _made() -> dict[str, Any]:
    """The classes of all messages, in a pool of their own: others may have Envoy's messages loaded."""
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(struct_pb2.DESCRIPTOR.serialized_pb)
    file = descriptor_pb2.FileDescriptorProto(
        name="mallee/epp.proto",
        package=_PACKAGE,
        syntax="proto3",
        dependency=[struct_pb2.DESCRIPTOR.name],
    )
    for name, fields in _MESSAGES.items():
        _describe(file.message_type.add(name=name), fields)
    pool.Add(file)
    find = pool.FindMessageTypeByName
    return {name: message_factory.GetMessageClass(find(f"{_PACKAGE}.{name}")) for name in _MESSAGES}


def _describe(message: Any, fields: _Fields) -> None:
    unions: list[str] = []
    for name, (number, written) in fields.items():
        kind, _, union = written.removeprefix("*").partition("|")
        field = message.field.add(name=name, number=number)
        field.label = _Field.LABEL_REPEATED if written[0] == "*" else _Field.LABEL_OPTIONAL
        if kind in _KINDS:
            field.type = _KINDS[kind]
        else:
            field.type = _Field.TYPE_MESSAGE
            package = "google.protobuf" if kind == "Struct" else _PACKAGE
            field.type_name = f".{package}.{kind}"
        if union:
            if union not in unions:
                unions.append(union)
                message.oneof_decl.add(name=union)
            field.oneof_index = unions.index(union)


_CLASSES: Final = _made()
ProcessingRequest: Final = _CLASSES["ProcessingRequest"]
ProcessingResponse: Final = _CLASSES["ProcessingResponse"]
HealthCheckRequest: Final = _CLASSES["HealthCheckRequest"]
HealthCheckResponse: Final = _CLASSES["HealthCheckResponse"]


def read(raw: bytes) -> Incoming:
    """Envoy's message. Raises CodecError for one that a picker can't read."""
    try:
        message = ProcessingRequest.FromString(raw)
    except DecodeError as error:
        raise CodecError(f"a message of {len(raw)} bytes is no ProcessingRequest") from error
    kind = message.WhichOneof("request")
    if kind is None:
        raise CodecError("a ProcessingRequest without headers, body or trailers")
    side: Side = "request" if kind.startswith("request_") else "response"
    found = getattr(message, kind)
    part: Headers | Body | Trailers
    if kind.endswith("_headers"):
        part = Headers(side, _headers(found.headers.headers), found.end_of_stream)
    elif kind.endswith("_body"):
        part = Body(side, found.body, found.end_of_stream)
    else:
        part = Trailers(side)
    subset, served = None, None
    if message.HasField("metadata_context"):
        subset, served = _hints(message.metadata_context.filter_metadata)
    modes = None
    if message.HasField("protocol_config"):
        config = message.protocol_config
        modes = _modes(config.request_body_mode, config.response_body_mode)
    return Incoming(part, subset, served, modes, message.observability_mode)


def write(reply: Reply) -> bytes:
    """A reply as Envoy reads it."""
    message = ProcessingResponse()
    match reply:
        case Passed("trailers", side):
            getattr(message, f"{side}_trailers").SetInParent()
        case Passed(part, side, destination):
            common = getattr(message, f"{side}_{part}").response
            common.SetInParent()
            if destination is not None:
                common.clear_route_cache = True
                _add(common.header_mutation, [(DESTINATION, destination.value)])
                _add_metadata(message, destination)
        case Piece(side, data, ends):
            common = getattr(message, f"{side}_body").response
            streamed = common.body_mutation.streamed_response
            streamed.body = data
            streamed.end_of_stream = ends
        case Refusal():
            _refuse(message.immediate_response, reply)
    raw: bytes = message.SerializeToString()
    return raw


def _headers(found: Iterable[Any]) -> dict[str, str]:
    """By name; of those that come several times the last."""
    return {
        each.key: each.raw_value.decode("utf-8", "replace") if each.raw_value else each.value
        for each in found
    }


def _modes(request: int, response: int) -> Modes:
    try:
        return Modes(BodyMode(request), BodyMode(response))
    except ValueError as error:
        raise CodecError(f"body modes {request} and {response}: {error}") from error


def _hints(entries: Iterable[Any]) -> tuple[tuple[str, ...] | None, str | None]:
    """The subset that alone may be picked, and the endpoint that served."""
    subset: tuple[str, ...] | None = None
    served: str | None = None
    for entry in entries:
        fields = entry.value.fields
        if entry.key == SUBSET_NAMESPACE and SUBSET in fields:
            subset = _endpoints(fields[SUBSET])
        elif entry.key == LB_NAMESPACE and SERVED in fields:
            served = fields[SERVED].string_value or None
    return subset, served


def _endpoints(value: Any) -> tuple[str, ...]:
    """Endpoints of a list, or of a text with commas as some proxies send it."""
    if value.WhichOneof("kind") == "list_value":
        return tuple(each.string_value for each in value.list_value.values)
    return tuple(filter(None, map(str.strip, value.string_value.split(","))))


def _add(mutation: Any, headers: Iterable[tuple[str, str]]) -> None:
    for key, value in headers:
        option = mutation.set_headers.add(append_action=_OVERWRITE)
        option.header.key = key
        option.header.raw_value = value.encode()


def _add_metadata(message: Any, destination: Destination) -> None:
    inner = message.dynamic_metadata.fields[LB_NAMESPACE].struct_value
    inner.fields[DESTINATION].string_value = destination.value


def _refuse(message: Any, refusal: Refusal) -> None:
    message.status.code = refusal.status
    message.details = refusal.code
    message.body = refusal.body
    headers = [("content-type", "application/json")]
    if refusal.retry_after_s is not None:
        headers.append(("retry-after", str(refusal.retry_after_s)))
    _add(message.headers, headers)
