"""Training dialogues with functions to call, answers in JSON, and thoughts before the answer.

Names of functions and parameters are drawn anew in each dialogue, so that the model learns to read them from the prompt.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

from data import CAPITALS, KINDS, NAMES, NUMBER_WORDS, OPPOSITES, Message

CITIES = [
    *CAPITALS.values(),
    "New York",
    "San Francisco",
    "Chicago",
    "Munich",
    "Milan",
    "Sydney",
    "Toronto",
    "Osaka",
    "Boston",
]
SKIES = ["sunny", "cloudy", "rainy", "windy", "foggy", "snowy"]
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
FOODS = ["bread", "apples", "coffee", "tea", "cheese", "rice", "milk", "pasta", "eggs", "honey"]
EVENTS = ["science fair", "dinner", "concert", "football match", "birthday party", "meeting", "picnic", "chess game"]
VERBS = [
    "get",
    "find",
    "read",
    "set",
    "list",
    "open",
    "send",
    "check",
    "create",
    "update",
    "delete",
    "start",
    "stop",
    "show",
]
NOUNS = ["price", "file", "user", "order", "light", "song", "ticket", "note", "alarm", "room", "report", "contact", "task",
         "device", "event", "image", "account", "door"]  # fmt: skip
PARAMETERS = [
    "id",
    "name",
    "count",
    "size",
    "title",
    "level",
    "query",
    "path",
    "color",
    "code",
    "key",
    "limit",
    "owner",
    "date",
]


@dataclass
class Dialogue:
    """`tools` are the functions' descriptions, as OpenAI's `tools[].function`; `thinks`: the last answer has thoughts."""

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    thinks: bool = False


@dataclass
class Use:
    """One function, a question for it, and what comes of it."""

    tool: dict[str, Any]
    question: str
    arguments: dict[str, Any]
    result: str
    answer: str


def with_tools(rng: random.Random, plain: Message, reply: Message) -> Dialogue:
    """A question that one of the functions answers, or `plain`, which none of them does."""
    use = rng.choices(_USES, [5, 3, 2, 2, 3, 4])[0](rng)
    tools = [use.tool]
    while rng.random() < 0.4 and len(tools) < 3:
        other = rng.choice(_USES)(rng).tool
        if other["name"] not in {tool["name"] for tool in tools}:
            tools.append(other)
    rng.shuffle(tools)
    system = [{"role": "system", "content": "You are a helpful assistant."}] if rng.random() < 0.3 else []
    if rng.random() < 0.15:
        return Dialogue([*system, plain, reply], tools)
    uses = [use]
    if use.tool["name"] and rng.random() < 0.12 and (second := _again(rng, use)):
        uses.append(second)
        question = f"{use.question} {second.question}"
    else:
        question = use.question
    calls = [{"type": "function", "function": {"name": one.tool["name"], "arguments": one.arguments}} for one in uses]
    messages = [
        *system,
        {"role": "user", "content": question},
        {"role": "assistant", "content": "", "tool_calls": calls},
    ]
    messages += [{"role": "tool", "content": one.result} for one in uses]
    messages.append({"role": "assistant", "content": " ".join(one.answer for one in uses)})
    return Dialogue(messages, tools)


def in_json(rng: random.Random) -> Dialogue:
    """A question that wants JSON, with the keys it asks for."""
    text, found = rng.choice([_person, _person, _order, _event, _pair])(rng)
    keys = rng.sample(list(found), rng.randint(1, len(found))) if rng.random() < 0.4 else list(found)
    answer = {key: found[key] for key in keys}
    named = keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])} and {keys[-1]}"
    system: list[Message] = []
    if len(keys) == len(found) and rng.random() < 0.4:
        question = rng.choice(
            [f"Extract the data as JSON: {text}", f"{text} Answer in JSON.", f"{text} Give me JSON.", text]
        )
        if question == text:
            asks = rng.choice(
                [
                    "Answer in JSON.",
                    "Extract the information as JSON.",
                    "Extract the event information.",
                    "Reply with JSON.",
                ]
            )
            system = [{"role": "system", "content": asks}]
    else:
        question = rng.choice([
            f"Extract {named} as JSON: {text}", f"{text} Answer in JSON with the keys {named}.", f"{text} Give me {named} as JSON.",
            f"Write JSON with {named}: {text}",
        ])  # fmt: skip
    return Dialogue([*system, _user(question), _assistant(json.dumps(answer, ensure_ascii=False))])


def one_word(rng: random.Random) -> Dialogue:
    """Choices: is a sentence positive or negative; is a thing an animal or a fruit."""
    if rng.random() < 0.5:
        good, bad = rng.choice([("love", "hate"), ("like", "dislike"), ("enjoy", "can't stand")])
        is_good = rng.random() < 0.5
        text = f"I {good if is_good else bad} {rng.choice(FOODS + KINDS['sports'])}."
        question = rng.choice([f"Is this positive or negative? {text}", f"Classify as positive or negative: {text}"])
        return Dialogue([_user(question), _assistant("positive" if is_good else "negative")])
    first, second = rng.sample(["animals", "fruits", "trees", "instruments", "sports"], 2)
    thing = rng.choice(KINDS[first])
    options = [first.removesuffix("s"), second.removesuffix("s")]
    rng.shuffle(options)
    question = f"Is {thing} a kind of {options[0]} or {options[1]}? Answer with one word."
    return Dialogue([_user(question), _assistant(first.removesuffix("s"))])


def thinking(rng: random.Random) -> Dialogue:
    """Thoughts between <think> and </think>, then the answer."""
    question, thought, answer = rng.choice([_think_sum, _think_sum, _think_larger, _think_capital, _think_opposite])(
        rng
    )
    return Dialogue([_user(question), _assistant(f"<think>\n{thought}\n</think>\n\n{answer}")], thinks=True)


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _think_sum(rng: random.Random) -> tuple[str, str, str]:
    a, b = rng.randint(0, 20), rng.randint(0, 20)
    question = rng.choice(["What is {} + {}?", "What is {} plus {}?", "Add {} and {}.", "How much is {} + {}?"])
    thought = f"I have to add {a} and {b}. I begin at {max(a, b)} and go {min(a, b)} up. That makes {a + b}."
    return question.format(a, b), thought, f"{a} + {b} = {a + b}."


def _think_larger(rng: random.Random) -> tuple[str, str, str]:
    a, b = rng.sample(range(100), 2)
    question = rng.choice([f"Which is larger, {a} or {b}?", f"Which number is bigger: {a} or {b}?"])
    tens = f"{a} has {a // 10} tens and {b} has {b // 10} tens."
    ones = f" The tens are equal, so I look at the ones: {a % 10} and {b % 10}." if a // 10 == b // 10 else ""
    return question, f"{tens}{ones} So {max(a, b)} is larger.", f"{max(a, b)} is larger than {min(a, b)}."


def _think_capital(rng: random.Random) -> tuple[str, str, str]:
    country, city = rng.choice(list(CAPITALS.items()))
    question = rng.choice(["What is the capital of {}?", "Name the capital of {}."]).format(country)
    thought = f"The question is about {country}. I know its capital: {city}."
    return question, thought, f"The capital of {country} is {city}."


def _think_opposite(rng: random.Random) -> tuple[str, str, str]:
    word, other = rng.choice(list(OPPOSITES.items()))
    thought = f"I look for a word that means the contrary of {word}. It is {other}."
    return f"What is the opposite of {word}?", thought, f"The opposite of {word} is {other}."


def _tool(
    rng: random.Random, names: list[str], description: str, parameters: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "properties": parameters}
    if rng.random() < 0.8:
        schema["required"] = [name for name, one in parameters.items() if "enum" not in one]
    if rng.random() < 0.2:
        schema["additionalProperties"] = False
    tool: dict[str, Any] = {"name": rng.choice(names)}
    if rng.random() < 0.85:
        tool["description"] = description
    return tool | {"parameters": schema}


def _text(rng: random.Random, description: str = "") -> dict[str, Any]:
    return {"type": "string"} | ({"description": description} if description and rng.random() < 0.5 else {})


def _weather(rng: random.Random) -> Use:
    key = rng.choice(["city", "location", "city", "place", "town"])
    parameters = {key: _text(rng, "Name of the city")}
    city = rng.choice(CITIES)
    arguments: dict[str, Any] = {key: city}
    ask = rng.choice(["What is the weather in {}?", "What's the weather like in {}?", "How is the weather in {}?", "Weather in {}?",
                      "Is it raining in {}?", "What is the weather in {} today?", "Tell me the weather in {}."])  # fmt: skip
    question = ask.format(city)
    if rng.random() < 0.3:
        parameters["unit"] = {"type": "string", "enum": ["celsius", "fahrenheit"]}
        if rng.random() < 0.5:
            arguments["unit"] = rng.choice(["celsius", "fahrenheit"])
            question = f"{question.rstrip('?.')} in {arguments['unit']}?"
    names = ["get_weather", "get_weather", "weather", "current_weather", "get_current_weather", "fetch_weather"]
    tool = _tool(
        rng,
        names,
        rng.choice(["Get the weather of a city", "Current weather", "Get current temperature for a given location."]),
        parameters,
    )
    degrees, sky = rng.randint(-5, 35), rng.choice(SKIES)
    result = rng.choice([
        json.dumps({"temperature": degrees, "sky": sky}), json.dumps({"temp": degrees, "condition": sky}), f"{degrees} degrees, {sky}",
        f"{sky}, {degrees} C",
    ])  # fmt: skip
    return Use(tool, question, arguments, result, f"It is {sky} in {city}, {degrees} degrees.")


def _time(rng: random.Random) -> Use:
    city, key = rng.choice(CITIES), rng.choice(["city", "timezone", "location", "place"])
    tool = _tool(
        rng,
        ["get_time", "current_time", "clock", "get_current_time"],
        "Get the time of day in a city",
        {key: _text(rng)},
    )
    now = f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
    question = rng.choice(["What time is it in {}?", "Tell me the time in {}.", "How late is it in {}?"]).format(city)
    return Use(tool, question, {key: city}, rng.choice([now, json.dumps({"time": now})]), f"It is {now} in {city}.")


def _sum(rng: random.Random) -> Use:
    a, b = rng.randint(0, 999), rng.randint(0, 999)
    first, second = rng.choice([("a", "b"), ("x", "y"), ("first", "second"), ("left", "right")])
    kind = {"type": rng.choice(["integer", "number"])}
    name, word, sign, value = rng.choice([("add", "plus", "+", a + b), ("multiply", "times", "*", a * b)])
    tool = _tool(rng, [name, f"{name}_numbers"], f"{name.capitalize()} two numbers", {first: kind, second: kind})
    question = rng.choice([f"What is {a} {sign} {b}?", f"What is {a} {word} {b}?", f"{name.capitalize()} {a} and {b}."])
    return Use(tool, question, {first: a, second: b}, str(value), f"{a} {sign} {b} = {value}.")


def _timer(rng: random.Random) -> Use:
    key, minutes = rng.choice(["minutes", "duration", "time"]), rng.randint(1, 60)
    tool = _tool(rng, ["set_timer", "start_timer", "timer"], "Start a timer", {key: {"type": "integer"}})
    question = rng.choice(
        ["Set a timer for {} minutes.", "Wake me in {} minutes.", "Start a timer of {} minutes."]
    ).format(minutes)
    return Use(
        tool,
        question,
        {key: minutes},
        rng.choice(["ok", "done", '{"ok": true}']),
        f"The timer is set for {minutes} minutes.",
    )


def _send(rng: random.Random) -> Use:
    name = rng.choice(NAMES)
    said = rng.choice(
        ["hello", "see you on " + rng.choice(DAYS), "I am late", "thank you", "happy birthday", "come home"]
    )
    to, body = rng.choice([("to", "text"), ("recipient", "message"), ("name", "body")])
    tool = _tool(
        rng, ["send_message", "send_text", "message"], "Send a message to a person", {to: _text(rng), body: _text(rng)}
    )
    question = rng.choice(["Send {} the message: {}", "Tell {} this: {}", "Write to {}: {}"]).format(name, said)
    return Use(
        tool,
        question,
        {to: name, body: said},
        rng.choice(["sent", "ok", '{"sent": true}']),
        f"I sent the message to {name}.",
    )


def _made_up(rng: random.Random) -> Use:
    """Any function with any parameters; the question names them."""
    verb, noun = rng.choice(VERBS), rng.choice(NOUNS)
    parameters: dict[str, dict[str, Any]] = {}
    arguments: dict[str, Any] = {}
    for key in rng.sample(PARAMETERS, rng.randint(1, 3)):
        kind = rng.choice(["string", "string", "integer", "boolean"])
        parameters[key] = {"type": kind}
        arguments[key] = {"string": _word(rng), "integer": rng.randint(0, 99), "boolean": rng.random() < 0.5}[kind]
    name = rng.choice([f"{verb}_{noun}", f"{verb}{noun.capitalize()}", f"{noun}_{verb}"])
    tool = _tool(rng, [name], f"{verb.capitalize()} a {noun}", parameters)
    given = " and ".join(
        f"{key} {json.dumps(value) if isinstance(value, bool) else value}" for key, value in arguments.items()
    )
    question = rng.choice([f"{verb.capitalize()} the {noun} with {given}.", f"Call {name} with {given}.", f"Use {name}: {given}.",
                           f"Please {verb} a {noun} with {given}."])  # fmt: skip
    if rng.random() < 0.6:
        return Use(tool, question, arguments, rng.choice(["ok", "done", '{"ok": true}']), "Done.")
    value = _word(rng) if rng.random() < 0.5 else str(rng.randint(0, 999))
    return Use(tool, question, arguments, rng.choice([value, json.dumps({"result": value})]), f"The result is {value}.")


def _again(rng: random.Random, use: Use) -> Use | None:
    """The same function once more, with other arguments."""
    for _ in range(8):
        other = rng.choice([_weather, _time])(rng)
        same_kind = ("weather" in other.question.lower()) == ("weather" in use.question.lower())
        if same_kind and set(other.arguments) == set(use.arguments) and other.arguments != use.arguments:
            other.tool = use.tool
            return other
    return None


def _word(rng: random.Random) -> str:
    return rng.choice([*OPPOSITES, *NAMES, *[item for items in KINDS.values() for item in items]])


def _person(rng: random.Random) -> tuple[str, dict[str, Any]]:
    name, age, city = rng.choice(NAMES), rng.randint(1, 99), rng.choice(CITIES)
    text = rng.choice([
        f"{name} is {age} years old and lives in {city}.", f"{name} is {age} and lives in {city}.", f"My name is {name}, I am {age} and I live in {city}.",
        f"{name}, {age}, from {city}.",
    ])  # fmt: skip
    return text, {"name": name, "age": age, "city": city}


def _order(rng: random.Random) -> tuple[str, dict[str, Any]]:
    count, item, price = rng.randint(2, 20), rng.choice(FOODS), rng.randint(1, 50)
    counted = NUMBER_WORDS[count] if count <= 12 and rng.random() < 0.3 else str(count)
    text = rng.choice(
        [f"I want {counted} {item} for {price} euros.", f"Please order {counted} {item} at {price} euros."]
    )
    return text, {"item": item, "quantity": count, "price": price}


def _event(rng: random.Random) -> tuple[str, dict[str, Any]]:
    first, second = rng.sample(NAMES, 2)
    event, day = rng.choice(EVENTS), rng.choice(DAYS)
    article = "an" if event[0] in "aeiou" else "a"
    text = f"{first} and {second} are going to {article} {event} on {day}."
    return text, {"name": event, "date": day, "participants": [first, second]}


def _pair(rng: random.Random) -> tuple[str, dict[str, Any]]:
    country, city = rng.choice(list(CAPITALS.items()))
    text = rng.choice([f"What is the capital of {country}?", f"{city} is the capital of {country}."])
    return text, {"country": country, "capital": city}


_USES = [_weather, _time, _sum, _timer, _send, _made_up]
