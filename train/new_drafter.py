"""The drafter that a run begins with: a fresh one in the target's image, or a published one."""

import dataclasses

import jax
import numpy as np
from jaxtyping import Array, Int, Key

from dspark_jax.config import (
    DecoderConfig,
    DrafterConfig,
    DraftModelConfig,
    Eagle3Config,
    MarkovHeadType,
    MTPConfig,
    TargetConfig,
    default_taps,
)
from dspark_jax.drafters.kinds import DrafterParams
from dspark_jax.io import InputError, Target, load_drafter
from dspark_jax.io.drafter_config import check_against_target
from dspark_jax.layers.linear import Linear
from dspark_jax.targets.decoder import head_weight
from dspark_jax.training.draft_vocabulary import most_frequent_ids
from dspark_jax.training.step import init_params, trainable
from dspark_jax.training.warm_start import start_from_target
from train.data import Documents
from train.fit_config import DrafterKind, FitConfig

_SHAPE = ("kind", "num_layers", "init_layers", "block_size", "sample_from_anchor", "causal_block", "markov_rank",
          "markov_head_type", "confidence_head", "target_layer_ids", "mask_token_id", "draft_vocab_size",
          "sliding_window")  # fmt: skip
# What only DSpark's kind has, and what multi-token prediction lacks besides.
_BLOCKS_ONLY = ("num_layers", "init_layers", "sample_from_anchor", "causal_block", "markov_rank", "markov_head_type",
                "confidence_head", "mask_token_id", "sliding_window")  # fmt: skip
_NOT_MTP = ("block_size", "target_layer_ids")


def initial_drafter(
    config: FitConfig, target: Target, documents: Documents, key: Key[Array, ""]
) -> tuple[DraftModelConfig, DrafterParams]:
    """Config and trainable parameters before the first step.

    Raises:
      InputError: options that make no drafter, or that contradict `--init`.
    """
    if config.init is not None:
        for name in _SHAPE:
            if getattr(config, name) is not None:
                raise InputError(f"--{name.replace('_', '-')}: fixed by --init {config.init}; leave it out")
        drafter = load_drafter(config.init, target=target, allow_config_keys=config.allow_config_key)
        return dataclasses.replace(drafter.config, num_anchors=config.num_anchors), trainable(drafter.params)
    vocab_size = target.config.vocab_size
    try:
        if config.kind in (None, DrafterKind.DSPARK):
            mask = config.mask_token_id
            if mask is None:
                mask = default_mask_token_id(target, documents.counts(vocab_size, trained_only=False))
            drafter_config = fresh_config(config, target.config, mask)
            _check_init_layers(config, drafter_config)
        else:
            drafter_config = fresh_pair_config(config, target.config)
        check_against_target(drafter_config, target.config)
        ids: Int[np.ndarray, "V_d"] | None = None
        if drafter_config.reduced_vocabulary:
            ids = most_frequent_ids(documents.counts(vocab_size, trained_only=True), drafter_config.draft_vocab_size)
    except ValueError as error:
        raise InputError(f"drafter options: {error}") from error
    params = init_params(drafter_config, key, None if ids is None else jax.numpy.asarray(ids))
    if config.init_layers is not None:
        params = start_from_target(params, target.params, config.init_layers)
    if isinstance(drafter_config, Eagle3Config):
        # Its own head learns faster from the target's than from noise.
        head = head_weight(target.params)
        # An array of its own: a train step is given the target's too, and consumes the drafter's.
        head = jax.numpy.array(head if ids is None else head[ids], jax.numpy.float32, copy=True)
        params = params.replace(lm_head=Linear(weight=head))
    return drafter_config, params


def _check_init_layers(config: FitConfig, drafter: DrafterConfig) -> None:
    if config.init_layers is None:
        return
    if len(config.init_layers) != drafter.num_hidden_layers:
        raise InputError(
            f"--init-layers: names {len(config.init_layers)} layers for a drafter of {drafter.num_hidden_layers}; "
            "name one for each"
        )
    for layer in config.init_layers:
        if not 0 <= layer < drafter.num_target_layers:
            raise InputError(f"--init-layers {layer}: the target's layers are 0..{drafter.num_target_layers - 1}")


