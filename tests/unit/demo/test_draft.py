"""The draft head's training on a tiny random Llama: what it reads of the target, the files, the count of what is accepted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from benchmarks.quality.real_texts import real_texts
from demo.draft.acceptance import acceptance
from demo.draft.answers import training_texts
from demo.draft.eagle import Draft, Lesson, drafted, loss_of
from demo.draft.target import Target, rotations
from demo.draft.train import QUICK, main, most_frequent
from tests.models import build_tiny_model

HIDDEN, ATTENTION, KV, VOCABULARY = 64, 64, 32, 512


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=3)


@pytest.fixture(scope="module")
def target(model: Path) -> Target:
    torch.set_num_threads(1)
    return Target(model, torch.device("cpu"), torch.float32)


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(VOCABULARY, (4, 24), generator=torch.Generator().manual_seed(0))


def test_hidden_states_are_those_that_enter_the_layers(model: Path, target: Target, ids: torch.Tensor) -> None:
    network = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        reference = network(ids, output_hidden_states=True)
    aux, last = target.whole(ids)
    entering = [reference.hidden_states[layer] for layer in target.shape.aux_layers]
    torch.testing.assert_close(aux, torch.cat(entering, -1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(last @ target.head.T, reference.logits, rtol=1e-4, atol=1e-4)


def test_one_token_at_a_time_gives_the_same_logits(target: Target, ids: torch.Tensor) -> None:
    cache, rotation = target.cache(*ids.shape), rotations(target.shape, ids.shape[1], ids.device)
    steps = [target.step(ids[:, at], at, cache, rotation) for at in range(ids.shape[1])]
    torch.testing.assert_close(torch.stack(steps, 1), target.whole(ids)[1] @ target.head.T, rtol=1e-4, atol=1e-4)


def test_the_loss_falls_in_twenty_steps(target: Target, ids: torch.Tensor) -> None:
    torch.manual_seed(0)
    known = torch.ones(VOCABULARY, dtype=torch.bool)
    lesson = Lesson(target, ids, torch.arange(VOCABULARY))
    draft = Draft(target, torch.arange(VOCABULARY), lesson.aux, 48)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=3e-3)
    losses = list[float]()
    for _ in range(20):
        loss = loss_of(draft, lesson, known, 3)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    assert drafted(draft, lesson, 3).shape == (4, 24 - 3 - 1, 3)


def test_a_row_of_a_later_step_sees_no_later_token(target: Target, ids: torch.Tensor) -> None:
    torch.manual_seed(0)
    lesson = Lesson(target, ids, torch.arange(VOCABULARY))
    draft = Draft(target, torch.arange(VOCABULARY), lesson.aux, 48)
    changed = ids.clone()
    changed[:, 12:] = (changed[:, 12:] + 1) % VOCABULARY
    before = drafted_logits(draft, lesson)
    after = drafted_logits(draft, Lesson(target, changed, torch.arange(VOCABULARY)))
    for step in range(3):  # row i of step s reads tokens up to i + 1 + s
        torch.testing.assert_close(before[step][:, : 11 - step], after[step][:, : 11 - step])
        assert not torch.equal(before[step][:, 11 - step], after[step][:, 11 - step])


def drafted_logits(draft: Draft, lesson: Lesson) -> list[torch.Tensor]:
    with torch.no_grad():
        return list(draft.unrolled(lesson.aux, lesson.embedded, 3))


@pytest.mark.parametrize("length", [1, 3, 5])
def test_a_draft_that_says_what_the_target_says_is_accepted_whole(ids: torch.Tensor, length: int) -> None:
    chains = ids.unfold(1, length, 1)[:, 2:]
    found = acceptance(chains, ids, torch.ones_like(ids, dtype=torch.bool), length)
    assert (found.mean_length, found.by_position) == (length + 1, (1.0,) * length)
    assert found.steps == len(ids) * -(-chains.shape[1] // (length + 1))


def test_only_what_stands_before_the_first_wrong_token_is_accepted() -> None:
    ids = torch.arange(12)[None]
    chains = ids.unfold(1, 3, 1)[:, 2:].clone()
    chains[0, 0, 1] = 99  # accepted: one of three; the walk goes on with row 2
    chains[0, 2, 0] = 99  # none, though two right ones follow
    found = acceptance(chains, ids, torch.ones_like(ids, dtype=torch.bool), 3)
    assert (found.steps, found.accepted) == (4, (3, 2, 2))  # rows 0, 2, 3, 7


def test_steps_over_tokens_that_are_not_the_targets_choice_do_not_count() -> None:
    ids = torch.arange(10)[None]
    greedy = torch.ones_like(ids, dtype=torch.bool)
    greedy[0, :6] = False
    found = acceptance(ids.unfold(1, 2, 1)[:, 2:], ids, greedy, 2)
    assert (found.steps, found.accepted) == (1, (1, 1))  # the one row whose two tokens are 6 and 7; then row 7 has none


def test_no_training_text_quotes_a_text_held_out() -> None:
    trained, held_out = "\n".join(training_texts()), real_texts()
    pages = [text for name, text in held_out.items() if name != "LICENSE"]
    lines = {line.strip() for text in pages for line in text.splitlines() if len(line.strip()) > 40}
    assert len(trained) > 100_000
    assert not [line for line in lines if line in trained]


def test_the_most_frequent_tokens_ascend() -> None:
    assert most_frequent(torch.tensor([[7, 7, 3, 3, 3, 5]]), 2, 10).tolist() == [3, 7]


def test_a_quick_run_writes_the_files_of_an_eagle3_head(model: Path, tmp_path: Path) -> None:
    assert main(["--model", str(model), "--out", str(tmp_path), "--device", "cpu", "--quick"]) == 0
    tensors, config = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_bytes())
    kept = QUICK.vocabulary
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "midlayer.hidden_norm.weight": (HIDDEN,),
        "midlayer.input_layernorm.weight": (HIDDEN,),
        "midlayer.post_attention_layernorm.weight": (HIDDEN,),
        "midlayer.self_attn.q_proj.weight": (ATTENTION, 2 * HIDDEN),
        "midlayer.self_attn.k_proj.weight": (KV, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": (KV, 2 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": (HIDDEN, ATTENTION),
        "midlayer.mlp.gate_proj.weight": (QUICK.intermediate, HIDDEN),
        "midlayer.mlp.up_proj.weight": (QUICK.intermediate, HIDDEN),
        "midlayer.mlp.down_proj.weight": (HIDDEN, QUICK.intermediate),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (kept, HIDDEN),
        "d2t": (kept,),
        "t2d": (VOCABULARY,),
    }
    targets = torch.arange(kept) + tensors["d2t"]  # d2t is an offset
    assert torch.equal(targets, tensors["t2d"].nonzero()[:, 0])
    assert (config["architectures"], config["draft_vocab_size"]) == (["LlamaForCausalLMEagle3"], kept)
    figures = {figure["name"]: figure["value"] for figure in json.loads((tmp_path / "draft.json").read_bytes())}
    assert 1 <= figures["own answers, 5 drafted, accepted length"] <= 6


def test_a_model_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--model", str(tmp_path / "nowhere.gguf"), "--out", str(tmp_path / "out")])
    assert "--model: there is no" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
