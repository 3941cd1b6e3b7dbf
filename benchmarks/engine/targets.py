"""The targets of the cells on H200s, by the model's shape: in bf16 on one, or in the formats and on the cards behind it."""

from __future__ import annotations

from typing import NamedTuple


class Yardstick(NamedTuple):
    """The reference of a figure, in the cell's unit."""

    target: float
    reference: float | None  # vLLM, prefix cache off, same kind of GPU; None: not measured


CARD = (
    "h200"  # the targets' card, as `benchmarks.environment.card_of` names it: another one's figures stand by themselves
)

REFERENCE = {
    "llama-3.1-8b": "vLLM 0.26.0, one H200, Llama-3.1-8B shape, bf16, random weights, prefix cache off",
    "llama-3.1-8b fp8": "vLLM 0.33, one H200, Llama-3.1-8B shape, dynamic online fp8, context about 1072",
    "llama-3.1-8b fp8 kv-fp8": "vLLM 0.33, one H200, Llama-3.1-8B shape, dynamic online fp8, 16-bit KV, context about 1072",
    "llama-3.1-70b fp8": "vLLM 0.33, one H200, Llama-3.1-70B shape, dynamic online fp8, context about 1072",
    "llama-3.1-8b int4": "not measured",
    "llama-3.1-8b tp2": "not measured",
    "llama-3.1-70b tp2": "not measured",
    "llama-3.1-70b fp8 tp2": "not measured",
    "qwen3-30b-a3b": "vLLM 0.33, one H200, Qwen3-30B-A3B shape, bf16, context about 1072, prefix cache off",
}

TARGETS: dict[str, dict[str, Yardstick]] = {
    "llama-3.1-8b": {
        "decode_b1_ctx1088": Yardstick(4.3, 4.98),
        "decode_b8_ctx1088": Yardstick(4.6, 5.20),
        "decode_b32_ctx1088": Yardstick(5.6, 6.20),
        "decode_b64_ctx1088": Yardstick(6.8, 7.59),
        "decode_b128_ctx1088": Yardstick(9.3, 10.55),
        "decode_b256_ctx1088": Yardstick(15.0, 18.12),
        "decode_b32_ctx8256": Yardstick(11.0, 13.1),
        "decode_b64_ctx4160": Yardstick(11.0, 13.4),
        "ttft_p512": Yardstick(14.0, 17.3),
        "ttft_p2048": Yardstick(48.0, 51.3),
        "ttft_p8192": Yardstick(205.0, 213.0),
        "prefill_1024": Yardstick(45_000.0, 43_500.0),
        "offline_1024_128": Yardstick(32.0, 29.7),
        "start_cold_cache": Yardstick(20.0, 164.0),
        "start_warm_cache": Yardstick(20.0, 164.0),
    },
    "llama-3.1-8b fp8": {
        "decode_b1_ctx1088": Yardstick(2.5, 3.45),
        "decode_b32_ctx1088": Yardstick(4.2, 5.33),
        "decode_b64_ctx1088": Yardstick(5.3, 6.20),
        "decode_b256_ctx1088": Yardstick(13.5, 16.3),
        "ttft_p512": Yardstick(10.5, 12.9),
        "ttft_p2048": Yardstick(33.0, 34.8),
        "ttft_p8192": Yardstick(145.0, 149.0),
        "prefill_1024": Yardstick(70_000.0, 67_000.0),
    },
    "llama-3.1-70b fp8": {
        "decode_b1_ctx1088": Yardstick(19.5, 20.9),
        "decode_b32_ctx1088": Yardstick(26.0, 30.0),
        "decode_b64_ctx1088": Yardstick(28.0, 30.2),
        "ttft_p2048": Yardstick(260.0, 267.0),
    },
    "qwen3-30b-a3b": {
        "decode_b1_ctx1088": Yardstick(2.8, 4.19),
        "decode_b32_ctx1088": Yardstick(14.5, 15.7),
        "decode_b64_ctx1088": Yardstick(16.8, 19.1),
        "decode_b256_ctx1088": Yardstick(24.0, 27.2),
        "ttft_p512": Yardstick(14.0, 18.0),
        "ttft_p2048": Yardstick(45.0, 84.0),
        "ttft_p8192": Yardstick(145.0, 153.0),
        "prefill_1024": Yardstick(75_000.0, 70_000.0),
    },
    "llama-3.1-8b int4": {
        "decode_b1_ctx1088": Yardstick(2.0, None),
        "decode_b16_ctx1088": Yardstick(2.6, None),
    },
    "llama-3.1-8b tp2": {
        "decode_b1_ctx1088": Yardstick(2.6, None),
        "decode_b32_ctx1088": Yardstick(3.4, None),
        "decode_b64_ctx1088": Yardstick(4.3, None),
    },
    "llama-3.1-70b tp2": {"decode_b1_ctx1088": Yardstick(19.5, None)},
    "llama-3.1-70b fp8 tp2": {"decode_b1_ctx1088": Yardstick(10.8, None)},
}
# 8-bit keys and values have a target of their own where the batch is large.
TARGETS["llama-3.1-8b fp8 kv-fp8"] = TARGETS["llama-3.1-8b fp8"] | {"decode_b256_ctx1088": Yardstick(10.5, 16.3)}
