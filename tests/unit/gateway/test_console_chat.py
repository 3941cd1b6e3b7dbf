"""What the chat decides without a page: branches, markdown, highlighting, options, files."""

# ruff: noqa: E501 - scripts of another language

from __future__ import annotations

import hashlib
import json
import tomllib
from typing import Any

from gateway.console.assets import FOLDER
from tests.console.logic import evaluate

VENDOR = FOLDER / "vendor"


def test_libraries_of_others_are_as_they_were_taken() -> None:
    listed = tomllib.loads((VENDOR / "VENDORED.toml").read_text())
    files = {entry["file"]: entry for entry in listed.values()}
    assert files.keys() == {path.name for path in VENDOR.glob("*.js")}
    for name, entry in files.items():
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == entry["sha256"]
        assert (VENDOR / entry["licence_file"]).exists()
        assert entry["integrity"].startswith("sha512-")
        assert entry["version"] in (VENDOR / name).read_text()[:500]


TREE = """
const tree = await at("chat/tree.js");
const c = tree.newConversation({ system: "" }, 1);
const q1 = tree.add(c, null, { role: "user", content: "one" }, 2);
const a1 = tree.add(c, q1.id, { role: "assistant", content: "first", calls: [] }, 3);
"""


def test_asking_again_and_editing_are_branches() -> None:
    found = evaluate(
        TREE
        + """
    const a2 = tree.add(c, q1.id, { role: "assistant", content: "second" }, 4);
    const q2 = tree.add(c, a2.id, { role: "user", content: "two" }, 5);
    const edited = tree.add(c, a2.id, { role: "user", content: "other two" }, 6);
    const words = (head) => tree.path(c, head).map((node) => node.content);
    out({
      path: words(q2.id), other: words(a1.id), siblings: tree.siblings(c, a1).map((node) => node.content),
      edits: tree.siblings(c, q2).map((node) => node.content), newest: words(tree.end(c, a2)), alone: tree.siblings(c, q1).length,
      title: tree.titleOf(c), named: tree.titleOf({ ...c, title: "mine" }), empty: tree.titleOf(tree.newConversation({})),
      nothing: tree.attachment(c, null), told: tree.messages(c, q2.id, "be short"),
    });"""
    )
    assert found["path"] == ["one", "second", "two"]
    assert found["other"] == ["one", "first"]
    assert found["siblings"] == ["first", "second"]
    assert found["edits"] == ["two", "other two"]
    assert found["newest"] == ["one", "second", "other two"]
    assert (found["alone"], found["nothing"]) == (1, None)
    assert (found["title"], found["named"], found["empty"]) == ("one", "mine", "New chat")
    assert found["told"] == [
        {"role": "system", "content": "be short"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "second"},
        {"role": "user", "content": "two"},
    ]


def test_what_failed_without_a_word_is_no_part_of_the_conversation() -> None:
    found = evaluate(
        TREE
        + """
    const q2 = tree.add(c, a1.id, { role: "user", content: "two" });
    const failed = tree.add(c, q2.id, { role: "assistant", content: "", error: "no" });
    const broken = tree.add(c, q2.id, { role: "assistant", content: "half", error: "cut" });
    const calls = [{ id: "x", name: "f", arguments: "{}" }];
    const calling = tree.add(c, q2.id, { role: "assistant", content: "", calls });
    const result = tree.add(c, calling.id, { role: "tool", call: "x", name: "f", content: "1" });
    const after = tree.add(c, result.id, { role: "assistant", content: "", error: "no" });
    out({ failed: tree.attachment(c, failed.id) === a1.id, broken: tree.attachment(c, broken.id) === broken.id,
      again: tree.attachment(c, after.id) === calling.id, open: tree.openCalls(c, after.id), closed: tree.openCalls(c, a1.id),
      told: tree.messages(c, after.id).slice(-2) });"""
    )
    assert found["failed"]
    assert found["broken"]
    assert found["again"]
    assert (found["open"], found["closed"]) == ([{"id": "x", "name": "f", "arguments": "{}"}], [])
    assert found["told"] == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "x", "content": "1"},
    ]


