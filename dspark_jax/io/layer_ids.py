"""Numbers of tapped layers: this project's and those of engines."""

from collections.abc import Sequence


def to_engine_layer_ids(layer_ids: Sequence[int]) -> tuple[int, ...]:
    """Tapped layers as vLLM, GGUF and Speculators count them: indices into Hugging Face's `hidden_states`.

    Here i is the output of decoder layer i and -1 the embedding; there they are i + 1 and 0.
    """
    return tuple(layer + 1 for layer in layer_ids)


def from_engine_layer_ids(layer_ids: Sequence[int]) -> tuple[int, ...]:
    """The inverse of `to_engine_layer_ids`."""
    return tuple(layer - 1 for layer in layer_ids)
