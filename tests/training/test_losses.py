"""The training forward, losses and gradients: goldens, the chunked vocabulary against numpy, leaks, memory."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.drafters import dspark, markov
from dspark_jax.drafters.confidence import confidence_logits
from dspark_jax.drafters.markov import MarkovHead
from dspark_jax.layers.kv_cache import init_cache
from dspark_jax.layers.linear import Embedding, Linear, embed, matmul
from dspark_jax.parameters import named_leaves
from dspark_jax.targets.decoder import forward_cached, forward_documents, head_weight
from dspark_jax.training import losses
from dspark_jax.training.anchors import Batch, make_blocks
from dspark_jax.training.losses import (
    LossConfig,
    block_losses,
    draft_blocks,
    draft_rows,
    summarize_teacher,
    total_loss,
    vocabulary_terms,
)
from dspark_jax.training.step import trainable, with_frozen
from tests.models import (
    GOLDEN_DRAFTERS,
    GOLDENS,
    drafter_config,
    golden_drafter,
    golden_target,
    random_drafter,
    random_target,
    target_config,
)


def rows_batch(tokens, loss_mask=None) -> Batch:
    """One document a row."""
    tokens = jnp.asarray(tokens, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    mask = jnp.ones(tokens.shape, bool) if loss_mask is None else jnp.asarray(loss_mask)
    document_ids = jnp.broadcast_to(jnp.arange(len(tokens), dtype=jnp.int32)[:, None], tokens.shape)
    return Batch(tokens, mask, document_ids, positions)


@pytest.mark.parametrize("name", GOLDEN_DRAFTERS)
def test_goldens(name):
    """Draft and confidence logits, masks, loss terms and gradient norms are the reference's."""
    golden = np.load(GOLDENS / f"{name}_train.npz")
    target, drafter = golden_target(), golden_drafter(name)
    config, gamma = drafter.config, drafter.config.block_size
    batch = rows_batch(golden["input_ids"], golden["loss_mask"] > 0)
    anchors = jnp.asarray(golden["anchor_positions"], jnp.int32)
    blocks = make_blocks(batch, anchors, jnp.asarray(golden["block_keep_mask"]), gamma)
    np.testing.assert_array_equal(blocks.slots, golden["eval_mask"])
    np.testing.assert_array_equal(blocks.targets, golden["target_ids"])

    features = jnp.asarray(golden["target_features"])
    hidden = draft_blocks(drafter.params, config, features, batch, blocks)
    logits = dspark.base_logits(drafter.params, hidden)
    head = drafter.params.markov_head
    if head is not None:
        previous = embed(head.markov_w1, blocks.previous)
        logits += matmul(markov.latents(head, config, previous, hidden), head.markov_w2.weight)
        confidence = confidence_logits(drafter.params.confidence_head, config, previous, hidden)
        np.testing.assert_allclose(confidence, golden["confidence_logits"], atol=1e-4)
    np.testing.assert_allclose(logits, golden["draft_logits"], atol=1e-4)

    only_ce = LossConfig(cross_entropy=1.0, total_variation=0.0, confidence=0.0)
    loss = only_ce if name == "dflash" else LossConfig()

    def objective(weights):
        sums = block_losses(
            with_frozen(weights, target.params),
            config,
            loss,
            head_weight(target.params),
            features,
            jnp.asarray(golden["target_last_hidden"]),
            batch,
            blocks,
            target.config.num_valid_tokens,
        )
        return total_loss(sums, loss, sums.weight, sums.cross_entropy_weight), sums

    (value, sums), gradient = jax.value_and_grad(objective, has_aux=True)(trainable(drafter.params))
    assert float(value) == pytest.approx(float(golden["loss"]), abs=1e-4)
    assert float(sums.weight) == pytest.approx(float(golden["ce_loss_den"]), rel=1e-5)
    assert float(sums.cross_entropy) == pytest.approx(float(golden["ce_loss_num"]), rel=1e-5)
    if name != "dflash":
        assert float(sums.total_variation) == pytest.approx(float(golden["l1_loss_num"]), rel=1e-5)
        assert float(sums.confidence) == pytest.approx(float(golden["confidence_loss_num"]), rel=1e-5)
    norms = {path: float(jnp.linalg.norm(leaf.ravel())) for path, leaf in named_leaves(gradient).items()}
    assert norms == pytest.approx(json.loads((GOLDENS / f"{name}_grad_norms.json").read_text()), rel=1e-3)


