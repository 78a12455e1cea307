"""Step times from the shipped operator tables, alone, against published figures and against real steps.

- Published decode of one sequence: engines that schedule each step after the last one agree with device time plus host
  work; compiled loops without a scheduler agree with the device time alone.
- Real steps: medians of 4,982 of vLLM 0.32 with Qwen3-8B in bfloat16 on one H200 (``h200_qwen3-8b.json``). That engine
  schedules synchronously (`libra_hpc.engine.settings`), so the host's work comes on top of the device's.
"""

from __future__ import annotations

import statistics
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_hpc.errors import UserError
from libra_hpc.models.devices import Device, device
from libra_hpc.models.shapes import model_shape, shapes
from libra_hpc.models.step_times.lookup import lookup
from libra_hpc.models.step_times.measured import load
from libra_hpc.models.step_times.roofline import Roofline
from libra_hpc.models.step_times.steps import StepTimes
from libra_hpc.models.step_times.tables import FOLDER, TableTimes, available, fit_line, load_table

from .support import bare

DEGREES = (1, 2, 4, 8)
NODE = 8

DATA_SHEET = {"a100": 80e9, "h200": 141e9}
"""Bytes of memory behind the rows of `DECODE` that KV limits: 0.9 of these are used. The driver reports 5 and 9 GB
more."""
DECODE = [
    ("a100", "qwen3-8b", 32, 1024, (2679, 4271, 6073, 6983)),
    ("a100", "qwen3-8b", 512, 1024, (27272, 32932, 33847, 31027)),
    ("a100", "qwen3-8b", 1024, 1024, (38983, 42618, 38755, 30474)),
    ("a100", "qwen3-8b", 4096, 1024, (47949, 44494, 39849, 35370)),
    ("a100", "qwen3-8b", 512, 32768, (1964, 2257, 2370, 2319)),
    ("a100", "qwen3-32b", 512, 1024, (2032, 11729, 13425, 12176)),
    ("a100", "qwen3-32b", 512, 8192, (173, 2712, 3673, 3939)),
    ("a100", "qwen3-32b", 512, 32768, (0, 704, 968, 1153)),
    ("h200", "qwen3-8b", 32, 1024, (6027, 8528, 11089, 11537)),
    ("h200", "qwen3-8b", 512, 1024, (63631, 76819, 74101, 65346)),
    ("h200", "qwen3-8b", 4096, 1024, (130078, 114778, 105183, 89223)),
    ("h200", "qwen3-8b", 512, 32768, (5981, 6339, 6504, 6448)),
    ("h200", "qwen3-32b", 128, 1024, (6061, 10293, 14018, 16127)),
    ("h200", "qwen3-32b", 512, 32768, (1492, 2628, 3048, 3205)),
]
"""Tokens/s of decoding on 8 devices as 8/TP replicas, composed from NVIDIA's operator tables: (device, model, sequences
in all, context of each, at TP 1, 2, 4, 8); 0: out of memory."""
# Milliseconds of one prompt: (device, model, new tokens, cached context, TP 1, 2, 4, 8), from the same source.
PREFILL = [
    ("a100", "qwen3-8b", 2048, 0, (127, 81, 53, 40)),
    ("a100", "qwen3-8b", 512, 16384, (64, 35, 22, 15)),
    ("a100", "qwen3-14b", 2048, 0, (217, 131, 80.9, 59.7)),
    ("a100", "qwen3-32b", 2048, 0, (501, 281, 173, 114)),
    ("a100", "qwen3-32b", 512, 49152, (430, 230, 124, 70)),
    ("h200", "qwen3-8b", 2048, 0, (42, 29, 21, 16)),
    ("h200", "qwen3-32b", 512, 16384, (73, 42, 26, 18)),
]
steps = st.tuples(st.integers(1, 2000), st.integers(0, 4_000_000), st.integers(0, 20000), st.integers(0, 200_000))


def nominal(name: str) -> Device:
    return bare(name, memory_bytes=DATA_SHEET[name])


