"""Answers inside a grammar: what a step and a first mask cost, and whether answers validate.

    python -m benchmarks.engine.structured --out DIR                          on a CPU with the demo model, in some minutes
    python -m benchmarks.engine.structured --out DIR --device cuda --model F  on a GPU; F without a tokenizer gets a wide one

Schemas: Kubernetes' of `kubernetes-validate` (Apache-2.0), the metaschemas of `jsonschema-specifications` (MIT), this chart's
values; `--schemas FOLDER` adds others, such as `cfnlint/data/schemas/resources` of `cfn-lint` (MIT-0).
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import random
import re
import statistics
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from benchmarks.environment import ROOT, describe
from benchmarks.results_format import Result, ResultsPage, notes_of
from common.messages import MAX_GRAMMAR_CHARS, Grammar, SamplingParams
from engine.config import CacheConfig, EngineConfig
from engine.engine import Engine
from engine.grammars.grammars import Grammars
from engine.groups import Table, entries_of
from engine.sequence import Sequence as Tokens
from gateway.grammars.forms import text_of
from gateway.grammars.wanted import json_schema

ROWS, STEPS, ROUNDS = 64, 40, 8
LONGEST_ANSWER = 700  # tokens
WIDE_VOCABULARY = 128_256
NO_CONSTRAINT = ("description", "title", "format", "examples", "example", "default", "$schema", "$id", "id", "$comment")
TEXT, WHOLE = {"type": "string"}, {"type": "integer"}
COMMON: dict[str, Any] = {
    "person": {"name": TEXT, "age": WHOLE, "email": TEXT},
    "call": {"name": {"enum": ["search", "weather", "mail"]}, "arguments": {"type": "object"}},
    "classes": {"label": {"enum": [f"class {index}" for index in range(50)]}, "confidence": {"type": "number"}},
    "invoice": {
        "number": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{6}$"},
        "date": {"type": "string", "format": "date"},
        "lines": {"type": "array", "items": {"type": "object", "properties": {"text": TEXT, "cents": WHOLE}}},
    },
    "steps": {"steps": {"type": "array", "items": {"type": "object", "properties": {"thought": TEXT}}}, "answer": TEXT},
    "contact": {"id": {"type": "string", "format": "uuid"}, "site": {"type": "string", "format": "uri"}},
}


def main(arguments: Sequence[str]) -> int:
    """Return 1 if an answer is invalid."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=ROOT / "demo")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--answers", type=int, default=1_000)
    parser.add_argument("--schemas", type=Path, action="append", default=[])
    options = parser.parse_args(arguments)
    facts = describe("benchmarks.engine.structured", arguments, torch.device(options.device))
    name = "structured" if options.device == "cpu" else "structured_gpu"
    page = ResultsPage(options.out, name, title="Answers inside a grammar", facts=facts, notes=notes_of(name))
    if not (options.model / "tokenizer.json").is_file():
        _write_tokenizer(options.model)
    page.state("model", _described(options.model))
    _first_masks(page)
    dtype = "float32" if options.device == "cpu" else "auto"
    engine = Engine(
        EngineConfig(
            model=options.model,
            device=options.device,
            dtype=dtype,
            max_model_len=768,
            cache=CacheConfig(num_blocks=ROWS * 48),
        )
    )
    _step(page, engine, _stops(options.model))
    return _answers(page, engine, options.model, options.schemas, options.answers) if options.answers else 0


def _described(model: Path) -> str:
    config = json.loads((model / "config.json").read_text())
    names = ("num_hidden_layers", "hidden_size", "vocab_size")
    return f"{model.name}: " + ", ".join(f"{name} {config[name]:,}" for name in names)


def _stops(model: Path) -> list[int]:
    named = json.loads((model / "config.json").read_text())["eos_token_id"]
    return named if isinstance(named, list) else [named]


def _first_masks(page: ResultsPage) -> None:
    """From the grammar's text to its first mask, each on a worker that has not seen it, with a wide vocabulary."""
    with tempfile.TemporaryDirectory() as folder:
        _write_tokenizer(Path(folder))
        grammars = Grammars(Path(folder), WIDE_VOCABULARY)
        for name, properties in COMMON.items():
            schema = {
                "type": "object",
                "properties": properties,
                "required": list(properties),
                "additionalProperties": False,
            }
            began = time.perf_counter()
            masks = grammars.masks([_sequence(name, _grammar(schema)).schedule(1)], lambda _: 0)
            took_ms = 1000 * (time.perf_counter() - began)
            assert not masks.problems
            page.add(Result(name=f"first_mask_{name}", value=took_ms, unit="ms", better="lower", target=20))


