"""Timings by name and from files: of `mallee profile`, and of Dynamo."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mallee.mocker.timing import Timing, load_timing
from mallee.mocker.timing.dynamo import DynamoTable, gridded, load_npz
from mallee.mocker.timing.files import GridData, TimingFile, read_timing
from mallee.mocker.timing.grid import Decodes, Prefills
from mallee.mocker.timing.profiles import DEFAULT_TIMING, fits_table, fitted, kv_room, timing_names
from mallee.protocol.errors import ConfigError

ISL, TTFT = [100.0, 1000.0, 4000.0], [0.02, 0.05, 0.2]
ACTIVE, CONTEXT = [1000.0, 20_000.0, 100_000.0], [350.0, 3000.0]
ITL = [[0.005, 0.004], [0.012, 0.008], [0.03, 0.02]]


def table() -> DynamoTable:
    return DynamoTable(ISL, TTFT, ACTIVE, CONTEXT, ITL)


def profile() -> TimingFile:
    return TimingFile(
        conditions={"model": "tiny", "threads": 2},
        kv_bytes_per_token=64,
        jitter=0.05,
        shares_reads=True,
        model=GridData(
            Prefills((16, 64), (0, 256), ((0.01, 0.02), (0.03, 0.04))),
            Decodes((1, 8), (32, 512), ((0.01, 0.011), (0.012, 0.02))),
        ),
    )


def test_dynamos_table_is_exact_at_its_points_and_clamped_outside() -> None:
    """K20: 1-D over new tokens, 2-D over (KV tokens in use, mean context)."""
    model = table()
    for isl, seconds in zip(ISL, TTFT, strict=True):
        assert model.prefill_s(int(isl), 12345) == pytest.approx(seconds, rel=1e-12)
    assert model.prefill_s(1, 0) == TTFT[0]
    assert model.prefill_s(10**6, 0) == TTFT[-1]
    assert model.prefill_s(2500, 0) == pytest.approx((0.05 + 0.2) / 2)
    assert model.decode_s(2, 1000.0) == pytest.approx(0.005 + (0.004 - 0.005) * (150 / 2650))
    assert model.decode_s(1, 1e9) == ITL[-1][-1]
    assert model.decode_s(10_000, 500.0) == ITL[0][0]
    rows = round(60_000 / 3000)
    assert model.decode_s(rows, rows * 3000.0) == pytest.approx((0.008 + 0.02) / 2)
    # Prefill and decode of a pass add up.
    wanted = model.prefill_s(1100, 0) + model.decode_s(3, 3000.0)
    found = Timing(model).step_s([(1000, 0), (100, 500)], 3, 3000.0)
    assert found == pytest.approx(wanted)


def test_both_sets_of_dynamos_keys_are_read(tmp_path: Path) -> None:
    """K20: an NPZ file of the planner has points, one of the mocker a grid."""
    active, context = np.meshgrid(ACTIVE, CONTEXT, indexing="ij")
    ttft_ms, itl_ms = 1000 * np.array(TTFT), 1000 * np.array(ITL)
    planner = {
        "prefill_ttft": ttft_ms,
        "x_kv_usage": active.ravel() / 200_000,
        "y_context_length": context.ravel(),
        "z_itl": itl_ms.ravel(),
        "max_kv_tokens": np.array([200_000]),
    }
    mocker = {
        "prefill_ttft_ms": ttft_ms,
        "decode_active_kv_tokens": np.array(ACTIVE),
        "decode_context_length": np.array(CONTEXT),
        "decode_itl": itl_ms,
    }
    for each in (planner, mocker):
        path = tmp_path / "perf.npz"
        np.savez(path, prefill_isl=np.array(ISL), **each)
        found = load_timing(str(path)).model
        assert isinstance(found, DynamoTable)
        for name in ("isl", "active", "context"):
            assert getattr(found, name) == pytest.approx(getattr(table(), name))
        np.testing.assert_allclose(found.itl_s, ITL)
        np.testing.assert_allclose(found.ttft_s, TTFT)


def test_curves_of_their_own_points_become_one_grid() -> None:
    active = np.array([1.0, 3.0, 5.0, 2.0, 4.0])
    context = np.array([10.0, 10.0, 10.0, 20.0, 20.0])
    tokens, contexts, grid = gridded(active, context, np.array([1.0, 3.0, 9.0, 4.0, 6.0]))
    assert tokens.tolist() == [1, 2, 3, 4, 5]
    assert contexts.tolist() == [10, 20]
    assert grid[:, 0].tolist() == [1, 2, 3, 6, 9]
    assert grid[:, 1].tolist() == [4, 4, 5, 6, 9], (
        "after its last point it rises as the shorter one"
    )


def arrays(**changed: Any) -> dict[str, Any]:
    """A right file of Dynamo's planner, but for what is changed (None: left out)."""
    good = {
        "prefill_isl": np.array([100, 200]),
        "prefill_ttft": np.array([10.0, 20.0]),
        "x_kv_usage": np.array([0.1, 0.5, 0.1, 0.5]),
        "y_context_length": np.array([350.0, 350.0, 3000.0, 3000.0]),
        "z_itl": np.array([5.0, 10.0, 4.0, 8.0]),
        "max_kv_tokens": np.array([100_000]),
    } | changed
    return {key: value for key, value in good.items() if value is not None}


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"prefill_isl": None}, "prefill_isl: missing; there is max_kv_tokens"),
        ({"z_itl": None}, "z_itl: missing"),
        ({"max_kv_tokens": None}, "max_kv_tokens: missing"),
        ({"max_kv_tokens": np.array([0])}, "max_kv_tokens=[0]"),
        ({"prefill_ttft": np.array([1.0])}, "prefill_ttft: 1 values, prefill_isl has 2"),
        ({"prefill_ttft": np.array([1.0, -2.0])}, "prefill_ttft[1]=-2.0"),
        ({"prefill_ttft": np.array([1.0, np.nan])}, "prefill_ttft[1]=nan"),
        ({"prefill_ttft": np.array(["a", "b"])}, "prefill_ttft: <U1 [2]"),
        ({"prefill_isl": np.array([200, 100])}, "prefill_isl[1]=100 after 200"),
        ({"prefill_isl": np.array([[1, 2]])}, "prefill_isl: int64 [1, 2]"),
        ({"z_itl": np.array([5.0, 10.0])}, "z_itl: 2 values, x_kv_usage has 4"),
        ({"z_itl": np.array([5.0, np.inf, 4.0, 8.0])}, "z_itl[1]=inf"),
        ({"z_itl": np.array([0.0, 10.0, 4.0, 8.0])}, "z_itl[0][0]=0"),
    ],
)
def test_wrong_npz_files_are_refused_by_key_and_value(
    changed: dict[str, Any], named: str, tmp_path: Path
) -> None:
    """K20: the file, the key and what it holds."""
    path = tmp_path / "wrong.npz"
    np.savez(path, **arrays(**changed))
    with pytest.raises(ConfigError) as caught:
        load_npz(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert named in str(caught.value)
    np.savez(path, **arrays())
    load_npz(path)


def test_what_is_no_file_of_its_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    for content in (b"", b"{", b"[1]", b"\xff\xfe", b'{"jitter": NaN}'):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="no timing file"):
            load_timing(str(path))
    path = tmp_path / "wrong.npz"
    for content in (b"", b"nonsense", b"PK\x03\x04 cut"):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="no NPZ file"):
            load_timing(str(path))
    np.savez(path, **arrays(z_itl=np.array([object()] * 4)))
    with pytest.raises(ConfigError, match="no NPZ file"):
        load_npz(path)


