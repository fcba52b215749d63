"""Drafters: DeepSpec, DFlash, JetSpec, EAGLE-3 and multi-token-prediction folders, read and written exactly."""

import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dspark_jax.config import DrafterConfig, DraftModelConfig, Eagle3Config, MTPConfig, TargetConfig
from dspark_jax.drafters.kinds import DrafterParams, declare_drafter
from dspark_jax.io.drafter_config import check_against_target, drafter_config_from_fields, fields_from_drafter_config
from dspark_jax.io.errors import InputError
from dspark_jax.io.files import atomic_folder, read_json, write_json
from dspark_jax.io.int8_weights import FIELDS, Int8Source, int8_tensors, take_storage
from dspark_jax.io.mtp_config import stored_name
from dspark_jax.io.named_models import locate
from dspark_jax.io.safetensors import FILE, SafetensorsSource, write_safetensors
from dspark_jax.io.target import Target, resolve_folder
from dspark_jax.io.tensors import INT8, TensorSource, check_tensors, load_parameters
from dspark_jax.layers.linear import Embedding, Linear, embed
from dspark_jax.layers.quantized import QuantizedWeight, pack, quantize, unpack
from dspark_jax.parameters import named_leaves
from dspark_jax.targets.decoder import head_weight

# SpecForge's names: d2t[i] is the target id of row i of a reduced draft vocabulary, minus i; t2d marks those ids.
_D2T, _T2D = "d2t", "t2d"
# The relative distance of a few embedding rows above which the drafter was made for another target. Copies in
# bfloat16 or of quantised weights stay under it.
_EMBEDDING_TOLERANCE = 0.1


@dataclasses.dataclass(frozen=True, eq=False)
class Drafter:
    """A loaded drafter. `fingerprint` is a short hash of its config and of some of its stored values."""

    config: DraftModelConfig
    params: DrafterParams
    name: str
    fingerprint: str


def describe_drafter(
    source: str | os.PathLike, *, target: TargetConfig | None = None, allow_config_keys: Sequence[str] = ()
) -> DraftModelConfig:
    """Reads the config of a drafter, and with a `target` checks it against it, without the weights.

    Raises:
      InputError: an unknown layout or config key, or a drafter of another target; in one line that names it.
    """
    return _describe(resolve_folder(locate(source)), target, allow_config_keys)[0]


def _describe(
    folder: Path, target: TargetConfig | None, allow_config_keys: Sequence[str]
) -> tuple[DraftModelConfig, bool]:
    """The config, and whether weights are stored in int8."""
    path = folder / "config.json"
    fields = read_json(path)
    try:
        int8 = take_storage(fields)
        config = drafter_config_from_fields(fields, allow_config_keys, target)
        if target is not None:
            check_against_target(config, target)
    except ValueError as error:
        raise InputError(f"{path}: {error}") from error
    return config, int8


def load_drafter(
    source: str | os.PathLike,
    *,
    target: Target | None = None,
    dtype: Any = "float32",
    mesh: Mesh | None = None,
    allow_config_keys: Sequence[str] = (),
) -> Drafter:
    """Loads a drafter from a folder or hub id of DeepSpec, the original DFlash, JetSpec, EAGLE-3 (as SpecForge writes
    it) or one multi-token-prediction module (`mtp_config`); or by a name of `named_models`, such as "smollm2-dspark".

    With a `target` it is checked against it, and the embedding and head that the file may lack are the target's.
    Weights are cast to `dtype` and, with a mesh, sharded by `sharding.RULES`. With dtype "int8" the weights of products
    are quantised, everything else is float32; weights that the file holds in int8 (`int8_weights`) are then taken as
    they are, and dequantised for another dtype.

    Raises:
      InputError: an unknown layout, a drafter of another target, a missing, extra or misshapen tensor, one that is not
        finite in `dtype`, an unknown config key; in one line that names it.
      ValueError: "int8" with a mesh.
    """
    folder = resolve_folder(locate(source))
    config, int8 = _describe(folder, None if target is None else target.config, allow_config_keys)
    name = folder.resolve().name if Path(source).is_dir() else str(source)
    with Int8Source(folder) if int8 else SafetensorsSource(folder) as tensors:
        params = _load(tensors, config, target, dtype, mesh)
        return Drafter(config, params, name, _fingerprint(tensors, config, dtype == INT8))


def _renamed(config: DraftModelConfig) -> Callable[[str], str]:
    """From a parameter's dotted path to the tensor's name."""
    return functools.partial(stored_name, config) if isinstance(config, MTPConfig) else str


