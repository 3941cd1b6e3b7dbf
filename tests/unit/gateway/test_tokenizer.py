"""Model folders as people have them: where templates, BOS and stop tokens are found, and what a template may do."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, processors

from common.errors import InvalidRequestError
from gateway.answers.tokenizer import ChatTokenizer
from gateway.templates.template import ChatTemplate, check_template
from tests.models import build_tokenizer

MESSAGES = [{"role": "user", "content": "Grüß <dich>"}]
Build = Callable[..., ChatTokenizer]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    build_tokenizer(folder)
    return folder


@pytest.fixture
def build(plain: Path, tmp_path: Path) -> Build:
    """Make a folder with changed settings and open it."""

    def build(*, template: Any = None, jinja: str | None = None, bos: bool = False, **files: Any) -> ChatTokenizer:
        folder = tmp_path / "model"
        shutil.copytree(plain, folder)
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        settings["chat_template"] = template
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        if jinja is not None:
            (folder / "chat_template.jinja").write_text(jinja)
        if bos:
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            tokenizer.post_processor = processors.TemplateProcessing(
                single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
            )
            tokenizer.save(str(folder / "tokenizer.json"))
        for name, content in files.items():
            (folder / f"{name}.json").write_text(json.dumps(content))
        return ChatTokenizer(folder)

    return build


def test_a_given_template_takes_the_place_of_the_folders(build: Build, tmp_path: Path) -> None:
    build(jinja="{{ messages[0].content }}")
    given = "{% for message in messages %}<tool_call>{{ message.content }}{% endfor %}"
    tokenizer = ChatTokenizer(tmp_path / "model", template=given)
    assert tokenizer.render(MESSAGES) == "<tool_call>Grüß <dich>"
    assert tokenizer.format.format.name == "hermes"


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{% for m in messages %}\n{{ m }", "is no Jinja: line 2"),
        ("Hello {{ name }}", "reads no `messages`"),
        ("", "reads no"),
    ],
)
def test_what_is_no_template_is_told(source: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        check_template(source)


def test_bos_is_there_once(build: Build) -> None:
    tokenizer = build(template="{{ bos_token }}{{ messages[0].content }}", bos=True)
    assert tokenizer.encode("a").count(0) == 1
    assert tokenizer.encode_chat(MESSAGES).count(0) == 1


def test_the_file_wins_over_the_inline_template(build: Build) -> None:
    assert build(template="inline", jinja="file").render(MESSAGES) == "file"


def test_the_default_of_several_templates(build: Build) -> None:
    several = [{"name": "rag", "template": "rag"}, {"name": "default", "template": "usual"}]
    assert build(template=several).render(MESSAGES) == "usual"


def test_no_template_is_an_error_of_chat_only(build: Build) -> None:
    tokenizer = build()
    assert tokenizer.encode("a")
    with pytest.raises(InvalidRequestError, match="/v1/completions"):
        tokenizer.encode_chat(MESSAGES)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "Grüß <dich>"}'),
        ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}", '{"a":2,"b":1}'),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("{% generation %}\nanswer\n{% endgeneration %}\n!", "answer\n!"),
        ("{% for m in messages %}{% if true %}{% break %}{% endif %}x{% endfor %}y", "y"),
        ("{% if tools is not none %}tools{% endif %}{% if documents %}docs{% endif %}-", "-"),
        ("  {% if true %}\nx\n  {% endif %}\n", "x\n"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ bos_token }}{{ eos_token }}", "<|endoftext|><|im_end|>"),
        ("{{ thinking | default(true) }}{{ add_generation_prompt }}", "FalseTrue"),
    ],
)
def test_what_templates_use(build: Build, template: str, text: str) -> None:
    assert build(template=template).render(MESSAGES, variables={"thinking": False}) == text


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[9].content }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ 1 / 0 }}",
        "{{ none + 1 }}",
        "{{ messages[0]['content'].no_such() }}",
    ],
)
def test_what_a_template_refuses_is_a_wrong_request(build: Build, template: str) -> None:
    with pytest.raises(InvalidRequestError):
        build(template=template).render(MESSAGES)


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "tools", "bos_token"])
def test_clients_set_only_variables_of_their_own(build: Build, name: str) -> None:
    with pytest.raises(InvalidRequestError, match=name):
        build(template="x").render(MESSAGES, variables={name: 1})


def test_variables_may_have_any_other_name(build: Build) -> None:
    assert build(template="{{ self_ }}x").render(MESSAGES, variables={"self": 1, "context": 2, "self_": 3}) == "3x"


def test_the_final_message_is_left_open(build: Build) -> None:
    tokenizer = build(template="{% for m in messages %}[{{ m.content | trim }}]{% endfor %}")
    messages = [*MESSAGES, {"role": "assistant", "content": "so "}]
    assert tokenizer.render(messages, continue_final_message=True) == "[Grüß <dich>][so "
    with pytest.raises(InvalidRequestError, match="final message"):
        ChatTemplate("{{ messages[0].content }}", {}).render(messages, continue_final_message=True)


def test_stop_tokens_of_all_files_count(build: Build) -> None:
    tokenizer = build(generation_config={"eos_token_id": [2, 7]}, config={"eos_token_id": 9, "vocab_size": 600})
    assert tokenizer.eos_ids == [2, 7, 9]
    assert tokenizer.vocab_size == 600


def test_a_checkpoint_with_other_parts_says_so_of_its_text_part(build: Build) -> None:
    tokenizer = build(generation_config={}, config={"text_config": {"eos_token_id": [2, 9], "vocab_size": 600}})
    assert (tokenizer.eos_ids, tokenizer.vocab_size) == ([2, 9], 600)


def test_what_the_text_part_says_of_its_vocabulary_counts(build: Build) -> None:
    """Ovis 2's config.json says a smaller one beside it, without the tokens of chat."""
    assert build(config={"vocab_size": 20, "text_config": {"vocab_size": 600}}).vocab_size == 600


def test_a_folder_without_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        ChatTokenizer(tmp_path)


def test_the_fingerprint_is_the_one_that_workers_of_010_send(tmp_path: Path) -> None:
    build_tokenizer(tmp_path)
    content = (tmp_path / "tokenizer.json").read_bytes()
    expected = hashlib.blake2b(content, digest_size=16, key=b"baton.tokenizer.v1").hexdigest()
    assert ChatTokenizer(tmp_path).fingerprint == expected
    (tmp_path / "tokenizer.json").write_bytes(content + b"\n")
    assert ChatTokenizer(tmp_path).fingerprint != expected