def reference_terms(logits, teacher, rows, ids, num_valid_tokens):
    """Cross-entropy, L1 distance, forward KL, soft cross-entropy and agreement from whole logits, and ∂KL/∂logits, in
    numpy float64.
    """

    def softmax(x):
        e = np.exp(x - x.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)

    teacher = np.where(np.arange(teacher.shape[1])[None] < num_valid_tokens, teacher.astype(np.float64), -np.inf)
    p, q = softmax(teacher), softmax(logits.astype(np.float64))
    whole = np.zeros_like(p)
    whole[:, ids] = q
    distance = np.abs(whole - p).sum(-1)
    truth = np.where(rows >= 0, -np.log(q[np.arange(len(q)), np.maximum(rows, 0)]), 0)
    present = p[:, ids]
    log_ratio = np.log(np.where(present > 0, present, 1)) - np.log(q)
    forward_kl = np.where(present > 0, present * log_ratio, 0).sum(-1)
    law = present / present.sum(-1, keepdims=True)
    soft = np.where(np.isin(p.argmax(-1), ids), -(law * np.log(q)).sum(-1), 0)
    slope = present.sum(-1, keepdims=True) * q - present
    return (truth, distance, forward_kl, soft, q.argmax(-1) == rows), slope


@pytest.mark.parametrize(("draft_vocab_size", "num_valid_tokens"), [(11, 11), (11, 9), (6, 9)])
def test_chunked_terms_equal_whole_ones(draft_vocab_size, num_valid_tokens):
    """Any chunk gives the reference's terms and the gradients of the unchunked ones; absent mass counts."""
    rng = np.random.default_rng(0)
    config = drafter_config(target_config(11), draft_vocab_size=draft_vocab_size)
    target = random_target(target_config(11))
    drafter = random_drafter(config, target)
    hidden, teacher = (jnp.asarray(rng.normal(size=(10, 16)), jnp.float32) for _ in range(2))
    latents = jnp.asarray(rng.normal(size=(10, 4)), jnp.float32)
    rows = draft_rows(drafter, config, jnp.asarray(rng.integers(0, 11, 10), jnp.int32))
    ids = np.arange(11) if drafter.draft_token_ids is None else np.asarray(drafter.draft_token_ids)
    assert (draft_vocab_size == 11) == bool((rows >= 0).all())

    def run(chunk, w2, hidden=hidden):
        params = drafter.replace(markov_head=drafter.markov_head.replace(markov_w2=Linear(weight=w2)))
        summary = None
        if config.reduced_vocabulary:
            wanted = jnp.ones((1, 10), bool)
            summary = summarize_teacher(head_weight(target), teacher[None], wanted, num_valid_tokens)
            summary = jax.tree.map(lambda x: x[0], summary)
        inputs = (params, head_weight(target), hidden, latents, teacher, rows)
        return vocabulary_terms(*inputs, num_valid_tokens, chunk, summary)

    w2 = drafter.markov_head.markov_w2.weight
    logits = hidden @ drafter.lm_head.weight.T + latents @ w2.T
    teacher_logits = np.asarray(teacher @ head_weight(target).T)
    expected, slope = reference_terms(np.asarray(logits), teacher_logits, np.asarray(rows), ids, num_valid_tokens)
    gradients = []
    for chunk in (3, 10, 64):
        for mine, theirs in zip(run(chunk, w2), expected, strict=True):
            np.testing.assert_allclose(mine, theirs, atol=2e-5)
        gradients.append(jax.grad(lambda w, chunk=chunk: sum(x.sum() for x in run(chunk, w)))(w2))
    np.testing.assert_allclose(gradients[0], gradients[1], atol=1e-5)
    np.testing.assert_allclose(gradients[0], gradients[2], atol=1e-5)
    distilled = jax.grad(lambda hidden: run(3, w2, hidden)[2].sum())(hidden)
    np.testing.assert_allclose(distilled, slope @ np.asarray(drafter.lm_head.weight), atol=1e-5)


