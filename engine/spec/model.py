"""The description of a model, as plain values from its config.json. Sizes are element counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from engine.formats.product import Format
from engine.formats.quantization import UNQUANTISED, Quantization
from engine.kernels.attention import HeadShape
from engine.spec.attention import AttentionSpec
from engine.spec.ends import PLAIN_EMBEDDING, PLAIN_HEAD, RMS_NORMS, EmbeddingSpec, HeadSpec, NormSpec
from engine.spec.experts import SparseMlpSpec
from engine.spec.halves import AltUpSpec, LaurelSpec
from engine.spec.mla import MLASpec
from engine.spec.states import ChannelDeltaSpec, DeltaSpec, Kept, MambaSpec, SelectiveSpec, ShortConvolutionSpec
from engine.weights.names import AS_OURS, StoredNames


class UnsupportedModelError(ValueError):
    """The checkpoint's config.json asks for something that the engine doesn't compute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedMlpSpec:
    """An MLP that computes down(act(gate(x)) * up(x))."""

    size: int
    bias: bool = False
    activation: Literal["silu", "gelu_tanh"] = "silu"
    sparsity: float = 0.0  # share of gates set to 0, by their mean and deviation
    gate_multiplier: float = 1.0  # multiplies the gate before the activation
    under: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    fused: str = ""  # the module of both, the gate's rows first
    down: str = "mlp.down_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainMlpSpec:
    """An MLP that computes down(act(up(x)))."""

    size: int
    bias: bool
    activation: Literal["gelu_tanh", "gelu", "relu2", "silu", "xielu"]
    learned: str = ""  # module of the activation's learned parameters, which xielu has
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseBesideExpertsSpec:
    """A gated MLP in parallel with experts: each has its own norm before, and another before the sum."""

    dense: GatedMlpSpec
    experts: SparseMlpSpec
    after_dense: str
    before_experts: str
    after_experts: str
    router_norm: str  # a tensor: its weight, divided by the root of the hidden size


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortcutSpec:
    """A gated MLP, and experts with the same input, whose output is added after a later layer, see `ends_shortcut`."""

    dense: GatedMlpSpec
    experts: SparseMlpSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class SideBySideSpec:
    """Mamba-2 and attention in parallel: both read the same input and add to the stream."""

    mamba: MambaSpec
    attention: AttentionSpec
    around_mamba: BranchSpec
    around_attention: BranchSpec

    @property
    def kept(self) -> tuple[Kept, ...]:
        return (*self.attention.kept, *self.mamba.kept)


# Further kinds join these unions.
MixerSpec = (
    AttentionSpec
    | MLASpec
    | DeltaSpec
    | ChannelDeltaSpec
    | MambaSpec
    | SelectiveSpec
    | ShortConvolutionSpec
    | SideBySideSpec
)
MlpSpec = GatedMlpSpec | PlainMlpSpec | SparseMlpSpec | DenseBesideExpertsSpec | ShortcutSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchSpec:
    """The connection of one half of a layer to the residual stream. Norms are named by their tensors."""

    before: str = ""  # "": it reads the stream without a norm
    after: str = ""  # norm of its output
    after_eps: float = 0.0  # its epsilon; 0: the model's
    multiplier: float = 1.0  # scales its output
    shares: bool = False  # it reads the input of the preceding half
    scalar: str = ""  # tensor [1] that scales the whole stream, after it
    scale: float = 1.0  # or a number


