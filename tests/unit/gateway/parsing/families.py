"""Signs of answers' formats in published models' folders: words of the chat template, and tokens.

docs/models.md says of each architecture what `choose` makes of these.
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.parsing.choose import choose

HERMES = '<tool_call>\n{"name": {{ call.name }}, "arguments": {{ call.arguments | tojson }}}\n</tool_call>'
FUNCTIONS = "<tool_call>\n<function={{ call.name }}>\n<parameter={{ name }}>\n{{ value }}\n</parameter>\n</function>\n</tool_call>"
PAIRS = "<tool_call>{{ call.name }}<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value></tool_call>"
THINK = "{{ '<think>' + message.reasoning_content + '</think>' }}"
SECTION = "<|tool_calls_section_begin|><|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>{{ call.arguments }}<|tool_call_end|>"
LISTED = "[TOOL_CALLS][{% for call in calls %}{{ call | tojson }}{% endfor %}]"
NAMED = "[TOOL_CALLS]{{ call.name }}[ARGS]{{ call.arguments }}"
CALLS_BEGIN = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
PARTS = "<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>"


@dataclass(frozen=True)
class Shown:
    """Models of the same format. What a space separates in `architectures` is served by Baton."""

    models: str
    architectures: str
    calls: str
    reasoning: str = ""
    template: str = ""
    tokens: tuple[str, ...] = ()


SHOWN = (
    Shown("Qwen2.5", "Qwen2ForCausalLM", "hermes", "", HERMES, ("<tool_call>", "</tool_call>")),
    Shown(
        "Qwen3, QwQ, SmolLM3, EXAONE 4, Ring, ERNIE 4.5 Thinking, Trinity",
        "Qwen2ForCausalLM Qwen3ForCausalLM Qwen3MoeForCausalLM Qwen3NextForCausalLM SmolLM3ForCausalLM Exaone4ForCausalLM"
        " ExaoneMoeForCausalLM BailingMoeV2ForCausalLM Ernie4_5_MoeForCausalLM AfmoeForCausalLM Qwen3VLForConditionalGeneration"
        " Qwen3VLMoeForConditionalGeneration",
        "hermes", "think", HERMES + THINK, ("<tool_call>", "</tool_call>", "<think>", "</think>"),
    ),
    Shown("Granite 4, Falcon-H1", "GraniteMoeHybridForCausalLM FalconH1ForCausalLM", "hermes", "", HERMES, ("<|tool_call|>",)),
    Shown("Qwen3-Coder", "Qwen3MoeForCausalLM Qwen3NextForCausalLM", "qwen3_coder", "", FUNCTIONS),
    Shown(
        "Qwen3.5, Nemotron 3, MiMo-V2",
        "Qwen3_5ForCausalLM Qwen3_5ForConditionalGeneration Qwen3_5MoeForCausalLM Qwen3_5MoeForConditionalGeneration NemotronHForCausalLM"
        " MiMoV2FlashForCausalLM",
        "qwen3_coder", "think", FUNCTIONS + THINK,
    ),
    Shown(
        "Seed-OSS", "SeedOssForCausalLM", "seed", "seed",
        "{%- set toolcall_begin_token = '<seed:tool_call>' -%}{%- set think_begin_token = '<seed:think>' -%}<function={{ name }}><parameter=",
    ),
    Shown(
        "MiniMax M2", "MiniMaxM2ForCausalLM", "minimax_m2", "think", '<minimax:tool_call><invoke name="{{ name }}">' + THINK
    ),
    Shown(
        "GLM-4.5 to 5",
        "Glm4MoeForCausalLM Glm4MoeLiteForCausalLM Glm4vMoeForConditionalGeneration Glm46VForConditionalGeneration GlmMoeDsaForCausalLM",
        "glm", "think", PAIRS + THINK, ("<tool_call>", "<arg_key>", "<think>"),
    ),
    Shown("Llama 3.1 to 3.3", "LlamaForCausalLM", "llama3_json", "", '{{ "<|python_tag|>" + call.name }}'),
    Shown("Llama 4", "Llama4ForCausalLM Llama4ForConditionalGeneration", "pythonic", "", "<|python_start|>"),
    Shown("OLMo 3", "Olmo3ForCausalLM", "olmo3", "think", "<function_calls>{{ call }}</function_calls>" + THINK),
    Shown(
        "Mistral 7B v0.3, Mixtral, Nemo, Small 3.1", "MistralForCausalLM MixtralForCausalLM Mistral3ForConditionalGeneration",
        "mistral_list", "", LISTED,
    ),
    Shown(
        "Devstral, Ministral 3, Mistral Small 3.2 and 4",
        "MistralForCausalLM Mistral3ForConditionalGeneration Ministral3ForCausalLM Mistral4ForCausalLM", "mistral", "", NAMED,
    ),
    Shown(
        "Magistral", "MistralForCausalLM Mistral3ForConditionalGeneration", "mistral", "mistral", NAMED + "[THINK]{{ t }}[/THINK]"
    ),
    Shown(
        "DeepSeek V3 and R1", "DeepseekV3ForCausalLM", "deepseek_v3", "think", CALLS_BEGIN + "\\n```json\\n" + THINK
    ),
    Shown("DeepSeek V3.1", "DeepseekV3ForCausalLM DeepseekV32ForCausalLM", "deepseek_v31", "think", CALLS_BEGIN + THINK),
    Shown("DeepSeek V3.2", "DeepseekV32ForCausalLM", "deepseek_v32", "think", "", ("｜DSML｜", "<think>", "</think>", "<｜tool▁call▁begin｜>")),
    Shown(
        "Kimi K2, K2.5 and Linear",
        "DeepseekV3ForCausalLM Kimi_K25ForConditionalGeneration KimiK25ForConditionalGeneration KimiLinearForCausalLM",
        "kimi_k2", "think", SECTION, ("<think>", "</think>"),
    ),
    Shown("Gemma 4", "Gemma4ForCausalLM Gemma4ForConditionalGeneration Gemma4UnifiedForCausalLM"
          " Gemma4UnifiedForConditionalGeneration", "gemma4", "gemma4", "<|tool_call>call:{{ name }}{"),
    Shown("FunctionGemma", "Gemma3ForCausalLM", "function_gemma", "", "<start_function_call>call:{{ name }}{"),
    Shown("gpt-oss", "GptOssForCausalLM", "harmony", "harmony", PARTS),
    Shown("Command R and R+", "CohereForCausalLM", "command_r", "", "Write \\'Action:\\' followed by a list: ```json [{\"tool_name\": "),
    Shown(
        "Command R7B, A, A Vision and A Reasoning",
        "Cohere2ForCausalLM Cohere2VisionForConditionalGeneration Cohere2MoeForCausalLM", "cohere", "cohere",
        '<|START_THINKING|><|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f"}]<|END_ACTION|>',
    ),
    Shown(
        "Granite 3.0 to 3.2", "GraniteForCausalLM GraniteMoeForCausalLM GraniteMoeSharedForCausalLM", "granite", "",
        "respond with <|tool_call|> followed by a JSON list of tools used", ("<|tool_call|>",),
    ),
    Shown(
        "Granite 3.3", "GraniteForCausalLM", "granite", "think_response",
        "respond only with <|tool_call|> followed by a JSON list; between <think></think> and <response></response>", ("<|tool_call|>",),
    ),
    Shown(
        "Phi-4-mini and multimodal", "Phi3ForCausalLM Phi4MMForCausalLM Phi4MultimodalForCausalLM", "phi4_mini", "",
        "{{ '<|tool|>' + message['tools'] + '<|/tool|>' }}", ("<|tool_call|>", "<|/tool_call|>", "<|tool|>", "<|/tool|>"),
    ),
    Shown(
        "LFM2", "Lfm2ForCausalLM Lfm2MoeForCausalLM Lfm2VlForConditionalGeneration", "lfm2", "",
        "List of tools: <|tool_list_start|>[", ("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    Shown("LFM2.5", "Lfm2ForCausalLM Lfm2MoeForCausalLM", "lfm2", "think", "<|tool_call_start|>[" + THINK),
    Shown("Nemotron Nano 2", "NemotronHForCausalLM", "nemotron", "think", '<TOOLCALL>[{"name": "f"}]</TOOLCALL>' + THINK),
    Shown(
        "Apertus", "ApertusForCausalLM", "apertus", "apertus",
        "{%- set inner_token = '<|inner_prefix|>' -%}{%- set tool_calls_token = '<|tools_prefix|>' -%}",
    ),
    Shown("Solar Open", "SolarOpenForCausalLM", "solar", "solar", "<|begin|>assistant<|think|><|tool_calls|><|tool_call:begin|>{{ id }}"),
    Shown(
        "InternLM 3", "InternLM3ForCausalLM", "internlm", "", "<|im_start|>{{ message.role }}",
        ("<|action_start|>", "<|action_end|>", "<|plugin|>", "<|interpreter|>"),
    ),
    Shown(
        "Intern-S1", "InternS1ForConditionalGeneration", "internlm", "think", "<|action_start|><|plugin|>{{ call }}<|action_end|>" + THINK
    ),
    Shown("Jamba", "JambaForCausalLM", "jamba", "", '<tool_calls>[\n    {"name": "f", "arguments": {}}\n]</tool_calls>'),
    Shown(
        "HunYuan A13B", "HunYuanMoEV1ForCausalLM", "hunyuan", "think_answer",
        '<tool_calls>[{"name": "f"}]</tool_calls> {{ "助手：" + content }}<tool_call><think></think>',
    ),
    Shown(
        "Hy3", "HYV3ForCausalLM", "hy_v3", "hy_v3", "{{ '<tool_call' ~ s ~ '>' ~ name ~ '<tool_sep' ~ s ~ '>' ~ '<arg_key' ~ s ~ '>' }}",
        ("<tool_sep:opensource>", "<think:opensource>", "</think:opensource>"),
    ),
    Shown(
        "Hy3 preview", "HYV3ForCausalLM", "hy_v3_preview", "think", "<tool_calls><tool_call>{{ name }}<tool_sep><arg_key>" + THINK
    ),
    Shown("LongCat-Flash", "LongcatFlashForCausalLM", "longcat", "longcat", "<longcat_tool_call>{{ call }}", ("<longcat_think>",)),
    Shown(
        "LongCat-Flash 2601", "LongcatFlashForCausalLM", "longcat_tags", "longcat", "<longcat_tool_call>{{ name }}<longcat_arg_key>",
        ("<longcat_think>",),
    ),
)  # fmt: skip


def format_of(shown: Shown) -> tuple[str, str]:
    """The names of calls' and reasoning's formats that Baton takes for it."""
    found = choose(shown.template, {token: 1_000 + index for index, token in enumerate(shown.tokens)}).format
    return found.name, found.reasoning


def formats_of(architecture: str) -> tuple[str, str]:
    """The same for docs: of all models of an architecture."""
    formats = [format_of(shown) for shown in SHOWN if architecture in shown.architectures.split()]
    named = [dict.fromkeys(names) for names in zip(*formats, strict=True)] or [{}, {}]
    calls, reasoning = (", ".join(f"`{name}`" for name in names if name) or "–" for names in named)
    return calls, reasoning
