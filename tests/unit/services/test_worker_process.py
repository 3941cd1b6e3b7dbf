"""What a fake device takes over from the model that it stands for."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtransfer.shm import ShmTransport
from services.runtime.worker_process import build_engine
from services.worker.settings import WorkerServiceSettings


@pytest.mark.parametrize(("config", "vocab_size"), [('{"vocab_size": 4096}', 4096), ("{}", 512), ("", 512)])
def test_a_fake_device_knows_the_token_ids_of_its_model_s_tokenizer(
    tmp_path: Path, config: str, vocab_size: int
) -> None:
    if config:
        (tmp_path / "config.json").write_text(config)
    settings = WorkerServiceSettings(model=tmp_path, fake=True, kv_memory_mb=1, max_batch_tokens=64, max_sequences=4)
    assert build_engine(settings, ShmTransport()).vocab_size == vocab_size
