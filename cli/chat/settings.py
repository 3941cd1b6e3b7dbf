"""Settings of `baton chat`."""

from __future__ import annotations

from pydantic import Field

from cli.reach import ClientOptions


class ChatSettings(ClientOptions):
    """`baton chat`: talk to a gateway in the terminal. `/help` lists what it can do meanwhile."""

    served_model_name: str = Field("", description="model to ask for; empty: the first that the server lists")
    system: str = Field("", description="system message")
    set: str = Field(
        "",
        description="what /set takes in the chat, as max_tokens=100, by commas or one flag each, and think=on; temperature is "
        "0.7 unless it is set, to default for the model's own",
    )
    tools: str = Field("", description="file with functions that the model may call, a list as in OpenAI's `tools`")
