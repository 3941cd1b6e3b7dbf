"""Settings of `baton chat`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from cli.reach import ClientOptions
from common.settings import AUTO


class ChatSettings(ClientOptions):
    """`baton chat`: talk to a gateway in the terminal. `/help` lists what it can do meanwhile."""

    served_model_name: str = Field("", description="model to ask for; empty: the first that the server lists")
    system: str = Field("", description="system message")
    max_tokens: Annotated[int, Field(ge=0), AUTO] = Field(
        0, description="longest answer; auto: what the context has room for"
    )
    temperature: Annotated[float, Field(ge=0, le=2)] = Field(0.7, description="0: always the most likely token")
    tools: str = Field("", description="file with functions that the model may call, a list as in OpenAI's `tools`")
    think: bool = Field(False, description="let the model think before it answers, if it can (`enable_thinking`)")
    markdown: bool = Field(True, description="draw Markdown, on a terminal and with `rich` installed")
    history: bool = Field(True, description="keep what was typed for the next chat, in ~/.local/state/baton")
