"""What a round of decoding costs each chip: the verification of a bucket of tokens, and the drafting before it.

Counted are matrix products, weights and caches; passes over the logits (noise, filters, sampling) are not.
"""

from dspark_jax.config import DrafterConfig, TargetConfig
from dspark_jax.planning.products import (
    Cost,
    Product,
    attention_products,
    cut,
    key_value_products,
    layer_products,
    once,
)

_FLOAT32 = 4


def verify_cost(
    config: TargetConfig, slots: int, width: int, capacity: int, bucket: int, model: int = 1
) -> dict[str, Cost]:
    """One pass over `bucket` packed tokens of `slots` requests of up to `width` nodes.

    Shapes are static: attention reads the whole `capacity` of every slot's cache.
    """
    layers = config.num_hidden_layers
    head = Product(
        rows=bucket, inner=config.hidden_size, columns=cut(config.vocab_size, model), result=_FLOAT32
    )  # fmt: skip
    return {
        "verify layers": once(layer_products(config, bucket, model)) * layers,
        "verify attention": once(attention_products(config, slots, width, capacity, model)) * layers,
        "verify head": once([head]),
    }


def extend_cost(config: DrafterConfig, slots: int, tokens: int, model: int = 1) -> dict[str, Cost]:
    """Adding `tokens` of each request to the drafter's context."""
    d, rows = config.hidden_size, slots * tokens
    features = Product(rows=rows, inner=len(config.target_layer_ids) * d, columns=d)
    keys_values = once(key_value_products(config, rows, model)) * config.num_hidden_layers
    return {"draft context": once([features]) + keys_values}


def draft_cost(config: DrafterConfig, slots: int, capacity: int, model: int = 1) -> dict[str, Cost]:
    """A chain for each request: the parallel stage, one product for all base logits, and a step a draft of the
    sequential head, which reads its weights each time."""
    layers, block = config.num_hidden_layers, config.block_size
    drafts, vocabulary = config.num_drafts, cut(config.draft_vocab_size, model)
    attention = attention_products(config, slots, block, capacity + block, model, scores=0)
    base = Product(rows=slots * drafts, inner=config.hidden_size, columns=vocabulary, result=_FLOAT32)
    costs = {
        "draft layers": once(layer_products(config, slots * block, model)) * layers,
        "draft attention": once(attention) * layers,
        "draft head": once([base]),
    }
    if config.markov_rank:
        step = Product(
            rows=slots, inner=config.markov_rank, columns=vocabulary, count=drafts, result=_FLOAT32
        )  # fmt: skip
        costs["draft sequential"] = once([step])
    return costs