BEFORE_MIXER = BranchSpec(before="input_layernorm")
BEFORE_MLP = BranchSpec(before="post_attention_layernorm")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer: a mixer of tokens, then an MLP on each alone; or one of them."""

    mixer: MixerSpec | None = None
    mlp: MlpSpec | None = None
    around_mixer: BranchSpec = BEFORE_MIXER
    around_mlp: BranchSpec = BEFORE_MLP
    around_input: BranchSpec | None = None  # if the model has `layer_inputs`
    laurel: LaurelSpec | None = None  # before the mixer, whose input it shares
    ends_shortcut: bool = False  # the output of an earlier layer's experts is added after it

    @property
    def attention(self) -> AttentionSpec | MLASpec | None:
        mixer = self.mixer.attention if isinstance(self.mixer, SideBySideSpec) else self.mixer
        return mixer if isinstance(mixer, AttentionSpec | MLASpec) else None

    @property
    def kept(self) -> tuple[Kept, ...]:
        return self.mixer.kept if self.mixer is not None else ()

    def with_attention(self, **changes: Any) -> LayerSpec:
        """Return the same layer with changed fields of its attention."""
        assert self.attention is not None
        changed = replace(self.attention, **changes)
        if isinstance(self.mixer, SideBySideSpec) and isinstance(changed, AttentionSpec):
            return replace(self, mixer=replace(self.mixer, attention=changed))
        return replace(self, mixer=changed)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSpec:
    """A drafter beside a model: the layers that it keeps in the pool, and what it reads of the model's passes."""

    layers: tuple[LayerSpec, ...]
    aux_layers: tuple[int, ...]  # layers of the model whose input it reads
    reads_output: bool = False  # and the model's normed output, of all rows
    is_model: bool = False  # it reads tokens
    attends: bool = False  # its layers attend to all rows of a pass
    ahead: int = 0  # positions behind a pass that its first drafted token takes
    most: int | None = None  # drafted tokens; None: any number
    in_blocks: bool = False  # one pass guesses all tokens of a draft
    hidden_size: int = 0  # 0: the model's
    reads_head: bool = False  # it computes the model's LM head

    def at_most(self, num_drafts: int) -> int:
        """The tokens of a draft for which so many are asked."""
        return min(num_drafts, self.most or num_drafts)

    @property
    def windows_by_heads(self) -> dict[HeadShape, tuple[int, ...]]:
        """The distinct windows of its layers with each shape of attention heads, in order."""
        return _windows_by_heads(layer.attention for layer in self.layers if layer.attention is not None)


def _windows_by_heads(mixers: Iterable[AttentionSpec | MLASpec]) -> dict[HeadShape, tuple[int, ...]]:
    found: dict[HeadShape, set[int]] = {}
    for mixer in mixers:
        found.setdefault(mixer.heads, set()).add(mixer.window)
    return {heads: tuple(sorted(windows)) for heads, windows in found.items()}


