"""Models that pool, by the kernels of GPUs: a random one of a class against transformers."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import torch

from engine.kernels.rope import rope_and_write_kv
from engine.pooling import encoder, graphs
from engine.pooling.engine import PoolingInput
from engine.pooling.graphs import Passes
from engine.step.graphs import Captures
from tests.pooling_models import build_pooling_model
from tests.unit.engine.pooling.references import EXACT, engine_of, inputs, reference
from tests.unit.kernels.triton_checks import Suite

# Calls of the fused kernel, one a layer: without norms of heads, with them, and with weights that are less by 1.
ROTATED = {"ModernBertModel": 3, "NomicBertModel": 3, "Qwen3Model": 3, "Gemma3TextModel": 3, "MistralModel": 3}
ROTATED |= {"BertModel": 0, "MPNetModel": 0}
CAPTURED = ("BertModel", "MPNetModel", "ModernBertModel", "Qwen3Model")
DECODERS = ("Qwen3Model", "MistralModel")


def check(family: str, device: str, large: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = build_pooling_model(Path(folder), family)
        engine, theirs, texts = engine_of(model, device=device), reference(model), inputs()[1:5]
        texts.append([*texts[3][:16], 5, 6])
        asked = [PoolingInput(tokens=text, work="token_embed", is_raw=True) for text in texts]
        with mock.patch.object(encoder, "rope_and_write_kv", wraps=rope_and_write_kv) as fused:
            found = engine.compute(asked)
        assert fused.call_count == ROTATED[family]
        assert engine.found[-1] == (16 if family in DECODERS else 0), "a decoder shares a block"
        for text, own in zip(texts, found, strict=True):
            with torch.no_grad():
                wanted = theirs(torch.tensor([text])).last_hidden_state[0].float()
            torch.testing.assert_close(own, wanted, **EXACT)


@dataclass(frozen=True, slots=True)
class _Again:
    """In place of a CUDA graph: launches again."""

    run: Callable[[], object]

    def replay(self) -> None:
        self.run()


def check_captured(family: str, device: str, large: bool) -> None:
    """Passes in larger captured ones, where other tokens were before, are those kernel by kernel."""
    with tempfile.TemporaryDirectory() as folder:
        model = build_pooling_model(Path(folder), family)
        plain, captured = (engine_of(model, device=device, captures=False, prefix_bytes=0) for _ in range(2))
        captured._passes = passes = Passes(captured._encoder, torch.device(device), sizes=(12, 32))
        long, *others = ([17 * at % 90 + 5 for at in range(begin, begin + count)] for begin, count in LONG_AND_SHORT)
        with mock.patch.object(Captures, "capture", autospec=True, side_effect=lambda _, run: _Again(run)) as capture:
            for texts in ([long], others, [long, *others], others[:2], others[1:]):
                asked = [PoolingInput(tokens=text, second=len(text) // 2) for text in texts]
                for found, wanted in zip(captured.compute(asked), plain.compute(asked), strict=True):
                    torch.testing.assert_close(found, wanted, **EXACT)
        assert capture.call_count == 2, "two sizes came twice"
        assert len(passes) == 2


def check_alike(device: str, large: bool) -> None:
    """Texts of one length have a captured pass of their own, and a general one where that can not be captured."""
    with tempfile.TemporaryDirectory() as folder:
        model = build_pooling_model(Path(folder), "BertModel")
        plain = engine_of(model, device=device, captures=False)
        for outcomes in ([None, None], [None, RuntimeError("not this one"), None]):
            captured = engine_of(model, device=device, captures=False)
            captured._passes = passes = Passes(captured._encoder, torch.device(device), sizes=(16, 32))
            coming = iter(outcomes)

            def capture(_: Captures, run: Callable[[], object], coming: Iterator[Exception | None] = coming) -> _Again:
                if (error := next(coming)) is not None:
                    raise error
                return _Again(run)

            with (
                mock.patch.object(Captures, "capture", autospec=True, side_effect=capture),
                mock.patch.object(graphs, "MANY_ALIKE", 8),
            ):
                for lengths in ((6, 6), (6, 6), (6, 6), (4, 4, 4), (5, 4), (6, 6), (6, 6)):
                    asked = [PoolingInput(tokens=[17 * at % 90 + 5 for at in range(n)]) for n in lengths]
                    for own, wanted in zip(captured.compute(asked), plain.compute(asked), strict=True):
                        torch.testing.assert_close(own, wanted, **EXACT)
            assert len(passes) == 2
            assert not [*coming], "all were asked for"


def check_captured_prefixes(device: str, large: bool) -> None:
    """A decoder's passes of which parts are kept or read are captured, too."""
    with tempfile.TemporaryDirectory() as folder:
        model = build_pooling_model(Path(folder), "Qwen3Model")
        plain, captured = (engine_of(model, device=device, captures=False, prefix_bytes=1 << 18) for _ in range(2))
        captured._passes = passes = Passes(captured._encoder, torch.device(device), sizes=(16, 32, 64))
        first, found = [17 * at % 90 + 5 for at in range(18)], list[list[int]]()
        with mock.patch.object(Captures, "capture", autospec=True, side_effect=lambda _, run: _Again(run)):
            for texts in (
                [first],
                [first],
                [first],
                [[*first[:16], at, 7] for at in range(2)],
                [first],
                [first[2:]],
                [first],
            ):
                asked = [PoolingInput(tokens=text) for text in texts]
                for own, wanted in zip(captured.compute(asked), plain.compute(asked), strict=True):
                    torch.testing.assert_close(own, wanted, **EXACT)
                found.append([*captured.found])
        assert found == [[0], [0], [16], [16, 16], [16], [0], [16]]
        assert len(passes) > 1


LONG_AND_SHORT = ((0, 22), (100, 5), (200, 1), (400, 3))
CHECKS: dict[str, Callable[[str, bool], None]] = {family: partial(check, family) for family in ROTATED}
CHECKS |= {f"{family}, captured": partial(check_captured, family) for family in CAPTURED}
CHECKS["texts of one length, captured"] = check_alike
CHECKS["prefixes, captured"] = check_captured_prefixes
SUITE = Suite(CHECKS)
run, interpret = SUITE.run, SUITE.interpret
