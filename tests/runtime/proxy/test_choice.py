"""The choice of the HTTP proxy, and what of it listens where."""

import stat
from importlib.util import find_spec
from pathlib import Path

import pytest

from mallee.runtime.proxy import choice as proxy
from mallee.runtime.proxy.haproxy import closed, flaws, limited, main


@pytest.fixture
def binary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program in the place of HAProxy; nothing else is chosen in the environment."""
    path = tmp_path / "haproxy-of-mine"
    path.write_text('#!/bin/sh\necho "$@"\n')
    path.chmod(0o755)
    monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", str(path))
    monkeypatch.delenv(proxy.SWITCH, raising=False)
    return path


def test_haproxy_is_taken_where_it_runs_with_every_file_in_the_private_folder(
    binary: Path, tmp_path: Path
) -> None:
    found = proxy.serving_environment(tmp_path)
    assert found[proxy.SWITCH] == "1"
    launcher = Path(found["RAY_SERVE_HAPROXY_BINARY_PATH"])
    assert stat.S_IMODE(launcher.stat().st_mode) == 0o700
    assert str(binary) in launcher.read_text()
    paths = [value for value in found.values() if value.startswith("/")]
    assert len(paths) == 6
    assert all(Path(path).is_relative_to(tmp_path) for path in paths)


@pytest.mark.usefixtures("binary")
def test_the_operator_has_the_last_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(proxy.SWITCH, "0")
    assert proxy.serving_environment(tmp_path) == {}
    assert proxy.advice() is None


def test_where_it_does_not_run_there_is_none(
    binary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    binary.write_text("#!/bin/sh\nexit 1\n")
    assert proxy.haproxy_binary() is None
    assert proxy.serving_environment(tmp_path) == {}
    assert proxy.advice() is None
    monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", str(tmp_path / "missing"))
    assert proxy.haproxy_binary() is None


@pytest.mark.usefixtures("binary")
def test_the_slower_proxy_is_pointed_out_unless_it_was_chosen() -> None:
    advice = proxy.advice()
    assert advice is not None
    assert f"{proxy.SWITCH}=1" in advice


FRONTEND = ("{{ config.frontend_host }}:{{ config.frontend_port }}", "127.0.0.1:8000")
PORTS = (("{{ config.metrics_port }}", "9101"), ("{{ config.stats_port }}", "8404"))


def template(*filled: tuple[str, str]) -> str:
    """The configuration that the installed Ray writes, with some of its places filled in."""
    spec = find_spec("ray")  # not imported: that takes seconds
    assert spec is not None
    assert spec.origin is not None
    text = (Path(spec.origin).parent / "serve/_private/haproxy_templates.py").read_text()
    for place, value in filled:
        text = text.replace(place, value)
    return text


def test_rays_template_takes_the_limits() -> None:
    """It has the places that are looked for."""
    found = limited(template(FRONTEND), 7)
    assert found.count("timeout http-request 10s") == found.count("option srvtcpka\n") == 1
    assert found.count("sc0_conn_cur gt 7 }") == 1
    assert found.index("!{ path /-/healthz }") < found.index("acl routes path -i /-/routes")
    assert limited(found, 7) == found
    assert [flaw.partition("'bind")[0].partition("'stats")[0] for flaw in flaws(found, 7)] == [
        "others may write to ",
        "'frontend prometheus' listens on an address: ",
        "'listen stats' listens on an address: ",
    ]


@pytest.mark.parametrize(
    ("before", "after", "flaw"),
    [
        ("frontend http_frontend", "frontend main", "'frontend http_frontend' takes no line"),
        (
            "    mode http\n",
            "    mode tcp\n",
            "'defaults' takes no line 'timeout http-request 10s'",
        ),
        ("frontend prometheus", "frontend metrics", "'frontend metrics' listens on an address"),
        ("mode 666", "mode 0666", "others may write to"),
    ],
)
def test_a_configuration_of_ray_that_is_not_known_starts_nothing(
    before: str, after: str, flaw: str, tmp_path: Path
) -> None:
    written = template(FRONTEND, *PORTS, ("{{ config.socket_path }}", "/x/admin.sock"))
    path = tmp_path / "haproxy.cfg"
    path.write_text(written.replace(before, after))
    with pytest.raises(SystemExit, match="HAProxy is not started") as ended:
        main("7", "/bin/false", "-f", str(path))
    assert flaw in str(ended.value)
    assert path.read_text() == written.replace(before, after)
    assert flaws(limited(closed(written, tmp_path), 7), 7) == []


def test_ray_side_doors_become_sockets_of_the_folder(tmp_path: Path) -> None:
    """Nothing but the API listens on an address."""
    found = closed(template(*PORTS), tmp_path)
    doors = [line.split()[1] for line in found.splitlines() if line.strip().startswith("bind ")]
    side = [door for door in doors if "frontend_host" not in door and door != "{{"]
    assert side == [f"unix@{tmp_path}/prometheus.sock", f"unix@{tmp_path}/stats.sock"]
    assert closed(found, tmp_path) == found
