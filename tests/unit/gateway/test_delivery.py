"""From a generation's mailbox to the socket: what a client gets does not depend on how its tokens came."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from typing import Any

import pytest

from common.errors import UnavailableError
from common.messages import SamplingParams
from gateway.answers.answer import MAX_TOKENS, Answer, Turn
from gateway.answers.ask import Reply, TextRules
from gateway.answers.choice import Choice, Piece
from gateway.answers.tokenizer import ChatTokenizer
from gateway.dialects.openai.chat import Chat
from gateway.dialects.openai.completions import Completions
from gateway.dialects.openai.schema import ChatRequest, CompletionRequest
from gateway.observe.metrics import AnswerMetrics, GatewayMetrics
from gateway.request.spec import TokenEvent
from gateway.request.timeline import STOP_STRING
from gateway.routes.serving import StreamedAnswer
from tests.unit.gateway.delivered import Generation, Socket, cut, put, turn_over

TEXT = "<think>Größe 🙂 or\u2028not?</think>The capital of France is Paris, and the sea is near."


class Stream:
    """An answer of one or more choices, written to a socket."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        *,
        n: int = 1,
        turn: Turn | None = None,
        stops: Sequence[str] = (),
        max_tokens: int = 500,
        **asked: Any,
    ) -> None:
        chat = {"model": "m", "messages": [{"role": "user", "content": "?"}], "stream": True}
        self.body = ChatRequest(**chat, **asked)
        self.generations = [Generation() for _ in range(n)]
        sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=tokenizer.eos_ids)
        rules = TextRules(stops=stops)
        choices = [
            Choice(one, tokenizer, index=index, rules=rules, sampling=sampling, reply=Reply(), prompt=[5])
            for index, one in enumerate(self.generations)
        ]
        self.answer = Answer(
            id="a",
            model="m",
            own_model="m",
            tokenizer=tokenizer,
            choices=choices,
            prompts=[[5]],
            turn=turn or Turn(),
            created=7,
        )
        metrics = AnswerMetrics(GatewayMetrics(["m"]), self.answer, 0.0)
        self.streamed = StreamedAnswer(Chat().events(self.body, self.answer), self.answer, metrics)
        self.socket = Socket()
        self.streamed.begin(self.socket)

    def put(self, events: Sequence[TokenEvent], choice: int = 0) -> None:
        for event in events:
            put(self.generations[choice].mailbox, event)

    @property
    def message(self) -> tuple[str, str, str | None]:
        """Content, reasoning and finish of the first choice, from what was written."""
        entries = [entry for event in self.socket.events for entry in event.get("choices", ()) if entry["index"] == 0]
        deltas = [entry["delta"] for entry in entries]
        content, reasoning = ("".join(d.get(name) or "" for d in deltas) for name in ("content", "reasoning"))
        return content, reasoning, entries[-1]["finish_reason"]


def ids_of(tokenizer: ChatTokenizer, text: str = TEXT) -> list[int]:
    return [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_ids[0]]


@pytest.mark.parametrize("seed", range(20))
async def test_any_split_and_any_delay_make_the_same_message(demo: ChatTokenizer, seed: int) -> None:
    """Frames of some tokens each; several of them in a turn; a client that stops reading now and then."""
    dice = random.Random(seed)
    options = {"logprobs": True, "top_logprobs": 1, "stream_options": {"include_usage": True}} if seed % 2 else {}
    stops = ["is near", "Pluto"] if seed % 3 == 0 else []
    whole, split = (Stream(demo, stops=stops, **options) for _ in range(2))
    ids = ids_of(demo)
    whole.put(cut(ids, [1000], logprobs=bool(options)))
    await turn_over()
    for event in cut(ids, [dice.randrange(1, 6) for _ in range(9)], logprobs=bool(options)):
        split.put([event])
        if dice.random() < 0.2:
            split.socket.reads.clear()
        elif dice.random() < 0.7:
            split.socket.reads.set()
            await turn_over()
    split.socket.reads.set()
    while not split.socket.is_ended:
        await turn_over()
    assert split.message == whole.message
    assert split.message[0].startswith("The capital of France")
    assert split.message[1] == "Größe 🙂 or\u2028not?"
    told, wanted = (
        [
            one
            for event in stream.socket.events
            for entry in event["choices"]
            for one in (entry.get("logprobs") or {}).get("content") or ()
        ]
        for stream in (split, whole)
    )
    assert told == wanted
    assert bool(told) is bool(options)
    assert split.socket.events[-1].get("usage") == whole.socket.events[-1].get("usage")
    assert split.answer.usage() == whole.answer.usage()


