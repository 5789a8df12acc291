"""A service on this machine that does not start."""

from pathlib import Path
from typing import Any

import pytest

from mallee.actors.config import AppConfig
from mallee.actors.local import RAY_STARTS, LocalStack
from mallee.protocol.errors import ConfigError
from support.mock_scene import make_folder


@pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20")  # Ray's
def test_a_ray_that_is_late_is_one_error_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray raises a bare exception then, and is started again; all others go on as they are, bare ones too."""
    late = Exception("The current node timed out during startup.")
    raised: list[Exception] = [
        *[late] * RAY_STARTS,
        late,
        Exception("Head node session dir not found in NodeInfo."),
        OSError("no file"),
    ]

    def init(**options: Any) -> None:
        raise raised.pop(0)

    monkeypatch.setattr("ray.init", init)
    config = AppConfig.model_validate(
        {"model": str(make_folder(tmp_path)), "engine": {"kind": "mock"}}
    )
    with pytest.raises(ConfigError, match=r"Ray did not start, 3 times: .*timed out.*try again"):
        LocalStack(config, port=0).start()
    with pytest.raises(Exception, match="session dir") as found:
        LocalStack(config, port=0).start()
    assert type(found.value) is Exception
    with pytest.raises(OSError, match="no file"):
        LocalStack(config, port=0).start()
