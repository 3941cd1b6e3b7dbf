"""Models of vectors in Ollama's form, beside those that generate. It asks for no scores, so models of these are not listed."""

from __future__ import annotations

from gateway.answers.catalogue import PooledFacts
from gateway.answers.start import Answers
from gateway.dialects.ollama.entries import NEVER, details, entry, family_of
from gateway.dialects.ollama.lines import stamp
from gateway.http.problem import Json
from modelfiles.pooling import EMBED

_NS = 1_000_000_000


def _listed(answers: Answers) -> list[tuple[str, str, PooledFacts]]:
    """Each name, the model's own, and the model."""
    catalogue = answers.catalogue
    named = [(name, own, catalogue.pooled[own]) for name, own in catalogue.pooled_names.items()]
    return [one for one in named if EMBED in one[2].pooling.works]


def tags(answers: Answers) -> list[Json]:
    since = stamp(answers.started_at * _NS)
    return [entry(name, own, "", facts.saved) | {"modified_at": since} for name, own, facts in _listed(answers)]


def loaded(answers: Answers) -> list[Json]:
    """Those with a ready worker."""
    return [
        entry(name, own, "", facts.saved)
        | {"expires_at": NEVER, "size_vram": 0, "context_length": facts.pooling.max_len}
        for name, own, facts in _listed(answers)
        if answers.catalogue.pools(own)
    ]


def shown(name: str, answers: Answers) -> Json | None:
    """The answer of /api/show; None for a model that makes no vectors."""
    own = answers.catalogue.pooled_name(name)
    facts = answers.catalogue.pooled.get(own)
    if facts is None or EMBED not in facts.pooling.works:
        return None
    family = family_of(facts.saved)
    return {
        "modelfile": f"FROM {own}",
        "parameters": "",
        "template": "{{ .Prompt }}",
        "details": details(name, own, facts.saved),
        "model_info": {
            "general.architecture": family,
            "general.basename": name,
            f"{family}.vocab_size": facts.vocab_size,
            f"{family}.embedding_length": facts.pooling.size,
            f"{family}.context_length": facts.pooling.max_len,
        },
        "capabilities": ["embedding"],
        "modified_at": stamp(answers.started_at * _NS),
    }
