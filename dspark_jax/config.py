"""Static, hashable descriptions of models. Field names are those of Hugging Face's `config.json`."""

import dataclasses
import enum


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Frequency scaling of the Llama-3 kind: long wavelengths are stretched by `factor`, short ones are kept."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Shape of a stack of pre-norm decoder layers with grouped-query attention and a gated SiLU MLP.

    `sliding_windows` has one entry for each layer: the window's width in positions (a query at position p sees
    keys at positions > p - width), or None for full attention.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    max_position_embeddings: int = 4096
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    initializer_range: float = 0.02
    sliding_windows: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        if not self.sliding_windows:
            object.__setattr__(self, "sliding_windows", (None,) * self.num_hidden_layers)
        if len(self.sliding_windows) != self.num_hidden_layers:
            raise ValueError(
                f"sliding_windows has {len(self.sliding_windows)} entries for {self.num_hidden_layers} layers"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetConfig(DecoderConfig):
    """A target language model.

    `num_valid_tokens`: ids at or above it are padding rows of the vocabulary and are never sampled.
    `stacked_layers`: layers are one tree with a leading axis, run by `lax.scan` (compiles fast, for pods), or a
    tuple of trees, run by a Python loop (fast decoding on CPU).
    """

    model_type: str
    tie_word_embeddings: bool = False
    num_valid_tokens: int = 0
    stacked_layers: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.num_valid_tokens:
            object.__setattr__(self, "num_valid_tokens", self.vocab_size)
        if not 0 < self.num_valid_tokens <= self.vocab_size:
            raise ValueError(f"num_valid_tokens {self.num_valid_tokens} is outside 1..{self.vocab_size}")


class MarkovHeadType(enum.Enum):
    """How the sequential head turns the previous token into a logit bias."""

    VANILLA = "vanilla"
    GATED = "gated"
    RNN = "rnn"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftModelConfig(DecoderConfig):
    """What the configs of all drafters have in common; a drafter's kind is the class of its config.

    `block_size`: positions of a round's drafting. `num_target_layers`: of the target that it was made for.
    `target_layer_ids`: tapped target layers, ascending; i is the output of decoder layer i, -1 the embedding.
    `draft_vocab_size`: rows of the drafter's head; smaller than `vocab_size` for a reduced draft vocabulary.
    `num_anchors`: positions of a document, at most, from which drafting is trained at a time.
    """

    model_type: str
    block_size: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...] = ()
    draft_vocab_size: int = 0
    num_anchors: int = 512

    # A kind that has heads declares them as fields.
    markov_rank = 0
    enable_confidence_head = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.draft_vocab_size:
            object.__setattr__(self, "draft_vocab_size", self.vocab_size)
        if self.block_size < 1:
            raise ValueError(f"block_size {self.block_size} must be at least 1")
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise ValueError(f"draft_vocab_size {self.draft_vocab_size} is outside 1..{self.vocab_size}")

    @property
    def num_drafts(self) -> int:
        """γ: tokens that a round drafts. Draft k predicts position anchor+k+1."""
        return self.block_size

    @property
    def reduced_vocabulary(self) -> bool:
        return self.draft_vocab_size < self.vocab_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterConfig(DraftModelConfig):
    """A DSpark drafter; DFlash is one with `markov_rank` 0 and no confidence head, JetSpec a causal in-place DFlash.

    `block_size`: slots [anchor, MASK, …] of one backbone pass. `sample_from_anchor`: slot k predicts the token at
    position anchor+k+1 (anchor-first); if false, that at anchor+k (in place), and slot 0 predicts nothing.
    `causal_block`: a slot sees only its own and earlier slots of its block.
    """

    mask_token_id: int
    markov_rank: int = 256
    markov_head_type: MarkovHeadType = MarkovHeadType.VANILLA
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    sample_from_anchor: bool = True
    causal_block: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_drafts < 1:
            raise ValueError(f"block_size {self.block_size} must be at least 2 when sample_from_anchor is false")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(f"mask_token_id {self.mask_token_id} is outside the vocabulary of {self.vocab_size}")
        check_taps(self.target_layer_ids, self.num_target_layers)
        if self.enable_confidence_head and self.confidence_head_with_markov and not self.markov_rank:
            raise ValueError("confidence_head_with_markov needs a Markov head: markov_rank is 0")

    @property
    def num_drafts(self) -> int:
        """γ: tokens that a block drafts. Draft k predicts position anchor+k+1 in either layout."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3Config(DraftModelConfig):
    """An Eagle3 drafter (arXiv 2503.01840): one layer, run once a draft on its own last output.

    `block_size`: the drafts of a round, whose number is free in decoding; training unrolls as many steps.
    """

    block_size: int = 7
    num_hidden_layers: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_taps(self.target_layer_ids, self.num_target_layers)
        _check_one_layer(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MTPConfig(DraftModelConfig):
    """One multi-token-prediction module (DeepSeek-V3, arXiv 2412.19437, section 2.2): one layer, one draft a round.

    Its feature is the target's last hidden state, after the final norm; it taps no layer.
    """

    block_size: int = 1
    num_hidden_layers: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_size != 1:
            raise ValueError(f"block_size {self.block_size}: one multi-token-prediction module drafts one token")
        if self.target_layer_ids:
            raise ValueError("target_layer_ids: multi-token prediction reads the last hidden state, no tapped layer")
        _check_one_layer(self)


def _check_one_layer(config: DecoderConfig) -> None:
    if config.num_hidden_layers != 1:
        raise ValueError(f"num_hidden_layers {config.num_hidden_layers}: this kind of drafter has one layer")
    if config.sliding_windows != (None,):
        raise ValueError("sliding_window: this kind of drafter attends to everything before")


# No paper has used more nodes; what grows with a tree's square stays affordable.
_LARGEST_TREE = 1024


class TreeKind(enum.Enum):
    """How a tree of candidates grows.

    PCTREE: every parent on the frontier has children of its own, by the Markov head (PCTree, arXiv 2608.02123).
    JETSPEC: best-first over candidates of each depth that all parents share (JetSpec, arXiv 2606.18394).
    DDTREE: the most probable prefixes of such shared candidates (DDTree, arXiv 2604.12989).
    """

    PCTREE = "pctree"
    JETSPEC = "jetspec"
    DDTREE = "ddtree"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeSpec:
    """The shape of a tree of drafts.

    `k`: children of an expanded parent (4 for PCTree, 7 for JetSpec; DDTree has no such limit). `width`: parents that
    PCTree expands at each depth, k by default. `budget`: nodes, the root included. `spine`: whether PCTree keeps the
    greedy chain, as far as it is confident, whenever the budget has room for a whole one; then a tree never accepts
    less than the chain. None stands for the default; what a kind does not have must be None.
    """

    kind: TreeKind = TreeKind.PCTREE
    k: int | None = None
    width: int | None = None
    budget: int = 32
    spine: bool | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", TreeKind(self.kind))
        defaults: dict[str, int | bool] = {
            TreeKind.PCTREE: {"k": 4, "width": self.k or 4, "spine": True},
            TreeKind.JETSPEC: {"k": 7},
            TreeKind.DDTREE: {},
        }[self.kind]
        for field in ("k", "width", "spine"):
            if getattr(self, field) is None:
                object.__setattr__(self, field, defaults.get(field))
            elif field not in defaults:
                raise ValueError(f"tree {field}: a {self.kind.value} tree has none; leave it out")
        for field, least in (("k", 1), ("width", 1), ("budget", 2)):
            value = getattr(self, field)
            if value is not None and not least <= value <= _LARGEST_TREE:
                raise ValueError(f"tree {field} {value} must be in {least}..{_LARGEST_TREE}")


def check_taps(target_layer_ids: tuple[int, ...], num_target_layers: int) -> None:
    """Raises ValueError unless the taps are ascending ids in -1..N-2 (the last layer's output is ambiguous)."""
    if not target_layer_ids:
        raise ValueError("target_layer_ids is empty")
    if list(target_layer_ids) != sorted(set(target_layer_ids)):
        raise ValueError(f"target_layer_ids {list(target_layer_ids)} must be ascending and distinct")
    if target_layer_ids[0] < -1 or target_layer_ids[-1] > num_target_layers - 2:
        raise ValueError(
            f"target_layer_ids {list(target_layer_ids)} must lie in -1..{num_target_layers - 2} for a target of "
            f"{num_target_layers} layers: the last layer's output is not a tap"
        )


def default_taps(num_target_layers: int, count: int = 5) -> tuple[int, ...]:
    """Evenly spaced tapped layers from 1 to N-3; fewer than `count` for a shallow target."""
    first, last = min(1, num_target_layers - 2), max(num_target_layers - 3, 0)
    spread = [first + (last - first) * i / max(count - 1, 1) for i in range(count)]
    return tuple(sorted({round(layer) for layer in spread}))
