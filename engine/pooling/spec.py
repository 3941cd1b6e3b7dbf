"""An encoder as plain values. E hidden size, I intermediate size, D head size."""

from __future__ import annotations

from dataclasses import dataclass

from engine.formats.quantization import UNQUANTISED, Quantization
from engine.spec.ends import NormSpec
from engine.spec.scaling import RopeSpec
from engine.weights.names import AS_OURS, StoredNames


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensSpec:
    """Tables whose rows are added up for each token, by their names, and the norm behind them."""

    words: str
    vocab_size: int
    norm: str  # "": none
    positions: str = ""  # "": none is learnt
    num_positions: int = 0
    first_position: int = 0
    types: str = ""  # a row for each of an input's two texts; "": none
    num_types: int = 0
    multiplier: float = 1.0  # a word's row, times this


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderAttentionSpec:
    """Attention of one layer: its products' names below the layer, and what a token sees."""

    num_heads: int
    head_dim: int
    # Products of queries, keys and values; a single one has all three, in this order.
    inputs: tuple[str, ...]
    output: str
    has_bias: bool = True
    rope: RopeSpec | None = None
    reach: int = 0  # positions on each side; 0: all
    num_kv_heads: int = 0  # 0: as many as query heads
    head_norms: tuple[str, ...] = ()  # norms of each query and key head
    is_causal: bool = False  # no token sees a later one
    has_output_bias: bool = True
    scale: float = 0.0  # a factor of scores; 0: the root of head_dim, inverted
    # A table of biases of scores by distance, [buckets, heads], which is all layers' (MPNet); "": none.
    distances: str = ""

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return (self.num_kv_heads or self.num_heads) * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedForwardSpec:
    """An MLP: act(x up) down, or gated, act(x gate) * (x up) down, where one product may have the rows of both."""

    inputs: tuple[str, ...]  # up; gate and up
    output: str
    intermediate_size: int
    activation: str
    is_gated: bool = False
    has_bias: bool = True
    has_output_bias: bool | None = None  # None: as its inputs
    is_up_first: bool = False  # the rows of up precede those of gate


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """MLPs of which a router chooses some for each token, with their shares in a softmax over all."""

    router: str  # product [experts, E]
    up: str  # [experts * I, E], one expert behind the other
    down: str  # the same, transposed
    bias: str  # [E], added once
    count: int
    chosen: int
    intermediate_size: int
    activation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderLayerSpec:
    """One layer: attention, then an MLP or experts, with a norm before each or behind each."""

    attention: EncoderAttentionSpec
    mlp: FeedForwardSpec | ExpertsSpec
    norms: tuple[str, str]  # attention's, the MLP's; "": none
    after: tuple[str, str] = ("", "")  # norms of both results, before they are added
    is_prenorm: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifierSpec:
    """From a text's vector to a score of each label: a product with an activation, a norm, a last product; "": none.

    With `words` the last product is a row of the table `output`, or the difference of two.
    """

    output: str
    num_labels: int
    dense: str = ""
    pools: str = "cls"  # mode of `modelfiles.pooling`
    activation: str = "tanh"
    norm: str = ""
    has_dense_bias: bool = True
    has_bias: bool = True
    words: tuple[int, ...] = ()  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptersSpec:
    """Products of low rank beside every matrix and table, for each adapter by its number."""

    count: int
    rank: int
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSpec:
    """A whole encoder. Layers have the prefix `under`, with `{}` for their number."""

    hidden_size: int
    max_position_embeddings: int
    tokens: TokensSpec
    layers: tuple[EncoderLayerSpec, ...]
    under: str
    norms: NormSpec
    final_norm: str = ""
    classifier: ClassifierSpec | None = None
    dtype: str = "float32"  # the checkpoint's
    overflows: bool = False  # float16 is too narrow
    adapters: AdaptersSpec | None = None
    stored: StoredNames = AS_OURS
    quantization: Quantization = UNQUANTISED