def test_chats_come_back_from_a_file_as_they_were_and_wrong_ones_are_refused() -> None:
    found = evaluate(
        TREE
        + """
    const share = await at("chat/share.js");
    c.lanes = [{ head: a1.id, options: { system: "short" } }];
    a1.reasoning = "hm"; a1.calls = [{ id: "x", name: "f", arguments: '{"a": "```"}' }];
    const [given] = share.parsed(share.asJson([c]));
    const back = tree.imported(given, { system: "mine" });
    const wrong = (make) => { try { const given = structuredClone(c); make(given); tree.imported(given, {}); return "taken"; } catch (error) { return error.message; } };
    const refused = (text) => { try { share.parsed(text); return "taken"; } catch (error) { return error.message; } };
    out({ same: tree.path(back, back.lanes[0].head).map(({ role, content, reasoning }) => [role, content, reasoning ?? ""]), other: back.id !== c.id,
      options: back.lanes[0].options, markdown: share.asMarkdown(c), name: share.fileName("What's up? Ä/..", "md"),
      circle: wrong((one) => (one.nodes[q1.id].parent = a1.id)), role: wrong((one) => (one.nodes[q1.id].role = "boss")), none: wrong((one) => delete one.nodes),
      number: tree.path(tree.imported({ nodes: { x: { id: "x", role: "user", content: 5, created: "y" } } }, {}), null).length,
      json: refused("{"), format: refused("{}"),
      curl: share.asCurl("http://h/v1", { text: "it's" }, true) });"""
    )
    assert found["same"] == [["user", "one", ""], ["assistant", "first", "hm"]]
    assert found["other"]
    assert found["options"] == {"system": "mine"}
    assert (
        "## Model\n\n<details><summary>Reasoning</summary>\n\nhm\n\n</details>\n\nfirst\n\nCalls `f`:\n\n````json\n"
        in found["markdown"]
    )
    assert found["name"] == "what-s-up-ä.md"
    assert "circle" in found["circle"]
    assert 'role "boss"' in found["role"]
    assert "nodes" in found["none"]
    assert found["json"].startswith("not JSON")
    assert "format" in found["format"]
    assert found["curl"].splitlines() == [
        "curl 'http://h/v1' \\",
        "  -H 'content-type: application/json' \\",
        '  -H "authorization: Bearer $BATON_API_KEY" \\',
        "  -d '{",
        ' "text": "it\'\\\'\'s"',
        "}'",
    ]


def test_options_make_a_body_and_wrong_ones_are_named() -> None:
    found = evaluate(
        """
    const { body, changed, NONE, FIELDS } = await at("chat/options.js");
    const made = (options) => { try { return body({ model: "m", ...options }, []); } catch (error) { return error.message; } };
    out([made({}), made({ temperature: "0.5", top_k: "3", stop: "a\\nb\\\\n", seed: " 7 ", thinking: "off", tool_choice: "required" }),
      made({ tools: '[{"type": "function"}]', tool_choice: "required", schema: '{"type": "object"}', extra: '{"n": 2}' }),
      made({ temperature: "hot" }), made({ temperature: "3" }), made({ top_k: "1.5" }), made({ tools: "{}" }), made({ schema: "[" }), made({ extra: "[]" }),
      changed(NONE), changed({ ...NONE, temperature: "1", max_tokens: "5" }), FIELDS.length]);"""
    )
    assert found[0] == {"model": "m", "messages": []}
    assert found[1] == {
        "model": "m", "messages": [], "temperature": 0.5, "top_k": 3, "seed": 7, "stop": ["a", "b\n"],
        "chat_template_kwargs": {"enable_thinking": False},
    }  # fmt: skip
    assert (found[2]["tool_choice"], found[2]["n"]) == ("required", 2)
    assert found[2]["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": {"type": "object"}},
    }
    told = found[3:9]
    assert told[0] == "Temperature: a number is needed"
    assert told[1] == "Temperature: must be from 0 to 2"
    assert told[2] == "Top k: a whole number is needed"
    assert told[3] == "Tools, a JSON list: must be a JSON list"
    assert told[4].startswith("JSON schema of the answer: ")
    assert told[5] == "Further fields of the body, JSON: must be a JSON object"
    assert found[9:11] == [0, 2]


def test_every_setting_is_in_one_group_and_examples_make_a_body() -> None:
    found = evaluate(
        """
    const { body, EXAMPLES, FIELDS, GROUPS } = await at("chat/options.js");
    out({ fields: FIELDS.map(([name]) => name), grouped: GROUPS.flatMap(([, names]) => names), body: body({ model: "m", ...EXAMPLES }, []) });"""
    )
    assert sorted(found["grouped"]) == sorted(found["fields"])
    assert found["body"]["tools"][0]["function"]["name"] == "get_weather"
    assert found["body"]["response_format"]["json_schema"]["schema"]["required"] == ["name", "age"]


def nodes(markdown: str) -> Any:
    return evaluate(
        f"""
    const {{ nodesOf }} = await at("chat/markdown.js");
    const {{ Lexer }} = await at("vendor/marked.js");
    out(nodesOf(new Lexer({{ gfm: true }}).lex({json.dumps(markdown)})));"""
    )


