"""Model arithmetic, roofline, curves, bathtub, chips and the generator."""

from pathlib import Path

import pytest

from pdd.core.errors import ConfigurationError
from pdd.sim.bathtub import bathtub, closed_form_revenue, find_valley
from pdd.sim.chips import load_chips, rate_chips
from pdd.sim.curves import read_surface
from pdd.sim.fleet import RoleModel, build_parts
from pdd.sim.model import load_model_config, model_shape
from pdd.sim.prfaas import PUBLISHED_KV_BYTES
from pdd.sim.profile import profile_workload
from pdd.sim.scenario_file import load_scenario
from pdd.sim.workload.stream import build_paths
from pdd.sim.workload.synthetic import generate_agent_workload

PAPER = Path(__file__).parents[3] / "examples" / "scenarios" / "paper.toml"


@pytest.fixture(scope="module")
def prefill() -> RoleModel:
    parts = build_parts(load_scenario(PAPER))
    return parts.role(parts.scenario.fleet.prefill, "prefill")


@pytest.mark.parametrize(
    ("name", "total_billion", "active_billion"),
    [
        ("deepseek-v3", 671, 37),
        ("llama-3.1-70b", 70.6, 70),
        ("qwen3-235b", 235, 22),
        ("gpt-oss-120b", 117, 5.1),
    ],
)
def test_parameters_follow_from_the_configuration(
    name: str, total_billion: float, active_billion: float
) -> None:
    shape = model_shape(load_model_config(name))
    assert shape.total_params / 1e9 == pytest.approx(total_billion, rel=0.01)
    assert shape.active_params / 1e9 == pytest.approx(active_billion, rel=0.03)


def test_dense_mla_expands_cached_latents_in_prefill_and_works_on_latents_in_decode() -> None:
    """DeepSeek-V3: 61 layers, 128 heads of 128 + 64 and 128, latents of 512 + 64."""
    shape = model_shape(load_model_config("deepseek-v3"))
    pairs, heads = 61 * 1000 * (60_000 + 500), 128
    expand = 61 * 60_000 * 2 * 512 * heads * (128 + 128)
    assert shape.attention_flops(1000, 60_000) == pytest.approx(pairs * 2 * heads * (192 + 128) + expand)
    assert shape.decode_flops(60_000) == pytest.approx(61 * 60_000 * 2 * heads * (576 + 512))


def test_sparse_mla_attends_to_what_its_indexer_selects() -> None:
    shape = model_shape(load_model_config("deepseek-v3.2"))
    selected = 61 * 2048 * 2 * 128 * (576 + 512)
    scored = 61 * 60_000 * 2 * 64 * 128
    assert shape.decode_flops(60_000) == pytest.approx(selected + scored)
    assert shape.attention_flops(1, 60_000) == pytest.approx(selected + scored, rel=1e-4)


def test_an_indexer_bounds_what_decode_reads() -> None:
    scenario = load_scenario(PAPER.with_name("paper-mla.toml"))
    roofline = build_parts(scenario).role(scenario.fleet.main, "main").roofline
    base, per_context = roofline.decode_terms(1)
    chip_bytes_per_s = 8 * 4.8e12 * 0.8
    scoring_s = 61 * 2 * 64 * 128 / (8 * 989e12 * 0.5)
    assert per_context == pytest.approx(max(61 * 132 / chip_bytes_per_s, scoring_s))
    assert base > 2048 * 61 * 656 / chip_bytes_per_s


def test_a_model_whose_shape_is_unknown_says_what_is_missing() -> None:
    with pytest.raises(ConfigurationError, match="hidden_size"):
        model_shape(load_model_config("deepseek-v4-pro"))


def test_prefill_grows_with_context_and_pays_whole_tiles(prefill: RoleModel) -> None:
    roofline = prefill.roofline
    assert roofline.chunk_s(8192, 50_000) > roofline.chunk_s(8192, 0)
    assert roofline.chunk_s(8193, 0) > roofline.chunk_s(8192, 0) * 1.005
    assert roofline.prefill_s(16_384, 0, chunk_tokens=8192) == pytest.approx(
        roofline.chunk_s(8192, 0) + roofline.chunk_s(8192, 8192)
    )