def _load(
    source: TensorSource, config: DraftModelConfig, target: Target | None, dtype: Any, mesh: Mesh | None
) -> DrafterParams:
    shapes, rename = source.shapes(), _renamed(config)
    declaration = dataclasses.replace(declare_drafter(config), draft_token_ids=None)
    taken = [field for field in declaration.FROZEN if rename(f"{field}.weight") not in shapes]
    if taken and target is None:
        name = rename(f"{taken[0]}.weight")
        raise InputError(f"{source.path}: tensor {name} is missing and no target is given to take it from")
    declaration = dataclasses.replace(declaration, **dict.fromkeys(taken))
    mapped = config.reduced_vocabulary or isinstance(config, Eagle3Config)
    check_tensors(source, declaration, rename, ignored={_D2T, _T2D} if mapped else ())
    if target is not None and "embed_tokens" not in taken:
        _check_embedding(source, rename("embed_tokens.weight"), target)
    params = load_parameters(source, declaration, dtype, rename=rename, mesh=mesh, head_dim=config.head_dim)
    ids = _draft_token_ids(source, config) if config.reduced_vocabulary or _D2T in shapes else None
    if config.reduced_vocabulary:
        if mesh is not None:
            ids = jax.device_put(ids, jax.NamedSharding(mesh, jax.P()))
        params = params.replace(draft_token_ids=jnp.asarray(ids))
    if target is None:
        return params
    if "embed_tokens" in taken:
        params = params.replace(embed_tokens=Embedding(weight=_taken(target.params.embed_tokens.weight, dtype)))
    if "lm_head" in taken:
        params = params.replace(
            lm_head=Linear(weight=_taken(head_weight(target.params), dtype, params.draft_token_ids))
        )
    return params


def _taken(weight: jax.Array | QuantizedWeight, dtype: Any, ids: jax.Array | None = None):
    """The target's weight, or those rows of it, as the drafter stores weights."""
    if dtype == INT8 and isinstance(weight, QuantizedWeight):
        # Rounded again, its scales would change in their last bits.
        return weight if ids is None else pack(*(part[np.asarray(ids)] for part in unpack(weight)))
    weight = weight.astype(jnp.float32 if dtype == INT8 else dtype)
    rows = weight if ids is None else weight[ids]
    return quantize(np.asarray(rows)) if dtype == INT8 else rows


def _fingerprint(source: TensorSource, config: DraftModelConfig, int8: bool) -> str:
    """The same whatever the floating-point dtype and the mesh that the drafter is loaded with; another after training
    goes on, and for int8 weights.
    """
    digest = hashlib.sha256(repr(config).encode())
    for name, shape in sorted(source.shapes().items()):
        if name not in ("embed_tokens.weight", "lm_head.weight"):
            few = (*(slice(0, min(4, rows)) for rows in shape[:1]), *(slice(None) for _ in shape[1:]))
            digest.update(np.asarray(source.read(name, few), np.float32).tobytes())
    if int8:
        digest.update(INT8.encode())
    return digest.hexdigest()[:16]


def _draft_token_ids(source: TensorSource, config: DraftModelConfig) -> np.ndarray:
    """Target ids of the draft vocabulary's rows, int32 [V_d]; `t2d`, where it is there, must mark the same."""
    shapes = source.shapes()
    shape = shapes.get(_D2T)
    if shape != (config.draft_vocab_size,):
        found = "missing" if shape is None else f"of shape {list(shape)}"
        raise InputError(f"{source.path}: tensor {_D2T} is {found}; draft_vocab_size is {config.draft_vocab_size}")
    offsets = source.read(_D2T, (slice(None),))
    if not np.issubdtype(offsets.dtype, np.integer):
        raise InputError(f"{source.path}: tensor {_D2T} is stored as {offsets.dtype}; it must be of integers")
    ids = np.arange(config.draft_vocab_size) + offsets.astype(np.int64)
    if ((ids < 0) | (ids >= config.vocab_size)).any() or (np.diff(ids) <= 0).any():
        raise InputError(f"{source.path}: tensor {_D2T} must give ascending target ids under {config.vocab_size}")
    if _T2D in shapes:
        marked = np.zeros(config.vocab_size, bool)
        marked[ids] = True
        if shapes[_T2D] != marked.shape or (source.read(_T2D, (slice(None),)).astype(bool) != marked).any():
            raise InputError(
                f"{source.path}: tensor {_T2D} must mark, of {config.vocab_size} ids, those that {_D2T} gives"
            )
    return ids.astype(np.int32)


