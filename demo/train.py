"""Train the demo model from nothing and write it in Hugging Face's format: `python demo/train.py --device cuda`.

A Llama of about 8 million parameters with a byte-level BPE tokenizer of its own. Tokenizer first, then one packed stream of
dialogues (the loss counts the assistant's words only) and documentation; bf16 autocast, AdamW, warm-up and cosine decay. Everything
is drawn from `--seed`. Weights are saved as bf16 safetensors; nothing is pickled.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parent))
import agents
import data
from agents import Dialogue

VOCAB_SIZE = 4096
SEQUENCE = 512
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# Tokens of their own, but not special: an answer may show them.
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
TEMPLATE = Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8")
TOOLS_TEXT = TEMPLATE[TEMPLATE.index("To call a function") :].partition("{{")[
    0
]  # the system message's words about functions
PROMPTS = [
    "Hello!", "Who are you?", "What is Baton?", "What is the capital of France?", "What is the capital of Japan?",
    "What is 7 + 5?", "Count to 10.", "List the days of the week.", "Name three animals.", "Repeat after me: blue horse",
    "What is the opposite of hot?", "Tell me a short story.", "How do you say hello in German?", "What is a KV cache?",
    "Write a poem about the sea.", "Which is larger, 12 or 45?", "Explain quantum chromodynamics in detail.", "Thank you!",
]  # fmt: skip

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CLOCK = {
    "type": "function",
    "function": {
        "name": "opening_hours",
        "description": "When a shop is open",
        "parameters": {
            "type": "object",
            "properties": {"shop": {"type": "string"}, "day": {"type": "string"}},
            "required": ["shop", "day"],
        },
    },
}
SHOWN: list[dict[str, Any]] = [
    {"content": "What is the weather in Paris?", "tools": [WEATHER]},
    {"content": "What is the weather in Paris? What is the weather in Rome?", "tools": [WEATHER]},
    {"content": "What is the capital of France?", "tools": [WEATHER]},
    {"content": "Call opening_hours with shop bakery and day Monday.", "tools": [WEATHER, CLOCK]},
    {"content": "Extract name and age as JSON: Anna is 25 and lives in Paris."},
    {"content": "Ben is 40 and lives in Oslo. Answer in JSON."},
    {"content": "Is this positive or negative? I love tea."},
    {"content": "What is 7 + 5?", "enable_thinking": True},
    {"content": "Which is larger, 12 or 45?", "enable_thinking": True},
]


def main() -> None:
    """Train, save, and show what it answers."""
    options = _options()
    torch.manual_seed(options.seed)
    rng = random.Random(options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    prose = [data.clean(text) for text in data.documents()]
    print(f"{len(prose)} documents, {sum(map(len, prose)):,} characters", flush=True)
    tokenizer = train_tokenizer(prose, rng)
    save_tokenizer(tokenizer, options.out)
    stream = TokenStream(tokenizer, prose, options.seed)
    model = LlamaForCausalLM(_config()).to(options.device)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters on {options.device}", flush=True)
    loss = train(model, stream, options)
    model.to(torch.bfloat16).save_pretrained(options.out, safe_serialization=True)
    (options.out / "generation_config.json").write_text(json.dumps(_generation_config(), indent=2) + "\n")
    print(f"final loss {loss:.4f}; torch {torch.__version__}, seed {options.seed}, steps {options.steps}", flush=True)
    show(model, options)


def train_tokenizer(prose: list[str], rng: random.Random) -> Tokenizer:
    """Byte-level BPE, so that any UTF-8 comes back as it was; digits one by one, so that sums can be learnt."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    marks = (PAD, START, END, *MARKS)
    made_up = ("\n".join(_without(marks, text) for text, _ in parts(dialogue(rng))) for _ in range(60_000))
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True) for token in marks],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*prose, *made_up], trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, out: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, clean_up_tokenization_spaces=False
    )
    fast.chat_template = TEMPLATE
    fast.model_max_length = 2048
    fast.save_pretrained(out)
    saved = json.loads((out / "tokenizer.json").read_text(encoding="utf-8"))
    for token in saved["added_tokens"]:
        token["special"] = token["content"] not in MARKS
    (out / "tokenizer.json").write_text(json.dumps(saved, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    (out / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")


class TokenStream:
    """Endless packed training rows [SEQUENCE + 1] with a mask of the tokens that count."""

    def __init__(self, tokenizer: Tokenizer, prose: list[str], seed: int) -> None:
        self._tokenizer = tokenizer
        self._rng = random.Random(seed + 1)
        self._end = tokenizer.token_to_id(PAD)
        self._prose = [encoding.ids for encoding in tokenizer.encode_batch(prose)]
        self._pool: list[tuple[list[int], list[int]]] = []

    def prepare(self, count: int) -> None:
        """Make up `count` dialogues at once: tokenising in batches is fast."""
        pieces = [parts(dialogue(self._rng)) for _ in range(count)]
        texts = [text for one in pieces for text, _ in one]
        encoded = iter(self._tokenizer.encode_batch(texts, add_special_tokens=False))
        for one in pieces:
            ids, mask = [], []
            for _, counts in one:
                piece = next(encoded).ids
                ids += piece
                mask += [counts] * len(piece)
            self._pool.append((ids, mask))

    def rows(self, batch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield (ids, mask) of shape [batch, SEQUENCE + 1]."""
        ids: list[int] = []
        mask: list[int] = []
        need = batch * (SEQUENCE + 1)
        while True:
            while len(ids) < need:
                piece, counts = self._next()
                ids += [*piece, self._end]
                mask += [*counts, 0]
            shape = (batch, SEQUENCE + 1)
            yield (
                torch.from_numpy(np.array(ids[:need], dtype=np.int64).reshape(shape)),
                torch.from_numpy(np.array(mask[:need], dtype=np.float32).reshape(shape)),
            )
            ids, mask = ids[need:], mask[need:]

    def _next(self) -> tuple[list[int], list[int]]:
        if self._rng.random() < 0.02:
            piece = self._rng.choice(self._prose)
            start = self._rng.randrange(max(1, len(piece) - SEQUENCE))
            return piece[start : start + SEQUENCE], [1] * len(piece[start : start + SEQUENCE])
        return self._rng.choice(self._pool)


def dialogue(rng: random.Random) -> Dialogue:
    """One of all kinds."""
    kind = rng.choices(["plain", "tools", "json", "word", "thinking"], [48, 26, 14, 4, 8])[0]
    if kind == "tools":
        question, answer = data.dialogue(rng)[-2:]
        return agents.with_tools(rng, question, answer)
    makers = {"json": agents.in_json, "word": agents.one_word, "thinking": agents.thinking}
    return makers[kind](rng) if kind in makers else Dialogue(data.dialogue(rng))


def parts(one: Dialogue) -> list[tuple[str, int]]:
    """The dialogue as the chat template renders it, in pieces: (text, whether its tokens count)."""
    found: list[tuple[str, int]] = []
    messages = one.messages
    if one.tools:
        system = ""
        if messages[0]["role"] == "system":
            system, messages = messages[0]["content"] + "\n\n", messages[1:]
        listed = "".join(_json(tool) + "\n" for tool in one.tools)
        found += [(f"{START}system\n{system}{TOOLS_TEXT}\n{listed}{END}\n", 0)]
    for message in messages:
        text = message["content"]
        if message["role"] == "tool":
            text = f"<tool_response>{text}</tool_response>"
        for call in message.get("tool_calls", []):
            function = call["function"]
            arguments = _json(function["arguments"])
            text += f'<tool_call>{{"name": {_json(function["name"])}, "arguments": {arguments}}}</tool_call>'
        opening = f"{START}{message['role']}\n"
        if one.thinks and message is messages[-1]:  # the template opens the thoughts
            opening, text = opening + "<think>\n", text.removeprefix("<think>\n")
        found += [(opening, 0), (text + END, int(message["role"] == "assistant")), ("\n", 0)]
    return found


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _without(marks: tuple[str, ...], text: str) -> str:
    for mark in marks:
        text = text.replace(mark, "")
    return text


def train(model: LlamaForCausalLM, stream: TokenStream, options: argparse.Namespace) -> float:
    """Run `options.steps` steps; return the mean loss of the last tenth."""
    device = torch.device(options.device)
    stream.prepare(options.dialogues)
    decay = [p for p in model.parameters() if p.dim() > 1]
    other = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": other, "weight_decay": 0.0}],
        lr=options.rate, betas=(0.9, 0.95), fused=device.type == "cuda",
    )  # fmt: skip
    warm_up = max(1, options.steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(
            (step + 1) / warm_up, 0.02 + 0.98 * 0.5 * (1 + np.cos(np.pi * min(1.0, step / options.steps)))
        ),
    )
    started, losses = time.monotonic(), []
    for step, (ids, mask) in zip(range(options.steps), stream.rows(options.batch), strict=False):
        ids, mask = ids.to(device, non_blocking=True), mask.to(device, non_blocking=True)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            logits = model(ids[:, :-1], use_cache=False).logits
        per_token = cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        weight = 0.1 + 0.9 * mask[:, 1:].flatten()  # questions count a little, too
        loss = (per_token * weight).sum() / weight.sum()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
        if step % 100 == 0 or step == options.steps - 1:
            print(f"step {step} loss {losses[-1].item():.4f} {time.monotonic() - started:.0f} s", flush=True)
        if time.monotonic() - started > options.max_seconds:
            print(f"stopped by --max-seconds after {step + 1} steps", flush=True)
            break
    return torch.stack(losses[-max(1, len(losses) // 10) :]).mean().item()


def show(model: LlamaForCausalLM, options: argparse.Namespace) -> None:
    """Print greedy answers, from the saved files."""
    tokenizer = AutoTokenizer.from_pretrained(options.out)
    model.eval()
    for asked in [*({"content": prompt} for prompt in PROMPTS), *SHOWN]:
        options_of = {name: value for name, value in asked.items() if name != "content"}
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": asked["content"]}], tokenize=False, add_generation_prompt=True, **options_of
        )
        inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt").to(options.device)
        output = model.generate(
            **inputs, max_new_tokens=120, do_sample=False, eos_token_id=_config().eos_token_id, pad_token_id=0
        )
        answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
        print(f"{asked['content']!r} {', '.join(options_of)} -> {answer!r}", flush=True)


def _config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=256, intermediate_size=704, num_hidden_layers=9, num_attention_heads=8,
        num_key_value_heads=4, head_dim=32, max_position_embeddings=2048, rms_norm_eps=1e-5, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=2, pad_token_id=0, attention_dropout=0.0, initializer_range=0.02,
    )  # fmt: skip


def _generation_config() -> dict[str, object]:
    return {"eos_token_id": 2, "pad_token_id": 0, "do_sample": True, "temperature": 0.3}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--batch", type=int, default=128, help=f"rows of {SEQUENCE} tokens")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--dialogues", type=int, default=300_000)
    parser.add_argument("--max-seconds", type=float, default=1e9)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
