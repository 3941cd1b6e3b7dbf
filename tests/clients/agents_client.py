"""openai-agents by its default, the Responses API: tools, structured output, streams, turns."""

from __future__ import annotations

from typing import Any

from agents import (
    Agent,
    ModelSettings,
    Runner,
    function_tool,
    set_default_openai_client,
    set_tracing_disabled,
)
from cases import BASE_URL, MODEL, PERSON, WEATHER, case, run
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)
asked: list[str] = []


class Person(BaseModel):
    name: str
    age: int


@function_tool
def get_weather(city: str) -> str:
    """Get the weather of a city"""
    asked.append(city)
    return '{"temperature": 18, "sky": "sunny"}'


def agent(**options: Any) -> Agent[Any]:
    """An agent with a client of its case's event loop."""
    set_default_openai_client(AsyncOpenAI(base_url=BASE_URL, api_key="none", max_retries=0))
    return Agent(name="helper", model=MODEL, model_settings=ModelSettings(temperature=0), **options)


@case("an agent that says something")
async def plain() -> None:
    one = agent()
    assert "Paris" in (await Runner.run(one, "What is the capital of France?")).final_output


@case("an agent that calls a tool")
async def tools() -> None:
    asked.clear()
    one = agent(tools=[get_weather])
    assert (await Runner.run(one, WEATHER)).final_output
    assert asked == ["Paris"]


@case("the same, streamed")
async def streamed() -> None:
    asked.clear()
    one = agent(tools=[get_weather])
    result = Runner.run_streamed(one, WEATHER)
    kinds = [event.data.type async for event in result.stream_events() if event.type == "raw_response_event"]
    assert kinds.count("response.completed") == 2
    assert result.final_output
    assert asked == ["Paris"]


@case("an object by schema")
async def structured() -> None:
    one = agent(output_type=Person)
    assert (await Runner.run(one, PERSON)).final_output == Person(name="Anna", age=25)


@case("a second turn with the first one's items")
async def second_turn() -> None:
    one = agent()
    first = await Runner.run(one, "Hello!")
    again = [*first.to_input_list(), {"role": "user", "content": "What is 2 + 2?"}]
    assert "4" in (await Runner.run(one, again)).final_output  # type: ignore[arg-type]


run()