def test_a_profile_comes_back_equal(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    profile().save(path)
    assert read_timing(path) == profile()
    timing = load_timing(str(path))
    assert timing.jitter == 0.05
    assert timing.shares_reads
    assert timing.step_s([(64, 256)], 0, 0) == 0.04
    assert timing.step_s([], 8, 8 * 512) == 0.02


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("model",), None, "Object missing required field `model`"),
        (("format",), "mallee-timing-9", "$.format"),
        (("model", "form"), "cube", "$.model.form"),
        (("model", "prefill", "new"), None, "missing required field `new` - at `$.model.prefill`"),
        (("model", "prefill", "new"), [16, "x"], "$.model.prefill.new[1]"),
        (("model", "prefill", "new"), [64, 16], "prefill.new[1]=16 after 64: must increase"),
        (("model", "decode", "seconds"), [[0.01, 0.02]], "decode.seconds: 1 rows, its axis has 2"),
        (("model", "decode", "seconds"), [[1, 2], [-3, 4]], "decode.seconds[1][0]=-3"),
        (("model", "decode", "speed"), 3, "unknown field `speed`"),
        (("jitter",), -0.5, "jitter=-0.5"),
    ],
)
def test_wrong_profiles_are_refused_by_field_and_value(
    path: tuple[str, ...], value: Any, named: str, tmp_path: Path
) -> None:
    file = tmp_path / "profile.json"
    profile().save(file)
    data = json.loads(file.read_text())
    inner = data
    for key in path[:-1]:
        inner = inner[key]
    if value is None:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    file.write_text(json.dumps(data))
    with pytest.raises(ConfigError) as caught:
        load_timing(str(file))
    assert str(caught.value).startswith(f"{file}: ")
    assert named in str(caught.value)


