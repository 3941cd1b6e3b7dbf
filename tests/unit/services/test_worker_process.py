"""What a fake device takes over from the model that it stands for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest

from common.settings import ConfigError
from engine.config import KV_CACHE_DTYPES, SKIPPED_LAYERS
from kvtransfer.shm import ShmTransport
from services.runtime.loading import load_settings
from services.up.settings import devices_of
from services.worker.process import build_engine, build_lender
from services.worker.settings import WorkerServiceSettings
from tests.models import build_tiny_model
from tests.unit.engine.families import hybrids
from tests.unit.engine.generate import Generator, new_sequence
from worker.worker import WorkerEngine


@pytest.mark.parametrize(("config", "vocab_size"), [('{"vocab_size": 4096}', 4096), ("{}", 512), ("", 512)])
def test_a_fake_device_knows_the_token_ids_of_its_model_s_tokenizer(
    tmp_path: Path, config: str, vocab_size: int
) -> None:
    if config:
        (tmp_path / "config.json").write_text(config)
    settings = WorkerServiceSettings(
        model=tmp_path, device="fake", kv_memory_mb=1, max_batch_tokens=64, max_sequences=4
    )
    assert build_engine(settings, ShmTransport()).vocab_size == vocab_size


@pytest.mark.parametrize(
    ("asked", "dtypes", "block_bytes"),
    [
        ("auto", ["float32"], 2048),
        ("fp8", ["float8_e4m3fn"], 512),
        ("int8", ["uint8", "float32"], 768),
        ("int4", ["uint8", "bfloat16"], 512),
    ],
)
def test_a_fake_device_keeps_what_is_asked_for(tmp_path: Path, asked: str, dtypes: list[str], block_bytes: int) -> None:
    settings = WorkerServiceSettings(model=tmp_path, device="fake", kv_cache_dtype=asked, kv_memory_mb=1)
    layout = build_engine(settings.sized(), ShmTransport()).layout
    assert ([part.dtype for part in layout.pages], layout.block_bytes) == (dtypes, block_bytes)


def test_what_keys_and_values_are_kept_as_has_the_same_names_everywhere(tmp_path: Path) -> None:
    for name, choices in (("kv_cache_dtype", tuple(KV_CACHE_DTYPES)), ("kv_cache_dtype_skip_layers", SKIPPED_LAYERS)):
        assert get_args(WorkerServiceSettings.model_fields[name].annotation) == choices
    words = ["--model", str(tmp_path), "--kv-cache-dtype", "int8_per_token_head"]
    words += ["--kv-cache-dtype-skip-layers", "sliding_window", "--disable-hybrid-kv-cache-manager"]
    settings = load_settings(WorkerServiceSettings, command="worker", arguments=words, environment={}).sized()
    cache = settings.engine().cache
    assert (cache.kv_cache_dtype, cache.kv_cache_dtype_skip_layers) == ("int8_per_token_head", "sliding_window")
    assert cache.disable_hybrid_kv_cache_manager


@pytest.mark.quick(first=1)
@pytest.mark.parametrize("build", [lambda folder: build_tiny_model(folder / "tiny", "llama"), hybrids.QWEN_3_5.build])
def test_twins_compute_with_weights_that_were_lent_and_others_with_their_own(
    tmp_path: Path, build: Callable[[Path], Path]
) -> None:
    model = build(tmp_path)
    twin, other = (
        WorkerServiceSettings(model=model, kv_memory_mb=1, dtype=dtype).sized() for dtype in ("auto", "bfloat16")
    )
    lender = build_lender("decode", {"BATON_MODEL": str(model), "BATON_KV_MEMORY_MB": "2"})
    said = answer_of(build_engine(twin, ShmTransport()))
    file = model / "model.safetensors"
    header = file.read_bytes()[: 8 + int.from_bytes(file.read_bytes()[:8], "little")]
    file.write_bytes(header.ljust(file.stat().st_size, b"\0"))
    assert lender is not None
    assert answer_of(build_engine(twin, ShmTransport(), lender)) == said
    assert answer_of(build_engine(other, ShmTransport(), lender)) == [0] * len(said) != said


def test_nothing_is_lent_by_a_fake_device_or_where_loading_fails(tmp_path: Path) -> None:
    assert build_lender("decode", {"BATON_MODEL": str(tmp_path), "BATON_DEVICE": "fake"}) is None
    assert build_lender("decode", {"BATON_MODEL": str(tmp_path)}) is None
    assert build_lender("decode", {"BATON_THREADS": "many"}) is None


def answer_of(engine: WorkerEngine) -> list[int]:
    return Generator(engine).run([new_sequence("r", [5, 6, 7])])[0]  # type: ignore[arg-type]


def test_a_fake_device_has_the_cpu_s_memory_and_its_own_costs() -> None:
    found = [WorkerServiceSettings(device=device) for device in ("fake", "fake:2", "fake:0:1.5", "cpu", "cuda:1")]
    assert [one.fake for one in found] == [(1.0, 50.0), (2.0, 50.0), (0.0, 1.5), None, None]
    assert [one.processor for one in found] == ["cpu", "cpu", "cpu", "cpu", "cuda:1"]
    assert devices_of("fake:2:1", [1, 1]) == ["fake:2:1", "fake:2:1"]
    for wrong in ("fake:", "fake:a", "fake:1:2:3", "fake,cpu"):
        with pytest.raises(ConfigError, match=r"cpu, cuda, cuda:N .* or fake is needed"):
            load_settings(WorkerServiceSettings, command="decode", arguments=["--device", wrong], environment={})