def fresh_config(config: FitConfig, target: TargetConfig, mask_token_id: int) -> DrafterConfig:
    """A drafter whose layers are like the target's. ValueError for options that make none."""

    def choice(value, default):
        return default if value is None else value

    like_target = {field.name: getattr(target, field.name) for field in dataclasses.fields(DecoderConfig)}
    layers = choice(config.num_layers, 5)
    rank = choice(config.markov_rank, 256)
    like_target |= {"num_hidden_layers": layers, "sliding_windows": (config.sliding_window,) * layers}
    return DrafterConfig(
        **like_target,
        model_type=target.model_type,
        block_size=choice(config.block_size, 7),
        sample_from_anchor=choice(config.sample_from_anchor, True),
        causal_block=choice(config.causal_block, False),
        mask_token_id=mask_token_id,
        target_layer_ids=choice(config.target_layer_ids, default_taps(target.num_hidden_layers)),
        num_target_layers=target.num_hidden_layers,
        markov_rank=rank,
        markov_head_type=choice(config.markov_head_type, MarkovHeadType.VANILLA),
        enable_confidence_head=choice(config.confidence_head, True),
        confidence_head_with_markov=rank > 0,
        num_anchors=config.num_anchors,
        draft_vocab_size=choice(config.draft_vocab_size, 0),
    )


def fresh_pair_config(config: FitConfig, target: TargetConfig) -> Eagle3Config | MTPConfig:
    """An Eagle3 drafter or a multi-token-prediction module, whose layer is like the target's. Eagle3's layer is of the
    Llama family whatever the target's. ValueError for options that make none, InputError for those of other kinds.
    """
    kind = config.kind
    for name in (*_BLOCKS_ONLY, *(_NOT_MTP if kind is DrafterKind.MTP else ())):
        if getattr(config, name) is not None:
            raise InputError(f"--{name.replace('_', '-')}: --kind {kind.value} has no such option; leave it out")
    shared = {field.name: getattr(target, field.name) for field in dataclasses.fields(DecoderConfig)} | {
        "model_type": target.model_type,
        "num_hidden_layers": 1,
        "sliding_windows": (),
        "num_target_layers": target.num_hidden_layers,
        "num_anchors": config.num_anchors,
        "draft_vocab_size": config.draft_vocab_size or 0,
    }
    if kind is DrafterKind.MTP:
        return MTPConfig(**shared)
    taps = config.target_layer_ids
    shared |= {"model_type": "llama", "qk_norm": False, "attention_bias": False, "mlp_bias": False}
    return Eagle3Config(
        **shared,
        block_size=7 if config.block_size is None else config.block_size,
        target_layer_ids=default_taps(target.num_hidden_layers) if taps is None else taps,
    )


def default_mask_token_id(target: Target, counts: Int[np.ndarray, "V"]) -> int:
    """The tokenizer's mask token, else a padding row of the vocabulary, else a special token absent from the data.

    Without a tokenizer it is the lowest id above all ids of the data and the EOS ids, which are likely to be special.

    Raises:
      InputError: there is no such id.
    """
    tokenizer, vocab_size = target.tokenizer, target.config.vocab_size
    if tokenizer is None:
        used = [*np.flatnonzero(counts), *target.eos_token_ids]
        candidates = [int(max(used)) + 1]
    else:
        named = tokenizer.token_id(tokenizer.special_tokens.get("mask_token", ""))
        special = {i for i, token in tokenizer.backend.get_added_tokens_decoder().items() if token.special}
        absent = [i for i in sorted(special - {*target.eos_token_ids}) if i < vocab_size and not counts[i]]
        candidates = [*([] if named is None else [named]), target.config.num_valid_tokens, *absent]
    for candidate in candidates:
        if candidate < vocab_size:
            return candidate
    raise InputError("--mask-token-id: no special id is absent from the data; name an id that the data never uses")
