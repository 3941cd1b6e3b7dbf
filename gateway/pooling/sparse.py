"""TEI's weights of words."""

from __future__ import annotations

from typing import Any, ClassVar

from gateway.http.api import fields
from gateway.http.problem import Json
from gateway.pooling.apis import Asking, written
from gateway.pooling.service import Wish
from gateway.pooling.vectors import TeiInputs, cut, floats
from modelfiles.pooling import LEXICAL


class TeiSparseRequest(TeiInputs):
    """Body of POST /embed_sparse, TEI's."""


class TeiSparse:
    """TEI's weights of words: each token of a text that has one, with its greatest."""

    body = TeiSparseRequest
    described: ClassVar[Json] = {
        "type": "array",
        "items": {"type": "array", "items": fields({"index": {"type": "integer"}, "value": {"type": "number"}})},
    }

    async def answer(self, body: TeiSparseRequest, asking: Asking) -> Any:
        fitting = cut(body.truncate, from_left=body.truncation_direction == "left")
        fitting = asking.prompted(body.model, LEXICAL, fitting, body.prompt_name)
        wish = Wish(model=body.model, inputs=body.inputs, name="inputs", work=LEXICAL, fitting=fitting)
        rows = await asking.rows(wish)

        def told() -> list[Any]:
            return [_weights(floats(values)) for values in rows.values]

        return await written(rows, told)


def _weights(pairs: list[float]) -> list[Json]:
    return [{"index": int(pairs[at]), "value": pairs[at + 1]} for at in range(0, len(pairs), 2)]
