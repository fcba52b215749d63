"""Clipped AdamW with linear warm-up and cosine decay to zero."""

import dataclasses

import jax
import optax


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with linear warm-up and cosine decay to zero; the defaults are the paper's."""

    learning_rate: float = 6e-4
    beta1: float = 0.9
    beta2: float = 0.999
    weight_decay: float = 0.0
    warmup_fraction: float = 0.04
    clip_norm: float = 1.0


def make_optimizer(config: OptimizerConfig, total_steps: int) -> optax.GradientTransformation:
    """The update rule for a run of `total_steps`; norms and biases, being vectors, do not decay."""
    warmup = max(1, round(config.warmup_fraction * total_steps))
    rate = optax.warmup_cosine_decay_schedule(0.0, config.learning_rate, warmup, max(total_steps, warmup + 1))
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            rate,
            config.beta1,
            config.beta2,
            weight_decay=config.weight_decay,
            mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params),
        ),
    )