def _check_embedding(source: TensorSource, name: str, target: Target) -> None:
    rows = np.unique(np.linspace(0, target.config.num_valid_tokens - 1, 16).astype(np.int32))
    whole = slice(None)
    own = np.concatenate([source.read(name, (slice(row, row + 1), whole)) for row in rows])
    own = own.astype(np.float64)
    other = np.asarray(embed(target.params.embed_tokens, jnp.asarray(rows))).astype(np.float64)
    if not np.linalg.norm(own - other) <= _EMBEDDING_TOLERANCE * np.linalg.norm(other):
        raise InputError(
            f"{source.path}: {name} differs from that of the target {target.name}: a drafter of another target"
        )


def check_deepspec(folder: str | os.PathLike, config: DraftModelConfig, dtype: Any) -> None:
    """Raises an InputError for a drafter that DeepSpec's layout cannot hold."""
    if isinstance(config, DrafterConfig) and config.reduced_vocabulary:
        raise InputError(
            f"{folder}: a reduced draft vocabulary (draft_vocab_size {config.draft_vocab_size} of "
            f"{config.vocab_size}) cannot be exported as DeepSpec; train with the whole vocabulary"
        )
    if dtype == INT8:
        raise InputError(f"{folder}: int8 weights cannot be exported as DeepSpec, which engines load; take bfloat16")


def save_drafter(
    folder: str | os.PathLike,
    config: DraftModelConfig,
    params: DrafterParams,
    target_config: TargetConfig,
    *,
    dtype: Any = "float32",
    eos_token_ids: Iterable[int] = (),
    deepspec: bool = False,
) -> None:
    """Writes a drafter as a folder, which appears whole or not at all: DeepSpec's layout if it is anchor-first, else
    that of the original DFlash, with the embedding and the head; Eagle3 as SpecForge does, without the embedding;
    multi-token prediction as `mtp_config` says, without either.

    A reduced draft vocabulary is written with a tensor `d2t`, which DeepSpec does not know: `deepspec` refuses it.
    With dtype "int8" the weights of products are written in int8 with their scales (`int8_weights`), all else in
    float32, and what is the target's is left out; engines cannot read that, and `deepspec` refuses it too. `params`
    hold the embedding and the head.

    Raises:
      InputError: the folder cannot be written, or `deepspec` and a reduced vocabulary or int8.
      ValueError: the drafter does not fit the target, or the format cannot hold its config.
    """
    check_against_target(config, target_config)
    if deepspec:
        check_deepspec(folder, config, dtype)
    if params.embed_tokens is None or params.lm_head is None:
        raise ValueError("params must hold embed_tokens and lm_head")
    eos = sorted(eos_token_ids)
    fields = fields_from_drafter_config(config) | {
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "dtype": str(jnp.dtype(jnp.float32 if dtype == INT8 else dtype)),
        **(FIELDS if dtype == INT8 else {}),
    }
    # Only DeepSpec's layout repeats what is the target's.
    unwritten = () if isinstance(config, DrafterConfig) and dtype != INT8 else params.FROZEN
    tensors = _tensors(dataclasses.replace(params, **dict.fromkeys((*unwritten, "draft_token_ids"))), config, dtype)
    rows = np.arange(config.draft_vocab_size)
    ids = np.asarray(params.draft_token_ids).astype(np.int64) if config.reduced_vocabulary else rows
    if config.reduced_vocabulary or isinstance(config, Eagle3Config):
        tensors[_D2T] = ids - rows
    if isinstance(config, Eagle3Config):
        tensors[_T2D] = np.isin(np.arange(config.vocab_size), ids)
    with atomic_folder(folder) as temporary:
        write_json(temporary / "config.json", fields)
        write_safetensors(temporary / FILE, tensors)


def _tensors(params: DrafterParams, config: DraftModelConfig, dtype: Any) -> dict[str, np.ndarray]:
    """The tensors of a file, by name."""
    declared, rename, tensors = named_leaves(declare_drafter(config)), _renamed(config), {}
    for path, leaf in named_leaves(params, lambda node: isinstance(node, QuantizedWeight)).items():
        name = rename(path)
        if dtype == INT8 and declared[path].quantizable:
            tensors |= int8_tensors(name, leaf)
        else:
            tensors[name] = np.asarray(leaf.astype(jnp.float32 if dtype == INT8 else dtype))
    return tensors
