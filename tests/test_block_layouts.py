"""Blocks that are anchor-first or in place, bidirectional or causal: which slot drafts what, and what it sees."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.config import DrafterConfig
from dspark_jax.drafters import dspark
from dspark_jax.drafters.backbone import backbone, context_features, context_keys_values
from dspark_jax.drafting.chain import propose_chain
from dspark_jax.parameters import named_leaves
from dspark_jax.sampling import sampling_params
from dspark_jax.targets.decoder import forward_documents, head_weight
from dspark_jax.training.anchors import make_blocks
from dspark_jax.training.losses import LossConfig, block_losses, draft_blocks, slot_weights, total_loss
from tests.models import drafter_config, random_drafter, random_target, target_config
from tests.test_generation import Small
from tests.training.test_losses import rows_batch

LAYOUTS = [(first, causal) for first in (True, False) for causal in (False, True)]
LENGTH, ANCHORS = 20, (3, 9, 15)


def layout(sample_from_anchor: bool, causal_block: bool, **changes) -> DrafterConfig:
    """A drafter without heads of two layers and four slots."""
    changes = {"num_hidden_layers": 2, "block_size": 4} | changes
    return drafter_config(
        target_config(), "dflash", sample_from_anchor=sample_from_anchor, causal_block=causal_block, **changes
    )


def reference_block(params, config: DrafterConfig, features, token: int, anchor: int) -> np.ndarray:
    """h [block_size, d] of every slot of one block, from the definition, in numpy float64."""
    weights = {name: np.asarray(leaf).astype(np.float64) for name, leaf in named_leaves(params).items()}
    size, width = config.block_size, config.head_dim
    group = config.num_attention_heads // config.num_key_value_heads

    def norm(x, name):
        return weights[name] * x / np.sqrt((x**2).mean(-1, keepdims=True) + config.rms_norm_eps)

    def project(x, name):
        return x @ weights[f"{name}.weight"].T

    def rotated(x, positions):
        angles = positions[:, None, None] * config.rope_theta ** (-np.arange(0, width, 2) / width)[None, None]
        first, second = x[..., : width // 2], x[..., width // 2 :]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    slots = anchor + np.arange(size)
    context = norm(project(features[:anchor].astype(np.float64), "fc"), "hidden_norm.weight")
    x = weights["embed_tokens.weight"][[token] + [config.mask_token_id] * (size - 1)]
    for index in range(config.num_hidden_layers):
        layer = f"layers.{index}"
        h = norm(x, f"{layer}.input_layernorm.weight")
        rows, positions = np.concatenate([context, h]), np.concatenate([np.arange(anchor), slots])
        attention = f"{layer}.self_attn"
        q, k, v = (
            project(y, f"{attention}.{name}_proj").reshape(len(y), -1, width)
            for y, name in ((h, "q"), (rows, "k"), (rows, "v"))
        )
        q = rotated(norm(q, f"{attention}.q_norm.weight"), slots)
        k = rotated(norm(k, f"{attention}.k_norm.weight"), positions)
        out = np.zeros_like(q)
        for slot in range(size):
            seen = anchor + (slot + 1 if config.causal_block else size)
            for head in range(config.num_attention_heads):
                scores = k[:seen, head // group] @ q[slot, head] / np.sqrt(width)
                scores = np.exp(scores - scores.max())
                out[slot, head] = scores / scores.sum() @ v[:seen, head // group]
        x = x + project(out.reshape(size, -1), f"{attention}.o_proj")
        h = norm(x, f"{layer}.post_attention_layernorm.weight")
        gate = project(h, f"{layer}.mlp.gate_proj")
        x = x + project(gate / (1 + np.exp(-gate)) * project(h, f"{layer}.mlp.up_proj"), f"{layer}.mlp.down_proj")
    return norm(x, "norm.weight")


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


@pytest.mark.parametrize(("sample_from_anchor", "causal_block"), LAYOUTS)
def test_which_slot_drafts_what(sample_from_anchor, causal_block):
    """Draft k is of the token at anchor+k+1, from slot k or in place from slot k+1, in training and in decoding."""
    config = layout(sample_from_anchor, causal_block)
    target = random_target(target_config())
    drafter = random_drafter(config, target)
    tokens = np.random.default_rng(0).integers(0, 8, (1, LENGTH))
    batch = rows_batch(tokens)
    out = forward_documents(
        target, target_config(), batch.tokens, batch.positions, batch.document_ids, config.target_layer_ids
    )
    features, last = np.asarray(out.features)[0], np.asarray(out.hidden)[0].astype(np.float64)
    every = [reference_block(drafter, config, features, int(tokens[0, anchor]), anchor) for anchor in ANCHORS]
    first = 0 if sample_from_anchor else 1
    expected = np.stack([h[first:] for h in every])

    anchors = jnp.asarray([ANCHORS], jnp.int32)
    blocks = make_blocks(batch, anchors, jnp.ones((1, len(ANCHORS)), bool), config.num_drafts)
    hidden = jax.jit(draft_blocks, static_argnums=1)(drafter, config, out.features, batch, blocks)
    np.testing.assert_allclose(hidden[0], expected, atol=1e-4)
    assert not np.allclose(hidden[0, :, :3], [h[1 - first :][:3] for h in every], atol=1e-2), "not the other layout"

    loss = LossConfig(cross_entropy=0.0, total_variation=0.0, forward_kl=1.0, confidence=0.0, decay=float("inf"))
    sums = block_losses(drafter, config, loss, head_weight(target), out.features, out.hidden, batch, blocks, 8)
    head = np.asarray(head_weight(target)).astype(np.float64)
    cross_entropy, forward_kl, count = 0.0, 0.0, 0
    for h, anchor in zip(every, ANCHORS, strict=True):
        for draft in range(config.num_drafts):
            if anchor + draft + 1 < LENGTH:
                log_q = log_softmax(h[draft + first] @ head.T)
                log_p = log_softmax(last[anchor + draft] @ head.T)
                cross_entropy -= log_q[tokens[0, anchor + draft + 1]]
                forward_kl += (np.exp(log_p) * (log_p - log_q)).sum()
                count += 1
    assert float(sums.cross_entropy) == pytest.approx(cross_entropy, rel=1e-4)
    assert float(sums.weight) == count
    assert float(total_loss(sums, loss, sums.weight, sums.weight)) == pytest.approx(forward_kl / count, rel=1e-4)

    zero = jnp.zeros(1, jnp.int32)
    state = dspark.extend(drafter, config, dspark.init_state(config, 1, 32, jnp.float32), out.features, zero)

    @functools.partial(jax.jit, static_argnums=0)
    def propose(choose, token, position):
        noise = jnp.zeros((1, config.num_drafts), jnp.int32)
        hidden = dspark.block_hidden(drafter, config, state, token, position)
        return propose_chain(drafter, config, hidden, token, noise, choose, jnp.zeros(1, jnp.float32))

    def best(logits, _):
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    for h, anchor in zip(expected, ANCHORS, strict=True):
        proposal = propose(best, batch.tokens[:, anchor], jnp.full(1, anchor, jnp.int32))
        assert proposal.tokens[0].tolist() == [tokens[0, anchor], *(h @ head.T).argmax(-1)]


@pytest.mark.parametrize("causal_block", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_what_a_slot_sees(causal_block, training):
    """Another input of a slot changes that slot and, in a causal block, no slot before it; else it changes all."""
    config = layout(True, causal_block)
    drafter = random_drafter(config, random_target(target_config()))
    rng = np.random.default_rng(0)
    # More anchors than are attended at a time, and documents, where it is training.
    count = 35 if training else 1
    positions = jnp.arange(40, dtype=jnp.int32)[None]
    anchors = jnp.arange(2, 2 + count, dtype=jnp.int32)[None]
    documents = jnp.zeros((1, 40), jnp.int32) if training else None
    features = jnp.asarray(rng.normal(size=(1, 40, 32)), jnp.float32)
    context = context_features(drafter.fc, drafter.hidden_norm, config, features)
    layers = context_keys_values(drafter.layers, config, context, positions)
    block = rng.normal(size=(1, count, 4, 16)).astype(np.float32)

    @jax.jit
    def run(block):
        return backbone(drafter.layers, drafter.norm, config, block, anchors, layers, positions, documents)

    before = np.asarray(run(block))
    for slot in range(4):
        changed = block.copy()
        changed[:, :, slot] += 1
        moved = np.abs(np.asarray(run(changed)) - before).max(axis=-1)
        assert (moved[:, :, slot:] > 1e-4).all()
        assert (moved[:, :, :slot] == 0).all() if causal_block else (moved > 1e-4).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("head", ["dflash", "rnn"])
def test_in_place_output_is_plain_output(head, temperature):
    small = Small(head, block_size=4, sample_from_anchor=False, causal_block=True)
    sampling = sampling_params(4, temperature)
    speculative = small.run(small.config(), sampling=sampling)
    plain = small.run(small.config(drafter=None, plain_width=4), sampling=sampling)
    np.testing.assert_array_equal(speculative.tokens, plain.tokens)
    assert speculative.counts.accepted.shape == (4, 3)
    assert (speculative.counts.accepted.sum(axis=1) > 0).any()


def test_an_infinite_decay_weighs_every_draft_the_same():
    mask = np.ones((1, LENGTH), bool)
    mask[0, 12:] = False
    blocks = make_blocks(
        rows_batch(np.zeros((1, LENGTH)), mask), jnp.asarray([[3, 9]], jnp.int32), jnp.ones((1, 2), bool), 4
    )
    np.testing.assert_array_equal(slot_weights(blocks, float("inf"))[0], [[1, 1, 1, 1], [1, 1, 0, 0]])


def test_a_block_in_place_needs_a_slot_to_draft():
    assert layout(False, False).num_drafts == 3 and layout(True, False).num_drafts == 4
    with pytest.raises(ValueError, match="block_size 1 must be at least 2 when sample_from_anchor is false"):
        layout(False, False, block_size=1)
