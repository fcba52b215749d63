"""Target models: from a Hugging Face folder, a hub id or a GGUF file, and to a folder."""

import contextlib
import dataclasses
import functools
import hashlib
import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dspark_jax import targets
from dspark_jax.config import TargetConfig
from dspark_jax.io.device_dtype import warn_if_emulated
from dspark_jax.io.errors import InputError
from dspark_jax.io.files import atomic_folder, read_json, write_json
from dspark_jax.io.gguf import GgufFile
from dspark_jax.io.named_models import locate
from dspark_jax.io.prompts import PromptEncoder
from dspark_jax.io.safetensors import FILE, SafetensorsSource, write_safetensors
from dspark_jax.io.tensors import INT8, TensorSource, check_tensors, load_parameters, stored_names
from dspark_jax.io.tokenizer import Tokenizer, load_tokenizer
from dspark_jax.layers.quantized import QuantizedWeight
from dspark_jax.parameters import named_leaves
from dspark_jax.targets.decoder import TargetParams, declare_target, fuse_projections, is_fused
from dspark_jax.targets.hf_fields import fields_from_config

_HUB_FILES = ["*.safetensors", "*.json", "*.jinja"]
# Other formats of the same weights, which some repositories hold beside them.
_OTHER_HUB_FILES = ["*/*", "consolidated*"]
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}


@dataclasses.dataclass(frozen=True, eq=False)
class Target:
    """A loaded target. `fingerprint` is a short hash of its config and of some of its stored values."""

    config: TargetConfig
    params: TargetParams
    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]
    name: str
    fingerprint: str


@dataclasses.dataclass(frozen=True, eq=False)
class TargetDescription:
    """What can be known of a target while its weights are unread. `files`: its folder, or its GGUF file, opened."""

    config: TargetConfig
    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]
    name: str
    files: Path | GgufFile

    @functools.cached_property
    def fingerprint(self) -> str:
        """A short hash of the config and of a few rows of the weights; the same in whatever floating-point type, on
        whatever mesh and however stored they are loaded."""
        digest = hashlib.sha256(repr(dataclasses.replace(self.config, num_valid_tokens=0)).encode())
        last = self.config.num_hidden_layers - 1
        few = (slice(0, 4),)
        with _open(self.files) as source:
            for name in ("embed_tokens", f"layers.{last}.mlp.down_proj", f"layers.{last}.input_layernorm", "norm"):
                digest.update(np.asarray(source.read(f"model.{name}.weight", few), np.float32).tobytes())
        return digest.hexdigest()[:16]

    def prompt_encoder(self, enable_thinking: bool | None, limit: int | None = None) -> PromptEncoder:
        """For prompts of at most `limit` tokens: by default as many as leave room for a new one in the context."""
        limit = self.config.max_position_embeddings - 1 if limit is None else limit
        return PromptEncoder(self.tokenizer, self.config.vocab_size, limit, enable_thinking)

    def load(
        self,
        *,
        dtype: Any = "float32",
        mesh: Mesh | None = None,
        stacked_layers: bool = False,
        fused_projections: bool = False,
        without_layers: bool = False,
    ) -> Target:
        """Reads the weights: as `load_target`, with its errors; `without_layers` only embedding, norm and head.

        Warns where the device has no arithmetic of the dtype.
        """
        if fused_projections and mesh is not None:
            raise ValueError("fused projections cannot be sharded: load them without a mesh")
        warn_if_emulated(dtype)
        config = dataclasses.replace(self.config, stacked_layers=stacked_layers)
        declaration = declare_target(config)
        if without_layers:
            declaration = declaration.replace(layers=())
        with _open(self.files) as source:
            params = load_parameters(source, declaration, dtype, rename=hf_name, mesh=mesh, head_dim=config.head_dim)
        if fused_projections and dtype != INT8:
            params = fuse_projections(params)
        # Rounded to int8 it is another model.
        fingerprint = f"{self.fingerprint}-{INT8}" if dtype == INT8 else self.fingerprint
        return Target(config, params, self.tokenizer, self.eos_token_ids, self.name, fingerprint)


def describe_target(source: str | os.PathLike, *, allow_config_keys: Sequence[str] = ()) -> TargetDescription:
    """Reads and checks all of a target but the values of its weights; see `load_target`.

    Raises:
      InputError: anything wrong with the files, in one line that names the file and the field or tensor.
    """
    found = locate(source)
    if str(found).endswith(".gguf"):
        files = GgufFile(found)
        config, tokenizer = files.config(tuple(allow_config_keys)), files.tokenizer()
        eos_token_ids, name = files.eos_token_ids(), files.path.stem
    else:
        files = resolve_folder(found)
        fields = read_json(files / "config.json")
        try:
            config = targets.config_from_hf(fields, allow_config_keys)
        except ValueError as error:
            raise InputError(f"{files / 'config.json'}: {error}") from error
        tokenizer, eos_token_ids = load_tokenizer(files), _eos_token_ids(files, fields)
        name = files.resolve().name if Path(source).is_dir() else str(source)
    valid = config.vocab_size if tokenizer is None else min(tokenizer.num_ids, config.vocab_size)
    config = dataclasses.replace(config, num_valid_tokens=valid)
    with _open(files) as tensors:
        ignored = {tensor for tensor in tensors.shapes() if tensor.endswith("rotary_emb.inv_freq")}
        if config.tie_word_embeddings:
            ignored.add("lm_head.weight")
        check_tensors(tensors, declare_target(config), hf_name, ignored)
    return TargetDescription(config, tokenizer, eos_token_ids, name, files)


