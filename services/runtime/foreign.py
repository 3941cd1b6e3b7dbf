"""vLLM's options: those with the same meaning here, those that are always on, and those with another name or meaning."""

from __future__ import annotations

# Options with the same meaning and type. Each applies where a command has the setting and no such flag of its own.
ALIASES = {
    "--max-num-seqs": "max_sequences",
    "--max-num-batched-tokens": "max_batch_tokens",
    "--api-key": "api_keys",
    "--ssl-certfile": "tls_cert",
    "--ssl-keyfile": "tls_key",
    "--uvicorn-log-level": "log_level",
    "--otlp-traces-endpoint": "otlp_endpoint",
    "--base-url": "url",
    **dict.fromkeys(("-tp", "--tp", "--tp-size"), "tensor_parallel_size"),
    **dict.fromkeys(("-pp", "--pp-size"), "pipeline_parallel_size"),
}
# Ignored, since Baton always does so; any other value is refused. None: the option takes no value.
IS_SO: dict[str, str | None] = {
    "--enable-auto-tool-choice": None,
    "--enable-prefix-caching": None,
    "--enable-chunked-prefill": None,
    "--enable-prompt-tokens-details": None,
    "--data-parallel-size": "1",
    "--load-format": "safetensors",
}
_NO_LORA = "LoRA is not served: merge the adapter into the weights (merge_and_unload of peft) and serve the folder"
ELSEWHERE = dict.fromkeys(
    ("--enable-lora", "--lora-modules", "--lora-paths", "--lora-adapters", "--lora", "--max-loras", "--max-lora-rank"),
    _NO_LORA,
)
ELSEWHERE |= {
    "--data-parallel-size": "--prefill N --decode N start more workers",
    "--gpu-memory-utilization": "--kv-memory-mb sizes the KV pool; without it a GPU gives what weights and passes leave",
    **dict.fromkeys(
        ("--node-rank", "--master-addr", "--master-port", "--dist-init-addr", "--headless"),
        "--nnodes N:RANK@HOST:PORT says how many hosts have a worker's stages, which one this is, and where they meet",
    ),
    "--swap-space": "KV is not swapped: --kv-memory-mb is the pool, and sequences that don't fit are computed again; "
    "--kv-host-mb keeps what the pool evicts",
    **dict.fromkeys(
        ("--kv-offloading-size", "--kv-offloading-backend", "--hicache-size", "--hicache-ratio"),
        "--kv-host-mb is the host memory, in MiB, for blocks that the KV pool evicts",
    ),
    "--enable-hierarchical-cache": "--kv-host-mb is the host memory, in MiB, for blocks that the KV pool evicts",
    "--cpu-offload-gb": "weights stay on the device",
    "-q": "--quantization",
    "--trust-remote-code": "Baton never runs code of a checkpoint",
    "--tokenizer": "it is the one in --model's folder",
    "--download-dir": "--model is a folder, and nothing is downloaded",
    "--revision": "--model is a folder, and nothing is downloaded",
    "--allowed-origins": "--cors-origins, by commas",
    "--root-path": "let the proxy in front take the prefix away",
    "--seed": "each request may have its `seed`",
    "--enforce-eager": "there is no such switch",
    "--kv-transfer-config": "--transport says how KV moves, --prefill and --decode how many workers there are",
    "--disable-log-requests": "--log-requests off",
    "--enable-log-requests": "--log-requests all",
    "--no-enable-log-requests": "--log-requests off",
    "--hf-token": "the variable HF_TOKEN",
    **dict.fromkeys(
        ("--speculative-model", "--speculative-draft-model-path", "--model-draft", "-md"),
        """--speculative-config '{"method": "draft_model", "model": FOLDER}'""",
    ),
    "--num-speculative-tokens": "--speculative-config suffix:K",
    "--speculative-num-draft-tokens": "--speculative-config suffix:K",
    "--speculative-algorithm": "--speculative-config suffix, or ngram",
    "--speculate": "--speculative-config ngram:K",
    "--draft-max": "--speculative-config ngram:K",
    "-m": "--model, or the folder without a flag",
    "--n-gpu-layers": "--device cuda",
    "-ngl": "--device cuda",
    "--ctx-size": "--max-model-len",
}