@dataclass(frozen=True, slots=True)
class StageSpec:
    """One of the stages that compute a range of the layers each."""

    number: int
    ranges: tuple[range, ...]  # one for each stage

    @property
    def layers(self) -> range:
        return self.ranges[self.number]

    @property
    def all(self) -> list[StageSpec]:
        return [StageSpec(number, self.ranges) for number in range(len(self.ranges))]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One decoder-only model."""

    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    layers: tuple[LayerSpec, ...]
    norms: NormSpec = RMS_NORMS
    embedding: EmbeddingSpec = PLAIN_EMBEDDING
    head: HeadSpec = PLAIN_HEAD
    altup: AltUpSpec | None = None
    stored: StoredNames = AS_OURS
    dtype: str  # the checkpoint's: "float32", "bfloat16", "float16"
    quantization: Quantization = UNQUANTISED
    draft: DraftSpec | None = None
    stage: StageSpec | None = None  # the layers that this process computes; None: all

    def with_names(self, stored: StoredNames) -> ModelSpec:
        """Return the same model for a checkpoint with other names. Ignored names stay ignored."""
        return replace(self, stored=self.stored.within(stored))

    def within(self, longest: int) -> ModelSpec:
        """Return the same model for sequences of at most `longest` tokens, without chunked attention that none exceeds."""
        layers = [
            layer.with_attention(window=0) if layer.attention and -layer.attention.window >= longest else layer
            for layer in self.layers
        ]
        return replace(self, layers=tuple(layers))

    def format_of(self, *modules: str) -> Format:
        """The storage format of a module's matrix, by our name of it, or by several that it may have."""
        return self.quantization.format_of(name for module in modules for name in self.stored.theirs(module))

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def own_layers(self) -> range:
        """The layers that this process computes and keeps the content of."""
        return range(self.num_layers) if self.stage is None else self.stage.layers

    @property
    def has_embedding(self) -> bool:
        """True if this process computes the first layer."""
        return self.own_layers.start == 0

    @property
    def has_head(self) -> bool:
        """True if this process computes the last layer."""
        return self.own_layers.stop == self.num_layers

    @property
    def own_draft(self) -> DraftSpec | None:
        """The drafter, if this process has it: the first stage's."""
        return self.draft if self.has_embedding else None

    @property
    def windows(self) -> tuple[int, ...]:
        """The window of each layer with attention."""
        return tuple(mixer.window for mixer in self.attentions)

    @property
    def attentions(self) -> tuple[AttentionSpec | MLASpec, ...]:
        """The specs of the layers that have attention."""
        return tuple(layer.attention for layer in self.layers if layer.attention is not None)

    @property
    def _attending(self) -> tuple[AttentionSpec | MLASpec, ...]:
        """The specs of all attention in a pass."""
        draft = self.draft.layers if self.draft is not None and self.draft.attends else ()
        return (*self.attentions, *(layer.attention for layer in draft if layer.attention is not None))

    @property
    def last_mixer(self) -> int:
        """The last layer in which tokens interact: after it only the sampled ones matter."""
        return max(index for index, layer in enumerate(self.layers) if layer.mixer is not None)

    @property
    def has_state(self) -> bool:
        """True if some layers keep a recurrent state instead of each token's KV."""
        return any(not kept.per_token for kept in self.kept)

    @property
    def windows_by_heads(self) -> dict[HeadShape, tuple[int, ...]]:
        """The distinct windows of the layers with each shape of attention heads, in order; a draft model's too."""
        return _windows_by_heads(self._attending)

    @property
    def kept(self) -> dict[Kept, int]:
        """Number of layers that keep each kind of content. Each kind is a part of every block, or of every state.

        What is kept of each token comes first, codes before all else: the first part's dtype is the pool's name elsewhere.
        """
        draft = self.draft.layers if self.draft is not None else ()
        found = Counter(kept for layer in (*self.layers, *draft) for kept in layer.kept)
        return dict(sorted(found.items(), key=lambda item: item[0].rank))

    def kept_within(self, layers: range) -> Counter[Kept]:
        """Number of these layers that keep each kind of content, a drafter's among those of the first stage."""
        draft = self.draft.layers if self.draft is not None and 0 in layers else ()
        return Counter(kept for layer in (*draft, *(self.layers[index] for index in layers)) for kept in layer.kept)

    @property
    def places(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For each layer of this process, the place of its content: the part's index and the layer's index within it."""
        return self._places[len(self._draft_layers) :]

    @property
    def draft_places(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """The same for the layers of its drafter, which come before the model's: so a stage's follow one another."""
        return self._places[: len(self._draft_layers)]

    @property
    def _draft_layers(self) -> tuple[LayerSpec, ...]:
        return self.own_draft.layers if self.own_draft is not None else ()

    @property
    def _places(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        parts, used = list(self.kept), Counter[Kept]()
        places, lent = [], dict[str, tuple[tuple[int, int], ...]]()
        for layer in (*self._draft_layers, *(self.layers[index] for index in self.own_layers)):
            numbers, mixer = list[tuple[int, int]](), layer.mixer
            for kept in layer.kept:  # a layer may keep two of a kind
                numbers.append((parts.index(kept), used[kept]))
                used[kept] += 1
            own = tuple(numbers)
            if isinstance(mixer, AttentionSpec) and mixer.sharing.lends:
                lent[mixer.sharing.lends] = own
            borrows = mixer.sharing.borrows if isinstance(mixer, AttentionSpec) else ""
            places.append(lent[borrows] if borrows else own)
        return tuple(places)

    @property
    def widest_mlp(self) -> int:
        """The largest intermediate size of a layer, plus its experts' output for a token."""
        return max((_width(layer.mlp, self.hidden_size) for layer in self.layers if layer.mlp is not None), default=0)

    def has_plain_attention(self, heads: HeadShape) -> bool:
        """True if attention of this shape is a causal softmax over all positions, in all layers."""
        mixers = [mixer for mixer in self._attending if mixer.heads == heads]
        scores = [mixer.scores for mixer in mixers if isinstance(mixer, AttentionSpec)]
        return not any(mixer.window for mixer in mixers) and not any(each.softcap or each.sinks for each in scores)


def _width(mlp: MlpSpec, hidden_size: int) -> int:
    if isinstance(mlp, DenseBesideExpertsSpec | ShortcutSpec):
        return max(_width(mlp.dense, hidden_size), _width(mlp.experts, hidden_size))
    return mlp.router.rule.chosen * (mlp.size + hidden_size) if isinstance(mlp, SparseMlpSpec) else mlp.size
