"""The child process that says what workers would refuse: it reads their settings, and writes a text for each."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import msgspec

from engine.foreign import is_foreign
from engine.resolving import read_config
from modelfiles.pooling import is_pooled
from services.runtime.loading import load_settings
from services.worker.process import FAILURES
from services.worker.ranks import check_ranks
from services.worker.settings import WorkerServiceSettings


def said(variables: Mapping[str, str]) -> str:
    """The refusal of one worker; "" if it would start, as far as its model goes."""
    try:
        settings = load_settings(WorkerServiceSettings, command="worker", arguments=[], environment=variables).sized()
        check_ranks(settings)
        check_fields(settings)
    except FAILURES as error:
        return str(error)
    return ""


def check_fields(settings: WorkerServiceSettings) -> None:
    """Raise ValueError or OSError for a model whose configuration its family doesn't know all of."""
    if settings.fake:
        return
    if is_pooled(settings.model):
        from engine.pooling.families import read_encoder_spec  # the nursery imports what all its workers need

        read_encoder_spec(settings.model)
    elif not is_foreign(config := settings.engine()):  # only transformers could tell of others, and it is slow
        read_config(config)


if __name__ == "__main__":
    asked = msgspec.json.decode(sys.stdin.buffer.read(), type=list[dict[str, str]])
    sys.stdout.buffer.write(msgspec.json.encode([said(variables) for variables in asked]))
