"""The arithmetic of a DSpark update as eager PyTorch recipes do it, to compare with.

The target runs through transformers with all hidden states; the drafter attends by
`torch.nn.functional.scaled_dot_product_attention` under a dense boolean mask of all slots by the context and all slots;
the logits of draft and teacher are there for the whole vocabulary at all slots at once. torch is imported where it is
used: it is in the extra `parity`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from dspark_jax.config import DrafterConfig
from dspark_jax.drafters.kinds import DrafterParams
from dspark_jax.parameters import named_leaves
from dspark_jax.training.anchors import Blocks
from dspark_jax.training.step import TrainConfig


def make_step(model: Any, config: TrainConfig, params: DrafterParams) -> Callable[[np.ndarray, Blocks, float], float]:
    """A function of a document [1, T], its blocks and a learning rate, that updates a copy of trainable `params` and
    returns the loss before the update.

    `model`: of transformers. Only drafters with a vanilla Markov head and a confidence head over whole vocabularies.
    """
    import torch

    weights = {name: torch.tensor(np.asarray(leaf), requires_grad=True) for name, leaf in named_leaves(params).items()}
    made = config.optimizer
    optimizer = torch.optim.AdamW(
        weights.values(), lr=0.0, betas=(made.beta1, made.beta2), weight_decay=made.weight_decay
    )

    def step(tokens: np.ndarray, blocks: Blocks, rate: float) -> float:
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = _loss(model, weights, config, torch.tensor(tokens), _tensors(blocks))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), made.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def _tensors(blocks: Blocks) -> dict[str, Any]:
    """The blocks of the one row: anchors [A]; slots, previous and targets [A, γ]."""
    import torch

    names = ("anchors", "slots", "previous", "targets")
    arrays = {name: torch.tensor(np.asarray(getattr(blocks, name)[0])) for name in names}
    return {name: array if name == "slots" else array.long() for name, array in arrays.items()}


def _loss(model: Any, weights: dict[str, Any], config: TrainConfig, tokens: Any, blocks: dict[str, Any]) -> Any:
    import torch
    from torch.nn import functional

    drafter, terms = config.drafter, config.loss
    gamma = drafter.num_drafts
    with torch.no_grad():
        out = model.model(tokens.long(), output_hidden_states=True, use_cache=False)
        features = torch.cat([out.hidden_states[layer + 1] for layer in drafter.target_layer_ids], dim=-1)[0]
        last = out.last_hidden_state[0]
        head = model.get_output_embeddings().weight
        positions = blocks["anchors"][:, None] + torch.arange(gamma)
        teacher = functional.linear(last[positions.clamp(max=len(last) - 1)], head)
        teacher[..., config.target.num_valid_tokens :] = -torch.inf
        law = teacher.softmax(dim=-1)
    hidden = _hidden(model, weights, drafter, tokens[0].long(), features, blocks["anchors"], positions)
    previous = weights["markov_head.markov_w1.weight"][blocks["previous"]]
    logits = functional.linear(hidden, head.detach())
    logits = logits + functional.linear(previous, weights["markov_head.markov_w2.weight"])
    log_draft = logits.log_softmax(dim=-1)
    distance = (log_draft.exp() - law).abs().sum(dim=-1)
    cross_entropy = -log_draft.gather(-1, blocks["targets"][..., None])[..., 0]
    confidence = functional.linear(
        torch.cat([hidden, previous], dim=-1),
        weights["confidence_head.proj.weight"],
        weights["confidence_head.proj.bias"],
    )[..., 0]
    label = (1 - 0.5 * distance).detach()
    confidence = functional.binary_cross_entropy_with_logits(confidence, label, reduction="none")
    weight = torch.exp(-torch.arange(gamma) / terms.decay) * blocks["slots"]
    total = terms.cross_entropy * cross_entropy + terms.total_variation * distance + terms.confidence * confidence
    return (weight * total).sum() / weight.sum()


def _mask(anchors: Any, gamma: int, length: int) -> Any:
    """[A·γ, T + A·γ]: a slot sees the context before its anchor, and the slots of its block."""
    import torch

    context = torch.arange(length) < anchors.repeat_interleave(gamma)[:, None]
    block = torch.arange(len(anchors)).repeat_interleave(gamma)
    return torch.cat([context, block[:, None] == block], dim=1)


def _hidden(
    model: Any, weights: dict[str, Any], config: DrafterConfig, tokens: Any, features: Any, anchors: Any, positions: Any
) -> Any:
    """h of every slot, [A, γ, d]: the parallel backbone over the packed anchors."""
    import torch
    from torch.nn import functional

    def norm(x, name):
        return functional.rms_norm(x, x.shape[-1:], weights[f"{name}.weight"], config.rms_norm_eps)

    def linear(x, name):
        return functional.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def heads(x, name):
        """[1, heads, rows, D], with the norm of queries and keys where there is one."""
        x = linear(x, f"{name}_proj").unflatten(-1, (-1, config.head_dim))
        x = norm(x, f"{name}_norm") if f"{name}_norm.weight" in weights else x
        return x.transpose(0, 1)[None]

    def rotate(x, places):
        cos, sin = model.model.rotary_emb(x, places[None])
        first, second = x.chunk(2, dim=-1)
        return x * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]

    length, gamma = len(tokens), positions.shape[1]
    context = norm(linear(features, "fc"), "hidden_norm")
    block = torch.full_like(positions, config.mask_token_id)
    block[:, 0] = tokens[anchors]
    x = model.get_input_embeddings().weight.detach()[block.flatten()]
    mask, places = _mask(anchors, gamma, length), positions.flatten()
    keys_places = torch.cat([torch.arange(length), places])
    for layer in range(config.num_hidden_layers):
        name = f"layers.{layer}"
        h = norm(x, f"{name}.input_layernorm")
        both = torch.cat([context, h])
        q = rotate(heads(h, f"{name}.self_attn.q"), places)
        k = rotate(heads(both, f"{name}.self_attn.k"), keys_places)
        v = heads(both, f"{name}.self_attn.v")
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        x = x + linear(out[0].transpose(0, 1).flatten(1), f"{name}.self_attn.o_proj")
        h = norm(x, f"{name}.post_attention_layernorm")
        gate = functional.silu(linear(h, f"{name}.mlp.gate_proj"))
        x = x + linear(gate * linear(h, f"{name}.mlp.up_proj"), f"{name}.mlp.down_proj")
    return norm(x, "norm").unflatten(0, (-1, gamma))
