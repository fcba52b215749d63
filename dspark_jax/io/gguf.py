"""GGUF files of the llama architecture: config, dequantised weights and tokenizer."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from dspark_jax.config import RopeScaling, TargetConfig
from dspark_jax.io.errors import InputError
from dspark_jax.io.tensors import Index
from dspark_jax.io.tokenizer import Tokenizer
from dspark_jax.layers.rope import inverse_frequencies

_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Llama 3's frequency scaling is stored as a tensor of factors, one a rotary plane.
_ROPE_FACTORS = "rope_freqs.weight"

_KNOWN_KEYS = {
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size",
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.dimension_count",
}  # fmt: skip


class GgufFile:
    """A GGUF file as a `TensorSource` with Hugging Face's names and layout, its tensors dequantised to float32.

    Raises:
      InputError: no file, a corrupt one, another architecture, or the gguf package is not installed.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        try:
            import gguf
        except ImportError as error:
            raise InputError(f"{path}: reading GGUF needs the gguf package: pip install 'dspark-jax[gguf]'") from error
        self.path = Path(path)
        if not self.path.is_file():
            raise InputError(f"{path}: no such file")
        self._dequantize = gguf.dequantize
        try:
            reader = gguf.GGUFReader(self.path)
            self.metadata: dict[str, Any] = {key: field.contents() for key, field in reader.fields.items()}
            self._tensors = {_hf_name(tensor.name): tensor for tensor in reader.tensors}
        except Exception as error:  # a corrupt header fails anywhere in the reader
            raise InputError(f"{path}: truncated or corrupt GGUF file ({error}); get it again") from error
        self._rope_factors = self._tensors.pop(_ROPE_FACTORS, None)
        architecture = self.metadata.get("general.architecture")
        if architecture != "llama":
            raise InputError(f"{path}: general.architecture {architecture!r} is not supported; only llama is")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(int(n) for n in reversed(tensor.shape)) for name, tensor in self._tensors.items()}

    def read(self, name: str, index: Index) -> np.ndarray:
        try:
            weights = self._dequantize(self._tensors[name].data, self._tensors[name].tensor_type)
        except (NotImplementedError, ValueError) as error:
            raise InputError(f"{self.path}: tensor {name} cannot be dequantised ({error})") from error
        if ".q_proj." in name:
            weights = _unpermute(weights, self._integer("llama.attention.head_count"))
        elif ".k_proj." in name:
            weights = _unpermute(weights, self._key_heads())
        return weights[index]

    def _integer(self, key: str, default: int | None = None) -> int:
        value = self.metadata.get(key, default)
        if not isinstance(value, int) or value < 1:
            raise InputError(f"{self.path}: {key} must be a positive integer, not {value!r}")
        return value

    def _key_heads(self) -> int:
        return self._integer("llama.attention.head_count_kv", self._integer("llama.attention.head_count"))

    def _number(self, key: str, default: float) -> float:
        """A float32 as its shortest decimal: 1e-05, not 9.999999747378752e-06."""
        return float(str(np.float32(self.metadata.get(key, default))))

    def config(self, allow_keys: tuple[str, ...] = ()) -> TargetConfig:
        """The model that the metadata describes. InputError for a missing, unknown or unsupported key."""
        known = {f"llama.{key}" for key in _KNOWN_KEYS} | set(allow_keys)
        unknown = sorted(key for key in self.metadata if key.startswith("llama.") and key not in known)
        if unknown:
            raise InputError(
                f"{self.path}: unknown key {unknown[0]}; if it changes nothing, allow it with --allow-config-key"
            )
        heads, width = self._integer("llama.attention.head_count"), self._integer("llama.embedding_length")
        head_dim = self._integer("llama.attention.key_length", width // heads)
        if self._integer("llama.rope.dimension_count", head_dim) != head_dim:
            raise InputError(f"{self.path}: llama.rope.dimension_count is not the head's width {head_dim}")
        shapes = self.shapes()
        try:
            config = TargetConfig(
                model_type="llama",
                vocab_size=shapes.get("model.embed_tokens.weight", (0,))[0],
                hidden_size=width,
                intermediate_size=self._integer("llama.feed_forward_length"),
                num_hidden_layers=self._integer("llama.block_count"),
                num_attention_heads=heads,
                num_key_value_heads=self._key_heads(),
                head_dim=head_dim,
                rms_norm_eps=self._number("llama.attention.layer_norm_rms_epsilon", 1e-5),
                rope_theta=self._number("llama.rope.freq_base", 10_000.0),
                max_position_embeddings=self._integer("llama.context_length"),
                attention_bias="model.layers.0.self_attn.q_proj.bias" in shapes,
                mlp_bias="model.layers.0.mlp.up_proj.bias" in shapes,
                tie_word_embeddings="lm_head.weight" not in shapes,
            )
        except ValueError as error:
            raise InputError(f"{self.path}: {error}") from error
        return self._scaled(config)

    def _scaled(self, config: TargetConfig) -> TargetConfig:
        """Finds the Llama-3 scaling behind a tensor of frequency factors."""
        if self._rope_factors is None:
            return config
        factors = self._dequantize(self._rope_factors.data, self._rope_factors.tensor_type).astype(np.float64)
        plain, scaled = inverse_frequencies(config), None
        if factors.shape == plain.shape:
            scaled = dataclasses.replace(config, rope_scaling=RopeScaling(float(factors.max()), 1.0, 4.0, 8192))
        if scaled is None or not np.allclose(plain / inverse_frequencies(scaled), factors, rtol=1e-4):
            raise InputError(f"{self.path}: {_ROPE_FACTORS} is not the scaling of Llama 3, the only one supported")
        return scaled

    def eos_token_ids(self) -> tuple[int, ...]:
        keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
        found = {key: self.metadata[key] for key in keys if key in self.metadata}
        for key, value in found.items():
            if type(value) is not int or not 0 <= value < 2**31:
                raise InputError(f"{self.path}: {key} must be a token id, not {value!r}")
        return tuple(sorted(set(found.values())))

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer and chat template of the metadata, or None where there is none."""
        if "tokenizer.ggml.model" not in self.metadata:
            return None
        try:
            return gguf_tokenizer(self.metadata, str(self.path))
        except InputError:
            raise
        except Exception as error:  # the tokenizers library raises nothing narrower
            raise InputError(f"{self.path}: malformed tokenizer ({error}); get the file again") from error


def _hf_name(name: str) -> str:
    if name.startswith("blk."):
        _, layer, rest = name.split(".", 2)
        module, _, kind = rest.partition(".")
        return f"model.layers.{layer}.{_TENSORS.get(module, module)}.{kind}"
    module, _, kind = name.partition(".")
    return f"{_TENSORS.get(module, module)}.{kind}"


def _unpermute(weights: np.ndarray, heads: int) -> np.ndarray:
    """Undoes llama.cpp's reordering, which rotates neighbouring rows where Hugging Face rotates halves."""
    return weights.reshape(heads, -1, 2, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


# How each tokenizer cuts text before merging: the file holds only the name.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,%d}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _pre_tokenizer(kind: str) -> list[pre_tokenizers.PreTokenizer] | None:
    match kind:
        case "gpt-2":
            return [pre_tokenizers.ByteLevel(add_prefix_space=False)]
        case "smollm":
            return [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        case "llama-bpe" | "qwen2":
            pattern = Regex(_CONTRACTIONS + _WORDS % (3 if kind == "llama-bpe" else 1))
            bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            return [pre_tokenizers.Split(pattern, "isolated"), bytes_only]
    return None


def gguf_tokenizer(metadata: Mapping[str, Any], name: str) -> Tokenizer:
    """The byte-level BPE tokenizer that GGUF metadata describes.

    Raises:
      InputError: another kind of tokenizer, or an unknown `tokenizer.ggml.pre`.
    """
    if metadata["tokenizer.ggml.model"] != "gpt2":
        raise InputError(
            f"{name}: tokenizer.ggml.model {metadata['tokenizer.ggml.model']!r} is not supported, only gpt2"
        )
    kind = metadata.get("tokenizer.ggml.pre")
    cutters = _pre_tokenizer(str(kind))
    if cutters is None:
        raise InputError(
            f"{name}: tokenizer.ggml.pre {kind!r} is not supported; known: gpt-2, smollm, llama-bpe, qwen2"
        )
    missing = [key for key in ("tokens", "token_type", "merges") if f"tokenizer.ggml.{key}" not in metadata]
    if missing:
        raise InputError(f"{name}: tokenizer.ggml.{missing[0]} is missing")
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=kind == "llama-bpe"))
    if kind == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(cutters)
    backend.decoder = decoders.ByteLevel()
    control, user_defined = 3, 4
    for token, token_kind in zip(tokens, kinds, strict=True):
        if token_kind in (control, user_defined):
            backend.add_tokens([AddedToken(token, special=token_kind == control, normalized=False)])
    special = {}
    for key, short in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        if (index := metadata.get(f"tokenizer.ggml.{short}_token_id")) is not None:
            special[key] = tokens[index]
    if metadata.get("tokenizer.ggml.add_bos_token"):
        bos = special["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], special_tokens=[(bos, vocabulary[bos])]
        )
    return Tokenizer(backend, metadata.get("tokenizer.chat_template"), special, name)
