"""POST /generate, /generate_stream, and / , which does either."""

from __future__ import annotations

from typing import Any

from common.errors import InvalidRequestError
from common.messages import SamplingParams
from common.tracing import Attributes
from gateway.answers.answer import Answer
from gateway.answers.ask import Ask, Constraint, ContextFit, DraftWish, Sampling, Text, TextRules
from gateway.answers.choice import Piece
from gateway.dialects.best_of import by_likelihood
from gateway.dialects.described import described
from gateway.dialects.dialect import Events
from gateway.dialects.tgi.bodies import TgiParameters, TgiRequest
from gateway.dialects.tgi.events import TokenEvents
from gateway.dialects.tgi.objects import finish_reason, prefill_tokens, tokens_of, top_tokens
from gateway.http.problem import Json
from gateway.http.streaming import EVENTS

_SAME_NAMES = ("top_p", "typical_p", "frequency_penalty", "repetition_penalty")
FIELD_NAMES = {"prompt": "inputs", "max_tokens": "max_new_tokens", "prompt_logprobs": "decoder_input_details"}


class Generate:
    """A text in, a text out. `streams`: always. `as_pipeline`: in the form of transformers' pipelines, a list of one text, which
    begins with the prompt unless `return_full_text` is false.
    """

    body = TgiRequest
    operation = "text_completion"
    stream_type = EVENTS
    is_batchable = False

    def __init__(self, *, streams: bool = False, as_pipeline: bool = False) -> None:
        self._streams = streams
        self._as_pipeline = as_pipeline

    def ask(self, body: TgiRequest) -> Ask:
        parameters, stream = body.parameters, self._streams or body.stream
        if stream:
            _check_stream(parameters)
        return Ask(
            model=body.model,
            answer_prefix="tgi-",
            prompts=[Text(body.inputs)],
            stream=stream,
            sampling=Sampling(
                params=_sampling(
                    parameters, tells_tokens=stream or parameters.tells_tokens or parameters.best_of_several
                ),
                n=parameters.best_of or 1,
                seed=parameters.used_seed,
                drafts=DraftWish.of(parameters.speculation),
            ),
            text=TextRules(stops=parameters.stop or (), include_stop=True),
            fit=ContextFit(longest_prompt=parameters.truncate),
            constraint=Constraint(grammar=parameters.wanted),
            field_names=FIELD_NAMES,
        )

    def events(self, body: TgiRequest, answer: Answer) -> Events:
        return TokenEvents(body.parameters, answer, self._before(body))

    async def whole(self, body: TgiRequest, answer: Answer) -> Any:
        pieces = await answer.whole()
        best, *others = [pieces[place] for place in by_likelihood(pieces)]
        told: Json = {"generated_text": self._before(body) + best.text}
        if body.parameters.tells_tokens:
            told["details"] = _details(body.parameters, answer, best)
            if body.parameters.best_of_several:
                told["details"]["best_of_sequences"] = [
                    {"generated_text": self._before(body) + piece.text} | _details(body.parameters, answer, piece)
                    for piece in others
                ]
        return [told] if self._as_pipeline else told

    def describe(self, body: TgiRequest) -> Attributes:
        parameters = body.parameters
        return described(
            model=body.model,
            stream=self._streams or body.stream,
            max_tokens=parameters.max_new_tokens,
            temperature=parameters.temperature,
            top_p=parameters.top_p,
            seed=parameters.seed,
        )

    def _before(self, body: TgiRequest) -> str:
        """Return the prefix of every text."""
        wanted = body.parameters.return_full_text
        return body.inputs if (self._as_pipeline if wanted is None else wanted) else ""


def _check_stream(parameters: TgiParameters) -> None:
    """Check streaming. Raises InvalidRequestError for details that exist at the end only."""
    for name, is_asked in (
        ("best_of", parameters.best_of_several),
        ("decoder_input_details", parameters.decoder_input_details),
    ):
        if is_asked:
            raise InvalidRequestError(f"parameters.{name}: not in a stream", param=name)


def _sampling(parameters: TgiParameters, *, tells_tokens: bool) -> SamplingParams:
    """Sampling parameters: TGI's defaults take precedence over the model's."""
    given: dict[str, Any] = {
        name: float(value) for name in _SAME_NAMES if (value := getattr(parameters, name)) is not None
    }
    temperature = 1.0 if parameters.temperature is None else parameters.temperature
    return SamplingParams(
        **given,
        temperature=temperature if parameters.samples else 0.0,
        top_k=parameters.top_k or 0,
        logprobs=(parameters.top_n_tokens or 0) if tells_tokens else None,
        prompt_logprobs=0 if parameters.decoder_input_details else None,
        max_tokens=parameters.max_new_tokens,
    )


def _details(parameters: TgiParameters, answer: Answer, piece: Piece) -> Json:
    tokenizer = answer.tokenizer
    last_id = piece.token_ids[-1] if piece.token_ids else None
    told: Json = {
        "finish_reason": finish_reason(tokenizer, piece.finish, last_id),
        "generated_tokens": len(piece.token_ids),
        "seed": parameters.used_seed,
        "prefill": prefill_tokens(tokenizer, piece.prompt),
        "tokens": tokens_of(tokenizer, piece),
    }
    if parameters.top_n_tokens:
        told["top_tokens"] = [top_tokens(tokenizer, entry) for entry in piece.logprobs]
    return told
