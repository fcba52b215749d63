"""What a train step of a DSpark drafter costs each chip, part by part, from its shapes.

Counted are matrix products and the state of the optimiser. What is done element by element (norms, softmaxes, masks) is
thought of as part of the products beside it, so bytes are a floor. Documents are as long as their rows, and anchors
spread evenly over them: an anchor sees half of its row.
"""

from dspark_jax.config import DrafterConfig, TargetConfig
from dspark_jax.drafters.markov import declare_markov
from dspark_jax.parameters import count
from dspark_jax.planning.products import (
    Cost,
    Product,
    attention_products,
    cut,
    key_value_products,
    layer_products,
    once,
    times,
)
from dspark_jax.training.losses import LossConfig

# Queries that one program of the attention kernel reads its keys for.
_TILE = 256
# Of a pair of forward products, scores and values, the kernels' backward passes do seven more: both compute the scores
# and their gradient again, then one makes the gradient of the queries, the other those of keys and values.
_KERNEL = (2 + 7) / 2
_FLOAT32 = 4


def target_cost(config: TargetConfig, rows: int, length: int, model: int = 1) -> dict[str, Cost]:
    """The frozen target's pass over `rows` of `length` tokens. Attention is dense: all keys, of which half count."""
    layers = config.num_hidden_layers
    seen = (length + 1) / (2 * length)
    attention = attention_products(config, rows, length, length, model)
    return {
        "target layers": once(layer_products(config, rows * length, model)) * layers,
        "target attention": times(attention, useful=seen, executed=1) * layers,
    }


def drafter_cost(config: DrafterConfig, rows: int, length: int, model: int = 1) -> dict[str, Cost]:
    """The drafter over its blocks in `rows` of `length` tokens, forward and backward, without the losses.

    Its weights are float32 masters. The features are the frozen target's, so their projection's input has no gradient.
    """
    d, layers = config.hidden_size, config.num_hidden_layers
    anchors = min(config.num_anchors, length)
    slots = anchors * config.block_size
    features = [
        Product(rows=rows * length, inner=len(config.target_layer_ids) * d, columns=d, right=_FLOAT32),
    ]
    tile = min(_TILE, slots)
    context = attention_products(config, rows * slots / tile, tile, length / 2, model, scores=0)
    own = attention_products(config, rows * anchors, config.block_size, config.block_size, model, scores=_FLOAT32)
    keys_values = key_value_products(config, rows * length, model, _FLOAT32)
    return {
        "features": times(features, useful=2, executed=2),
        "context keys and values": times(keys_values, useful=3, executed=3) * layers,
        "draft layers": times(layer_products(config, rows * slots, model, _FLOAT32), useful=3, executed=3) * layers,
        "draft attention": (
            times(context, useful=3, executed=_KERNEL) + times(own, useful=3, executed=3.5)
        ) * layers,
    }  # fmt: skip


def loss_cost(config: DrafterConfig, loss: LossConfig, rows: int, length: int, model: int = 1) -> dict[str, Cost]:
    """Heads and losses of the drafts of `rows`. Logits are float32, exist for `chunk` drafts at a time, and are
    computed again backward; the weights are read for each chunk.

    Frozen heads have no gradient of their weights.
    """
    drafts = rows * min(config.num_anchors, length) * config.num_drafts
    chunk = min(loss.chunk, drafts)
    chunks, vocabulary = -(-drafts // chunk), cut(config.draft_vocab_size, model)
    shape = {"rows": chunk, "columns": vocabulary, "count": chunks, "result": _FLOAT32}
    head = [Product(inner=config.hidden_size, **shape)]
    costs = {
        "teacher head": times(head, useful=1, executed=2),
        "draft head": times(head, useful=2, executed=3),
    }
    if config.markov_rank:
        bias = [Product(inner=config.markov_rank, right=_FLOAT32, **shape)]
        # Of its own the head has the two vocabulary tables, and what makes a latent of their rows.
        small = count(declare_markov(config)) - (config.vocab_size + config.draft_vocab_size) * config.markov_rank
        latents = [Product(rows=drafts, inner=1, columns=small, left=0, result=0)]
        costs["Markov head"] = times(bias, useful=3, executed=4) + times(latents, useful=3, executed=3)
    return costs


def optimizer_cost(parameters: float, parts: int) -> dict[str, Cost]:
    """AdamW over `parameters` on a chip, all float32: weights, two moments and the sum of the gradients of `parts`."""
    accumulate, update = 3, 7
    return {"optimiser": Cost(bytes=_FLOAT32 * parameters * (accumulate * parts + update))}


def train_step_cost(
    target: TargetConfig,
    drafter: DrafterConfig,
    loss: LossConfig,
    *,
    rows: int,
    parts: int,
    length: int,
    parameters: float,
    model: int = 1,
) -> dict[str, Cost]:
    """Of one chip in one step: `parts` passes over `rows` documents each, then an update.

    `model`: chips that share the same rows. `parameters`: trained ones that lie on a chip.
    """
    costs = target_cost(target, rows, length, model)
    costs |= drafter_cost(drafter, rows, length, model)
    costs |= loss_cost(drafter, loss, rows, length, model)
    return {name: cost * parts for name, cost in costs.items()} | optimizer_cost(parameters, parts)
