"""Dialects: the HTTP APIs, one folder each. The rest of the gateway needs only their entries in `DIALECTS`."""

from __future__ import annotations

from gateway.dialects.anthropic import DIALECT as ANTHROPIC
from gateway.dialects.dialect import Dialect
from gateway.dialects.kserve import DIALECT as KSERVE
from gateway.dialects.llamacpp import DIALECT as LLAMACPP
from gateway.dialects.ollama import DIALECT as OLLAMA
from gateway.dialects.openai import DIALECT as OPENAI
from gateway.dialects.responses import DIALECT as RESPONSES
from gateway.dialects.sagemaker import DIALECT as SAGEMAKER
from gateway.dialects.tgi import DIALECT as TGI

DIALECTS: tuple[Dialect, ...] = (OPENAI, RESPONSES, ANTHROPIC, KSERVE, OLLAMA, TGI, SAGEMAKER, LLAMACPP)
