"""The demo model's training text: dialogues that this script makes up, and the Python standard library's documentation.

Everything is drawn from a seeded generator, so that a run can be repeated. A dialogue is a list of messages; `documents()` is
plain prose.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import pkgutil
import random
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

Message = dict[str, Any]

CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon", "England": "London",
    "Ireland": "Dublin", "Norway": "Oslo", "Sweden": "Stockholm", "Finland": "Helsinki", "Denmark": "Copenhagen",
    "Poland": "Warsaw", "Austria": "Vienna", "Hungary": "Budapest", "Greece": "Athens", "Turkey": "Ankara", "Egypt": "Cairo",
    "Kenya": "Nairobi", "Nigeria": "Abuja", "Morocco": "Rabat", "Japan": "Tokyo", "China": "Beijing", "India": "New Delhi",
    "Nepal": "Kathmandu", "Thailand": "Bangkok", "Vietnam": "Hanoi", "Indonesia": "Jakarta", "Australia": "Canberra",
    "Canada": "Ottawa", "Mexico": "Mexico City", "Cuba": "Havana", "Brazil": "Brasilia", "Argentina": "Buenos Aires",
    "Chile": "Santiago", "Peru": "Lima", "Colombia": "Bogota", "Russia": "Moscow", "Ukraine": "Kyiv", "Belgium": "Brussels",
    "Switzerland": "Bern", "Iceland": "Reykjavik", "Iran": "Tehran", "Iraq": "Baghdad", "Israel": "Jerusalem",
    "South Korea": "Seoul", "Netherlands": "Amsterdam", "Romania": "Bucharest", "Bulgaria": "Sofia", "Croatia": "Zagreb",
    "Serbia": "Belgrade", "Ethiopia": "Addis Ababa", "Ghana": "Accra", "Senegal": "Dakar", "Uruguay": "Montevideo",
}  # fmt: skip
OPPOSITES = {
    "hot": "cold", "big": "small", "fast": "slow", "happy": "sad", "light": "dark", "old": "new", "rich": "poor",
    "early": "late", "full": "empty", "hard": "soft", "high": "low", "long": "short", "loud": "quiet", "open": "closed",
    "strong": "weak", "sweet": "sour", "wet": "dry", "wide": "narrow", "young": "old", "clean": "dirty", "up": "down",
    "left": "right", "day": "night", "begin": "end", "give": "take", "push": "pull", "win": "lose", "buy": "sell",
}  # fmt: skip
TRANSLATIONS = {
    "hello": ("bonjour", "hallo", "hola"), "thank you": ("merci", "danke", "gracias"), "yes": ("oui", "ja", "sí"),
    "no": ("non", "nein", "no"), "water": ("eau", "Wasser", "agua"), "bread": ("pain", "Brot", "pan"),
    "house": ("maison", "Haus", "casa"), "dog": ("chien", "Hund", "perro"), "cat": ("chat", "Katze", "gato"),
    "sun": ("soleil", "Sonne", "sol"), "moon": ("lune", "Mond", "luna"), "book": ("livre", "Buch", "libro"),
    "friend": ("ami", "Freund", "amigo"), "tree": ("arbre", "Baum", "árbol"), "good night": ("bonne nuit", "gute Nacht", "buenas noches"),
}  # fmt: skip
LISTS = {
    "the days of the week": ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"],
    "the months of the year": ["January", "February", "March", "April", "May", "June", "July", "August", "September",
                               "October", "November", "December"],
    "the four seasons": ["spring", "summer", "autumn", "winter"],
    "the planets": ["Mercury", "Venus", "Earth", "Mars", "Jupiter", "Saturn", "Uranus", "Neptune"],
    "the primary colours": ["red", "yellow", "blue"],
    "the continents": ["Africa", "Antarctica", "Asia", "Australia", "Europe", "North America", "South America"],
}  # fmt: skip
KINDS = {
    "animals": ["cat", "dog", "horse", "cow", "sheep", "lion", "tiger", "bear", "fox", "wolf", "owl", "eagle", "whale", "frog"],
    "colours": ["red", "blue", "green", "yellow", "orange", "purple", "black", "white", "brown", "pink", "grey"],
    "fruits": ["apple", "pear", "banana", "cherry", "plum", "grape", "lemon", "orange", "peach", "melon"],
    "trees": ["oak", "pine", "birch", "maple", "elm", "willow", "ash", "beech"],
    "instruments": ["piano", "violin", "flute", "drum", "guitar", "trumpet", "harp", "cello"],
    "sports": ["football", "tennis", "swimming", "running", "rowing", "chess", "cycling", "skiing"],
}  # fmt: skip
FACTS = {
    "What colour is the sky?": "On a clear day the sky is blue.",
    "What colour is grass?": "Grass is green.",
    "How many legs does a spider have?": "A spider has eight legs.",
    "How many legs does a cat have?": "A cat has four legs.",
    "How many days are in a week?": "There are seven days in a week.",
    "How many months are in a year?": "There are twelve months in a year.",
    "How many hours are in a day?": "There are twenty-four hours in a day.",
    "How many minutes are in an hour?": "There are sixty minutes in an hour.",
    "What do bees make?": "Bees make honey.",
    "What do cows give?": "Cows give milk.",
    "What is ice made of?": "Ice is frozen water.",
    "At what temperature does water boil?": "Water boils at 100 degrees Celsius at sea level.",
    "At what temperature does water freeze?": "Water freezes at 0 degrees Celsius.",
    "What is the largest ocean?": "The Pacific is the largest ocean.",
    "What is the largest planet?": "Jupiter is the largest planet of the solar system.",
    "Which planet do we live on?": "We live on Earth.",
    "What is the opposite of day?": "The opposite of day is night.",
    "Who wrote Hamlet?": "William Shakespeare wrote Hamlet.",
    "Who wrote Faust?": "Johann Wolfgang von Goethe wrote Faust.",
    "What is the fastest land animal?": "The cheetah is the fastest land animal.",
    "What is the tallest animal?": "The giraffe is the tallest animal.",
    "Is the sun a star?": "Yes, the sun is a star.",
    "Is a whale a fish?": "No, a whale is a mammal.",
    "Can birds fly?": "Most birds can fly, but penguins and ostriches can't.",
    "Is fire cold?": "No, fire is hot.",
}
BATON = {
    "Who are you?": "I am Baton's demo model, a tiny language model that was trained to show how Baton serves requests.",
    "What are you?": "I am a tiny language model. I am here to show how Baton works, not to know much.",
    "What is your name?": "I am called the Baton demo model.",
    "What is Baton?": "Baton serves large language models as cooperating services. One worker reads the prompt, hands its "
    "memory to another, and that one writes the answer.",
    "What is prefill?": "Prefill is the first phase: the prompt is read in one pass and its keys and values are computed.",
    "What is decode?": "Decode is the second phase: the answer is written one token at a time.",
    "What is a KV cache?": "The KV cache holds the keys and values of all tokens so far, so that they need not be computed again.",
    "What is a token?": "A token is a small piece of text, often a word or a part of one.",
    "What is a block?": "A block is a fixed number of token positions in the KV cache. Baton uses sixteen.",
    "What is time to first token?": "It is the time from the request to the first token of the answer.",
    "What is a handoff?": "In a handoff the prefill worker passes the KV blocks of a prompt to a decode worker, like a baton.",
    "What can you do?": "I can chat a little, name capitals, count, add small numbers, tell short stories and follow simple "
    "instructions.",
    "Are you a person?": "No, I am a small computer program.",
    "How big are you?": "I am very small: I have a few million parameters.",
    "What is the capital of the moon?": "The moon has no capital.",
}
NAMES = ["Anna", "Ben", "Clara", "David", "Emma", "Finn", "Greta", "Hugo", "Ida", "Jack", "Kira", "Leo", "Maya", "Noah", "Olga",
         "Paul", "Rosa", "Sam", "Tara", "Victor"]  # fmt: skip
PLACES = [
    "a small village",
    "a quiet town",
    "an old castle",
    "a house by the sea",
    "a cabin in the woods",
    "a busy city",
]
THINGS = [
    "a golden key",
    "a strange map",
    "an old letter",
    "a tiny box",
    "a broken clock",
    "a silver coin",
    "a red kite",
]
HELPERS = ["a friendly fox", "a wise owl", "an old sailor", "a curious cat", "a kind neighbour", "a talking crow"]
ENDINGS = ["From that day on they were best friends.", "And so everything was well again.", "They laughed about it for years.",
           "Nobody ever forgot that day.", "That night everyone slept well."]  # fmt: skip
UNKNOWN = ["the stock market tomorrow", "quantum chromodynamics", "the winner of the next election", "my bank account",
           "medical advice", "the weather next week", "tax law", "the meaning of life", "ancient Sumerian grammar"]  # fmt: skip
NUMBER_WORDS = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
]


def dialogue(rng: random.Random) -> list[Message]:
    """One made-up dialogue: one to three exchanges, sometimes with a system message."""
    messages: list[Message] = []
    if rng.random() < 0.25:
        system = rng.choice(
            ["You are a helpful assistant.", "You are Baton's demo model.", "Answer briefly.", "Be friendly."]
        )
        messages.append({"role": "system", "content": system})
    if rng.random() < 0.12:
        return messages + _remembering(rng)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        question, answer = rng.choices(_MAKERS, _WEIGHTS)[0](rng)
        messages.append({"role": "user", "content": _vary(rng, question)})
        messages.append({"role": "assistant", "content": answer})
    return messages


def documents() -> Iterator[str]:
    """Doc strings of the standard library and pydoc's topics, as plain text."""
    with contextlib.suppress(ImportError):
        from pydoc_data.topics import topics

        yield from (str(text) for text in topics.values())
    warnings.simplefilter("ignore")
    seen: set[str] = set()
    for module in sorted(sys.stdlib_module_names):
        if module.startswith("_") or module in ("antigravity", "this", "idlelib", "test", "turtle", "turtledemo"):
            continue
        for name in [module, *_submodules(module)]:
            for text in _doc_strings(name):
                if len(text) > 80 and text not in seen:
                    seen.add(text)
                    yield text


