# mypy: allow-untyped-calls
"""Tiny random models whose tokens have vectors: ColBERT's in its authors' form and in PyLate's, bge-m3's heads."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.pooling_models import build_pooling_model, randomise

CLS, SEP, MASK = 2, 3, 4
QUERY, DOCUMENT = 100, 101  # markers
SIZE = 24  # features of a token's vector
METADATA = {
    "query_token_id": "[unused0]",
    "doc_token_id": "[unused1]",
    "query_token": "[Q]",
    "doc_token": "[D]",
    "similarity": "cosine",
    "interaction": "colbert",
    "query_maxlen": 12,
    "doc_maxlen": 20,
    "dim": SIZE,
    "mask_punctuation": True,
    "attend_to_mask_tokens": False,
}
PYLATE = {
    "model_type": "ColBERT",
    "prompts": {"query": "", "document": ""},
    "similarity_fn_name": "MaxSim",
    "query_prefix": "[Q] ",
    "document_prefix": "[D] ",
    "query_length": 12,
    "document_length": 20,
    "attend_to_expansion_tokens": False,
    "skiplist_words": list(string.punctuation),
    "do_query_expansion": True,
}


def build_colbert(folder: Path, **changes: Any) -> Path:
    """ColBERT as its authors publish it; `changes` of its artifact.metadata."""
    build_pooling_model(folder, "BertModel", modules=())
    add_words(folder, {"[unused0]": QUERY, "[unused1]": DOCUMENT})
    stored = {f"bert.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    linear = torch.randn(SIZE, 32, generator=torch.Generator().manual_seed(8)) / 32**0.5
    save_file(stored | {"linear.weight": linear}, folder / "model.safetensors")
    changed(folder / "config.json", architectures=["HF_ColBERT"])
    (folder / "artifact.metadata").write_text(json.dumps({**METADATA, **changes}))
    return folder


def build_pylate(folder: Path, family: str = "ModernBertModel", **changes: Any) -> Path:
    """ColBERT in PyLate's form: a product in a folder of its own; `changes` of its configuration."""
    fields = {"local_attention": 64} if family == "ModernBertModel" else {}
    build_pooling_model(folder, family, modules=("Dense",), **fields)
    add_words(folder, {"[Q] ": QUERY, "[D] ": DOCUMENT})
    (folder / "config_sentence_transformers.json").write_text(json.dumps({**PYLATE, **changes}))
    return folder


def build_m3(folder: Path, *, colbert: int = 32, dtype: torch.dtype = torch.float16) -> Path:
    """bge-m3: XLM-R whose first token is the vector, and heads of torch.save beside it."""
    build_pooling_model(folder, "XLMRobertaModel", pooling={"pooling_mode_cls_token": True})
    changed(folder / "config.json", bos_token_id=CLS, eos_token_id=SEP)
    special = {"cls_token": "[CLS]", "eos_token": "[SEP]", "pad_token": "[PAD]", "unk_token": {"content": "[UNK]"}}
    changed(folder / "tokenizer_config.json", **special)
    for name, size in (("sparse_linear.pt", 1), ("colbert_linear.pt", colbert)):
        if size:
            head = torch.nn.Linear(32, size)
            randomise(head, 12)
            if size == 1:
                torch.nn.init.constant_(head.bias, 0.5)  # some weights are above 0, and some below
            torch.save(head.to(dtype).state_dict(), folder / name)
    return folder


def add_words(folder: Path, words: dict[str, int]) -> None:
    file = folder / "tokenizer.json"
    read = json.loads(file.read_bytes())
    read["model"]["vocab"] |= words
    file.write_text(json.dumps(read))


def changed(file: Path, **fields: Any) -> None:
    """Some fields of a JSON file changed."""
    file.write_text(json.dumps({**json.loads(file.read_bytes()), **fields}))