def test_decode_reads_weights_and_context(prefill: RoleModel) -> None:
    roofline = prefill.roofline
    weights = 32.8e9 / (3.35e12 * 0.8)
    assert roofline.decode_step_s(1, 0) == pytest.approx(weights + 0.002, rel=0.01)
    assert roofline.decode_step_s(4, 256_000) - roofline.decode_step_s(4, 0) == pytest.approx(
        256_000 * 131_072 / (3.35e12 * 0.8), rel=1e-6
    )
    assert roofline.max_batch(64_000) == 4


def test_measured_curves_interpolate_and_name_bad_lines(tmp_path: Path) -> None:
    path = tmp_path / "decode.csv"
    path.write_text("batch,context_tokens,step_seconds\n1,0,0.01\n1,1000,0.02\n9,0,0.03\n9,1000,0.04\n")
    surface = read_surface(path, ("batch", "context_tokens", "step_seconds"))
    assert surface.at(5, 500) == pytest.approx(0.025)
    path.write_text("batch,context_tokens,step_seconds\n1,0,soon\n")
    with pytest.raises(ConfigurationError, match="line 2: expected three numbers"):
        read_surface(path, ("batch", "context_tokens", "step_seconds"))


def test_the_closed_form_is_monotone_without_attention_and_a_tub_with_it() -> None:
    flat = [closed_form_revenue(h / 100, discount=0.1, attention_ratio=0.0, floor=0.0) for h in range(100)]
    assert flat == sorted(flat)
    tub = [closed_form_revenue(h / 100, discount=0.1, attention_ratio=1.0, floor=0.0) for h in range(100)]
    lowest = tub.index(min(tub))
    assert 0 < lowest < 99
    assert tub[-1] > tub[0]


def test_the_valley_is_found_and_its_tail_chunks_too(prefill: RoleModel) -> None:
    valley = find_valley(bathtub(prefill, prompt_tokens=64_000, discount=0.1))
    assert valley.is_tub
    assert 0 < valley.hit_ratio < 1
    assert valley.depth < 1
    assert "more cache" in valley.advice


def test_chips_are_rated_by_balance() -> None:
    roles = {rating.chip.name: rating.role for rating in rate_chips(load_chips(), reference="H100-SXM")}
    assert roles["H200"] == "main"
    assert roles["H20"] == "main"
    assert roles["L40S"] == "prefill"
    assert roles["H100-SXM"] == "either"


def test_a_bad_table_of_chips_is_named(tmp_path: Path) -> None:
    path = tmp_path / "chips.toml"
    path.write_text('[X]\nbf16_tflops = 1\nhbm_gb = 0\nsource = "me"\n')
    with pytest.raises(ConfigurationError, match=r"\[X\].*\n.*hbm_gb"):
        load_chips(path)


def test_curves_of_prfaas_are_linear_between_points() -> None:
    assert PUBLISHED_KV_BYTES.at(1024) == pytest.approx(190.8 * 2**20)
    assert PUBLISHED_KV_BYTES.at(4.5 * 1024) == pytest.approx((190.8 + 308.9) / 2 * 2**20)


def test_the_generator_is_repeatable_and_fits_its_targets() -> None:
    first, again = (generate_agent_workload(requests=30_000, rate_per_s=11.5, seed=2) for _ in range(2))
    assert first.arrival_s == again.arrival_s
    assert first.input_tokens == again.input_tokens
    profile = profile_workload(first, build_paths(first))
    assert profile.hit_ratio == pytest.approx(0.90, abs=0.015)
    assert profile.output_tokens == pytest.approx(1_000, rel=0.03)
    assert sorted(first.input_tokens)[len(first) // 2] == pytest.approx(63_000, rel=0.05)
    assert first.rate_per_s == pytest.approx(11.5, rel=0.08)