def test_padded_vocabulary_rows_have_no_target_mass():
    config = drafter_config(target_config(11))
    target = random_target(target_config(11))
    hidden = jnp.ones((2, 16))
    terms = [
        vocabulary_terms(
            random_drafter(config, target), head_weight(target), hidden, None, hidden, jnp.zeros(2, jnp.int32), valid, 2
        )[1]
        for valid in (11, 9)
    ]
    assert not np.allclose(terms[0], terms[1])


def shape_only(vocabulary, width, rank, count, chunk):
    """Memory of the loss and its gradients for abstract inputs, in bytes."""

    def loss(w2, hidden, latents, head, teacher, rows):
        params = dspark.DrafterParams(
            embed_tokens=None,
            fc=None,
            hidden_norm=None,
            layers=(),
            norm=None,
            lm_head=Linear(weight=head),
            markov_head=MarkovHead(markov_w1=Embedding(weight=w2), markov_w2=Linear(weight=w2)),
        )
        terms = vocabulary_terms(params, head, hidden, latents, teacher, rows, vocabulary, chunk)
        return terms[0].sum() + terms[1].sum() + terms[2].sum()

    def array(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype)

    compiled = (
        jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
        .lower(
            array(vocabulary, rank),
            array(count, width),
            array(count, rank),
            array(vocabulary, width),
            array(count, width),
            array(count, dtype=jnp.int32),
        )
        .compile()
    )
    return compiled.memory_analysis().temp_size_in_bytes


def test_vocabulary_rows_are_never_all_there():
    """Qwen3's vocabulary, 512 anchors of 7 slots: under 1.5 GB of temporaries, over 8 GB without chunks."""
    shape = (151_936, 1024, 256, 512 * 7)
    assert shape_only(*shape, LossConfig().chunk) < 1.5e9
    assert shape_only(*shape, 512 * 7) > 8e9


def test_nothing_at_or_after_an_anchor_reaches_its_block():
    config = drafter_config(target_config(), num_hidden_layers=2)
    drafter = random_drafter(config, random_target(target_config()))
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 8, (2, 20))
    features = rng.normal(size=(2, 20, 32)).astype(np.float32)
    anchors = jnp.asarray([[3, 9, 15], [1, 8, 19]], jnp.int32)

    def run(tokens, features):
        batch = rows_batch(tokens)
        blocks = make_blocks(batch, anchors, jnp.ones((2, 3), bool), 3)
        return np.asarray(draft_blocks(drafter, config, jnp.asarray(features), batch, blocks))

    before = run(tokens, features)
    for row in range(2):
        for index, anchor in enumerate(np.asarray(anchors)[row]):
            other, changed = tokens.copy(), features.copy()
            other[row, anchor + 1 :] = (other[row, anchor + 1 :] + 1) % 8
            changed[row, anchor:] += 1
            np.testing.assert_array_equal(run(other, changed)[row, index], before[row, index])
            seen = features.copy()
            seen[row, anchor - 1] += 1
            assert not np.allclose(run(tokens, seen)[row, index], before[row, index])


