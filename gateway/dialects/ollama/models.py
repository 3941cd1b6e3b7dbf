"""The served models in Ollama's form: listed, loaded, shown in detail."""

from __future__ import annotations

import json
import time
from typing import Any

from gateway.answers.catalogue import Served
from gateway.answers.start import Answers
from gateway.dialects.dialect import Asked
from gateway.dialects.ollama import vectors
from gateway.dialects.ollama.entries import NEVER, details, entry, family_of
from gateway.dialects.ollama.lines import stamp
from gateway.http.problem import Json

RUNNING = "Ollama is running"  # the body of `/` on its own port
VERSION = "0.40.0"  # the API version: clients require a minimum
_NS = 1_000_000_000
YEAR_S = 31_536_000
_PARAMETERS = {"repetition_penalty": "repeat_penalty"}


def version(answers: Answers, asked: Asked) -> Json:
    return {"version": VERSION}


def tags(answers: Answers, asked: Asked) -> Json:
    """All models, even without a ready worker."""
    listed = answers.catalogue.listed()
    found = [_entry(served) | {"modified_at": _since(served, answers)} for served in listed]
    return {"models": [*found, *vectors.tags(answers)]}


def loaded(answers: Answers, asked: Asked) -> Json:
    """Models with a ready worker."""
    found = [served for served in answers.catalogue.listed() if served.is_ready]
    return {
        "models": [
            _entry(served)
            | {"expires_at": _expires(served, answers), "size_vram": 0, "context_length": served.max_model_len or 0}
            for served in found
        ]
        + vectors.loaded(answers)
    }


def _expires(served: Served, answers: Answers) -> str:
    """The instant at which a host unloads the model, if nobody asks for it before."""
    left_s = None if answers.loads is None else answers.loads.left_s(served.name)
    return NEVER if left_s is None or left_s > YEAR_S else stamp(time.time_ns() + int(left_s * _NS))


def shown(served: Served, answers: Answers) -> Json:
    """Return the answer of /api/show."""
    tokenizer, family = served.tokenizer, _family(served)
    parameters, system = "\n".join(_parameters(served)), served.preset.system
    info: dict[str, Any] = {
        "general.architecture": family,
        "general.basename": served.asked_as,
        f"{family}.vocab_size": tokenizer.vocab_size,
    }
    if served.max_model_len is not None:
        info[f"{family}.context_length"] = served.max_model_len
    return {
        "modelfile": _modelfile(served),
        "parameters": parameters,
        "template": tokenizer.template_source,
        "details": _details(served),
        "model_info": info,
        "capabilities": capabilities(served),
        "modified_at": _since(served, answers),
    } | ({"system": system} if system else {})


def _modelfile(served: Served) -> str:
    """The model as Ollama would be told of it."""
    preset = served.preset
    return "\n".join(
        [
            f"FROM {served.name}",
            *(f"PARAMETER {one}" for one in _parameters(served)),
            *([f"SYSTEM {json.dumps(preset.system, ensure_ascii=False)}"] if preset.system else []),
            *(f"MESSAGE {one['role']} {json.dumps(one['content'], ensure_ascii=False)}" for one in preset.messages),
        ]
    )


def _parameters(served: Served) -> list[str]:
    """The model's own defaults, and those of its name."""
    preset = served.preset
    found = {
        _PARAMETERS.get(name, name): value for name, value in (served.tokenizer.defaults | preset.sampling).items()
    }
    found |= {} if preset.seed is None else {"seed": preset.seed}
    found |= {"num_predict": preset.max_tokens} if preset.max_tokens else {}
    stops = [f"stop {json.dumps(stop, ensure_ascii=False)}" for stop in preset.stops]
    return [*(f"{name} {value}" for name, value in sorted(found.items())), *stops]


def capabilities(served: Served) -> list[str]:
    """Return the model's capabilities here, in Ollama's words."""
    tokenizer, format_ = served.tokenizer, served.tokenizer.format.format
    known = {
        "tools": tokenizer.can_chat and bool(format_.name),
        "thinking": tokenizer.can_chat and bool(format_.reasoning),
        "insert": tokenizer.infill is not None,
    }
    return ["completion", *(name for name, can in known.items() if can)]


def _entry(served: Served) -> Json:
    return entry(served.asked_as, served.name, served.fingerprint, served.tokenizer.saved)


def _details(served: Served) -> Json:
    return details(served.asked_as, served.name, served.tokenizer.saved)


def _family(served: Served) -> str:
    return family_of(served.tokenizer.saved)


def _since(served: Served, answers: Answers) -> str:
    return stamp(answers.model(served.asked_as).created * _NS)
