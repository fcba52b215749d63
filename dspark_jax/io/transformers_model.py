"""A target as the transformers library (PyTorch) reads it, to compare with; both are in the extra `parity`."""

from pathlib import Path
from typing import Any

from dspark_jax.io.errors import InputError
from dspark_jax.io.named_models import locate
from dspark_jax.io.target import resolve_folder


def load_transformers_model(source: str) -> Any:
    """The model in float32, from the same files.

    Raises:
      InputError: torch or transformers is not installed, or cannot read the model.
    """
    try:
        import torch
        import transformers
    except ImportError as error:
        raise InputError(f"{error.name} is not installed: pip install -e '.[parity]'") from error
    path = Path(locate(source))
    place = {"gguf_file": path.name} if path.is_file() else {}
    folder = path.parent if place else resolve_folder(path)
    try:
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **place).eval()
    except Exception as error:  # the library raises nothing narrower
        version = transformers.__version__
        raise InputError(f"{source}: transformers {version} cannot read it ({error}); try another version") from error


def transformers_versions() -> dict[str, str]:
    """Of torch and transformers, which must be installed."""
    import torch
    import transformers

    return {"torch": torch.__version__, "transformers": transformers.__version__}