def _step(page: ResultsPage, engine: Engine, stops: list[int]) -> None:
    """Median step of 64 decoding rows, free and constrained ones in turns.

    On a GPU two passes are in flight. On a CPU it is the process's time, which others on the machine don't change.
    """
    item = {"type": "object", "properties": {"name": TEXT, "size": WHOLE}, "required": ["name", "size"]}
    grammar = _grammar({"type": "array", "items": item, "minItems": 1000})
    took: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(2 * ROUNDS):
        constrained = turn % 2 == 1
        asked = grammar if constrained else None
        rows = [_placed(_sequence(f"row {at}", asked, seed=at, stops=stops), at) for at in range(ROWS)]
        took[constrained] += _steps(engine, rows)[STEPS // 4 :]
    free, masked = (1000 * statistics.median(took[constrained]) for constrained in (False, True))
    page.add(
        Result(name="step_64_rows", value=free, unit="ms", better="lower"),
        Result(name="step_64_rows_constrained", value=masked, unit="ms", better="lower"),
        Result(name="step_longer", value=100 * (masked / free - 1), unit="%", better="lower", target=5),
    )


def _steps(engine: Engine, rows: list[Tokens]) -> list[float]:
    """Seconds from one pass's results to the next one's."""
    clock = time.perf_counter if engine.kv.is_cuda else time.process_time
    took, chunks = [], [row.schedule(row.num_unscheduled) for row in rows]
    in_flight, over_at = engine.launch(chunks), clock()
    for _ in range(STEPS):
        following = [row.schedule(1) for row in rows] if engine.kv.is_cuda else []
        launched = engine.launch(following)
        _apply(chunks, in_flight.wait())
        took.append(clock() - over_at)
        over_at = clock()
        chunks, in_flight = following, launched
        if not engine.kv.is_cuda:  # a launch on the CPU is over when it returns
            chunks = [row.schedule(1) for row in rows]
            in_flight = engine.launch(chunks)
    return took


def _apply(chunks: list[Any], results: list[Any]) -> None:
    for chunk, sampled in zip(chunks, results, strict=True):
        assert sampled is not None, "no finite logits"
        assert not sampled.problem, sampled.problem
        chunk.sequence.finish(chunk)
        chunk.sequence.append(sampled.token_id)


def _answers(page: ResultsPage, engine: Engine, model: Path, folders: list[Path], wanted: int) -> int:
    """Answers that ended by themselves, one a schema as long as there are schemas: all must validate."""
    schemas, stops = list(_schemas(folders)), _stops(model)
    random.Random(0).shuffle(schemas)
    waiting, counts, tokenizer = (
        itertools.cycle(schemas),
        Counter[str](),
        Tokenizer.from_file(str(model / "tokenizer.json")),
    )
    slots: list[tuple[Tokens, Any] | None] = [None] * ROWS
    asked, refused = 0, set[int]()
    while counts["valid"] + counts["invalid"] < wanted:
        for at, slot in enumerate(slots):
            while slot is None and len(refused) < len(schemas):
                schema = next(waiting)
                if id(schema) in refused:
                    continue
                asked += 1
                sequence = _placed(
                    _sequence(f"answer {asked}", _grammar(schema), seed=asked, max_tokens=LONGEST_ANSWER, stops=stops),
                    at,
                )
                building = engine.grammars.prepare(sequence)
                assert building is not None
                if building.result().problem:
                    refused.add(id(schema))
                    counts[_why(building.result().problem)] += 1
                    continue
                slot = slots[at] = (sequence, schema)
        running = [slot[0] for slot in slots if slot is not None]
        chunks = [sequence.schedule(sequence.num_unscheduled) for sequence in running]
        for chunk, sampled in zip(chunks, engine.launch(chunks).wait(), strict=True):
            if sampled is None or sampled.problem:
                counts["too complex in a step"] += 1
                _free(slots, chunk.sequence)
                continue
            chunk.sequence.finish(chunk)
            chunk.sequence.append(sampled.token_id)
            finish = chunk.sequence.finish_reason()
            if finish:
                schema = _free(slots, chunk.sequence)
                counts["cut" if finish == "length" else _judged(tokenizer, chunk.sequence, schema)] += 1
    page.state("schemas", f"{len(schemas)} of up to {MAX_GRAMMAR_CHARS:,} characters, {len(refused)} of them refused")
    others = [f"{count} {name}" for name, count in counts.most_common() if name not in ("valid", "invalid")]
    page.state("other ends", ", ".join(others))
    page.add(
        Result(name="answers_valid", value=counts["valid"], unit="answers", better="higher"),
        Result(name="answers: invalid", value=counts["invalid"], unit="answers", better="lower", target=0),
    )
    return 1 if counts["invalid"] else 0


def _why(problem: str) -> str:
    """The keyword that can't be enforced, or the kind of mistake."""
    words = problem.removeprefix("the grammar can't be built: ")
    return words if words.startswith("Unimplemented") else " ".join(words.split()[:3])


def _free(slots: list[tuple[Tokens, Any] | None], sequence: Tokens) -> Any:
    at = next(at for at, slot in enumerate(slots) if slot is not None and slot[0] is sequence)
    slot, slots[at] = slots[at], None
    assert slot is not None
    return slot[1]


def _judged(tokenizer: Tokenizer, sequence: Tokens, schema: Any) -> str:
    text = tokenizer.decode(sequence.token_ids[sequence.num_prompt_tokens : -1])
    try:
        kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        kind(schema).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError) as error:
        print(f"INVALID: {error}\n{text}\n{json.dumps(schema)[:2000]}", file=sys.stderr)
        return "invalid"
    return "valid"


