"""The engine: a model, its KV pool and a sampler behind one call, `launch`.

Schedulers decide what a pass computes; the worker's pipeline applies the results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch

from common.messages import KVLayout
from engine.batch.layout import Packed
from engine.cache.codes import with_codes
from engine.cache.memory import EmptiedPool
from engine.cache.pages import (
    allocate_zeros,
    entry_views,
    last_block,
    part_views,
    plan_layout,
    pool_dtype,
    pool_shape,
)
from engine.cache.windows import with_windows
from engine.checkpoint.fingerprint import model_fingerprint
from engine.config import EngineConfig
from engine.drafts import with_draft
from engine.drafts.chain import DraftChain
from engine.drafts.heads import BlockHead, DraftHead
from engine.foreign import ForeignDecoder, is_foreign
from engine.grammars.grammars import Grammars, Masks
from engine.groups import groups_of
from engine.kernels.attention import HeadShape
from engine.kernels.launch import compiled_ahead
from engine.lockstep import Lockstep, planned
from engine.model.decoder import Decoder
from engine.model.limits import head_limits
from engine.model.places import Part, kept_at
from engine.parallel.ranks import ONE_RANK, Ranks
from engine.passes import Finished, InvalidChunkError, Pass, Sampled
from engine.resolving import marks_of, read_config, resolve_dtype, resolve_max_model_len
from engine.sampling.device import DeviceSampler, Draw
from engine.sampling.device_pass import DevicePass
from engine.sampling.host import SampledRow, in_order, sample
from engine.sampling.scores import ScoredPass, sampled_rows, split
from engine.sampling.verifying import verifying
from engine.sequence import Chunk, Sequence
from engine.spec.model import DraftSpec
from engine.spec.stages import for_stage
from engine.staged import Sizes, Staged, staged
from engine.step.between import Between
from engine.step.graphs import graph_sizes
from engine.step.limits import GroupTables, HeadLimits, LastAttention, Limits
from engine.step.runner import Runner
from engine.step.staging import NewestTokens
from engine.step.warm import time_launch, time_prompts, warm_up, worth_capturing
from engine.weights.loader import load_weights, most_elements
from engine.weights.parameters import Weights
from engine.weights.sleeping import Asleep, MovedOut

__all__ = ["Chunk", "Engine", "InvalidChunkError", "Pass", "Sampled"]

Allocate = Callable[[tuple[int, ...], torch.dtype, str], torch.Tensor]
Load = Callable[[Weights, Path], None]


class Engine:
    """Loads a model on construction. `launch` is called by one thread at a time, not always the same one.

    `allocate(shape, dtype, device)` provides the pool's memory (a transport's, so that peers can reach it), initialised or not.
    `load(weights, folder)` fills the parameters. `lender`: an engine on the CPU whose config differs in nothing but pool and
    threads; this one computes with its weights, and loads none. `ranks`: those that share the model, of which the first has its
    followers repeat each pass. Raises RankLostError if one ends.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        allocate: Allocate | None = None,
        load: Load = load_weights,
        lender: Engine | None = None,
        ranks: Ranks = ONE_RANK,
    ) -> None:
        self._ranks, self._lockstep = ranks, Lockstep(ranks, config.device)
        foreign = ForeignDecoder(config.model) if is_foreign(config) else None
        config.check_stages(ranks.stage.count, is_foreign=foreign is not None)
        model = foreign.spec if foreign is not None else read_config(config)
        device = torch.device(config.device)
        if device.type == "cpu":
            torch.set_num_threads(config.num_threads)
        dtype_name = resolve_dtype(config.dtype, device, model.dtype)
        model = with_codes(model, config.cache, dtype_name)
        dtype = getattr(torch, dtype_name)
        self.config = config
        self.vocab_size = model.vocab_size
        self.max_model_len = resolve_max_model_len(config.max_model_len, model.max_position_embeddings)
        model = with_windows(model.within(self.max_model_len), config.cache, dtype_name, self.max_model_len)
        model, draft = with_draft(model, config, longest=self.max_model_len, is_ours=foreign is None)
        model = for_stage(model, *ranks.stage.place)
        if foreign is not None:
            self._decoder: Decoder | ForeignDecoder = foreign.load(model, dtype, device)
            load = _nothing_more
        elif lender is not None:
            self._decoder, load = lender._decoder, _nothing_more
        else:
            self._decoder = Decoder(
                model,
                dtype=dtype,
                device=device,
                max_model_len=self.max_model_len,
                most_elements=most_elements(config.model) if load is load_weights else None,
                group=ranks.group,
            )
            model = self._decoder.spec
        self._head: DraftHead | BlockHead | None = None if lender is None else lender._head
        if model.own_draft is not None and draft is not None and self._head is None:
            assert isinstance(self._decoder, Decoder), "checked"
            self._head = draft.head(self._decoder, self.max_model_len)
        differing = map("differing={}".format, sorted(self._decoder.weights.differing))
        marks = [*marks_of(config, model, dtype_name), *differing]
        self.fingerprint = model_fingerprint(config.model, marks)
        sizes = self._decoder.weights.bytes_while_loading, self.max_model_len, ranks.held_back()
        self.layout: KVLayout = planned(ranks, config, lambda its: plan_layout(model, its, dtype_name, *sizes))
        self.kv = (allocate or allocate_zeros)(pool_shape(self.layout), pool_dtype(self.layout), config.device)
        self._drafting = self._new_drafting(self._decoder.spec.own_draft)
        self.grammars = Grammars(config.model, self.vocab_size)
        self._newest = NewestTokens.none(device)
        self._drawn: Draw | None = None  # the last pass that sampled on the device
        self._known: dict[Sequence, int] = {}  # newest tokens of one rank on the CPU, known at once
        # Milliseconds of a pass by slots for decoding tokens (0: none) and prompt tokens.
        self.pass_ms: dict[tuple[int, int], float] = {}
        # Milliseconds of drafting behind a pass, by sequences that draft.
        self.draft_ms: dict[int, float] = {}
        self.launch_ms = 0.0  # host time of an uncaptured pass; 0: no graphs
        aux = self._decoder.aux
        self._staged = staged(ranks.stage, Sizes(self.vocab_size, aux.arriving if aux else 0), dtype, device)
        self._sampler = DeviceSampler(self.vocab_size, max(config.max_sequences, config.max_batch_tokens), device)
        if device.type == "cuda":
            with ranks.stage.apart():
                self._start_on_gpu(load)
        else:
            load(self._decoder.weights, config.model)
            self._decoder.weights.settle()
            if self._head is not None and lender is None:
                self._head.load()
            self._runner = self._new_runner(self._decoder)
        self._decoder.weights.tell_changes()
        self._lockstep.begin()

    def _start_on_gpu(self, load: Load) -> None:
        """Load the weights while kernels are compiled; capture graphs; run and time passes of every kind."""
        self.grammars.read_ahead()
        longest = min(self.config.max_batch_tokens, self.max_model_len)
        sizes = graph_sizes(self.config.max_sequences, longest)
        if self._decoder.aux is not None:
            self._decoder.aux.reserve(max((size.tokens for size in sizes), default=0))
        with compiled_ahead():
            self._runner = self._new_runner(self._decoder.with_a_layer_of_each_kind())
            self._runner.rehearse(sizes)
            if self._drafting is not None:
                self._drafting.rehearse(self._runner, sizes)
            self.warm_up()
            load(self._decoder.weights, self.config.model)
            if self._head is not None:
                self._head.load()
        self._decoder.weights.settle()
        self._runner = self._new_runner(self._decoder)
        with self._lockstep.meeting():
            sizes = self._runner.capturable(sizes)
            self._captured = worth_capturing(
                sizes, self.launch, self.layout, vocab_size=self.vocab_size, exchange=self._ranks.exchange
            )
        self.draft_ms = self._capture()
        self.warm_up()
        depth = self._ranks.stage.count  # stages take about as long as one another
        self.pass_ms = {(size.decoding, size.prompts): depth * ms for size, ms in self._runner.measure().items()}
        alone = time_prompts(self.launch, self.layout, vocab_size=self.vocab_size, max_tokens=longest)
        self.pass_ms |= {(0, tokens): depth * ms for tokens, ms in alone.items()}
        self.launch_ms = time_launch(self.launch, self.layout, vocab_size=self.vocab_size, max_tokens=longest)
        self._forget_newest()

    def _capture(self) -> dict[int, float]:
        """Capture passes and drafts; return the drafts' milliseconds."""
        with self._lockstep.meeting():
            self._runner.capture(self._captured)
            return {} if self._drafting is None else self._drafting.capture(self._runner, self._captured)

    @torch.inference_mode()
    def sleep(self, *, moves: bool = True) -> Asleep:
        """Free memory of all ranks, see `engine.lockstep.Sleeping`. Raises MemoryError, RankLostError."""
        with self._lockstep.falling_asleep(moves) as together:
            self._forget_newest()
            if not moves:
                return EmptiedPool.fallen(self.kv, together)
            roots, stays = (self._decoder, self._head), (self._ranks.group, self._ranks.stage)
            return MovedOut.fallen(roots, self.kv, before=self._forget_graphs, stays=stays, together=together)

    def _forget_graphs(self) -> None:
        self._runner.forget_graphs()
        if self._drafting is not None:
            self._drafting.forget_graphs()

    @torch.inference_mode()
    def wake(self, asleep: Asleep) -> None:
        """Undo `sleep`. Raises MemoryError, RankLostError."""
        with self._lockstep.waking() as together:
            asleep.wake(together)
            if self.kv.is_cuda:
                self._capture()
                self._forget_newest()

    def _new_drafting(self, reads: DraftSpec | None) -> DraftChain | None:
        if reads is None or self._head is None or self.config.draft is None or self._decoder.aux is None:
            return None  # all of them are there, or none
        return DraftChain(
            self._head,
            kept=self._head.kept_in(part_views(self.kv, self.layout)),
            device=self.kv.device,
            heads=tuple(self._attending(reads.windows_by_heads).values()),
            num_drafts=reads.at_most(self.config.draft.num_drafts),
            reads=reads,
            leading=self._lockstep,
            states=self._decoder.aux,
        )

    def _new_runner(self, decoder: Decoder | ForeignDecoder) -> Runner:
        layout, model = self.layout, self._decoder.spec
        parts: list[Part] = [*part_views(self.kv, layout), *entry_views(self.kv, layout)]
        last = max(index for index, layer in enumerate(model.layers) if layer.attention is not None)
        if model.has_head:
            block, _ = kept_at(parts, model.places[last - model.own_layers.start])
        else:
            block = last_block(model, str(decoder.weights.dtype).removeprefix("torch."), layout.block_size)
        attention = self._attending(model.windows_by_heads)
        limits = Limits(
            block_size=layout.block_size,
            num_blocks=layout.num_blocks,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            attention=tuple(attention.values()),
            last=LastAttention(
                attention[model.attentions[-1].heads], model.windows[-1], table=0 if block is None else 1 + block
            ),
            tables=GroupTables(groups_of(layout)),
        )
        return Runner(
            decoder,
            parts,
            limits,
            Between.of(self._ranks.stage, model.hidden_size, decoder.weights.dtype, self.kv.device, self._decoder.aux),
            max_tokens=self.config.max_batch_tokens,
            max_sequences=self.config.max_sequences,
        )

    def _attending(self, windows: Mapping[HeadShape, tuple[int, ...]]) -> dict[HeadShape, HeadLimits]:
        model, verifies = self._decoder.spec, self.config.draft is not None and self.config.draft.num_drafts > 0
        return head_limits(model, windows, self._decoder.weights, verifies=verifies)

    def warm_up(self) -> None:
        """Run passes of every kind while the pool is empty, so that no request waits for a compilation."""
        warm_up(
            self.launch,
            self.layout,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            max_tokens=self.config.max_batch_tokens,
        )
        self._forget_newest()

    def _forget_newest(self) -> None:
        self._drawn, self._known = None, {}
        self._remember(NewestTokens.none(self.kv.device))

    @torch.inference_mode()
    def launch(self, chunks: list[Chunk]) -> Pass:
        """Start a forward pass over the chunks. The caller applies the results of `Pass.wait` to the sequences.

        Passes run in launch order. A chunk may begin with the token that the pass just before samples for its sequence
        (`Sequence.num_pending`).

        Raises InvalidChunkError before anything was computed when a chunk contradicts its sequence or the pool.
        """
        if not chunks:
            return Finished([])
        if self._staged is not None:
            self._staged.know(chunks)
        packed = self._runner.pack(self._runner.ordered(chunks), self._newest)
        return verifying(chunks, lambda rows: self._launch(rows, packed))

    def _launch(self, chunks: list[Chunk], packed: Packed) -> Pass:
        """Start a packed pass over chunks of which none has a row besides itself."""
        ordered = self._runner.ordered(chunks)
        if self._staged is not None:
            return self._launch_staged(self._staged, chunks, ordered, packed)
        is_alone = self._ranks.group.size == 1
        logits = self._runner.execute(packed) if is_alone else self._lockstep.execute(self._runner, packed)
        if self._drafting is None:
            return self._sampled(chunks, ordered, logits)
        with self._lockstep.drafting():
            inputs = self._drafting.inputs_of(self._runner, packed)
            launched = self._sampled(chunks, ordered, logits)
            return self._drafting.behind(self._runner, launched, chunks, ordered, packed, inputs)

    def _launch_staged(self, staged: Staged, chunks: list[Chunk], ordered: list[Chunk], packed: Packed) -> Pass:
        """The same where later stages go on with it."""
        drafting, runner, finish = self._drafting, self._runner, partial(self._sampled, chunks, ordered)
        with self._lockstep.turn():
            self._lockstep.execute(runner, packed)
            if drafting is not None and self._ranks.stage.is_apart:  # nothing comes whose results could be waited for
                inputs = drafting.inputs_of(runner, packed)
                return drafting.behind(runner, staged.launched(packed.size, finish), chunks, ordered, packed, inputs)
            draft = None if drafting is None else drafting.later(runner, chunks, ordered, packed).drafted
        return staged.launched(packed.size, finish, draft)

    def _sampled(self, chunks: list[Chunk], ordered: list[Chunk], logits: torch.Tensor | None) -> Pass:
        """Start sampling, and score what the logits of prompts are wanted for."""
        if logits is None or not any(chunk.scored for chunk in ordered):
            return self._sample(chunks, logits, ordered)
        scores, logits = split(logits, ordered)
        return ScoredPass(chunks, self._sample(chunks, logits, ordered), scores).finished()

    def follow(self, frame: bytes) -> None:
        """Do what a leader's message says, see `engine.lockstep`."""
        self._lockstep.follow(frame, self._runner, self._sampler, self._drafting, self, self._staged)

    @property
    def lost(self) -> str:
        """The reason that no further pass can be computed; "" while ranks live."""
        return self._lockstep.lost

    def _sample(self, chunks: list[Chunk], logits: torch.Tensor | None, ordered: list[Chunk]) -> Pass:
        """Start sampling a token for each row of logits, which are in the order of `ordered`."""
        sampling = [chunk for chunk in ordered if chunk.sample]
        # Waits for the previous pass while the device computes this one.
        masks = self.grammars.masks(sampling, self._pending)
        if self.kv.is_cuda or self._ranks.group.size > 1:
            return self._sample_on_device(chunks, logits, sampling, masks, ordered)
        allowed = masks.allowed(self.vocab_size) if masks.rows else {}
        rows = [SampledRow.of(chunk, self._known, allowed.get(row)) for row, chunk in enumerate(sampling)]
        sampled = sample(logits.float(), rows) if logits is not None else []
        tokens = [result.token_id if result else 0 for result in sampled]
        self._remember(NewestTokens(torch.tensor(tokens, dtype=torch.int64), [chunk.sequence for chunk in sampling]))
        self._known = {chunk.sequence: token for chunk, token in zip(sampling, tokens, strict=True)}
        return Finished(in_order(chunks, sampling, sampled, masks.problems))

    def _pending(self, sequence: Sequence) -> int:
        """Return the token that the previous pass samples for the sequence; on a GPU that pass may still run."""
        if self._drawn is None:
            return self._known[sequence]
        if self._staged is not None:
            self._staged.settle()
        return self._drawn.token_of(sequence)

    def _sample_on_device(
        self,
        chunks: list[Chunk],
        logits: torch.Tensor | None,
        sampling: list[Chunk],
        masks: Masks,
        ordered: list[Chunk],
    ) -> Pass:
        """Start sampling by packed words, which followers repeat."""
        is_scored = any(chunk.scored for chunk in ordered)
        if logits is None:
            if is_scored:
                self._lockstep.sample_nothing()
            self._forget_newest()
            launched = DevicePass.of_none(chunks, self.kv.device, self._ranks.check)
        else:
            packed = self._sampler.pack(sampling, self._newest, masks)
            rows = sampled_rows(ordered) if is_scored else None
            self._drawn = draw = self._lockstep.draw(self._sampler, logits, packed, self._newest.tensor, rows)
            self._remember(draw.newest)
            launched = DevicePass(chunks, sampling, draw, None, masks.problems, self._ranks.check)
        return launched if self.kv.is_cuda else Finished(launched.wait())

    def _remember(self, newest: NewestTokens) -> None:
        self._runner.keep_newest(newest.tensor)
        self._newest = newest


def _nothing_more(weights: Weights, folder: Path) -> None:
    """No-op, for weights that are already loaded."""
