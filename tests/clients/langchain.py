"""LangChain: bind_tools, with_structured_output by both methods, streams."""

from __future__ import annotations

from cases import BASE_URL, MODEL, PERSON, WEATHER, case, run
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

llm = ChatOpenAI(base_url=BASE_URL, api_key="none", model=MODEL, temperature=0, max_retries=0)  # type: ignore[arg-type]


class Person(BaseModel):
    """A person."""

    name: str
    age: int


@tool
def get_weather(city: str) -> str:
    """Get the weather of a city"""
    return f"sunny, 18 C in {city}"


@case("chat, whole and streamed")
def chat() -> None:
    assert "Paris" in llm.invoke("What is the capital of France?").content
    assert "Paris" in "".join(str(chunk.content) for chunk in llm.stream("What is the capital of France?"))


@case("bind_tools, and the result in a second turn")
def tools() -> None:
    bound = llm.bind_tools([get_weather])
    first = bound.invoke(WEATHER)
    (call,) = first.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})
    result = ToolMessage(content=get_weather.invoke(call["args"]), tool_call_id=call["id"])
    assert "sunny" in bound.invoke([HumanMessage(WEATHER), first, result]).content


@case("bind_tools, streamed")
def tools_streamed() -> None:
    whole = None
    for chunk in llm.bind_tools([get_weather]).stream(WEATHER):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    assert whole.tool_calls[0]["args"] == {"city": "Paris"}


@case("with_structured_output: json_schema")
def by_schema() -> None:
    assert llm.with_structured_output(Person, method="json_schema").invoke(PERSON) == Person(name="Anna", age=25)


@case("with_structured_output: function_calling")
def by_function() -> None:
    assert isinstance(llm.with_structured_output(Person, method="function_calling").invoke(PERSON), Person)


@case("with_structured_output: json_mode")
def by_mode() -> None:
    assert llm.with_structured_output(Person, method="json_mode").invoke(PERSON) == Person(name="Anna", age=25)


@case("the Responses API: whole, streamed, a tool and its result, an object by schema")
def responses() -> None:
    other = ChatOpenAI(
        base_url=BASE_URL,
        api_key="none",
        model=MODEL,
        temperature=0,
        max_retries=0,
        use_responses_api=True,  # type: ignore[arg-type]
    )
    assert "Paris" in other.invoke("What is the capital of France?").text
    assert "Paris" in "".join(chunk.text for chunk in other.stream("What is the capital of France?"))
    bound = other.bind_tools([get_weather])
    first = bound.invoke(WEATHER)
    (call,) = first.tool_calls
    result = ToolMessage(content=get_weather.invoke(call["args"]), tool_call_id=call["id"])
    assert "sunny" in bound.invoke([HumanMessage(WEATHER), first, result]).text
    assert other.with_structured_output(Person).invoke(PERSON) == Person(name="Anna", age=25)


run()
