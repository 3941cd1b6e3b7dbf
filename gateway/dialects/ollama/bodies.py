"""The bodies of chat and generate. Unsupported values are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PrivateAttr, StrictBool, StrictInt, StrictStr, model_validator

from gateway.answers.ask import MAX_TOOLS, ToolRules, lasting_s, template_variables, tool_rules
from gateway.dialects.foreign import Foreign, TranslatedFields, ignored, refused
from gateway.dialects.ollama.messages import ONLY_TEXT, OllamaMessage
from gateway.dialects.ollama.options import OllamaOptions
from gateway.dialects.openai.messages import MAX_MESSAGES, ToolDefinition
from gateway.grammars import wanted
from gateway.grammars.wanted import Wanted
from gateway.http.fields import MAX_TOKEN_IDS, Number, TokenIds

MAX_TOP = 20
_FREE = {"type": "object"}
_SCHEMAS: dict[str, dict[str, Any]] = {
    "format": {"anyOf": [{"enum": [None, "", "json"]}, _FREE]},
    "think": {"enum": [None, True, False, "low", "medium", "high", "max"]},
}
_FOREIGN = ignored("a context that is full ends the answer", "shift")


class OllamaRequest(TranslatedFields):
    """The common fields of both."""

    schemas: ClassVar[dict[str, dict[str, Any]]] = _SCHEMAS
    foreign: ClassVar[Mapping[str, Foreign]] = _FOREIGN

    model: Annotated[StrictStr, Field(min_length=1)]
    stream: StrictBool = True
    format: Any = None
    options: OllamaOptions = Field(default_factory=OllamaOptions)
    keep_alive: StrictStr | Number | None = None
    think: StrictBool | Literal["low", "medium", "high", "max"] | None = None
    logprobs: StrictBool = False
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=MAX_TOP)] = 0
    truncate: StrictBool = False
    _followed: Wanted | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _combinations(self) -> OllamaRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: only allowed when logprobs is true")
        self._followed = followed(self.format)
        try:
            _ = self.model_keep_s  # validates it now
        except ValueError as error:
            raise ValueError(f"keep_alive: {error}") from None
        return self

    @property
    def ignored(self) -> tuple[str, ...]:
        """Ignored fields of the body and of its options."""
        kept = () if self.keep_alive is None else ("keep_alive",)  # unless a host loads the model
        return (*self._ignored, *kept, *(f"options.{name}" for name in self.options.ignored))

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @property
    def unloads(self) -> bool:
        """True if a body without a prompt asks to unload the model."""
        return self.model_keep_s == 0

    @property
    def model_keep_s(self) -> float | None:
        """Seconds for which the model stays loaded after it; None: as configured."""
        return None if self.keep_alive is None else lasting_s(self.keep_alive)

    @property
    def followed(self) -> Wanted | None:
        """The schema of the answer."""
        return self._followed

    @property
    def variables(self) -> dict[str, Any]:
        """The value of `think` as template variables."""
        thinks = None if self.think is None else self.think is not False
        return template_variables(thinks=thinks, effort=self.think if isinstance(self.think, str) else None)


class OllamaChatRequest(OllamaRequest):
    """Body of POST /api/chat."""

    messages: Annotated[list[OllamaMessage], Field(max_length=MAX_MESSAGES)] = Field(default_factory=list)
    tools: Annotated[list[ToolDefinition], Field(max_length=MAX_TOOLS)] | None = None
    _tool_rules: ToolRules = PrivateAttr(default_factory=ToolRules)

    @model_validator(mode="after")
    def _read_tools(self) -> OllamaChatRequest:
        self._tool_rules = tool_rules(
            [tool.function.as_tool() for tool in self.tools or ()], "auto", None, parallel=True
        )
        return self

    @property
    def tool_rules(self) -> ToolRules:
        return self._tool_rules


class OllamaGenerateRequest(OllamaRequest):
    """Body of POST /api/generate."""

    foreign: ClassVar[Mapping[str, Foreign]] = {
        **_FOREIGN,
        **refused(
            "the model's own is used; --chat-template gives another one, and raw takes the prompt as it is", "template"
        ),
        **refused(ONLY_TEXT, "images"),
        **refused("no images are made", "width", "height", "steps"),
    }
    many: ClassVar[Mapping[str, int]] = {"context": MAX_TOKEN_IDS}

    prompt: StrictStr = ""
    suffix: StrictStr = ""
    system: StrictStr = ""
    raw: StrictBool = False
    context: TokenIds = Field(default_factory=list)

    @model_validator(mode="after")
    def _one_way(self) -> OllamaGenerateRequest:
        if self.raw and self.system:
            raise ValueError("system: raw takes the prompt as it is: write it there")
        if self.raw and self.context:
            raise ValueError("context: not allowed together with raw")
        if self.suffix and (self.system or self.context):
            raise ValueError("suffix: a text between two others has neither system nor context")
        return self


def followed(format: Any) -> Wanted | None:
    """Return the schema of a `format`, without unenforceable rules. Raises ValueError."""
    if format in (None, ""):
        return None
    if format == "json":
        return wanted.json_object("format")
    if not isinstance(format, dict):
        raise ValueError('format: must be "json" or a JSON schema')
    return wanted.json_schema("format", format, strict=False)
