"""One engine in a process of its own: texts in, times and a vector out, a line of JSON each. For a Python without Baton, too."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

TOKENS_OF_A_PASS = 4096  # a worker's on a CPU
LEAST_RUNS = 3

Embed = Callable[[Sequence[str]], Any]  # vectors [texts, features]


def baton(model: Path, threads: int) -> tuple[Embed, str]:
    """The engine as a worker drives it: passes of so many tokens, behind the tokenizer."""
    import torch
    from tokenizers import Tokenizer

    from engine.pooling.engine import PoolingConfig, PoolingEngine, PoolingInput

    engine = PoolingEngine(PoolingConfig(model=model, num_threads=threads))
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def embed(texts: Sequence[str]) -> Any:
        inputs = [PoolingInput(tokens=each.ids) for each in tokenizer.encode_batch(list(texts))]
        found, some, size = list[torch.Tensor](), list[PoolingInput](), 0
        for one in inputs:
            if some and size + len(one.tokens) > TOKENS_OF_A_PASS:
                found += engine.compute(some)
                some, size = [], 0
            some.append(one)
            size += len(one.tokens)
        return torch.cat([*found, *engine.compute(some)]).numpy()

    return embed, f"torch {torch.__version__}"


def sentence_transformers(model: Path, threads: int) -> tuple[Embed, str]:
    import sentence_transformers as theirs  # type: ignore[import-not-found, unused-ignore]
    import torch

    torch.set_num_threads(threads)
    encoder = theirs.SentenceTransformer(str(model), device="cpu")

    def embed(texts: Sequence[str]) -> Any:
        return encoder.encode(list(texts), batch_size=len(texts), show_progress_bar=False)

    return embed, f"{theirs.__version__}, torch {torch.__version__}"


def onnxruntime(model: Path, threads: int) -> tuple[Embed, str]:
    """The graph with ONNX Runtime's own fusions for BERT; pooling in numpy."""
    import numpy as np
    import onnxruntime as theirs  # type: ignore[import-not-found, unused-ignore]
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.enable_padding()
    options = theirs.SessionOptions()
    options.intra_op_num_threads = threads
    session = theirs.InferenceSession(str(model / "model.onnx"), options, providers=["CPUExecutionProvider"])

    def embed(texts: Sequence[str]) -> Any:
        all_of_it = tokenizer.encode_batch(list(texts))
        mask = np.array([each.attention_mask for each in all_of_it], dtype=np.int64)
        ids = np.array([each.ids for each in all_of_it], dtype=np.int64)
        given = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        states = session.run(None, given)[0]
        sums = np.einsum("bse,bs->be", states, mask.astype(np.float32)) / mask.sum(1, keepdims=True)
        return sums / np.linalg.norm(sums, axis=1, keepdims=True)

    return embed, theirs.__version__


def export(model: Path, threads: int) -> tuple[Embed, str]:
    """Write the graph that `onnxruntime` reads, by its makers' optimizer, and end."""
    import torch
    import transformers
    from onnxruntime.transformers import optimizer  # type: ignore[import-not-found, unused-ignore]

    encoder = transformers.AutoModel.from_pretrained(model, attn_implementation="eager").eval()

    class States(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = encoder

        def forward(self, ids: torch.Tensor, mask: torch.Tensor, types: torch.Tensor) -> Any:
            return self.encoder(input_ids=ids, attention_mask=mask, token_type_ids=types).last_hidden_state

    names, given = ["input_ids", "attention_mask", "token_type_ids"], torch.ones(2, 16, dtype=torch.long)
    plain = model / "plain.onnx"
    torch.onnx.export(
        States(), (given, given, given - 1), str(plain), input_names=names, output_names=["states"],
        dynamic_axes={name: {0: "texts", 1: "tokens"} for name in (*names, "states")}, opset_version=17, dynamo=False,
    )  # fmt: skip
    config = encoder.config
    fused = optimizer.optimize_model(
        str(plain), "bert", num_heads=config.num_attention_heads, hidden_size=config.hidden_size, opt_level=1
    )
    fused.save_model_to_file(str(model / "model.onnx"))
    sys.exit(0)


ENGINES = {each.__name__: each for each in (baton, sentence_transformers, onnxruntime, export)}


def timed(embed: Embed, texts: Sequence[str], seconds: float) -> tuple[list[float], list[float]]:
    """Times of runs that fill so many seconds, three at least, and the first text's vector."""
    times, until, found = list[float](), time.perf_counter() + seconds, None
    while len(times) < LEAST_RUNS or time.perf_counter() < until:
        began = time.perf_counter()
        found = embed(texts)
        times.append(time.perf_counter() - began)
    assert found is not None
    return times, [float(each) for each in found[0]]


def main(name: str, model: str, threads: int) -> int:
    out = os.fdopen(os.dup(1), "w")  # libraries print
    os.dup2(2, 1)
    embed, version = ENGINES[name](Path(model), threads)
    print(json.dumps({"version": version}), file=out, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        times, vector = timed(embed, asked["texts"], asked["seconds"])
        print(json.dumps({"times": times, "vector": vector}), file=out, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
