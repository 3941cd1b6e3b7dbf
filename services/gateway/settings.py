"""Settings of `baton gateway`, and their conversion for its components."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from common import PREFIX
from common.settings import AUTO_BELOW_0, OFF, ConfigError, Id, Port, Positive, Seconds
from services.gateway.models import ServedModelOptions, entries
from services.runtime.settings import ServiceLevelOptions

# Imported on use: help waits for no client and no gateway.
if TYPE_CHECKING:
    from gateway.admission.policy import RequestLimits
    from gateway.batches.records import BatchLimits
    from gateway.http.application import WebAccess
    from gateway.observe.attainment import ServiceLevels
    from gateway.parsing.choose import Parsers
    from gateway.responses.records import ResponseLimits

LOOPBACK = ("127.0.0.1", "localhost", "::1")
DAY_S = 86_400.0
BATCH_SHARE = 1 / 64  # a batch's lines, among the requests in flight
JINJA = ("{{", "{%", "\n")  # marks of a template, which no file name has
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9.\[\]:_-]+\Z")


class GatewaySettings(ServedModelOptions, ServiceLevelOptions):
    """`baton gateway`: HTTP in, tokens out."""

    tool_call_parser: str = Field(
        "auto",
        description="how models write tool calls: a format for all or model=format by commas; auto: by their files",
    )
    reasoning_parser: str = Field("auto", description="how models write reasoning, in the same way")
    chat_template: str = Field(
        "",
        description="chat template for models that bring none, or another one: a file with Jinja, or the Jinja itself; "
        "for one of several models: model=file by commas",
    )
    host: str = Field("127.0.0.1", description="address to listen on; other than loopback needs an API key")
    port: Port = Field(8000, description="HTTP port")
    own_port: Annotated[Port, OFF] = Field(
        0,
        description="share --port with the gateways of this host that have an --own-port, too; this one is this gateway's "
        "alone, for /metrics, /debug and probes",
    )
    ollama_port: Annotated[Port, OFF] = Field(
        0,
        description="serve at this port, too: Ollama's clients look for it at 11434, and are told at `/` that it runs",
    )
    grpc_port: Annotated[Port, OFF] = Field(
        0, description="serve KServe's protocol over gRPC at this port, too; needs grpcio (docs/dialects/kserve.md)"
    )
    api_keys: str = Field("", description="comma-separated API keys; empty: none is asked for (loopback only)")
    cors_origins: str = Field(
        "",
        description="comma-separated origins whose web pages may use this gateway, as https://app.example.org; *: all",
    )
    allowed_hosts: str = Field(
        "",
        description="comma-separated names under which a gateway without keys answers, beside --host and loopback's; *: all",
    )
    tls_cert: str = Field("", description="certificate chain (PEM): serve HTTPS instead of HTTP")
    tls_key: str = Field("", description="its key (PEM); empty: in the same file")
    gateway_id: Id = Field("", description="name on the bus; empty: made up")
    tenants: str = Field(
        "", description="TOML file with tenants, their keys and limits (docs/operations.md); read again on SIGHUP"
    )
    admin_key: str = Field(
        "",
        description="key for what tells of all tenants (/metrics, /debug, /console, /admin); empty: an API key is enough there",
    )
    metrics_key: str = Field(
        "", description="key that opens /metrics alone, for Prometheus; others that are enough there stay so"
    )
    orders_key: str = Field(
        "",
        description="key for /admin alone: unlike --admin-key it closes nothing that is open without one. `baton up` makes one "
        "where it is given no keys",
    )
    log_requests: Literal["off", "errors", "all"] = Field(
        "errors", description="a log line for each request: none, those that failed or were refused, all; never prompts"
    )
    unknown_fields: Literal["ignore", "refuse"] = Field(
        "refuse",
        description="fields of chat and completions that no server is known to have: left out and named in the answer's header "
        "x-baton-ignored-fields, or refused",
    )
    trace_url: str = Field(
        "",
        description="where the console links to for a trace, as https://jaeger.example/trace/{trace_id}; empty: no link",
    )
    request_timeout_s: Seconds = Field(600.0, description="deadline of a request that sets none")
    ttft_slo_ms_per_token: Annotated[float, Field(ge=0)] = Field(
        0.0, description="goodput: a first token may come so much later than --ttft-slo-ms for each prompt token, ms"
    )
    max_connections: Positive = Field(
        4096, description="open HTTP connections at most; further ones are answered with 503"
    )
    max_requests: Positive = Field(1024, description="requests in flight at most, of each model")
    max_queued_tokens: Positive = Field(
        4_000_000, description="prompt tokens waiting for prefill at most, of each model"
    )
    max_body_mb: Positive = Field(10, description="largest HTTP body, MiB")
    admit_by: Literal["deadline", "goal"] = Field(
        "deadline",
        description="refuse at once who can't get a first token by its deadline; or also who has a TTFT goal, of its own or its "
        "tenant's, that can't be met",
    )
    local_prefill_tokens: Annotated[int, Field(ge=-1), AUTO_BELOW_0] = Field(
        -1,
        description="uncached prompt up to this many tokens is prefilled on the decode worker; auto: whenever the rates that "
        "workers measure say that its first token comes earlier there",
    )

    batch_store_mb: Annotated[int, Field(ge=0), OFF] = Field(
        2048, description="Batch API: disk of NATS for files, batches and results, MiB; off: no Batch API"
    )
    responses_store_mb: Annotated[int, Field(ge=0), OFF] = Field(
        2048,
        description="Responses API: disk of NATS for responses and conversations that are kept, MiB; off: nothing is kept",
    )
    keep_days: Annotated[float, Field(gt=0, le=3650)] = Field(
        30.0, description="files, batches, responses and conversations are kept so long; the same for all gateways"
    )

    @property
    def public_ports(self) -> dict[str, int]:
        """Ports that clients know, by their flags. Gateways with a port of their own share them."""
        return {"--port": self.port} | ({"--ollama-port": self.ollama_port} if self.ollama_port else {})

    def limits(self) -> RequestLimits:
        """Limits of accepted requests."""
        from gateway.admission.policy import RequestLimits

        return RequestLimits(
            max_requests=self.max_requests,
            max_queued_tokens=self.max_queued_tokens,
            cut_over_tokens=self.local_prefill_tokens,
        )

    def levels(self) -> ServiceLevels:
        """The objectives of a good answer."""
        from gateway.observe.attainment import ServiceLevels

        return ServiceLevels(
            ttft_s=self.ttft_slo_ms / 1000,
            ttft_s_per_token=self.ttft_slo_ms_per_token / 1000,
            tpot_s=self.tpot_slo_ms / 1000,
        )

    def batches(self) -> BatchLimits:
        """Limits of the Batch API."""
        from gateway.batches.records import BatchLimits

        return BatchLimits(
            store_bytes=self.batch_store_mb << 20,
            concurrency=max(1, round(self.max_requests * BATCH_SHARE)),
            keep_s=self.keep_days * DAY_S,
        )

    def responses(self) -> ResponseLimits:
        """Limits of the Responses API's storage."""
        from gateway.responses.records import ResponseLimits

        return ResponseLimits(store_bytes=self.responses_store_mb << 20, keep_s=self.keep_days * DAY_S)

    def web(self) -> WebAccess:
        """Access of web pages (CORS)."""
        from gateway.http.application import WebAccess

        hosts = tuple(host.lower() for host in entries(self.allowed_hosts))
        return WebAccess(origins=tuple(entries(self.cors_origins)), bound=self.host, hosts=hosts)

    def parsers(self, model: str) -> Parsers:
        """Tool and reasoning parsers by model. Raises ConfigError."""
        from gateway.parsing.choose import Parsers

        named = {"calls": self.tool_call_parser, "reasoning": self.reasoning_parser}
        flags = {"calls": "--tool-call-parser", "reasoning": "--reasoning-parser"}
        found = {kind: self._of_model(flags[kind], text, model) or "auto" for kind, text in named.items()}
        for kind, name in found.items():
            try:
                Parsers(**{kind: name})
            except ValueError as error:
                raise ConfigError(f"{flags[kind]}: {error}") from None
        return Parsers(**found)

    def template(self, model: str) -> str:
        """The chat template given for a model; "": its own. Raises ConfigError if it is no template."""
        from gateway.templates.template import check_template

        text, flag = self.chat_template, "--chat-template"
        if not any(sign in text for sign in JINJA) and (name := self._of_model(flag, text, model)):
            flag = f"{flag} {name}"
            try:
                text = Path(name).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                why = "no such file" if isinstance(error, FileNotFoundError) else error
                raise ConfigError(f"{flag}: {why}; give a file with Jinja, or Jinja itself") from None
        elif not any(sign in text for sign in JINJA):
            return ""
        try:
            check_template(text)
        except ValueError as error:
            raise ConfigError(f"{flag}: {error}") from None
        return text

    def _of_model(self, flag: str, text: str, model: str) -> str:
        """A value for one model or for all: `a`, or `chat=a,coder=b`. Raises ConfigError for an unknown model."""
        named = dict(entry.partition("=")[::2] for entry in entries(text))
        for name, said in named.items():
            if said and name not in self.folders:
                raise ConfigError(f"{flag}: no model {name!r} is served; served: {', '.join(self.folders)}")
        return named.get(model) or next((name for name, said in named.items() if not said), "")

    @property
    def keys(self) -> tuple[str, ...]:
        """The API keys; empty: none is needed."""
        return tuple(entries(self.api_keys))

    @field_validator("cors_origins")
    @classmethod
    def _origins(cls, origins: str) -> str:
        for origin in entries(origins):
            if origin not in ("*", "null") and not _ORIGIN.match(origin):
                raise ConfigError(
                    f"--cors-origins: {origin!r} is no origin: write it like https://app.example.org:8443"
                )
        return origins

    @field_validator("trace_url")
    @classmethod
    def _trace_link(cls, url: str) -> str:
        if url and ("{trace_id}" not in url or not url.startswith(("https://", "http://"))):
            raise ConfigError(f"--trace-url: {url!r} is not like https://jaeger.example/trace/{{trace_id}}")
        return url

    @model_validator(mode="after")
    def _guarded(self) -> Self:
        if self.own_port and self.own_port == self.port:
            raise ConfigError(f"--own-port {self.own_port}: is --port, which is shared: give each gateway another one")
        if self.ollama_port and self.ollama_port in (self.port, self.own_port):
            raise ConfigError(f"--ollama-port {self.ollama_port}: is this gateway's already: leave it out")
        if self.grpc_port and self.grpc_port in (self.port, self.own_port, self.ollama_port):
            raise ConfigError(f"--grpc-port {self.grpc_port}: HTTP is served there: choose another one, usually 8001")
        if self.tls_key and not self.tls_cert:
            raise ConfigError("--tls-key is given without --tls-cert: give both, or none for HTTP")
        for model in self.folders:
            self.parsers(model)
        _ = self.aliases  # validates them now
        if self.host not in LOOPBACK and not self.keys and not self.tenants:
            raise ConfigError(
                f"--host {self.host} is not loopback: set {PREFIX}API_KEYS (--api-keys) or --tenants, "
                "or listen on 127.0.0.1; `baton keys new` makes a key"
            )
        return self
