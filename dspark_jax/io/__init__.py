"""Everything that touches a file: models, calibrations, tokenizers, prompts, JSON, and the one-line error."""

from dspark_jax.io.calibration import Calibration, CalibrationLaw, EdgeMap, load_calibration
from dspark_jax.io.drafter import Drafter, describe_drafter, load_drafter, save_drafter
from dspark_jax.io.errors import InputError
from dspark_jax.io.files import (
    JsonlWriter,
    atomic_file,
    atomic_folder,
    numbered_jsonl,
    read_json,
    read_jsonl,
    write_bytes,
    write_json,
    write_jsonl,
    write_text,
)
from dspark_jax.io.layer_ids import from_engine_layer_ids, to_engine_layer_ids
from dspark_jax.io.prompts import Prompt, PromptEncoder, check_messages, padded_length, parse_prompt, read_prompts
from dspark_jax.io.target import Target, TargetDescription, describe_target, load_target, save_target
from dspark_jax.io.tokenizer import Tokenizer, byte_tokenizer, load_tokenizer

__all__ = [
    "Calibration",
    "CalibrationLaw",
    "Drafter",
    "EdgeMap",
    "InputError",
    "JsonlWriter",
    "Prompt",
    "PromptEncoder",
    "Target",
    "TargetDescription",
    "Tokenizer",
    "atomic_file",
    "atomic_folder",
    "byte_tokenizer",
    "check_messages",
    "describe_drafter",
    "describe_target",
    "from_engine_layer_ids",
    "load_calibration",
    "load_drafter",
    "load_target",
    "load_tokenizer",
    "numbered_jsonl",
    "padded_length",
    "parse_prompt",
    "read_json",
    "read_jsonl",
    "read_prompts",
    "save_drafter",
    "save_target",
    "to_engine_layer_ids",
    "write_bytes",
    "write_json",
    "write_jsonl",
    "write_text",
]
