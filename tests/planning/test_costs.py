"""The analytic counts against XLA's own, of small models without loops: everything fits in one chunk."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from dspark_jax.config import MarkovHeadType
from dspark_jax.decode_state import DecodeConfig, Requests
from dspark_jax.drafters.kinds import declare_drafter
from dspark_jax.layers.kv_cache import init_cache
from dspark_jax.layers.packing import pack
from dspark_jax.parameters import abstract, count
from dspark_jax.planning.products import Cost, Product, cut, once, times
from dspark_jax.planning.round_cost import draft_cost, verify_cost
from dspark_jax.planning.train_cost import drafter_cost, loss_cost, target_cost, train_step_cost
from dspark_jax.rounds import draft_hidden, init_state
from dspark_jax.sampling import request_keys, sampling_params
from dspark_jax.targets.decoder import declare_target, forward_documents, forward_packed, target_logits
from dspark_jax.training.anchors import Batch
from dspark_jax.training.losses import LossConfig
from dspark_jax.training.step import TrainConfig, batch_losses, declare_trainable, total_loss
from tests.models import drafter_config, target_config

LENGTH = 64
# Wide, so that products are nearly all arithmetic, and short, so that attention is little of it.
TARGET = target_config(4096, hidden_size=512, intermediate_size=1024, num_attention_heads=4, head_dim=64)
DRAFTER = drafter_config(TARGET, block_size=7, num_anchors=16, num_hidden_layers=2, markov_rank=64)
TRAIN = TrainConfig(target=TARGET, drafter=DRAFTER, total_steps=10, loss=LossConfig(chunk=1 << 20))


def counted(function, *arguments) -> dict[str, float]:
    """XLA's count of the program as it is written, before CPU's own rewriting."""
    return jax.jit(function).lower(*arguments).cost_analysis()


def batch(rows: int = 2) -> Batch:
    tokens = jax.ShapeDtypeStruct((rows, LENGTH), jnp.int32)
    return Batch(tokens, jax.ShapeDtypeStruct(tokens.shape, bool), tokens, tokens, row_anchors=DRAFTER.num_anchors)


def total(costs: dict[str, Cost]) -> Cost:
    return sum(costs.values(), Cost())


def test_the_target_pass():
    def run(params, batch):
        return forward_documents(params, TARGET, batch.tokens, batch.positions, batch.document_ids).hidden

    xla = counted(run, abstract(declare_target(TARGET), jnp.bfloat16), batch())
    assert total(target_cost(TARGET, 2, LENGTH)).executed == pytest.approx(xla["flops"], rel=0.03)


@pytest.mark.parametrize("head", MarkovHeadType)
def test_losses_and_gradients(head):
    """All of a train step but the optimiser, which has no products."""
    config = dataclasses.replace(TRAIN, drafter=dataclasses.replace(DRAFTER, markov_head_type=head))

    def run(params, target, batch, key):
        def loss(params):
            return total_loss(batch_losses(params, target, config, batch, key), config.loss, 1.0, 1.0)

        return jax.value_and_grad(loss)(params)

    params = abstract(declare_trainable(config.drafter))
    key = jax.eval_shape(lambda: jax.random.key(0))
    xla = counted(run, params, abstract(declare_target(TARGET), jnp.bfloat16), batch(), key)
    costs = target_cost(TARGET, 2, LENGTH) | drafter_cost(config.drafter, 2, LENGTH)
    costs |= loss_cost(config.drafter, config.loss, 2, LENGTH)
    assert total(costs).executed == pytest.approx(xla["flops"], rel=0.05)


def test_a_verification_and_its_traffic():
    """Of a few tokens: what is moved is mostly weights, which every product reads once."""
    slots, width, capacity, bucket = 4, 4, 16, 12
    cache = jax.eval_shape(lambda: init_cache(TARGET, slots, capacity, jnp.bfloat16))

    def run(params, cache):
        index = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32)[None], (slots, width))
        seen, start = jnp.ones((slots, width, width), bool), jnp.full(slots, 8, jnp.int32)
        packing = pack(jnp.ones((slots, width), bool), bucket)
        out = forward_packed(params, TARGET, packing, index, index, seen, start, cache)
        return target_logits(params, TARGET, out.hidden)

    xla = counted(run, abstract(declare_target(TARGET), jnp.bfloat16), cache)
    cost = total(verify_cost(TARGET, slots, width, capacity, bucket))
    assert cost.useful == cost.executed == pytest.approx(xla["flops"], rel=0.03)
    weights = 2 * count(declare_target(TARGET))
    assert weights < cost.bytes < 1.1 * weights


def test_a_chain_of_drafts():
    slots, capacity = 4, 16
    config = DecodeConfig(target=TARGET, drafter=DRAFTER)
    state = jax.eval_shape(lambda: init_state(config, _requests(slots), capacity, jnp.bfloat16))

    def run(params, state):
        return draft_hidden(params, config, state)

    params = abstract(declare_drafter(DRAFTER), jnp.bfloat16)
    costs = draft_cost(DRAFTER, slots, capacity)
    parallel = costs["draft layers"].executed + costs["draft attention"].executed
    assert parallel == pytest.approx(counted(run, params, state)["flops"], rel=0.05)
    assert costs["draft head"].useful == 2 * slots * DRAFTER.num_drafts * TARGET.hidden_size * TARGET.vocab_size
    assert costs["draft sequential"].bytes > DRAFTER.num_drafts * 2 * TARGET.vocab_size * DRAFTER.markov_rank


def test_loops_are_counted_by_their_turns():
    """What XLA's own count cannot do: twice the parts, chunks or layers are twice the work."""
    costs = {
        parts: train_step_cost(TARGET, DRAFTER, TRAIN.loss, rows=1, parts=parts, length=LENGTH, parameters=1000)
        for parts in (1, 2)
    }
    for name, cost in costs[1].items():
        if name != "optimiser":
            assert costs[2][name] == cost * 2
    # A sum of gradients a part, and one update.
    assert costs[2]["optimiser"].bytes - costs[1]["optimiser"].bytes == 3 * 4 * 1000
    whole, chunked = (loss_cost(DRAFTER, LossConfig(chunk=chunk), 1, LENGTH) for chunk in (112, 28))
    for name, cost in whole.items():
        assert chunked[name].executed == cost.executed
        assert chunked[name].bytes > cost.bytes


def test_chips_share_heads_mlp_and_vocabulary():
    whole, half = (total(target_cost(TARGET, 1, LENGTH, model)) for model in (1, 2))
    assert half.executed == whole.executed / 2
    assert whole.bytes / 2 < half.bytes < whole.bytes
    # Two heads of keys are not cut in four.
    assert total(target_cost(TARGET, 1, LENGTH, 4)).executed > whole.executed / 4
    assert cut(6, 4) == 6


def test_products():
    product = Product(rows=2, inner=3, columns=5, count=7, left=1, right=2, result=4)
    assert product.flops == 2 * 2 * 3 * 5 * 7
    assert product.bytes == 7 * (6 * 1 + 15 * 2 + 10 * 4)
    assert once([product, product]) == Cost(2 * product.flops, 2 * product.flops, 2 * product.bytes)
    assert times([product], useful=2, executed=3) == Cost(2 * product.flops, 3 * product.flops, 3 * product.bytes)


def _requests(slots: int) -> Requests:
    zeros = jnp.zeros(slots, jnp.float32)
    return Requests(request_keys(0, slots), sampling_params(slots), jnp.ones(slots, jnp.int32), zeros)
