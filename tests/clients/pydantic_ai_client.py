"""pydantic-ai: typed output by tool and by schema, and an agent with a tool."""

from __future__ import annotations

from cases import BASE_URL, MODEL, PERSON, WEATHER, case, run
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=BASE_URL, api_key="none"))


class Person(BaseModel):
    name: str
    age: int


@case("text")
def text() -> None:
    assert "Paris" in Agent(model).run_sync("What is the capital of France?", model_settings={"temperature": 0}).output


@case("output by tool (its default)")
def by_tool() -> None:
    assert isinstance(
        Agent(model, output_type=Person).run_sync(PERSON, model_settings={"temperature": 0}).output, Person
    )


@case("output by schema")
def by_schema() -> None:
    agent = Agent(model, output_type=NativeOutput(Person))
    assert agent.run_sync(PERSON, model_settings={"temperature": 0}).output == Person(name="Anna", age=25)


@case("an agent with a tool")
def agent() -> None:
    asked = []

    def get_weather(city: str) -> str:
        """Get the weather of a city"""
        asked.append(city)
        return "sunny, 18 C"

    result = Agent(model, tools=[get_weather]).run_sync(WEATHER, model_settings={"temperature": 0})
    assert asked == ["Paris"]
    assert "sunny" in result.output


@case("streamed text")
async def streamed() -> None:
    async with Agent(model).run_stream("What is the capital of France?", model_settings={"temperature": 0}) as result:
        assert "Paris" in await result.get_output()


run()