def test_markdown_becomes_nodes_and_html_stays_words() -> None:
    assert nodes('# T\n\na **b** <img src=x onerror="alert(1)"> &amp; &lt;i&gt; \\*') == [
        ["h3", {"class": "h1"}, "T"],
        ["p", {}, "a ", ["strong", {}, "b"], " ", '<img src=x onerror="alert(1)">', " & <i> ", "*"],
    ]
    assert nodes("<script>alert(1)</script>\n\n```js x\n1 < 2\n```") == [
        ["p", {"class": "raw"}, "<script>alert(1)</script>"],
        ["code-block", {"language": "js"}, "1 < 2"],
    ]


def test_words_nested_beyond_the_parser_are_shown_as_they_are() -> None:
    found = evaluate(
        """
    class Element {
      children = [];
      setAttribute() {}
      remove() {}
      append(...more) { this.children.push(...more); }
      replaceChildren() { this.children = []; }
    }
    globalThis.document = { createElement: () => new Element() };
    globalThis.Text = String;
    const { Growing } = await at("chat/markdown.js");
    const root = new Element(), growing = new Growing(root);
    const text = ">".repeat(50_000);
    growing.show(text);
    growing.show(`${text} end`, { done: true });
    out(root.children.at(-1).children.join("") === `${text} end`);"""
    )
    assert found is True


def test_links_lead_to_the_web_only_and_pictures_are_not_loaded() -> None:
    safe = {"target": "_blank", "rel": "noopener noreferrer"}
    assert nodes("[a](https://x.y) ![i](https://x.y/z.png) [b](javascript:alert(1)) [c](data:text/html,x) [d](/admin/keys)") == [
        [
            "p", {}, ["a", {"href": "https://x.y", **safe}, "a"], " ", ["a", {"href": "https://x.y/z.png", **safe}, "i"],
            " ", ["span", {"class": "raw", "title": "javascript:alert(1)"}, "b"], " ",
            ["span", {"class": "raw", "title": "data:text/html,x"}, "c"], " ", ["span", {"class": "raw", "title": "/admin/keys"}, "d"],
        ]
    ]  # fmt: skip


def test_code_is_coloured_by_its_language() -> None:
    python, shell, unknown, json_text = evaluate(
        """
    const { highlighted } = await at("chat/highlight.js");
    out([highlighted('def f(x):  # c\\n  return "s" + 1', "py"), highlighted("echo $HOME # c", "bash"), highlighted("if x", ""), highlighted('{"a": true}', "json")]);"""
    )
    assert python == [
        ["word", "def"], ["", " "], ["call", "f"], ["", "(x):  "], ["comment", "# c"], ["", "\n  "], ["word", "return"], ["", " "],
        ["string", '"s"'], ["", " + "], ["number", "1"],
    ]  # fmt: skip
    assert shell == [["word", "echo"], ["", " $HOME "], ["comment", "# c"]]
    assert unknown == [["", "if x"]]
    assert json_text == [["", "{"], ["name", '"a"'], ["", ": "], ["word", "true"], ["", "}"]]


def test_chunks_become_an_answer_with_its_figures() -> None:
    found = evaluate(
        """
    const { take, pace } = await at("chat/asking.js");
    const node = { content: "", reasoning: "" };
    const delta = (delta, more = {}) => ({ id: "c", choices: [{ index: 0, delta, ...more }] });
    take(node, delta({ role: "assistant" }), 5);
    take(node, delta({ reasoning_content: "hm" }), 10);
    take(node, delta({ content: "a" }), 20);
    take(node, delta({ tool_calls: [{ index: 0, id: "x", function: { name: "f", arguments: "{" } }] }), 30);
    take(node, delta({ tool_calls: [{ index: 0, function: { arguments: "}" } }] }, { finish_reason: "tool_calls" }), 110);
    const before = structuredClone(node);
    take(node, { id: "c", choices: [], usage: { prompt_tokens: 9, completion_tokens: 11, prompt_tokens_details: { cached_tokens: 8 } } }, 110);
    out([before, node, pace(node.measured), pace({ ttft_ms: 5, total_ms: 5, completion_tokens: 1 })]);"""
    )
    before, after, pace, none = found
    assert (after["content"], after["reasoning"], after["finish"], after["request"]) == ("a", "hm", "tool_calls", "c")
    assert after["calls"] == [{"id": "x", "name": "f", "arguments": "{}"}]
    assert before["measured"] == {"total_ms": 110, "ttft_ms": 10, "thought_ms": 10, "completion_tokens": 4}
    assert after["measured"] == before["measured"] | {"completion_tokens": 11, "prompt_tokens": 9, "cached_tokens": 8}
    assert (pace, none) == (100, None)
