"""Installs and upgrades by Helm's engine, against a server that stores what it is given."""

import base64
from collections.abc import Iterator
from typing import Any

import pytest

from support.chart import CHART, MINIMAL, NAMESPACE, PICKERS, Object, merged
from support.fake_kubernetes import KINDS, Kubernetes, kubernetes

pytestmark = pytest.mark.process

MADE = {
    "mallee-ray-token": {"auth_token"},
    "mallee-link": {"secret"},
    "mallee-operator": {"key"},
    "mallee-nats": {
        *("gateways", "workers"),
        *("gateways-password", "workers-password", "routes-password"),
    },
}


@pytest.fixture
def cluster() -> Iterator[Kubernetes]:
    with kubernetes() as made:
        yield made


class Release:
    """A release called mallee, and what `helm` does with it."""

    def __init__(self, cluster: Kubernetes) -> None:
        from helm_python import Config

        self.helm = Config(
            kube_apiserver=cluster.url,
            kubeconfig_content="apiVersion: v1\nkind: Config\n",
            namespace=NAMESPACE,
            storage_driver="memory",
        )

    def install(self, values: dict[str, Any]) -> Object:
        return self.helm.install(CHART, "mallee", merged(MINIMAL, values), namespace=NAMESPACE)

    def upgrade(self, values: dict[str, Any]) -> Object:
        return self.helm.upgrade(CHART, "mallee", merged(MINIMAL, values), namespace=NAMESPACE)


def secrets_of(cluster: Kubernetes) -> dict[str, dict[str, str]]:
    return {name: cluster.secret(NAMESPACE, name) for name in MADE}


def test_secrets_are_made_once_kept_over_upgrades_and_taken_away_with_the_release(
    cluster: Kubernetes,
) -> None:
    release = Release(cluster)
    release.install({})
    first = secrets_of(cluster)
    assert {name: set(data) for name, data in first.items()} == MADE
    plain = {k: base64.b64decode(v).decode() for data in first.values() for k, v in data.items()}
    assert all(len(secret) > 40 for secret in plain.values())
    assert plain["gateways"] == f"gateways:{plain['gateways-password']}"
    release.upgrade({"workers": {"replicas": 3}})
    release.upgrade({"image": {"tag": "0.2.0"}})
    assert secrets_of(cluster) == first
    path = f"/apis/ray.io/v1/namespaces/{NAMESPACE}/rayservices/mallee"
    head = cluster.objects[path]["spec"]["rayClusterConfig"]["headGroupSpec"]
    assert head["template"]["spec"]["containers"][0]["image"].endswith(":0.2.0")
    release.upgrade({"timeSlicing": {"replicas": 2}, "ingress": {"enabled": True, "host": "x"}})
    assert len(cluster.objects) > 15
    release.helm.uninstall("mallee")
    assert cluster.objects == {}


def test_a_kuberay_that_is_too_old_is_refused_before_anything_is_made(
    cluster: Kubernetes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RayCronJob came with 1.6, as `authOptions.secretName` did, which older CRDs would drop."""
    from helm_python import HelmError

    monkeypatch.delitem(KINDS["ray.io/v1"], "RayCronJob")
    with pytest.raises(HelmError, match=r"KubeRay here is older than 1\.6"):
        Release(cluster).install({})
    assert cluster.objects == {}


def test_a_password_that_was_changed_is_kept_and_its_login_follows(cluster: Kubernetes) -> None:
    """And a key that is missing, as after an upgrade of the chart, is made."""
    release = Release(cluster)
    release.install({})
    stored = cluster.secret(NAMESPACE, "mallee-nats")
    gateways = stored["gateways"]
    stored["workers-password"] = base64.b64encode(b"pchanged").decode()
    del stored["routes-password"]
    release.upgrade({})
    now = secrets_of(cluster)["mallee-nats"]
    assert base64.b64decode(now["workers"]) == b"workers:pchanged"
    assert now["gateways"] == gateways
    assert len(base64.b64decode(now["routes-password"])) > 40


def test_a_release_of_pickers_keeps_their_certificate_and_leaves_nothing(
    cluster: Kubernetes,
) -> None:
    release = Release(cluster)
    release.install(dict(PICKERS))
    first = dict(cluster.secret(NAMESPACE, "mallee-picker-tls"))
    release.upgrade(merged(PICKERS, {"picker": {"replicas": 3}}))
    assert cluster.secret(NAMESPACE, "mallee-picker-tls") == first
    path = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/mallee-picker"
    assert cluster.objects[path]["spec"]["replicas"] == 3
    release.helm.uninstall("mallee")
    assert cluster.objects == {}


def test_secrets_of_the_user_are_not_made(cluster: Kubernetes) -> None:
    Release(cluster).install(
        {
            "ray": {"tokenSecret": "a"},
            "links": {"secret": "b"},
            "keys": {"operatorSecret": "c"},
            "nats": {"secret": "d"},
        }
    )
    assert not [path for path in cluster.objects if "/secrets/" in path]


def test_a_wrong_setting_ends_an_install_and_an_upgrade_with_its_message(
    cluster: Kubernetes,
) -> None:
    """By the hook, before anything of the release is made or changed."""
    from helm_python import HelmError

    wrong = {"autoscaling": {"enabled": True, "maxWorkers": 1}}
    release = Release(cluster)
    with pytest.raises(HelmError, match="pre-install"):
        release.install(wrong)
    assert {path.rpartition("/")[2] for path in cluster.objects} == {"mallee-check"}
    assert "workers=2: give 1 to 1, as autoscaling.min_workers" in cluster.logs[-1]
    Release(cluster).helm.close()
    release = Release(cluster)
    release.install({})
    assert not [path for path in cluster.objects if path.endswith("/mallee-check")]
    before = dict(cluster.objects)
    with pytest.raises(HelmError, match="pre-upgrade"):
        release.upgrade(wrong)
    assert before.items() <= cluster.objects.items()
    assert len(cluster.logs) == 3