def _sequence(
    name: str, grammar: Grammar | None, *, seed: int = 0, max_tokens: int = 10_000, stops: Sequence[int] = ()
) -> Tokens:
    sampling = SamplingParams(temperature=0.8, seed=seed, max_tokens=max_tokens, stop_token_ids=list(stops))
    return Tokens(
        request_id=name, attempt=1, token_ids=[5 + seed % 100], num_prompt_tokens=1, sampling=sampling, hash_root=b"",
        grammar=grammar,
    )  # fmt: skip


def _placed(sequence: Tokens, at: int) -> Tokens:
    sequence.tables = [Table(entries_of(range(48 * at, 48 * (at + 1)), 1))]
    return sequence


def _grammar(schema: Any) -> Grammar:
    return Grammar(text=text_of(json_schema("schema", schema).form, ()))


def _schemas(folders: list[Path]) -> Iterator[Any]:
    """Schemas that fit into a job, without what constrains nothing, with what they refer to."""
    kubernetes = _package("kubernetes_validate") / "kubernetes-json-schema"
    newest = max(
        kubernetes.glob("v*-local-strict"), key=lambda folder: [int(part) for part in re.findall(r"\d+", folder.name)]
    )
    places = [newest, _package("jsonschema_specifications") / "schemas", ROOT / "deploy/helm", *folders]
    seen = set[str]()
    for file in sorted(file for place in places for file in place.rglob("*.json") if not file.name.startswith("_")):
        try:
            schema = json.loads(file.read_text(encoding="utf-8"))
        except ValueError:
            continue
        if not isinstance(schema, dict) or not {"type", "properties", "anyOf", "oneOf"} & schema.keys():
            continue
        whole = _whole(schema, file)
        text = json.dumps(whole)
        if text not in seen and len(text) < MAX_GRAMMAR_CHARS - 500:
            seen.add(text)
            yield whole


def _whole(schema: Any, file: Path) -> Any:
    """The schema with the definitions of Kubernetes' other file that it needs."""
    definitions = file.with_name("_definitions.json")
    known = json.loads(definitions.read_text())["$defs"] if definitions.is_file() else {}
    plain, needed = _plain(schema), dict[str, Any]()
    missing = set(re.findall(r'"#/\$defs/([^"]+)"', json.dumps(plain))) & known.keys()
    while missing - needed.keys():
        name = min(missing - needed.keys())
        needed[name] = _plain(known[name])
        missing |= set(re.findall(r'"#/\$defs/([^"]+)"', json.dumps(needed[name]))) & known.keys()
    return plain | ({"$defs": needed} if needed else {})


def _plain(schema: Any, *, names: bool = False) -> Any:
    """Without annotations; `names`: the keys are properties' names."""
    if isinstance(schema, list):
        return [_plain(one) for one in schema]
    if isinstance(schema, str):
        return re.sub(r"^.*_definitions\.json#", "#", schema)
    if not isinstance(schema, dict):
        return schema
    kept = {name: value for name, value in schema.items() if names or not _says_nothing(name)}
    inner = ("properties", "definitions", "$defs", "patternProperties")
    return {name: _plain(value, names=not names and name in inner) for name, value in kept.items()}


def _says_nothing(keyword: str) -> bool:
    return keyword in NO_CONSTRAINT or keyword.startswith("x-")


def _package(name: str) -> Path:
    found = importlib.util.find_spec(name)
    assert found is not None, f"pip install {name}"
    assert found.origin is not None
    return Path(found.origin).parent


def _write_tokenizer(folder: Path) -> None:
    """A tokenizer.json of 128,256 byte-level tokens: the commonest words and parts of words in Python's own sources."""
    counts, size = Counter[str](), 0
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        text = file.read_text(encoding="utf-8", errors="ignore")
        size += len(text)
        for word in re.findall(r" ?[A-Za-z]+| ?[0-9]{1,3}| +|\n+ *|[^\sA-Za-z0-9]+", text):
            counts.update(
                {word[:12]: 1} | {part: 1 for end in range(2, min(len(word), 9)) for part in (word[:end], word[-end:])}
            )
        if size > 12_000_000:
            break
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    codes = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    chars = {byte: chr(byte) for byte in codes}
    chars |= {byte: chr(256 + index) for index, byte in enumerate(byte for byte in range(256) if byte not in codes)}
    words = ("".join(chars[byte] for byte in word.encode()) for word, _ in counts.most_common())
    vocabulary = dict.fromkeys([*alphabet, *words])
    kept = {word: index for index, word in enumerate(itertools.islice(vocabulary, WIDE_VOCABULARY - 3))}
    tokenizer = Tokenizer(models.BPE(vocab=kept, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True) for name in ("<|begin|>", "<|im_start|>", "<|im_end|>")]
    )
    tokenizer.save(str(folder / "tokenizer.json"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
