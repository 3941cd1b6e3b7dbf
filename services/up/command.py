"""The command of `baton up`: settings, checks, and the processes until a signal."""

from __future__ import annotations

import asyncio

from common.errors import ServingError
from common.settings import ConfigError
from services.host.nursery import Nursery, open_nursery
from services.nursery.beginning import Beginning
from services.runtime.checks.finding import refuse
from services.runtime.loading import fail, load_settings
from services.runtime.log import start_logging
from services.runtime.memory import importing
from services.runtime.models.named import all_brought, missing
from services.runtime.models.serving import serve
from services.up.checks import before_the_model, examine
from services.up.settings import UpSettings


async def run(settings: UpSettings, nursery: Nursery | None) -> None:
    """Start everything, print the welcome, and stop everything when signalled."""
    # Imported here, so that help and errors of options don't wait for them.
    with importing():
        from services.runtime.signals import until_signalled
        from services.up.stack import Stack

    async with until_signalled() as stopping, Stack(settings, say=_say, nursery=nursery) as stack:
        await stack.start(stopping)
        await stack.watch(stopping)


def up(arguments: list[str], begun: Beginning | None) -> int:
    """Serve until signalled; return the exit code. `begun`: the nursery's process, ended if it is not needed."""
    try:
        settings = load_settings(UpSettings, command="up", arguments=arguments).shared_out()
        if any(missing(folder, text_alone=bool(settings.fake)) for folder in settings.folders.values()):
            refuse(before_the_model(settings))
            settings = all_brought(settings, _say, text_alone=bool(settings.fake))
        for folder in settings.folders.values():
            serve(folder, "baton up")
        start_logging(service="up", level=settings.log_level, form=settings.log_format)
        findings = list(examine(settings))
        refuse(findings)
        for finding in findings:
            if finding.level == "warn":
                _say(f"warning: {finding.said}")
        twins = settings.prefills.least + settings.decodes.least
        nursery = None
        if settings.processor == "cpu" and not settings.loads_on_demand:
            nursery = open_nursery(twins, begun)
        elif begun is not None:
            begun.end()
        asyncio.run(run(settings, nursery))
    except (ConfigError, ServingError, OSError, ValueError) as error:
        return fail(error)
    return 0


def _say(line: str) -> None:
    print(line, flush=True)
