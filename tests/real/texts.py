"""Texts that tell tokenizers apart, made by a seed: languages, code, emoji, white space, and what looks like control tokens."""

from __future__ import annotations

import random

# One piece a line; in white space and signs `|` stands between pieces.
_LANGUAGES = """\
The lighthouse keeper's daughter didn't answer.
Grüße aus Köln, wo's regnet!
L'été, où êtes-vous ?
¿Mañana también?
Привет, как дела?
今日はいい天気ですね。
我们明天去北京。
안녕하세요 세계
مرحبا بالعالم
שלום עולם
नमस्ते दुनिया
สวัสดีชาวโลก
Ελληνικά
Tiếng Việt
İstanbul'da ığdır"""
_CODE = r"""for (int i = 0; i < 10; ++i) { a[i] ^= 0x1F; }
SELECT * FROM t WHERE a <> 'b''c';
<div class="x">&amp;</div>
{"key": [1, 2.50, -3e-7, null]}
x = y ** 2 // 3 % 4 != 5 and not z
https://example.org/a?b=c&d=%20#e
snake_case camelCase SCREAMING
\d+\.\w*$
1234567890
1,000,000
2026-11-24T18:00:00Z
١٢٣ ½ ² Ⅷ
0xdeadBEEF"""
_CONTROLS = """\
<|im_start|>
<|im_end|>
<|endoftext|>
<s>
</s>
<bos>
<start_of_turn>
<pad>
<|
|>
<think>
[INST]
<|im_start
im_end|>"""
_SIGNS = (
    "🙂|👩‍👩‍👧‍👦|🇩🇪|👍🏽|❤️|→←↑|∑∫√|…—–|“quoted”|e\u0301|\u200b|\ufeff|\u00ad|\U0001f9d1\u200d\U0001f680|~!@#$%^&*()_+"
)
_SPACES = " |  |   |\t|\n|\n\n|\r\n| \n |\u00a0|\u3000|        |\n    |def f(x: int):\n\treturn f'{x!r:>10}'|#!/bin/sh\nset -eu\n"
_KINDS = [_LANGUAGES.split("\n"), _CODE.split("\n"), _CONTROLS.split("\n"), _SIGNS.split("|"), _SPACES.split("|")]


def varied_texts(count: int, seed: int = 0) -> list[str]:
    """So many different texts of 1 to 12 pieces, some of which are cut, and touch where nothing is between them."""
    chance, found = random.Random(seed), dict[str, None]()
    while len(found) < count:
        pieces = [chance.choice(chance.choice(_KINDS)) for _ in range(chance.randint(1, 12))]
        pieces = [piece[chance.randrange(len(piece)) :] if chance.random() < 0.1 else piece for piece in pieces]
        found[chance.choice(("", " ", "\n")).join(pieces)] = None
    return list(found)
