"""Text that every Python has: the sources of its standard library, split by file into training and held-out."""

import dataclasses
import enum
import hashlib
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from dspark_jax.io.errors import InputError
from dspark_jax.io.files import reported
from dspark_jax.training.anchors import Batch

EOS = 257
# Installed packages, tests, and generated tables.
_EXCLUDED = frozenset({
    "site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__",
})  # fmt: skip
_HELD_OUT_ONE_IN = 20


class Split(enum.Enum):
    """Which files: those that the byte model is trained on, or the rest."""

    TRAIN = "train"
    HELD_OUT = "held-out"


def is_held_out(name: str) -> bool:
    """Whether a file, named relative to the sources with forward slashes, is held out: 5% are, by a hash of the name.

    A hash and not a position in the list, so that another version of Python, with other files, agrees on it.
    """
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) % _HELD_OUT_ONE_IN == 0


def corpus(split: Split, sources: Path | None = None) -> dict[str, bytes]:
    """The split's files by relative name, in sorted order. `sources`: default the running Python's standard library.

    Raises:
      InputError: the folder has no such file, or one cannot be read.
    """
    root = Path(sysconfig.get_path("stdlib")) if sources is None else sources
    names = sorted(
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if not _EXCLUDED & set(path.relative_to(root).parts) and not path.name.startswith("_sysconfigdata")
    )
    files = {}
    for name in names:
        if is_held_out(name) == (split is Split.HELD_OUT):
            with reported(root / name):
                files[name] = (root / name).read_bytes()
    files = {name: data for name, data in files.items() if data and _is_text(data)}
    if not files:
        raise InputError(f"{root}: holds no Python source of the {split.value} split")
    return files


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


@dataclasses.dataclass(frozen=True, eq=False)
class TokenStream:
    """Files one after another, each ended by EOS. `starts`: index of each file's first token, ascending."""

    tokens: np.ndarray
    starts: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)


def token_stream(files: Sequence[bytes]) -> TokenStream:
    """The bytes of the files as tokens, int32."""
    parts = [np.append(np.frombuffer(data, np.uint8).astype(np.int32), np.int32(EOS)) for data in files]
    lengths = np.array([len(part) for part in parts])
    return TokenStream(np.concatenate(parts), np.cumsum(lengths) - lengths)


def windows(stream: TokenStream, begins: np.ndarray, length: int) -> Batch:
    """Rows of `length` tokens from the indices `begins`, [len(begins), length].

    Positions count from the window's or the file's first token, whichever is later, as they would in decoding.
    Beyond the stream's end rows are padded.
    """
    index = begins[:, None] + np.arange(length)[None]
    inside = index < len(stream)
    index = np.minimum(index, len(stream) - 1)
    document = np.searchsorted(stream.starts, index, side="right").astype(np.int32) - 1
    first = np.maximum(stream.starts[document], begins[:, None])
    return Batch(
        tokens=jnp.asarray(stream.tokens[index]),
        loss_mask=jnp.asarray(inside),
        document_ids=jnp.asarray(np.where(inside, document, -1).astype(np.int32)),
        positions=jnp.asarray((index - first).astype(np.int32)),
    )
