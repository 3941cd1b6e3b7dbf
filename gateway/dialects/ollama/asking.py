"""The ask of chat and generate, and its description."""

from __future__ import annotations

from common.tracing import Attributes
from gateway.answers.ask import Ask, Constraint, ContextFit, DraftWish, Prompt, Reply, Sampling, Terms, TextRules
from gateway.dialects.described import described as attributes
from gateway.dialects.ollama.bodies import OllamaRequest
from gateway.dialects.ollama.lines import at_once
from gateway.http.problem import Json


def asked(
    body: OllamaRequest,
    *,
    answer_prefix: str,
    prompt: Prompt,
    prompt_name: str,
    reply: Reply | None,
    instead: Json | None,
) -> Ask:
    """Return a body's ask. `instead`: the content of the answer if nothing is to be generated."""
    options = body.options
    return Ask(
        model=body.model,
        answer_prefix=answer_prefix,
        prompts=[prompt],
        stream=body.stream,
        sampling=Sampling(
            params=options.sampling(body.num_logprobs),
            left_open=options.left_open,
            seed=options.wanted_seed,
            drafts=DraftWish.of(options.speculation),
        ),
        text=TextRules(stops=options.stop or []),
        fit=ContextFit(longest_prompt=-1 if body.truncate else None, ends_with_context=True),
        reply=reply,
        constraint=Constraint(grammar=body.followed),
        terms=Terms(model_keep_s=body.model_keep_s),
        instead=None if instead is None else at_once(body.model, instead, unloads=body.unloads),
        field_names={"max_tokens": "options.num_predict", "prompt": prompt_name},
    )


def described(body: OllamaRequest) -> Attributes:
    """The request as attributes of its span."""
    options = body.options
    return attributes(
        model=body.model,
        stream=body.stream,
        max_tokens=options.num_predict,
        temperature=options.temperature,
        top_p=options.top_p,
        seed=options.seed,
    )