def test_a_block_sees_its_own_document_only():
    config = drafter_config(target_config(), num_hidden_layers=2)
    target = random_target(target_config())
    drafter = random_drafter(config, target)
    rng = np.random.default_rng(1)
    first, second = rng.integers(0, 8, 7), rng.integers(0, 8, 9)
    packed = Batch(
        tokens=jnp.asarray([[*first, *second]], jnp.int32),
        loss_mask=jnp.ones((1, 16), bool),
        document_ids=jnp.asarray([[0] * 7 + [1] * 9], jnp.int32),
        positions=jnp.asarray([[*range(7), *range(9)]], jnp.int32),
    )

    def run(batch, anchors):
        out = forward_documents(
            target, target_config(), batch.tokens, batch.positions, batch.document_ids, config.target_layer_ids
        )
        blocks = make_blocks(batch, jnp.asarray(anchors, jnp.int32), jnp.ones((1, 2), bool), 3)
        return draft_blocks(drafter, config, out.features, batch, blocks), blocks

    together, blocks = run(packed, [[5, 11]])
    alone, own = run(rows_batch([second]), [[0, 4]])
    np.testing.assert_allclose(together[0, 1], alone[0, 1], atol=1e-4)
    np.testing.assert_array_equal(blocks.slots[0, 1], own.slots[0, 1])
    assert blocks.slots[0, 0].tolist() == [True, False, False], "labels end with the document"


@pytest.mark.parametrize("window", [None, 40])
def test_trainer_and_decoder_see_the_same(window):
    """The block at an anchor is the same in a training row and in a decoding round, at any position."""
    config = drafter_config(target_config(), num_hidden_layers=2, sliding_windows=(None, window))
    target = random_target(target_config())
    drafter = random_drafter(config, target)
    tokens = np.random.default_rng(2).integers(0, 8, (1, 2001))
    batch = rows_batch(tokens)
    out = forward_documents(
        target, target_config(), batch.tokens, batch.positions, batch.document_ids, config.target_layer_ids
    )
    positions = [10, 63, 700, 2000]
    anchors = jnp.asarray([positions], jnp.int32)
    blocks = make_blocks(batch, anchors, jnp.ones((1, 4), bool), 3)
    trained = draft_blocks(drafter, config, out.features, batch, blocks)

    zero = jnp.zeros(1, jnp.int32)
    cache = init_cache(target_config(), 1, 2010, jnp.float32)
    read = forward_cached(target, target_config(), batch.tokens, zero, cache, config.target_layer_ids)
    state = dspark.extend(drafter, config, dspark.init_state(config, 1, 2010, jnp.float32), read.features, zero)
    for index, position in enumerate(positions):
        decoded = dspark.block_hidden(
            drafter, config, state, batch.tokens[:, position], jnp.full(1, position, jnp.int32)
        )
        np.testing.assert_allclose(decoded[0], trained[0, index], atol=1e-4)


def test_the_teacher_s_summary_of_wanted_positions_and_of_others(monkeypatch):
    """Chunks without a wanted position are skipped; what is not wanted makes no term or gradient infinite."""
    monkeypatch.setattr(losses, "_SUMMARY_CHUNK", 4)
    config = drafter_config(target_config(11), draft_vocab_size=6)
    target = random_target(target_config(11))
    drafter = random_drafter(config, target)
    hidden = jax.random.normal(jax.random.key(0), (2, 7, 16))
    wanted = jnp.zeros((2, 7), bool).at[0, 5].set(True).at[1, 1:3].set(True)
    summary = summarize_teacher(head_weight(target), hidden, wanted, 9)
    logits = (hidden @ head_weight(target).T)[..., :9]
    np.testing.assert_allclose(summary.log_normalizer[wanted], jax.nn.logsumexp(logits, axis=-1)[wanted], atol=1e-5)
    np.testing.assert_array_equal(summary.best[wanted], jnp.argmax(logits, axis=-1)[wanted])
    assert np.isposinf(summary.log_normalizer[~wanted]).all() and (np.asarray(summary.best)[~wanted] == -1).all()

    def total(hidden):
        flat = (hidden.reshape(-1, 16), None, hidden.reshape(-1, 16), jnp.zeros(14, jnp.int32))
        known = jax.tree.map(lambda x: x.reshape(-1), summary)
        return sum(term.sum() for term in vocabulary_terms(drafter, head_weight(target), *flat, 9, 5, known))

    value, gradient = jax.value_and_grad(total)(hidden)
    assert np.isfinite(value) and np.isfinite(gradient).all()