def test_a_profile_that_can_t_be_read_is_not_written(tmp_path: Path) -> None:
    wrong = TimingFile(model=GridData(profile().model.prefill, Decodes((1,), (32,), ((0.0,),))))  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=r"decode.seconds\[0\]\[0\]=0"):
        wrong.save(tmp_path / "wrong.json")
    assert not list(tmp_path.iterdir())


def test_unknown_names_list_the_known() -> None:
    with pytest.raises(ConfigError) as caught:
        load_timing("h300-llama")
    for name in timing_names():
        assert name in str(caught.value)
    with pytest.raises(ConfigError, match="engine='x' after the @: there are vllm"):
        load_timing(f"{DEFAULT_TIMING}@x")
    with pytest.raises(ConfigError, match="dynamo"):
        load_timing("dynamo")


def test_every_named_profile_loads() -> None:
    for name in timing_names():
        timing = load_timing(name, kv_tokens=100_000)
        assert 0 < timing.step_s([(512, 1000)], 0, 0) < 20
        assert 0 < timing.multi_step_s(8, 8000, 10) < 20
    device, engine = load_timing(f"{DEFAULT_TIMING}@kernels"), load_timing(DEFAULT_TIMING)
    assert device.overhead_s == 0.0
    assert engine.step_s([(4096, 0)], 0, 0) > device.step_s([(4096, 0)], 0, 0)
    assert engine.request_s > 0
    assert any(DEFAULT_TIMING in line for line in fits_table())


def test_the_shipped_profiles_state_their_errors() -> None:
    """K19: coefficients fitted from measured kernels, within a tenth of them in the median."""
    profiles = fitted().profiles
    assert {fit.gpu for fit in profiles.values()} == {"h100", "h200", "b200", "gb10"}
    for name, fit in profiles.items():
        assert name.startswith(fit.gpu)
        if fit.prefill_error is not None and fit.decode_error is not None:
            assert fit.prefill_error.median < 0.1
            assert fit.decode_error.median < 0.1
        assert fit.kv_tokens > 10_000
        assert fit.is_guess == (fit.prefill_error is None)


def test_the_page_has_a_timing_file_of_six_lines(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "mock.md").read_text()
    text = page.split("```json\n")[1].split("```")[0]
    assert len(text.splitlines()) == 6
    file = tmp_path / "own.json"
    file.write_text(text)
    timing = load_timing(str(file))
    assert timing.model.prefill_s(2048, 32768) == pytest.approx(0.14)
    assert kv_room(str(file)).token_nbytes == 131072
    file.write_text(text.replace("0.09,", "-1,"))
    with pytest.raises(ConfigError, match=r"prefill.seconds\[1\]\[0\]=-1: must be more than 0"):
        load_timing(str(file))
    file.write_text(text.replace("0.02,", '"fast",'))
    with pytest.raises(ConfigError, match=r"got `str` - at `\$.model.decode.seconds\[1\]\[0\]`"):
        load_timing(str(file))
