"""Fields of other servers and routers that clients send to OpenAI's paths, and how each is treated."""

from __future__ import annotations

from typing import Any

from gateway.dialects.drafts import DRAFTED_SCHEMA, at_most_drafted
from gateway.dialects.foreign import EMPTY, Foreign, Json, as_ours, ignored, refused, translated

_BOOL: Json = {"type": ["boolean", "null"]}
_INTEGER: Json = {"type": ["integer", "null"]}
_TEXT: Json = {"type": ["string", "null"]}
_OBJECT: Json = {"type": ["object", "null"]}
_THINKING: Json = {
    "type": "object",
    "properties": {
        "type": {"enum": ["enabled", "disabled", "adaptive", "auto"]},
        "budget_tokens": {**_INTEGER, "minimum": -1},
    },
    "required": ["type"],
}


# -- what they mean ---------------------------------------------------------------------------------------------------


def _tokens(value: Any) -> Json:
    """llama.cpp's -1 means no limit; so does -2, since no context is shifted."""
    return {} if value in (-1, -2) else {"max_tokens": value}


def _switch(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def _object(value: Any) -> Json:
    if not isinstance(value, dict):
        raise ValueError("must be an object")
    return value


def _thinks(value: Any) -> Json:
    if _switch(value):
        return {"chat_template_kwargs": {"enable_thinking": True, "thinking": True}}
    return {"reasoning_effort": "none"}


def _think(value: Any) -> Json:
    return {"reasoning_effort": value} if isinstance(value, str) else _thinks(value)


def _thinking(value: Any) -> Json:
    """Convert `{"type": "enabled", "budget_tokens": 1024}` of DeepSeek, GLM and Anthropic."""
    if isinstance(value, bool):
        return _thinks(value)
    said = _object(value)
    kind, budget = said.get("type"), said.get("budget_tokens")
    if kind not in ("enabled", "disabled", "adaptive", "auto"):
        raise ValueError("type must be one of enabled, disabled, adaptive, auto")
    found = {} if kind in ("adaptive", "auto") else _thinks(kind == "enabled")
    return found | ({} if budget is None else {"thinking_token_budget": budget})


def _reasoning(value: Any) -> Json:
    """Convert OpenRouter's `effort`, `max_tokens`, `exclude`, `enabled`."""
    said = _object(value)
    found = {} if said.get("enabled") is None else _thinks(said["enabled"])
    if said.get("effort") is not None:
        found["reasoning_effort"] = said["effort"]
    if said.get("max_tokens") is not None:
        found["thinking_token_budget"] = said["max_tokens"]
    if said.get("exclude") is not None:
        found["include_reasoning"] = not _switch(said["exclude"])
    return found


_APART = "reasoning comes apart, as `reasoning_content`; `include_reasoning: false` leaves it out"


def _reasoning_format(value: Any) -> Json:
    if value == "hidden":
        return {"include_reasoning": False}
    if value not in ("auto", "deepseek", "parsed"):
        raise ValueError(_APART)
    return {}


def _budget(value: Any) -> Json:
    return {"thinking_token_budget": value}


def _greedy(value: Any) -> Json:
    return {} if _switch(value) else {"temperature": 0}


def _format(value: Any) -> Json:
    """Convert Ollama's "json" or schema."""
    if value == "json":
        return {"response_format": {"type": "json_object"}}
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "format", "schema": _object(value)}}}


def _usage(value: Any) -> Json:
    return {"stream_options": {"include_usage": True}} if _object(value).get("include") else {}


def _options(value: Any) -> Json:
    """Convert Ollama's options to the fields of the same names. Raises ValueError for one that would change the answer."""
    kept = {name: one for name, one in _object(value).items() if name not in _OF_MACHINES}
    if "options" in kept:
        raise ValueError("no options of options")
    return translated(kept, SHARED)[0]


def _probabilities(value: Any) -> Json:
    return {} if value == 0 else {"logprobs": value}


def _chat_probabilities(value: Any) -> Json:
    return {} if value == 0 else {"logprobs": True, "top_logprobs": value}


# -- the table --------------------------------------------------------------------------------------------------------


