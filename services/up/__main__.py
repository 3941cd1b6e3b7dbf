"""All of Baton on one machine: `baton up`."""

from __future__ import annotations

import asyncio
import sys

from common.errors import ServingError
from common.settings import ConfigError
from services.host.nursery import Nursery, open_nursery
from services.runtime.checks.finding import refuse
from services.runtime.loading import fail, load_settings
from services.runtime.log import start_logging
from services.runtime.models.named import all_brought, missing
from services.runtime.models.serving import serve
from services.up.checks import before_the_model, examine
from services.up.settings import UpSettings


async def run(settings: UpSettings, nursery: Nursery | None) -> None:
    """Start everything, print the welcome, and stop everything when signalled."""
    # Imported here, so that help and errors of options don't wait for them.
    from services.runtime.signals import until_signalled
    from services.up.stack import Stack

    async with until_signalled() as stopping, Stack(settings, say=_say, nursery=nursery) as stack:
        await stack.start(stopping)
        await stack.watch(stopping)


def main() -> int:
    """Entry point; returns the exit code."""
    try:
        settings = load_settings(UpSettings, command="up", arguments=sys.argv[1:]).shared_out()
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
        nursery = (
            open_nursery(twins) if settings.processor == "cpu" and not settings.loads_on_demand else None
        )  # first: importing takes longest
        asyncio.run(run(settings, nursery))
    except (ConfigError, ServingError, OSError, ValueError) as error:
        return fail(error)
    except KeyboardInterrupt:  # the second Ctrl-C: children die with this process
        return 130
    return 0


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