def node_rate(times: StepTimes, sequences: int, context: int) -> float:
    batch = min(sequences * times.tp // NODE, times.kv_capacity // context)
    return NODE / times.tp * batch / times.step_s(batch, batch * context) if batch else 0.0


@pytest.mark.parametrize(("name", "model", "sequences", "context", "wanted"), DECODE)
def test_decoding_on_a_node_matches_the_tool(
    name: str, model: str, sequences: int, context: int, wanted: tuple[float, ...]
) -> None:
    rates = [node_rate(lookup(nominal(name), model, tp), sequences, context) for tp in DEGREES]
    assert rates == pytest.approx(wanted, rel=0.1)


@pytest.mark.parametrize(("name", "model", "new", "cached", "wanted"), PREFILL)
def test_prefill_matches_the_tool(name: str, model: str, new: int, cached: int, wanted: tuple[float, ...]) -> None:
    milliseconds = [1e3 * lookup(bare(name), model, tp).step_s(0, 0, new, cached) for tp in DEGREES]
    assert milliseconds == pytest.approx(wanted, rel=0.05)


def test_a_mixed_step_matches_the_tool() -> None:
    # Qwen3-8B, A100, TP 4: 2,048 prompt tokens beside 64 decodes at a context of 2,048 each.
    assert lookup(bare("a100"), "qwen3-8b", 4).step_s(64, 64 * 2048, 2048, 0) == pytest.approx(0.0580, rel=0.05)


@pytest.mark.parametrize(("system", "model"), available())
def test_every_file_is_sound(system: str, model: str) -> None:
    table, shape, own = load_table(available()[system, model]), model_shape(model), device(system)
    assert (table.model, own.tables, own.intra_bytes_s) == (model, system, table.intra_bytes_s)
    assert list(table.degrees) == [tp for tp in DEGREES if shape.divides(tp)]
    times = {tp: TableTimes(table, own, shape, tp) for tp in table.degrees}
    for parts in table.degrees.values():
        assert len(parts.layers) == len(parts.reduce) == len(table.tokens)
        assert [len(row) for row in parts.decode_attention] == [len(table.contexts)] * len(table.batches)
        assert [len(row) for row in parts.prefill_attention] == [len(table.cached)] * len(table.news)
    for few, many in pairwise(tp for tp, each in times.items() if each.kv_capacity > 0):
        for batch in (one for one in (1, 8, 64, 512) if one * 1024 <= times[few].kv_capacity):
            speed_up = times[few].step_s(batch, batch * 1024) / times[many].step_s(batch, batch * 1024)
            # Whole experts per device: a small batch may find all of its experts on a few devices.
            least = 0.0 if table.degrees[many].experts == "expert" else 0.99
            assert least < speed_up <= 1.02 * many / few


@given(step=steps, more=steps, tp=st.sampled_from(DEGREES))
def test_more_tokens_never_take_less_time(
    step: tuple[int, int, int, int], more: tuple[int, int, int, int], tp: int
) -> None:
    step_s = lookup("a800", "qwen3-14b", tp).step_s
    (batch, kv, prefill, context), (_, kv_more, prefill_more, context_more) = step, more
    assert step_s(batch, kv + kv_more, prefill + prefill_more, context + context_more) >= step_s(*step) * (1 - 1e-12)


@given(batch=st.integers(1, 1500), more=st.integers(1, 500), context=st.integers(1, 8192), tp=st.sampled_from(DEGREES))
def test_more_sequences_of_a_context_never_take_less_time(batch: int, more: int, context: int, tp: int) -> None:
    step_s = lookup("h100", "qwen3-32b", tp).step_s
    assert step_s(batch + more, (batch + more) * context) >= step_s(batch, batch * context) * (1 - 1e-12)


@given(batch=st.integers(1, 1500), kv=st.integers(0, 2_000_000), span=st.integers(1, 1_000_000))
def test_a_step_is_linear_in_kv_tokens(batch: int, kv: int, span: int) -> None:
    step_s = lookup("a800", "qwen3-14b", 2).step_s
    assert step_s(batch, kv) + step_s(batch, kv + 2 * span) == pytest.approx(2 * step_s(batch, kv + span))


def test_the_a800_pays_for_its_links_where_messages_are_large() -> None:
    for tp in DEGREES:
        a100, a800 = lookup("a100", "qwen3-14b", tp).step_s, lookup("a800", "qwen3-14b", tp).step_s
        single, prompt = a800(1, 1024) / a100(1, 1024), a800(0, 0, 4096) / a100(0, 0, 4096)
        assert single == pytest.approx(1, abs=0.01)
        assert (single == prompt == 1) is (tp == 1)
        reduced = load_table(available()["a100", "qwen3-14b"]).degrees[tp].reduce
        extra = 0.5e-6 * (reduced[20] - reduced[0]) if tp > 1 else 0.0
        assert a800(0, 0, 4096) - a100(0, 0, 4096) == pytest.approx(extra, rel=1e-6)


def test_beyond_the_grid_time_goes_on_growing_with_the_work() -> None:
    step_s = lookup("h200", "qwen3-8b", 1).step_s
    assert step_s(0, 0, 32768, 0) > 2 * step_s(0, 0, 16384, 0)
    assert step_s(0, 0, 2048, 262144) == pytest.approx(2 * step_s(0, 0, 2048, 131072) - step_s(0, 0, 2048, 0), rel=0.1)
    assert step_s(2048, 2048 * 1024) == pytest.approx(2 * step_s(1024, 1024 * 1024), rel=0.15)


@pytest.mark.parametrize(("system", "model"), [pair for pair in available() if not model_shape(pair[1]).experts])
def test_the_roofline_of_a_dense_model_comes_near_its_table(system: str, model: str) -> None:
    ratios = []
    for tp in load_table(available()[system, model]).degrees:
        table, roofline = lookup(system, model, tp), Roofline(device(system), model_shape(model), tp)
        for step in (
            [(b, b * 2048, 0, 0) for b in (1, 8, 64, 256)]
            + [(0, 0, n, 4096) for n in (512, 2048, 8192)]
            + [(64, 131072, 512, 4096)]
        ):
            ratios.append(roofline.step_s(*step) / table.step_s(*step))
    assert 0.8 < sorted(ratios)[len(ratios) // 2] < 1.2
    assert min(ratios) > 0.55
    assert max(ratios) < 1.6


def test_the_files_are_small_and_cover_every_builtin_shape() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 1_000_000
    assert set(available()) == {(system, model) for system in ("a100", "h100", "h200") for model in shapes()}


def test_a_line_is_fitted_exactly_and_never_with_a_negative_coefficient() -> None:
    assert fit_line([1, 2, 4], [3, 5, 9], [1, 2, 3]) == pytest.approx((1, 2))
    assert fit_line([1, 2, 4], [4, 3, 2], [1, 1, 1]) == pytest.approx((3, 0))
    assert fit_line([1, 2], [1, 3], [1, 1]) == pytest.approx((0, 7 / 5))


def test_a_file_that_is_no_table_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a100_x.json"
    path.write_text("{}")
    with pytest.raises(UserError, match=r"operator table = .*a100_x.json.*provenance"):
        load_table(path)


A100 = device("a100")
SINGLE = [
    # Engines that wait for each step. QwenLM/Qwen2.5, docs/source/benchmark/speed_benchmark.rst: vLLM 0.6 on A100 80GB,
    # bf16, batch 1, 2,048 tokens after a prompt of 1.
    *((A100, model, 1, 1024, published, 0.05) for model, published in (("qwen2.5-7b", 84.28), ("qwen2.5-32b", 22.13))),
    # A compiled loop without host work. pytorch-labs/gpt-fast, README: Llama-2-70B on A100 80GB at 330 W, batch 1,
    # prompts of 5 tokens.
    *((bare("a100"), "llama-3.1-70b", tp, 128, rate, 0.1) for tp, rate in ((2, 21.32), (4, 38.01), (8, 62.50))),
]


@pytest.mark.parametrize(("machine", "model", "tp", "context", "published", "rel"), SINGLE)
def test_one_sequence_decodes_as_fast_as_published(
    machine: Device, model: str, tp: int, context: int, published: float, rel: float
) -> None:
    assert 1.0 / lookup(machine, model, tp).step_s(1, context) == pytest.approx(published, rel=rel)


MEASURED = load(Path(__file__).with_name("h200_qwen3-8b.json"))


def test_decode_steps_are_the_tables_plus_the_hosts_work() -> None:
    times = lookup("h200", "qwen3-8b", 1)
    errors = [abs(times.step_s(p.decodes, p.kv_tokens) / p.seconds - 1.0) for p in MEASURED.points if not p.prefill]
    assert len(errors) == 30
    assert statistics.median(errors) < 0.03
    assert max(errors) < 0.12


def test_long_prompts_take_the_time_of_the_tables() -> None:
    step_s = lookup("h200", "qwen3-8b", 1).step_s
    points = [p for p in MEASURED.points if p.prefill >= 1024]
    found = [step_s(p.decodes, p.kv_tokens, p.prefill, p.context) for p in points]
    assert found == pytest.approx([p.seconds for p in points], rel=0.2) != []


def test_the_kv_cache_is_as_large_as_planned() -> None:
    assert lookup("h200", "qwen3-8b", 1).kv_capacity == pytest.approx(MEASURED.kv_capacity[1], rel=0.05)
