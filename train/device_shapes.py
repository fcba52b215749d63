"""Models of the shapes that configs of `fit` describe, with random weights that are made on the device."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key

from dspark_jax.config import DrafterConfig, TargetConfig
from dspark_jax.drafters.kinds import DrafterParams
from dspark_jax.io.command_line import parse
from dspark_jax.layers.decoder import Remat, fuse_layer
from dspark_jax.parameters import Parameter, initialize, is_parameter
from dspark_jax.targets.decoder import TargetParams, declare_target
from dspark_jax.training.anchors import Batch
from dspark_jax.training.step import TrainConfig, declare_trainable, with_frozen
from train.fit_config import FitConfig
from train.plan_config import CONFIGS, drafter_shape, target_shape


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ShapeConfig(FitConfig):
    """A config of `fit` of which nothing is read or written."""

    data: tuple[Path, ...] = ()
    output: Path = Path()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Configs of a target, its drafter and its train step. `length`: tokens of a training document."""

    name: str
    train: TrainConfig
    length: int
    dtype: str

    @property
    def target(self) -> TargetConfig:
        return self.train.target

    @property
    def drafter(self) -> DrafterConfig:
        drafter: Any = self.train.drafter
        return drafter


def read_shape(name: str, program: str) -> Shape:
    """Of a shipped config's name, or a YAML file of `fit`'s options.

    Raises:
      InputError: there is none, or it makes no models.
    """
    config = parse(_ShapeConfig, ["--config", name], program, CONFIGS)
    target = target_shape(config)
    drafter = drafter_shape(config, target)
    train = TrainConfig(
        target=target,
        drafter=drafter,
        total_steps=config.steps or 1000,
        loss=config.loss,
        optimizer=config.optimizer,
        remat=Remat.PRODUCTS,
    )
    length = min(config.max_length, target.max_position_embeddings)
    return Shape(
        name=Path(name).stem if name.endswith(".yaml") else name, train=train, length=length, dtype=config.dtype
    )


def random_document(target: TargetConfig, length: int, num_anchors: int) -> Batch:
    """One row that a document of random tokens fills, all of it trained."""
    tokens = np.random.default_rng(0).integers(0, target.num_valid_tokens, (1, length))
    return Batch(
        tokens=jnp.asarray(tokens, jnp.int32),
        loss_mask=jnp.ones((1, length), bool),
        document_ids=jnp.zeros((1, length), jnp.int32),
        positions=jnp.arange(length, dtype=jnp.int32)[None],
        row_anchors=min(num_anchors, length),
    )


@functools.partial(jax.jit, static_argnames=("parameter", "dtype"))
def _draw(parameter: Parameter, key: Key[Array, ""], dtype: str) -> Array:
    return initialize(parameter, key, dtype)


def random_parameters(declaration: Any, seed: int, dtype: str) -> Any:
    """As `initialize`, one parameter after the other, each in a program of its own: what float32 a draw needs is there
    for one at a time, and parameters of one shape share a program.
    """
    leaves, structure = jax.tree.flatten(declaration, is_leaf=is_parameter)
    key = jax.random.key(seed)
    return structure.unflatten([_draw(leaf, jax.random.fold_in(key, i), dtype) for i, leaf in enumerate(leaves)])


def random_target(config: TargetConfig, dtype: str, fused: bool = False) -> TargetParams:
    """`fused`: with fewer products, as decoding on one device has them."""
    declaration = declare_target(config)
    params = random_parameters(declaration.replace(layers=()), 0, dtype)
    layers = (random_parameters(layer, i + 1, dtype) for i, layer in enumerate(declaration.layers))
    return params.replace(layers=tuple(map(fuse_layer, layers) if fused else layers))


def random_drafter(config: DrafterConfig, target: TargetParams, dtype: str) -> DrafterParams:
    """Around the target's own embedding and head."""
    return with_frozen(random_parameters(declare_trainable(config), 1000, dtype), target)