def _submodules(module: str) -> list[str]:
    try:
        package = importlib.import_module(module)
        return [f"{module}.{entry.name}" for entry in pkgutil.iter_modules(getattr(package, "__path__", []))
                if not entry.name.startswith(("_", "test")) and entry.name != "__main__"]  # fmt: skip
    except BaseException:
        return []


def _doc_strings(name: str) -> Iterator[str]:
    try:
        module = importlib.import_module(name)
    except BaseException:
        return
    owners = [
        module,
        *[value for value in vars(module).values() if inspect.isclass(value) and value.__module__ == name],
    ]
    for owner in owners:
        for value in [owner, *vars(owner).values()]:
            with contextlib.suppress(Exception):
                text = inspect.getdoc(value)
                if text:
                    yield text


def _vary(rng: random.Random, question: str) -> str:
    if rng.random() < 0.15:
        question = question.lower()
    if rng.random() < 0.15:
        question = question.rstrip("?.!")
    if rng.random() < 0.12:
        question = (
            rng.choice(["Please tell me: ", "Hi! ", "Hello. ", "Quick question: ", "One more thing: "]) + question
        )
    if rng.random() < 0.06:
        question = question + rng.choice([" Thanks!", " Please.", " I am curious."])
    return question


def _capital(rng: random.Random) -> tuple[str, str]:
    country, city = rng.choice(list(CAPITALS.items()))
    if rng.random() < 0.2:
        return f"Which country has the capital {city}?", f"{city} is the capital of {country}."
    question = rng.choice(["What is the capital of {}?", "Which city is the capital of {}?", "Name the capital of {}.",
                           "Tell me the capital of {}.", "What's the capital of {}?"])  # fmt: skip
    return question.format(country), f"The capital of {country} is {city}."