async def test_a_turn_has_one_write_and_one_event_a_choice(demo: ChatTokenizer) -> None:
    stream = Stream(demo, n=2)
    ids = ids_of(demo, "one two three four five six seven eight")
    first, *rest = cut(ids, [1])
    assert len(stream.socket.parts) == 1  # the opening
    stream.put([first])
    await turn_over()
    assert len(stream.socket.parts) == 2
    stream.put(rest[:3])
    stream.put(cut(ids, [2])[:2], choice=1)
    await turn_over()
    assert len(stream.socket.parts) == 3
    said = [(e["choices"][0]["index"], e["choices"][0]["delta"]["content"]) for e in stream.socket.events[3:]]
    decoded = [demo.decode(part, skip_special_tokens=True) for part in (ids[1:4], ids[:4])]
    assert said == list(enumerate(decoded))


async def test_tokens_wait_as_numbers_while_the_client_does_not_read(demo: ChatTokenizer) -> None:
    stream = Stream(demo, max_tokens=5000)
    ids = ids_of(demo, "a b c d e f g h " * 40)
    first, *rest = cut(ids, [1])
    stream.socket.reads.clear()
    stream.put([first])
    await turn_over()
    written = len(stream.socket.parts)
    for event in rest:
        stream.put([event])
        await turn_over()
    assert len(stream.socket.parts) == written
    stream.socket.reads.set()
    await turn_over()
    await turn_over()
    told = stream.socket.events[-1]["choices"][0]["delta"]["content"]
    assert told == demo.decode(ids[1 : 1 + MAX_TOKENS], skip_special_tokens=True).rstrip()  # then others have a turn
    while not stream.socket.is_ended:
        await turn_over()
    assert len(stream.socket.parts) - written <= 1 + len(ids) // MAX_TOKENS
    assert stream.message[0] == "a b c d e f g h " * 40


async def test_a_stop_string_in_the_middle_of_late_tokens_ends_the_stream(demo: ChatTokenizer) -> None:
    stream = Stream(demo, stops=["Paris"])
    stream.put(cut(ids_of(demo), [3])[:-1])
    await turn_over()
    assert stream.message == ("The capital of France is ", "Größe 🙂 or\u2028not?", "stop")
    assert stream.socket.is_ended
    assert stream.generations[0].cancelled == [STOP_STRING]


async def test_an_error_comes_behind_the_tokens_before_it_and_ends_all_choices(demo: ChatTokenizer) -> None:
    stream = Stream(demo, n=2)
    stream.put(cut(ids_of(demo, "so far so good"), [2])[:2])
    stream.generations[0].mailbox.close(UnavailableError("the worker is gone"))
    for _ in range(3):
        await turn_over()
    *_, told, error = stream.socket.events
    assert told["choices"][0]["delta"]["content"]
    assert error["error"]["message"] == "the worker is gone"
    assert stream.socket.is_ended
    assert b"[DONE]" not in b"".join(stream.socket.parts)
    assert stream.generations[1].cancelled == ["answer ended"]


@pytest.mark.parametrize("is_late", [False, True])
async def test_an_error_is_told_behind_tokens_that_are_only_text(demo: ChatTokenizer, is_late: bool) -> None:
    """They came in one turn, or while the client did not read."""
    stream = Stream(demo)
    first, second, third, *_ = cut(ids_of(demo, "so far so good"), [1])
    if is_late:
        stream.socket.reads.clear()
    stream.put([first])
    await turn_over()
    stream.put([second, third])
    stream.generations[0].mailbox.close(UnavailableError("the worker is gone"))
    stream.socket.reads.set()
    for _ in range(6):
        await turn_over()
    *_, told, error = stream.socket.events
    assert told["choices"][0]["delta"]["content"]
    assert error["error"]["message"] == "the worker is gone"
    assert stream.socket.is_ended


async def test_a_whole_answer_fails_behind_tokens_that_are_only_text(demo: ChatTokenizer) -> None:
    stream = Stream(demo)
    stream.streamed.close()
    [choice] = stream.answer.choices
    choice.generation = generation = Generation()
    whole = asyncio.ensure_future(stream.answer.whole())
    first, second, *_ = cut(ids_of(demo, "so far so good"), [1])
    for event in (first, second):
        await turn_over()
        put(generation.mailbox, event)
    generation.mailbox.close(UnavailableError("the worker is gone"))
    with pytest.raises(UnavailableError, match="the worker is gone"):
        await asyncio.wait_for(whole, 60)


async def test_nothing_is_written_to_a_client_that_left(demo: ChatTokenizer) -> None:
    stream = Stream(demo)
    first, *rest = cut(ids_of(demo), [1])
    stream.put([first])
    await turn_over()
    stream.put(rest[:5])
    written = list(stream.socket.parts)
    stream.streamed.close()
    await turn_over()
    assert stream.socket.parts == written
    assert stream.generations[0].cancelled == ["client disconnected"]


