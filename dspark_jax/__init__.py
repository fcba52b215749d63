"""Speculative decoding in JAX: DSpark drafting, lossless verification, and drafter training."""

from dspark_jax.config import (
    DrafterConfig,
    DraftModelConfig,
    Eagle3Config,
    MarkovHeadType,
    MTPConfig,
    RopeScaling,
    TargetConfig,
    TreeKind,
    TreeSpec,
    default_taps,
)
from dspark_jax.decode_state import DecodeConfig
from dspark_jax.generation import Generation, generate, generate_chunks
from dspark_jax.sampling import SamplingParams, request_keys, sampling_params
from dspark_jax.verification.verifier import Verifier

__all__ = [
    "DecodeConfig",
    "DraftModelConfig",
    "DrafterConfig",
    "Eagle3Config",
    "Generation",
    "MTPConfig",
    "MarkovHeadType",
    "RopeScaling",
    "SamplingParams",
    "TargetConfig",
    "TreeKind",
    "TreeSpec",
    "Verifier",
    "default_taps",
    "generate",
    "generate_chunks",
    "request_keys",
    "sampling_params",
]
