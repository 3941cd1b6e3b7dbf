"""Readers of config.json that make an `EncoderSpec`, by class."""

from __future__ import annotations

from pathlib import Path

from engine.families.reading import windows_by_layer
from engine.families.reading.fields import Fields
from engine.pooling.families.bert import read_bert, read_colbert, read_mpnet, read_roberta
from engine.pooling.families.decoders import (
    Read,
    one_window,
    read_decoder,
    read_eurobert,
    with_reward,
    with_words,
)
from engine.pooling.families.gemma import read_gemma3
from engine.pooling.families.gte import read_gte
from engine.pooling.families.jina import read_jina
from engine.pooling.families.reading import HARMLESS
from engine.pooling.families.rotated import read_modern_bert, read_nomic_bert
from engine.pooling.spec import EncoderSpec
from engine.spec.model import UnsupportedModelError
from modelfiles.files import CONFIG, read_json
from modelfiles.jina import JINA_CLASS
from modelfiles.late import COLBERT_CLASS
from modelfiles.scoring import is_scored, read_scoring
from modelfiles.served import HEADED, REWARD, STEPS, named_in

_READERS: dict[str, Read] = {
    "Bert": read_bert,
    "Roberta": read_roberta,
    "XLMRoberta": read_roberta,
    "Camembert": read_roberta,
    "MPNet": read_mpnet,
    "ModernBert": read_modern_bert,
    "NomicBert": read_nomic_bert,
    "EuroBert": read_eurobert,
    "Gemma3Text": read_gemma3,
    "New": read_gte,  # GTE's remote code
    "Gte": read_gte,
}
# Decoders whose last token is a text's vector: served so where the folder has modules.json.
_DECODERS: dict[str, Read] = {
    "Qwen3": read_decoder(head_norms=True, windows=windows_by_layer),
    "Qwen2": read_decoder(has_qkv_bias=True, windows=windows_by_layer),
    "Mistral": read_decoder(windows=one_window),
    "Llama": read_decoder(),
}
# Each class: the encoder itself, with a head for masked words, which isn't read, or with one of labels or rewards.
FAMILIES: dict[str, Read] = {
    f"{name}{kind}": reader
    for readers, kinds in ((_READERS, ("Model", "ForMaskedLM", HEADED)), (_DECODERS, (HEADED, REWARD, STEPS)))
    for name, reader in readers.items()
    for kind in kinds
} | {COLBERT_CLASS: read_colbert, JINA_CLASS: read_jina}
DECODERS: dict[str, Read] = {
    f"{name}{kind}": reader for name, reader in _DECODERS.items() for kind in ("Model", "ForCausalLM")
}


def read_encoder_spec(model: Path) -> EncoderSpec:
    """Raises UnsupportedModelError, which names class or field; OSError."""
    config = read_json(model, CONFIG)
    named = named_in(config)
    known = FAMILIES | DECODERS
    name = next((name for name in named if name in known), "")
    if not name:
        raise UnsupportedModelError(
            f"config.json: {', '.join(named) or 'no class'} is not computed as an encoder: {', '.join(sorted(known))} are"
        )
    fields = Fields(config)
    fields.ignore(*HARMLESS)
    scoring = read_scoring(model, config) if is_scored(model, config) else None
    words = scoring.words if scoring is not None else ()
    spec = known[name](fields, name.endswith(HEADED) and not words)
    if words:
        fields.ignore("classifier_from_token", "is_original_qwen3_reranker")
        spec = with_words(spec, words, is_tied=fields.flag("tie_word_embeddings"))
    elif scoring is not None and name.endswith((REWARD, STEPS)):
        spec = with_reward(spec, labels=len(scoring.labels))
    fields.check_all_known(remedy="")
    return spec
