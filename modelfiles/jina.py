"""Tasks of Jina's third embedder, as config.json names them: adapters, and the text that each wants before its inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelfiles.sentences import PoolingError
from modelfiles.served import named_in

JINA_CLASS = "XLMRobertaLoRA"
# Others' names for its tasks.
MEANT = {"query": "retrieval.query", "document": "retrieval.passage", "clustering": "separation"}


def tasks_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the adapters, in the order of their tensors; (): a model without. Raises PoolingError."""
    if JINA_CLASS not in named_in(config):
        return ()
    said = config.get("lora_adaptations") or []
    if not isinstance(said, list) or not all(isinstance(one, str) and one for one in said):
        raise PoolingError(f"config.json: lora_adaptations must be a list of names, not {said!r:.40}")
    return tuple(said)


def prompts_of(config: Mapping[str, Any]) -> dict[str, str]:
    """The text of each task, by its name and others' names for it. Raises PoolingError."""
    said = config.get("task_instructions")
    texts = dict.fromkeys(tasks_of(config), "")
    if isinstance(said, Mapping):
        texts |= {str(task): text for task, text in said.items() if isinstance(text, str)}
    return texts


def with_others_names(texts: Mapping[str, str], tasks: tuple[str, ...]) -> dict[str, str]:
    """Prompts, and those of tasks by others' names for them."""
    meant = {name: texts[task] for name, task in MEANT.items() if task in tasks and task in texts}
    return {**meant, **texts}


def adapter_of(name: str, tasks: tuple[str, ...]) -> str:
    """The task that a prompt's name means; "": none."""
    found = name if name in tasks else MEANT.get(name, "")
    return found if found in tasks else ""
