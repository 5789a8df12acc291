"""The Helm chart: rendered by Helm's own engine, and the files of it that are written from the code.

python tests/support/chart.py    writes values.schema.json and the accounts of NATS
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

CHART: Final = Path(__file__).resolve().parents[2] / "helm" / "mallee"
SCHEMA: Final = CHART / "values.schema.json"
NAMESPACE: Final = "llm"
IMAGE: Final[Mapping[str, Any]] = {"image": {"repository": "registry.example/mallee"}}
MINIMAL: Final[Mapping[str, Any]] = {**IMAGE, "model": "Qwen/Qwen3-0.6B"}
PICKERS: Final[Mapping[str, Any]] = {  # alone, without Ray
    **IMAGE,
    "ray": {"enabled": False},
    "picker": {
        "enabled": True,
        "model": "Qwen/Qwen3-8B",
        "inferencePool": {"create": True, "selector": {"app": "vllm"}},
    },
}
ACCOUNTS: Final = CHART / "files" / "nats-accounts.conf"

Object = dict[str, Any]


class Refused(Exception):
    """Helm does not render these values; the message is what `helm install` prints."""


def merged(*all_values: Mapping[str, Any]) -> Object:
    """Values over those before, as of several `-f`."""
    result: Object = {}
    for values in all_values:
        for key, value in values.items():
            old = result.get(key)
            is_both = isinstance(value, Mapping) and isinstance(old, Mapping)
            result[key] = merged(old or {}, value) if is_both else value
    return result


def values_of(file: str) -> Object:
    """The values of a file of the chart, such as `values-cpu.yaml`."""
    found: Object = yaml.safe_load((CHART / file).read_text())
    return found


def rendered(*values: Mapping[str, Any], name: str = "mallee") -> dict[str, str]:
    """Manifests by their template, of an image unless the values say otherwise. Raises Refused."""
    from helm_python import Chart, HelmError  # not on every platform

    with Chart.load(CHART) as chart:
        try:
            return chart.render(merged(IMAGE, *values), name=name, namespace=NAMESPACE)
        except HelmError as error:
            raise Refused(str(error)) from error


def faults(values: Mapping[str, Any]) -> list[str]:
    """Faults that `helm lint --strict` finds."""
    from helm_python.chart import lint  # not on every platform

    report = lint(CHART, merged(IMAGE, values), strict=True, namespace=NAMESPACE)
    severe = [each["error"] for each in report["messages"] if each["severity"] > 1]
    return [*severe, *report["errors"]]


def objects(*values: Mapping[str, Any], name: str = "mallee") -> list[Object]:
    """All objects of a release."""
    found = []
    for template, manifest in rendered(*values, name=name).items():
        if template.endswith(".yaml"):
            found += [each for each in yaml.safe_load_all(manifest) if each]
    return found


def one(found: list[Object], kind: str, name: str | None = None) -> Object:
    """The object of that kind, and name if there are several. Fails if there is none."""
    (match,) = (
        each for each in found if each["kind"] == kind and name in (None, each["metadata"]["name"])
    )
    return match


def serve_config(found: list[Object]) -> Object:
    """The config that KubeRay deploys."""
    config: Object = yaml.safe_load(one(found, "RayService")["spec"]["serveConfigV2"])
    return config


def settings(found: list[Object]) -> Object:
    """Mallee's settings in it."""
    made: Object = serve_config(found)["applications"][0]["args"]
    return made


def groups(found: list[Object]) -> dict[str, Object]:
    """The head and the worker groups of the cluster by their name; none in a release without Ray."""
    if not any(each["kind"] == "RayService" for each in found):
        return {}
    cluster = one(found, "RayService")["spec"]["rayClusterConfig"]
    return {
        "head": cluster["headGroupSpec"],
        **{each["groupName"]: each for each in cluster["workerGroupSpecs"]},
    }


def pods(found: list[Object]) -> dict[str, Object]:
    """Each kind of pod, as `{metadata, spec}`, by its component."""
    templates = [group["template"] for group in groups(found).values()]
    owners = ("StatefulSet", "Deployment", "Job")
    templates += [_template(each["spec"]) for each in found if each["kind"] in owners]
    templates += [each for each in found if each["kind"] == "Pod"]
    return {
        each["metadata"]["labels"]["app.kubernetes.io/component"]: {
            "metadata": each["metadata"],
            "spec": each["spec"],
        }
        for each in templates
    }


def _template(spec: Object) -> Object:
    """The pods of a StatefulSet or another owner, with a volume for each claim."""
    template: Object = spec["template"]
    claims = [
        {"name": name, "persistentVolumeClaim": {"claimName": name}}
        for name in [each["metadata"]["name"] for each in spec.get("volumeClaimTemplates", ())]
    ]
    if not claims:
        return template
    pod = template["spec"]
    return {**template, "spec": {**pod, "volumes": [*pod["volumes"], *claims]}}


def containers(found: list[Object]) -> Iterator[tuple[str, Object]]:
    """All containers with their pod's component, also those that run first."""
    for component, pod in pods(found).items():
        for each in (*pod["spec"]["containers"], *pod["spec"].get("initContainers", ())):
            yield component, each


def schema() -> str:
    """The schema of the values as it should be."""
    from support.chart_schema import schema_of

    return schema_of((CHART / "values.yaml").read_text())


def accounts() -> str:
    """The accounts of NATS as `mallee settings` prints them, for any fleet with one store."""
    from mallee.runtime.bus.accounts import authorization

    printed = authorization("FLEET", gateway="$GATEWAYS_PASSWORD", worker="$WORKERS_PASSWORD")
    return (
        "# `mallee settings --nats-permissions FLEET`, for all fleets: an upgrade has two, and one STORE.\n"
        + printed.replace("mallee.FLEET.", "mallee.*.").replace("mallee_FLEET_", "mallee_STORE_")
    )


if __name__ == "__main__":
    ACCOUNTS.write_text(accounts())
    SCHEMA.write_text(schema())