async def test_a_stream_that_breaks_says_so_and_breaks_no_other(
    demo: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = Turn()
    broken, whole = Stream(demo, turn=turn), Stream(demo, turn=turn)

    def crash(event: TokenEvent) -> Piece:
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(broken.answer.choices[0], "take", crash)
    for stream in (broken, whole):
        stream.put(cut(ids_of(demo), [7]))
    await turn_over()
    assert broken.socket.events[-1]["error"]["message"] == "internal error"
    assert broken.socket.is_ended
    assert whole.message[2] == "stop"


async def test_a_stream_that_can_not_be_closed_ends_and_holds_up_no_other(
    demo: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = Turn()
    broken, whole = Stream(demo, turn=turn), Stream(demo, turn=turn)

    def crash(reason: str) -> None:
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(broken.generations[0], "cancel", crash)
    for stream in (broken, whole):
        stream.put(cut(ids_of(demo), [7]))
    await turn_over()
    assert [stream.message[2] for stream in (broken, whole)] == ["stop", "stop"]
    assert broken.socket.is_ended
    assert whole.socket.is_ended


async def test_the_pieces_of_one_call_are_one_entry_of_an_event(demo: ChatTokenizer) -> None:
    stream = Stream(demo, tools=[{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}])
    calls = {"tools": stream.body.tool_rules}
    choice = Choice(
        stream.generations[0], demo, index=0, rules=TextRules(), reply=Reply(**calls), prompt=[5],
        sampling=SamplingParams(max_tokens=500, stop_token_ids=demo.eos_ids),
    )  # fmt: skip
    said = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, 3]}}\n</tool_call>'
    [event] = cut(ids_of(demo, said), [1000])
    [call] = choice.take(event).calls
    assert (call.name, json.loads(call.arguments)) == ("add", {"a": 1, "b": [2, 3]})


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("sizes", [(1,), (1, 4)])
async def test_a_whole_answer_is_what_the_stream_says(demo: ChatTokenizer, n: int, sizes: tuple[int, ...]) -> None:
    stream = Stream(demo, n=n)
    whole = Stream(demo, n=n)
    whole.streamed.close()  # it is read as one piece instead
    fresh = [Generation() for _ in range(n)]
    for choice, generation in zip(whole.answer.choices, fresh, strict=True):
        choice.generation = generation
    reading = asyncio.create_task(whole.answer.whole())
    await turn_over()
    for index in range(n):
        stream.put(cut(ids_of(demo), [3]), choice=index)
        for event in cut(ids_of(demo), sizes):
            put(fresh[index].mailbox, event)
            await turn_over()
    pieces = await reading
    await turn_over()
    assert [(piece.text, piece.reasoning, str(piece.finish)) for piece in pieces] == [stream.message] * n
    assert [piece.token_ids for piece in pieces] == [ids_of(demo)] * n


async def test_completions_write_their_text_as_it_is(demo: ChatTokenizer) -> None:
    """The JSON around a text is made once, of a text that is none."""
    body = CompletionRequest(model='with "quotes"', prompt="?", stream=True)
    generation = Generation()
    rules, sampling = TextRules(), SamplingParams(max_tokens=100)
    choice = Choice(generation, demo, index=0, rules=rules, sampling=sampling)
    answer = Answer(
        id="a", model='with "quotes"', own_model="m", tokenizer=demo, choices=[choice], prompts=[[5]], created=7
    )
    events = Completions().events(body, answer)
    for text in ('"', "\\", "\n", "\u2028", "\x00", "🙂", "plain"):
        told = events.event(choice, Piece(text=text))
        assert len(told.decode().splitlines()) == 2
        assert json.loads(told[6:]) == {
            "id": "a", "object": "text_completion", "created": 7, "model": 'with "quotes"',
            "system_fingerprint": None,
            "choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": None}],
        }  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
async def test_tokens_that_are_only_text_say_what_they_would_if_read_one_by_one(demo: ChatTokenizer, seed: int) -> None:
    """Any tokens, of which some are spaces, parts of characters, markup or special; with stop strings and without."""
    dice = random.Random(seed)
    ids = ids_of(demo, "<think>") if seed % 4 == 0 else []
    words = [
        demo.encode(word, add_special_tokens=False) for word in ("Größe", " 🙂", "  ", "</think>", "a < b", "\n\n", ".")
    ]
    while len(ids) < 300:
        ids += dice.choice(words) if dice.random() < 0.3 else [dice.randrange(demo.vocab_size)]
    stops = ["zu", " the end", "\n\n\n"] if seed % 2 else []
    read, told = (Stream(demo, stops=stops) for _ in range(2))
    for event in cut(ids, [1]):
        read.generations[0].mailbox.put(event)
        told.put([event])
        if dice.random() < 0.7:
            await turn_over()
    while not (read.socket.is_ended and told.socket.is_ended):
        await turn_over()
    assert told.message == read.message
    assert told.answer.usage() == read.answer.usage()


async def test_most_of_an_answer_is_not_read_token_by_token(
    demo: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Stream(demo)
    [choice] = stream.answer.choices
    ids = ids_of(demo, "The capital of France is Paris, and the sea is near.")
    taken: list[int] = []
    take = choice.take
    monkeypatch.setattr(choice, "take", lambda event: (taken.extend(event.token_ids), take(event))[1])
    for event in cut(ids, [1]):
        stream.put([event])
        await turn_over()
    assert stream.message == ("The capital of France is Paris, and the sea is near.", "", "stop")
    assert taken == [ids[0], ids[-1]]