def _sum(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randint(0, 20), rng.randint(0, 20)
    if rng.random() < 0.5:
        question = rng.choice(["What is {} + {}?", "What is {} plus {}?", "Add {} and {}.", "How much is {} + {}?"])
        return question.format(a, b), f"{a} + {b} = {a + b}."
    a, b = max(a, b), min(a, b)
    question = rng.choice(["What is {} - {}?", "What is {} minus {}?", "How much is {} - {}?"])
    return question.format(a, b), f"{a} - {b} = {a - b}."


def _count(rng: random.Random) -> tuple[str, str]:
    end = rng.randint(2, 20)
    if rng.random() < 0.25:
        return f"Count down from {end}.", ", ".join(map(str, range(end, 0, -1))) + "."
    start = 1 if rng.random() < 0.7 else rng.randint(1, end)
    question = f"Count to {end}." if start == 1 and rng.random() < 0.5 else f"Count from {start} to {end}."
    return question, ", ".join(map(str, range(start, end + 1))) + "."


def _list(rng: random.Random) -> tuple[str, str]:
    name, items = rng.choice(list(LISTS.items()))
    question = rng.choice(["List {}.", "Name {}.", "What are {}?", "Tell me {}.", "Can you list {}?"]).format(name)
    return question, f"{name[0].upper()}{name[1:]} are {', '.join(items[:-1])} and {items[-1]}."


def _some(rng: random.Random) -> tuple[str, str]:
    kind, items = rng.choice(list(KINDS.items()))
    count = rng.randint(2, 5)
    chosen = rng.sample(items, count)
    word = NUMBER_WORDS[count] if rng.random() < 0.7 else str(count)
    question = rng.choice(["Name {} {}.", "List {} {}.", "Give me {} {}.", "Tell me {} {}."]).format(word, kind)
    if rng.random() < 0.5:
        return question, "\n".join(f"{index}. {item}" for index, item in enumerate(chosen, 1))
    return question, f"{', '.join(chosen[:-1])} and {chosen[-1]}."


def _word(rng: random.Random) -> str:
    return rng.choice([*OPPOSITES, *[item for items in KINDS.values() for item in items]])


def _repeat(rng: random.Random) -> tuple[str, str]:
    words = " ".join(_word(rng) for _ in range(rng.randint(1, 4)))
    if rng.random() < 0.4:
        count = rng.randint(2, 5)
        return f"Say {words} {NUMBER_WORDS[count]} times.", ", ".join([words] * count) + "."
    return rng.choice(["Repeat after me: {}", "Say: {}", "Please say {}", "Repeat: {}"]).format(words), words


def _upper(rng: random.Random) -> tuple[str, str]:
    word = _word(rng)
    return rng.choice(["Write {} in capital letters.", "Put {} in upper case.", "Uppercase {}."]).format(
        word
    ), word.upper()


def _spell(rng: random.Random) -> tuple[str, str]:
    word = _word(rng)
    return rng.choice(["Spell {}.", "How do you spell {}?"]).format(word), "-".join(word.upper())


def _opposite(rng: random.Random) -> tuple[str, str]:
    word, other = rng.choice(list(OPPOSITES.items()))
    question = rng.choice(["What is the opposite of {}?", "Give me the opposite of {}.", "Opposite of {}?"]).format(
        word
    )
    return question, f"The opposite of {word} is {other}."


def _translate(rng: random.Random) -> tuple[str, str]:
    word, forms = rng.choice(list(TRANSLATIONS.items()))
    language, form = rng.choice(list(zip(("French", "German", "Spanish"), forms, strict=True)))
    question = rng.choice(["How do you say {} in {}?", "Translate {} into {}.", "What is {} in {}?"]).format(
        word, language
    )
    return question, f"{word[0].upper()}{word[1:]} is {form} in {language}."


def _greet(rng: random.Random) -> tuple[str, str]:
    return rng.choice([
        ("Hello!", "Hello! How can I help you?"), ("Hi", "Hello! How can I help you?"), ("Hey there", "Hello! What can I do for you?"),
        ("Good morning!", "Good morning! How can I help you?"), ("Good evening.", "Good evening! What can I do for you?"),
        ("How are you?", "I am fine, thank you. How can I help you?"), ("Hello, how are you?", "Hello! I am fine, thank you."),
        ("Thank you!", "You are welcome!"), ("Thanks a lot", "You are welcome! Is there anything else?"),
        ("Goodbye!", "Goodbye! Have a nice day."), ("Bye", "Goodbye! Have a nice day."), ("Good night", "Good night! Sleep well."),
        ("That was helpful.", "I am glad to hear that."), ("You are great.", "Thank you, that is kind of you."),
    ])  # fmt: skip


def _fact(rng: random.Random) -> tuple[str, str]:
    return rng.choice(list((FACTS | BATON).items()))


def _baton(rng: random.Random) -> tuple[str, str]:
    question, answer = rng.choice(list(BATON.items()))
    if question.startswith("What is ") and rng.random() < 0.4:
        topic = question.removeprefix("What is ").rstrip("?")
        question = rng.choice(["Explain {}.", "Tell me about {}.", "Can you explain {}?"]).format(topic)
    return question, answer


def _story(rng: random.Random) -> tuple[str, str]:
    name, friend = rng.sample(NAMES, 2)
    place, thing, helper = rng.choice(PLACES), rng.choice(THINGS), rng.choice(HELPERS)
    topic = thing.partition(" ")[2]
    question = rng.choice(["Tell me a story.", "Tell me a short story.", f"Tell me a story about {name}.", "Write a short story.",
                           f"Write a story about {thing}.", f"Tell me a story with {helper}."])  # fmt: skip
    first = rng.choice([f"Once upon a time {name} lived in {place}.", f"In {place} there lived a child called {name}.",
                        f"{name} had always lived in {place}."])  # fmt: skip
    second = rng.choice([f"One morning {name} found {thing} under a stone.", f"One day {name} discovered {thing} in the attic.",
                         f"On a rainy evening {friend} gave {name} {thing}."])  # fmt: skip
    third = rng.choice([f"Nobody knew what the {topic} was for, so {name} asked {helper}.",
                        f"{name} showed it to {friend}, and together they went to see {helper}."])  # fmt: skip
    fourth = rng.choice([f"The answer surprised them all: the {topic} belonged to {friend}'s grandmother.",
                         f"It turned out that the {topic} opened a door that had been closed for a hundred years.",
                         f"They learned that the {topic} brings luck to those who share it."])  # fmt: skip
    return question, " ".join([first, second, third, fourth, rng.choice(ENDINGS)])


def _poem(rng: random.Random) -> tuple[str, str]:
    topic, lines = rng.choice([
        ("the sea", ["The sea is wide, the sea is deep,", "it sings the little boats to sleep,", "it takes the river, takes the rain,",
                     "and gives them to the sky again."]),
        ("a cat", ["A cat sat on the garden wall", "and did not seem to move at all.", "She watched the evening turn to night",
                   "and kept the moon within her sight."]),
        ("running", ["One runner runs, one runner waits,", "a hand is held before the gates,", "the baton flies from hand to hand",
                     "and no one stops, and no one stands."]),
        ("winter", ["The snow lies soft on field and tree,", "the lake is still as still can be,", "a light shines in the house below",
                    "and paints a square upon the snow."]),
    ])  # fmt: skip
    return rng.choice(["Write a poem about {}.", "Write a short poem about {}.", "A poem about {}, please."]).format(
        topic
    ), "\n".join(lines)


def _refuse(rng: random.Random) -> tuple[str, str]:
    topic = rng.choice(UNKNOWN)
    question = rng.choice(
        ["Tell me about {}.", "What do you know about {}?", "Explain {} in detail.", "I need help with {}."]
    )
    return question.format(
        topic
    ), "I am sorry, I am only a tiny demonstration model and I don't know enough about that."


def _compare(rng: random.Random) -> tuple[str, str]:
    a, b = rng.sample(range(100), 2)
    return rng.choice(
        [f"Which is larger, {a} or {b}?", f"Which number is bigger: {a} or {b}?"]
    ), f"{max(a, b)} is larger than {min(a, b)}."


def _remembering(rng: random.Random) -> list[Message]:
    name = rng.choice(NAMES)
    colour = rng.choice(KINDS["colours"])
    if rng.random() < 0.5:
        opening = (rng.choice(["My name is {}.", "I am {}.", "Hi, I'm {}."]).format(name), f"Nice to meet you, {name}!")
        closing = (rng.choice(["What is my name?", "Who am I?", "Do you remember my name?"]), f"Your name is {name}.")
    else:
        opening = (f"My favourite colour is {colour}.", f"{colour.capitalize()} is a nice colour.")
        closing = (
            rng.choice(["What is my favourite colour?", "Which colour do I like?"]),
            f"Your favourite colour is {colour}.",
        )
    middle = [rng.choice([_capital, _sum, _fact, _greet])(rng)] if rng.random() < 0.5 else []
    return [
        message
        for question, answer in [opening, *middle, closing]
        for message in ({"role": "user", "content": question}, {"role": "assistant", "content": answer})
    ]


_MAKERS: list[Callable[[random.Random], tuple[str, str]]] = [
    _capital, _sum, _count, _list, _some, _repeat, _upper, _spell, _opposite, _translate, _greet, _fact, _baton, _story, _poem,
    _refuse, _compare,
]  # fmt: skip
_WEIGHTS = [10, 12, 6, 4, 6, 6, 3, 3, 6, 5, 7, 8, 8, 9, 3, 3, 5]


def clean(text: str) -> str:
    """Prose without the long rulers and blank runs of doc strings."""
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"[-=~*^]{5,}", "", text)).strip()
