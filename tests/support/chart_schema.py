"""The schema of the chart's values: of the settings, values.yaml, and what Kubernetes alone knows."""

import json
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, Final

import yaml

from mallee.actors.front.picker.config import PickerConfig
from mallee.runtime.config import AppConfig

Schema = dict[str, Any]

# Settings that the chart makes, and the value to give instead; None where there is nothing to give.
MADE: Final[Mapping[str, str | None]] = {
    "model": "model",
    "served_model_name": "servedModelName",
    "workers": "workers.replicas",
    "gateways": "gateways.replicas",
    "nats_url": "nats.url",
    "nats_credentials": "nats.secret",
    "nats_worker_credentials": "nats.secret",
    "nats_ca": "nats.caSecret",
    "autoscaling": "autoscaling",
    "telemetry.metrics_host": "monitoring.metrics",
    "telemetry.metrics_port": "monitoring.port",
    "engine.device": "workers.gpus",
    "engine.disk_path": "workers.disk",
    "http.keys_file": "keys.secret",
    "links.tcp": None,
    "links.secret_file": "links.secret",
    "links.tls_cert": "links.tlsSecret",
    "links.tls_key": "links.tlsSecret",
    "links.tls_ca": "links.tlsSecret",
    "ray.worker_cpus": "workers.cpus",
    "ray.worker_gpus": "workers.gpus",
    "ray.worker_resources": "workers.perPod",
    "ray.gateway_resources": "gateways.replicas",
}
MADE_OF_PICKERS: Final[Mapping[str, str | None]] = {
    "listen": "picker.service.port",
    "health_listen": None,
    "metrics_listen": "monitoring.metrics",
    "tls_cert": "picker.tls.secret",
    "tls_key": "picker.tls.secret",
    "pool": "picker.pool",
    "namespace": None,
    "kubernetes_url": None,
    "endpoints": "picker.pool",
    "endpoints_file": "picker.pool",
    "model": "picker.model",
    "nats_url": "nats.url",
    "nats_credentials": "nats.secret",
    "nats_ca": "nats.caSecret",
    "fleet": None,
}
# Values that are settings under another name.
SAME: Final[Mapping[str, str]] = {
    "workers.replicas": "workers",
    "workers.gpus": "ray.worker_gpus",
    "gateways.replicas": "gateways",
    "autoscaling.minWorkers": "autoscaling.min_workers",
    "autoscaling.maxWorkers": "autoscaling.max_workers",
    "autoscaling.targetRows": "autoscaling.target_rows",
    "autoscaling.lowerAfterS": "autoscaling.lower_after_s",
    "haproxy.connectionsPerClient": "http.max_connections_per_client",
    "haproxy.maxConnections": "http.max_connections",
}
_TEXTS: Final = {"type": "object", "additionalProperties": {"type": "string"}}
_NAME: Final = {"pattern": r"^$|^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$"}
_QUANTITY: Final = {"pattern": r"^[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti)$"}
# A bare number would be written as Helm reads it (1000000: 1e+06), and Kubernetes refuses it.
_VARIABLE: Final = {
    "type": "object",
    "required": ["name"],
    "properties": {"name": {"type": "string"}, "value": {"type": "string"}},
}
_PORT: Final = {"type": "integer", "minimum": 1, "maximum": 65535}
# Of single values, or of all that end so, beyond what their default shows. The first that matches counts.
KUBERNETES: Final[Mapping[str, Schema]] = {
    "timeSlicing.replicas": {},
    "*.replicas": {"minimum": 1},
    "*.perPod": {"minimum": 1},
    "*.maxPods": {"minimum": 1},
    "*.cpus": {"type": "number", "exclusiveMinimum": 0, "minimum": None},
    "gateways.memory": {"pattern": "^$|" + _QUANTITY["pattern"]},
    "*.memory": _QUANTITY,
    "*.env": {"items": {"$ref": "#/$defs/Variable"}},
    "workers.disk.size": {"pattern": "^[1-9][0-9]*(Gi|Ti)$"},
    "*.size": _QUANTITY,
    "*.scratchSize": _QUANTITY,
    "*ecret": _NAME,
    "*.claim": _NAME,
    "*.pool": _NAME,
    "monitoring.port": {"minimum": 1024, "maximum": 65504},
    "*.port": _PORT,
    "*.targetPorts": {"items": _PORT, "minItems": 1, "maxItems": 8, "uniqueItems": True},
    "*.pullSecrets": {"items": {"type": "string"}},
    "*.keys": {"items": {"type": "string"}},
    "*.affinity": {"type": "object", "additionalProperties": True},
    "*.dashboardLabels": _TEXTS,
    "*.intervalS": {"minimum": 1},
    "*.longestStreamS": {"minimum": 1},
    "*.idlePodS": {"minimum": 10},
    "*.objectStoreBytes": {"minimum": 78643200},
    "*.user": {"minimum": 1},
    "workers.gpuResource": {"pattern": "^[a-z0-9.-]+/[A-Za-z0-9._-]+$"},
    "workers.disk.kind": {"enum": ["none", "ephemeral", "claim", "url"]},
    "workers.disk.url": {"pattern": "^$|^[a-z0-9+.-]+://"},
    "image.pullPolicy": {"enum": ["Always", "IfNotPresent", "Never"]},
    "gcs.backend": {"enum": ["none", "redis", "rocksdb"]},
    "gcs.redisAddress": {"pattern": r"^$|^[^@\s]+:[0-9]+$"},
    "ray.version": {"pattern": r"^2\.60(\.|$)"},
    "ray.auth": {"enum": ["token", "disabled"]},
    "ray.upgrade": {"enum": ["NewCluster", "None"]},
    "picker.inferencePool.failureMode": {"enum": ["FailOpen", "FailClose"]},
    "service.type": {"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
    "nats.url": {"pattern": "^$|^(nats|tls)://"},
    "topologySpread.whenUnsatisfiable": {"enum": ["ScheduleAnyway", "DoNotSchedule"]},
}


def schema_of(values_yaml: str) -> str:
    """The text of values.schema.json."""
    settings, definitions = _of_settings(AppConfig, "", MADE)
    pickers, more = _of_settings(PickerConfig, "Picker", MADE_OF_PICKERS)
    values = yaml.safe_load(values_yaml)
    comments = dict(comments_of(values_yaml))
    made = _section(values, "", comments, {"settings": settings, "picker.settings": pickers})
    made["properties"]["global"] = {"type": "object"}
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Values of the chart"}
    defined = {**definitions, **more, "Variable": _VARIABLE}
    return json.dumps({**head, **made, "$defs": defined}, indent=1) + "\n"


def comments_of(values_yaml: str) -> Iterator[tuple[str, str]]:
    """The comment right above each value of values.yaml."""
    path: list[str] = []
    comment = ""
    for line in values_yaml.splitlines():
        stripped = line.strip()
        if stripped.startswith("#"):
            comment = stripped.removeprefix("# ")
            continue
        key, colon, _ = stripped.partition(":")
        if colon and not stripped.startswith("-"):
            path[(len(line) - len(line.lstrip())) // 2 :] = [key]
            if comment:
                yield ".".join(path), comment
        comment = ""


def _section(
    values: Mapping[str, Any], prefix: str, comments: Mapping[str, str], given: Mapping[str, Schema]
) -> Schema:
    """A section of values.yaml. A mapping with a comment of its own is a value."""
    properties: Schema = {}
    for key, default in values.items():
        path = f"{prefix}{key}"
        if path in given:
            properties[key] = given[path]
        elif path in comments:
            made = {"description": comments[path], **_value(path, default)}
            properties[key] = {name: part for name, part in made.items() if part is not None}
        else:
            properties[key] = _section(default, f"{path}.", comments, given)
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _value(path: str, default: Any) -> Schema:
    if path in SAME:
        return _of_setting(SAME[path])
    match default:
        case bool():
            made: Schema = {"type": "boolean"}
        case int():
            made = {"type": "integer", "minimum": 0}
        case float():
            made = {"type": "number", "minimum": 0}
        case str():
            made = {"type": "string", "minLength": 1 if default else None}
        case list():
            made = {"type": "array", "items": {"type": "object"}}
        case _:
            made = dict(_TEXTS)
    known = next((each for name, each in KUBERNETES.items() if fnmatchcase(path, name)), {})
    return {**made, **known}


def _of_setting(path: str) -> Schema:
    """The schema of a setting that a value gives; where it may be null, the value is left out."""
    section, _, name = path.rpartition(".")
    model: Any = AppConfig.model_fields[section].annotation if section else AppConfig
    field = model.model_json_schema()["properties"][name]
    (made,) = (each for each in field.get("anyOf", [field]) if each["type"] != "null")
    return {key: part for key, part in made.items() if key not in _UNUSED}


_UNUSED: Final = ("title", "default", "description", "required")


def _of_settings(
    model: type[AppConfig | PickerConfig], prefix: str, made: Mapping[str, str | None]
) -> tuple[Schema, Schema]:
    """Settings that may be given beside the chart's own, and the definitions of their sections."""
    whole: Schema = model.model_json_schema(ref_template=f"#/$defs/{prefix}{{model}}")
    sections: Schema = whole.pop("$defs")
    names = {name: field.annotation.__name__ for name, field in model.model_fields.items()
             if getattr(field.annotation, "__name__", "") in sections}  # fmt: skip
    for path, value in made.items():
        section, _, name = path.rpartition(".")
        owner = sections[names[section]] if section else whole
        remedy = (
            "made by the chart alone" if value is None else f"given by the chart's value {value}"
        )
        owner["properties"][name] = {"const": remedy}
    for each in (whole, *sections.values()):
        each.pop("title")
        each.pop("required", None)
        for field in each["properties"].values():
            field.pop("title", None)
            if "$ref" in field:
                field.pop("default")
            if "off" in field.get("enum", ()):  # which YAML reads as false
                del field["type"]
                field["enum"].append(False)
    return whole, {f"{prefix}{name}": each for name, each in sections.items()}