_OF_MACHINES = frozenset(
    {
        "num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "use_mmap", "use_mlock", "low_vram", "numa",
        "f16_kv", "vocab_only", "use_cache", "wait_for_model",
    }
)  # fmt: skip
_NO_SAMPLER = "not supported; top_p, top_k, min_p, typical_p and penalties are"
_AS_DOCUMENTED = "the answer has what is documented here"
_COUNT: Json = {**_INTEGER, "minimum": 0, "maximum": 20}
_TEXTS: Json = {"type": ["array", "null"], "items": {"type": "string", "minLength": 1}, "maxItems": 16}
SHARED: dict[str, Foreign] = {
    **as_ours("max_tokens", "n_predict", "num_predict", "max_new_tokens", "max_output_tokens", schema=_INTEGER, means=_tokens),
    **as_ours(
        "repetition_penalty", "repeat_penalty", schema={"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 100}
    ),
    **as_ours("typical_p", "typical", schema={"type": ["number", "null"], "minimum": 0, "maximum": 1}),
    **as_ours("seed", "random_seed", "sampling_seed", schema=_INTEGER),
    **as_ours("stop", "stop_sequences", schema=_TEXTS),
    **as_ours("bad_words", "banned_strings", schema=_TEXTS),
    **as_ours(
        "truncate_prompt_tokens", "truncate", "prompt_truncate_len", schema={**_INTEGER, "minimum": -1}, off=(False,)
    ),
    **as_ours("cache_salt", "extra_key", schema=_TEXT),
    **as_ours("ignore_eos", "ban_eos_token", schema=_BOOL),
    **as_ours("include_stop_str_in_output", "no_stop_trim", schema=_BOOL),
    **as_ours("`temperature: 0` where it is false", "do_sample", schema=_BOOL, means=_greedy),
    **as_ours(
        "response_format", "format", schema={"anyOf": [{"const": "json"}, _OBJECT]}, means=_format, off=("",)
    ),
    **as_ours("stream_options", "usage", schema=_OBJECT, means=_usage),
    "options": Foreign(
        says="the fields of the same names, but for those of the machine", means=_options, schema=_OBJECT
    ),
    **ignored(
        "one KV cache serves all requests, and forgets by itself",
        "cache_prompt", "cache_control", "keep_alive", "id_slot", "slot_id", "n_keep", "n_discard", "prompt_cache_max_len",
        "with_cache", "preserve_cache", "session_id", "conversation_id", "chat_id", "user_id",
    ),
    **ignored(
        "Baton chooses workers itself, and serves the models that it lists",
        "nvext", "kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room", "data_parallel_rank", "provider",
        "models", "route", "transforms", "preset", "fallbacks", "num_ctx",
    ),
    **ignored(
        "for clients, proxies and hosts",
        "trace", "trace_id", "rid", "litellm_metadata", "litellm_call_id", "litellm_trace_id", "custom_llm_provider",
        "drop_params", "num_retries", "caching", "anthropic_version", "betas", "features", "background_tasks", "model_item",
        "char_name", "user_name", "chat_completion_source", "safety_model", "safety_settings", "compliance",
        "mask_sensitive_info", "vllm_xargs", "custom_params",
    ),
    **ignored(
        _AS_DOCUMENTED,
        "details", "decoder_input_details", "return_progress", "return_tokens", "response_fields", "post_sampling_probs",
        "top_n_tokens", "perf_metrics_in_response", "log_metrics", "raw_output", "return_text_in_logprobs", "result_format",
        "incremental_output",
    ),
    **ignored(
        "samplers have one order; these only shape others, and penalties look at the whole text",
        "samplers", "sampler_order", "sampler_priority", "temperature_last", "min_keep", "penalize_nl", "repeat_last_n",
        "mirostat_tau", "mirostat_eta", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers",
        "xtc_threshold", "dynatemp_exponent", "smoothing_curve", "early_stopping",
    ),
    **as_ours("speculation", "speculative.n_max", schema=DRAFTED_SCHEMA, means=at_most_drafted),
    **ignored("as many tokens are drafted as pay", "speculative.n_min", "speculative.p_min"),
    **ignored("only text is read", "mm_processor_kwargs", "media_io_kwargs"),
    **refused(
        _NO_SAMPLER,
        "mirostat", "mirostat_mode", "dry_multiplier", "xtc_probability", "dynatemp_range", "dynamic_temperature", "top_a",
        "epsilon_cutoff", "eta_cutoff", "smoothing_factor", "penalty_alpha", "no_repeat_ngram_size", "watermark",
        "custom_logit_processor", "negative_prompt",
    ),
    **refused(_NO_SAMPLER, "top_n_sigma", off=(*EMPTY, -1)),
    **refused(_NO_SAMPLER, "tfs_z", "tfs", "guidance_scale", "encoder_repetition_penalty", "num_beams", off=(*EMPTY, 1)),
    **refused("use bad_words or logit_bias", "custom_token_bans"),
    **refused("use stop", "stop_regex"),
    **refused("no adapters are served: name a model of /v1/models", "lora_path", "adapter_id", "lora", "lora_request"),
    **refused(
        "not supported",
        "return_hidden_states", "return_routed_experts", "prompt_embeds", "session_params", "deferred", "grammar_lazy",
        "grammar_triggers",
    ),
    **refused("only text is read", "image_data", "images"),
    **refused("send its fields beside the others", "extra_body"),
    **refused("use timeout", "t_max_predict_ms", "t_max_prompt_ms", off=(*EMPTY, -1)),
    **refused("use truncate_prompt_tokens: -1", "context_length_exceeded_behavior", off=(*EMPTY, "error")),
    **refused(
        "nothing is searched: give what was found in a message",
        "enable_search", "web_search", "enable_web_search", "search_parameters", "search_settings", "plugins",
    ),
    **refused("the model's own template is used; --chat-template gives another one", "template", "raw", "context"),
    **refused("write it into the messages", "safe_prompt", "prompt_mode", "guideline", "tool_prompt"),
}  # fmt: skip
CHAT: dict[str, Foreign] = {
    **SHARED,
    **as_ours("`reasoning_effort: none` where it is false", "enable_thinking", schema=_BOOL, means=_thinks),
    **as_ours(
        "`reasoning_effort: none` where it is true", "disable_reasoning", schema=_BOOL,
        means=lambda value: _thinks(not _switch(value)),
    ),
    **as_ours(
        "reasoning_effort", "think", schema={"enum": [None, True, False, "none", "low", "medium", "high"]}, means=_think
    ),
    **as_ours("reasoning_effort", "thinking", schema={"anyOf": [_BOOL, _THINKING]}, means=_thinking),
    **as_ours("reasoning_effort", "reasoning", schema=_OBJECT, means=_reasoning),
    **as_ours(
        "include_reasoning", "reasoning_format", schema={"enum": [None, "auto", "deepseek", "parsed", "hidden"]},
        means=_reasoning_format,
    ),
    **as_ours("thinking_token_budget", "reasoning_budget", "reasoning_budget_tokens", schema={**_INTEGER, "minimum": -1}),
    **as_ours("top_logprobs", "n_probs", schema=_COUNT, means=_chat_probabilities),
    **ignored(_AS_DOCUMENTED, "stream_reasoning", "tool_stream", "clear_thinking", "reasoning_history"),
    **refused(_APART, "separate_reasoning", "reasoning_split", off=(True,)),
    **refused(_APART, "reasoning_in_content"),
    **refused("without `tools` calls are text", "parse_tool_calls", off=(True,)),
    **refused("send it as a message of role system", "system", "system_prompt"),
    **refused("send messages, or use /v1/completions", "prompt", "inputs"),
}  # fmt: skip
COMPLETIONS: dict[str, Foreign] = {
    **SHARED,
    **as_ours("logprobs", "n_probs", schema=_COUNT, means=_probabilities),
    **ignored(
        "a prompt has no template, and a text no parts",
        "enable_thinking", "disable_reasoning", "think", "thinking", "reasoning", "reasoning_format", "reasoning_effort",
        "include_reasoning", "separate_reasoning", "chat_template_kwargs",
    ),
    **refused("use /v1/chat/completions", "messages", "tools", "system", "system_prompt"),
    **refused("send prompt", "inputs"),
}  # fmt: skip