def load_target(
    source: str | os.PathLike,
    *,
    dtype: Any = "float32",
    mesh: Mesh | None = None,
    stacked_layers: bool = False,
    fused_projections: bool = False,
    allow_config_keys: Sequence[str] = (),
) -> Target:
    """Loads a target: a Hugging Face folder, a hub id such as "Qwen/Qwen3-4B", a .gguf file, or a name of
    `named_models`: "smollm2".

    Weights are cast to `dtype` and, with a mesh, sharded by `sharding.RULES`; each device reads its part only.
    With dtype "int8" the weights of products are quantised (`layers.quantized`), everything else is float32.
    `stacked_layers` stores the layers as one tree with a leading axis. `fused_projections` puts the weights of queries,
    keys and values into one, and those of the MLP's two inputs: fewer and larger products decode faster. Such
    parameters are on one device and cannot be saved; int8 weights are read in one pass anyway and stay as they are.
    `allow_config_keys` names unknown keys of the config that may be ignored. `config.num_valid_tokens` is the
    tokenizer's where it has fewer ids than the vocabulary has rows.

    Raises:
      InputError: anything wrong with the files, weights that are not finite in `dtype` included, in one line that names
        the file and the field or tensor.
      ValueError: "int8" or `fused_projections` with a mesh.
    """
    description = describe_target(source, allow_config_keys=allow_config_keys)
    return description.load(dtype=dtype, mesh=mesh, stacked_layers=stacked_layers, fused_projections=fused_projections)


def _open(files: Path | GgufFile) -> AbstractContextManager[TensorSource]:
    return contextlib.nullcontext(files) if isinstance(files, GgufFile) else SafetensorsSource(files)


def resolve_folder(source: str | os.PathLike) -> Path:
    """The local folder of a folder's name or a hub id, which is downloaded if need be.

    Raises:
      InputError: neither a folder nor a model that the hub gives.
    """
    path = Path(source)
    if path.is_dir():
        return path
    parts = str(source).split("/")
    if len(parts) != 2 or not all(parts) or parts[0] in (".", "..", "~"):
        raise InputError(f"{source}: no such folder")
    import huggingface_hub

    try:
        return Path(
            huggingface_hub.snapshot_download(str(source), allow_patterns=_HUB_FILES, ignore_patterns=_OTHER_HUB_FILES)
        )
    except Exception as error:  # network, authorisation and cache errors share no narrower class
        reason = str(error).strip().partition("\n")[0]
        raise InputError(
            f"{source}: no such folder, and the Hugging Face hub does not give it ({type(error).__name__}: {reason})"
        ) from error


def _eos_token_ids(folder: Path, fields: dict[str, Any]) -> tuple[int, ...]:
    ids: set[int] = set()
    generation = folder / "generation_config.json"
    for path, origin in ((generation, read_json(generation) if generation.exists() else {}), ("config.json", fields)):
        value = origin.get("eos_token_id")
        listed = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(i) is int and 0 <= i < 2**31 for i in listed):
            raise InputError(
                f"{folder / path}: eos_token_id must be an integer in 0..{2**31 - 1} or a list of them, not {value!r}"
            )
        ids.update(listed)
    return tuple(sorted(ids))


def hf_name(path: str) -> str:
    """The Hugging Face name of a target's tensor, from its dotted path in `TargetParams`."""
    return path if path.startswith("lm_head.") else f"model.{path}"


def save_target(
    folder: str | os.PathLike,
    config: TargetConfig,
    params: TargetParams,
    *,
    tokenizer: Tokenizer | None = None,
    eos_token_ids: Iterable[int] = (),
    dtype: Any = "float32",
) -> None:
    """Writes a Hugging Face folder: config.json, generation_config.json, model.safetensors and the tokenizer.

    The folder appears whole or not at all.

    Raises:
      InputError: it cannot be written.
      ValueError: a config or int8 weights, which the format cannot hold.
    """
    if isinstance(params.embed_tokens.weight, QuantizedWeight):
        raise ValueError("int8 weights cannot be saved; load the target in another dtype")
    if is_fused(params):
        raise ValueError("fused projections cannot be saved; load the target without them")
    eos = sorted(eos_token_ids)
    fields = fields_from_config(config) | {
        "architectures": [_ARCHITECTURES[config.model_type]],
        "model_type": config.model_type,
        "tie_word_embeddings": config.tie_word_embeddings,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "dtype": str(jnp.dtype(dtype)),
    }
    if config.model_type == "llama":
        fields["mlp_bias"] = config.mlp_bias
    declared, tensors = named_leaves(declare_target(config)), {}
    for path, array in named_leaves(params).items():
        names = stored_names(path, declared[path])
        parts = [array] if names == [path] else array
        tensors |= {hf_name(name): np.asarray(part.astype(dtype)) for name, part in zip(names, parts, strict=True)}
    with atomic_folder(folder) as temporary:
        write_json(temporary / "config.json", fields)
        write_json(temporary / "generation_config.json", {"eos_token_id": fields["eos_token_id"]})
        write_safetensors(temporary / FILE, tensors)
        if tokenizer is not None:
            tokenizer.save(temporary)
