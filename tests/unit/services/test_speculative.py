"""`--speculative-config` is read as vLLM reads it, and a wrong one names its field and the remedy."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from common.settings import ConfigError
from decode.drafts.drafters import DRAFTERS
from services.runtime.loading import as_environment, load_settings
from services.up.settings import UpSettings
from services.worker.options import WorkerOptions
from services.worker.settings import WorkerServiceSettings
from services.worker.speculative import (
    DRAFTED,
    DRAFTED_BY_BLOCKS,
    DRAFTED_BY_HEADS,
    DRAFTED_BY_MODELS,
    FORMS,
    SpeculativeConfig,
)


def test_every_drafter_has_its_form() -> None:
    assert set(FORMS) == set(DRAFTERS)


@pytest.mark.parametrize(
    ("text", "method", "most"),
    [
        ("suffix", "suffix", DRAFTED),
        ("suffix:3", "suffix", 3),
        ("ngram:16", "ngram", 16),
        ('{"method": "suffix"}', "suffix", DRAFTED),
        ("mtp", "mtp", DRAFTED_BY_HEADS),
        ('{"method": "qwen3_next_mtp", "num_speculative_tokens": 2}', "mtp", 2),
        ('{"method": "ngram", "num_speculative_tokens": 5}', "ngram", 5),
        ('{"method": "draft_model", "model": "small"}', "draft_model", DRAFTED_BY_MODELS),
        ('{"method": "dflash", "model": "head"}', "dflash", DRAFTED_BY_BLOCKS),
    ],
)
def test_a_name_a_name_with_a_number_and_json(text: str, method: str, most: int) -> None:
    config = SpeculativeConfig.parse(text)
    assert config is not None
    assert (config.method, config.most) == (method, most)
    assert config.adapts
    assert SpeculativeConfig.parse("") is None


def test_fields_of_both_methods() -> None:
    suffix = {"suffix_decoding_max_tree_depth": 12, "suffix_decoding_max_spec_factor": 2.0}
    suffix |= {"suffix_decoding_min_token_prob": 0.5, "suffix_decoding_max_cached_requests": 0}
    config = SpeculativeConfig.parse(json.dumps({"method": "suffix"} | suffix))
    assert config is not None
    lookup = config.lookup
    assert (lookup.lengths.most, lookup.factor, lookup.min_probability, lookup.answer_tokens) == (12, 2.0, 0.5, 0)
    config = SpeculativeConfig.parse('{"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}')
    assert config is not None
    lookup = config.lookup
    config = SpeculativeConfig.parse('{"method": "ngram", "enable_adaptive_verification": false}')
    assert config is not None
    assert not config.adapts
    assert (lookup.lengths.least, lookup.lengths.most, lookup.factor, lookup.answer_tokens) == (2, 4, math.inf, 0)


@pytest.mark.parametrize(
    ("text", "draft", "is_model"),
    [
        ("mtp", Path("."), False),
        ('{"method": "eagle3", "model": "head"}', Path("head"), False),
        ('{"method": "dspark", "model": "head"}', Path("head"), False),
        ('{"method": "eagle3", "model": "head", "parallel_drafting": true}', Path("head"), False),
        ('{"method": "draft_model", "model": "small"}', Path("small"), True),
        ("suffix", None, False),
    ],
)
def test_the_engine_gets_the_folder_of_weights(
    text: str, draft: Path | None, is_model: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a GGUF file below the folder would be the model
    arguments = ["--model", ".", "--speculative-config", text]
    worker = load_settings(WorkerServiceSettings, command="worker", arguments=arguments, environment={})
    engine = worker.sized().engine()
    found = engine.draft
    assert found is not None
    assert (found.folder, found.is_model, found.num_drafts > 0) == (draft, is_model, True)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sufix", "method must be one of suffix, ngram, eagle3, mtp, peagle, dflash, dspark, draft_model, not 'sufix'"),
        ("suffix:many", "METHOD:K"),
        ("suffix:0", "num_speculative_tokens: input should be greater than or equal to 1"),
        ("suffix:99", "num_speculative_tokens"),
        ("medusa", "method medusa isn't served yet: use suffix, ngram, eagle3, mtp"),
        ('{"method": "mtp", "model": "folder"}', "unknown field model: there are"),
        ("eagle3", "model: field required"),
        ("draft_model:5", "model: field required"),
        ('{"method": "draft_model", "model": "folder", "quantization": "fp8"}', "unknown field quantization"),
        ('{"method": "eagle3", "model": ""}', "model: string should have at least 1 character"),
        ('{"num_speculative_tokens": 3}', "method must be one of"),
        ('{"method": ["mtp"]}', "method must be one of"),
        ('{"method": "suffix", "num_speculative_token": 3}', "did you mean num_speculative_tokens?"),
        ('{"method": "suffix", "zzz": 3}', "unknown field zzz: there are"),
        ('{"method": "ngram", "prompt_lookup_min": 9, "prompt_lookup_max": 4}', "prompt_lookup_min 9 is above"),
        ('{"method": "suffix"', "no JSON object"),
        ("[]", "method must be one of"),
        ("{" * 5000, "at most 4096 characters"),
    ],
)
def test_a_wrong_one_stops_the_start(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(
            WorkerServiceSettings,
            command="worker",
            arguments=["--model", "smollm2", "--speculative-config", text],
            environment={},
        )
    assert "--speculative-config" in str(caught.value)
    assert str(caught.value).count(", not ") <= 1
    assert said in str(caught.value)


def test_baton_up_hands_it_to_its_workers() -> None:
    text = '{"method": "ngram", "num_speculative_tokens": 4}'
    up = load_settings(UpSettings, command="up", arguments=["--speculative-config", text], environment={})
    told = as_environment(up, WorkerOptions) | {"BATON_MODEL": "smollm2"}
    worker = load_settings(WorkerServiceSettings, command="worker", arguments=[], environment=told)
    assert worker.speculative_config == text
