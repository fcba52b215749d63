"""`python -m train cache`: the frozen target run once over the data, its features kept for every epoch of `fit`."""

import dataclasses
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts
from jax.experimental import multihost_utils
from jaxtyping import Int
from tqdm import tqdm

from dspark_jax.config import check_taps, default_taps
from dspark_jax.io import InputError, Target, TargetDescription, describe_target
from dspark_jax.training.features import Storage, StoredFeatures, compute_features
from train.cache_files import MANIFEST, Manifest, open_arrays, read_manifest
from train.cache_layout import Layout, cache_bytes, plan, row_length, state_arrays, token_bytes
from train.data import Documents, Encoding, file_digest, load_documents
from train.processes import hidden_bar, is_first, join, say, wait_for_all
from train.storage import missing_shards, storage_reported


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """Store the target's features of the data, so that `fit --features` needs no pass of the target.

    The same command again goes on where an interrupted one stopped, and ends with the same values.
    """

    target: str
    """Hugging Face folder or hub id, or a .gguf file."""
    data: tuple[Path, ...]
    """JSON Lines files as for `fit`; those of its --held-out-data may be among them."""
    output: Path
    """Folder to write."""
    target_layer_ids: tuple[int, ...] | None = None
    """Tapped target layers, as for `fit`: by default those that it trains with by default. None at all serves
    multi-token prediction, which reads the last hidden state only."""
    storage: Storage = "bfloat16"
    """How values are stored; int8 has a scale for each token and layer."""
    max_length: int = 4096
    """Tokens after which a document is cut; the target's context, if that is less."""
    batch_size: int = 16
    """Documents that the target reads at a time."""
    enable_thinking: bool | None = None
    """Passed to the chat template; by default the template decides."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the target's weights and activations."""
    distributed: bool = False
    """Run as one of several processes, each of which computes a part with its own device, as for `fit`: they share the
    data's and the output's folders and get the same command. Another number of them may go on."""
    estimate: bool = False
    """Print the size and the free space, and do nothing."""
    allow_config_key: tuple[str, ...] = ()
    """Unknown keys of the target's config.json that may be ignored."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise InputError(f"--batch-size {self.batch_size}: must be at least 1")
        if self.max_length < 2:
            raise InputError(f"--max-length {self.max_length}: must be at least 2")
        if not self.data:
            raise InputError("--data: name at least one file")


def main(config: CacheConfig) -> None:
    """Runs the command."""
    if config.distributed:
        # A SIGTERM then ends a process, as a kill does: what is written stays.
        jax.config.update("jax_enable_preemption_service", False)
        join()
    description = describe_target(config.target, allow_config_keys=config.allow_config_key)
    taps = _taps(config, description)
    if config.output.exists() and not config.output.is_dir():
        raise InputError(f"{config.output}: is a file; name a folder to write")
    encoding = Encoding(
        tokenizer=description.tokenizer,
        vocab_size=description.config.vocab_size,
        max_length=min(config.max_length, description.config.max_position_embeddings),
        enable_thinking=config.enable_thinking,
    )
    documents = load_documents(config.data, encoding)
    size = token_bytes(config.storage, len(taps) + 1, description.config.hidden_size)
    layout = plan(np.diff(documents.starts), config.batch_size, size)
    manifest = _manifest(config, description, taps, encoding.max_length, documents, layout)
    if config.estimate:
        total = _size(_bytes(manifest, layout.rows))
        say(f"{_contents(config, manifest)}: {total}, {size:,} bytes a token; {_size(_free(config.output))} free")
        return
    missing = _agreed(_missing(config, manifest, layout), manifest)
    if missing is None:
        say(f"{_contents(config, manifest)}: complete already")
        return
    if is_first():
        manifest.write(config.output)
        with _reported(config):
            open_arrays(config.output, manifest, create=True)
    # All write to what one has made.
    wait_for_all("arrays")
    _write(config, description.load(dtype=config.dtype), documents, layout, manifest, missing)


def _missing(config: CacheConfig, manifest: Manifest, layout: Layout) -> list[int] | None:
    """Numbers of the shards to compute, for which there is room; None where the cache is complete.

    Raises:
      InputError: as `_saved`; or there is too little room.
    """
    saved = _saved(config, manifest)
    missing = list(range(manifest.shards))
    if saved is not None:
        with _reported(config):
            missing = missing_shards(_arrays(config, manifest).values(), manifest.shards)
        if saved.complete and not missing:
            return None
    needed, free = _bytes(manifest, [layout.rows[number] for number in missing]), _free(config.output)
    if needed > free:
        raise InputError(
            f"{config.output}: needs {_size(needed)}, and {_size(free)} are free; make room, or use --storage int8, "
            "fewer --target-layer-ids or a smaller --max-length"
        )
    return missing


def _agreed(missing: list[int] | None, manifest: Manifest) -> list[int] | None:
    """What the first of several processes has found, once all have looked and none writes yet.

    Files on a shared disk may look older to another host.
    """
    found = np.zeros(1 + manifest.shards, bool)
    found[0] = missing is None
    found[1:][missing or []] = True
    complete, *absent = multihost_utils.broadcast_one_to_all(found).tolist()
    return None if complete else [number for number, is_absent in enumerate(absent) if is_absent]


def _taps(config: CacheConfig, description: TargetDescription) -> tuple[int, ...]:
    layers = description.config.num_hidden_layers
    if config.target_layer_ids is None:
        return default_taps(layers)
    try:
        if config.target_layer_ids:
            check_taps(config.target_layer_ids, layers)
    except ValueError as error:
        raise InputError(f"--target-layer-ids: {error}") from error
    return config.target_layer_ids


def _manifest(
    config: CacheConfig,
    description: TargetDescription,
    taps: tuple[int, ...],
    length: int,
    documents: Documents,
    layout: Layout,
) -> Manifest:
    return Manifest(
        target=description.fingerprint,
        tokenizer=None if description.tokenizer is None else description.tokenizer.fingerprint,
        enable_thinking=config.enable_thinking,
        data=file_digest(config.data),
        max_length=length,
        target_layer_ids=taps,
        storage=config.storage,
        dtype=config.dtype,
        batch_size=config.batch_size,
        hidden_size=description.config.hidden_size,
        documents=len(documents),
        tokens=len(documents.tokens),
        shards=len(layout.shards),
        shard_tokens=layout.shard_tokens,
    )


def _saved(config: CacheConfig, manifest: Manifest) -> Manifest | None:
    """The manifest that an earlier run left in the output.

    Raises:
      InputError: the output was made with other settings, or by something else.
    """
    folder = config.output
    if not (folder / MANIFEST).exists():
        # A killed run may have left a manifest's temporary file.
        others = sorted(path.name for path in folder.glob("*") if not path.name.startswith(f".{MANIFEST}"))
        if others:
            raise InputError(f"{folder}: holds {others[0]} and was not made by `cache`; name another --output")
        return None
    saved = read_manifest(folder)
    before, now = saved.fields(), manifest.fields()
    for name in now:
        if name == "complete" or before[name] == now[name]:
            continue
        difference = f"--{name.replace('_', '-')} {before[name]}, not {now[name]}"
        if name in ("target", "data"):
            difference = f"other contents of --{name}"
        elif name == "tokenizer":
            difference = "another tokenizer or chat template"
        raise InputError(f"{folder}: was made with {difference}; name another --output or remove it")
    return saved


def _reported(config: CacheConfig):
    return storage_reported(config.output, "written", "make room and run the command again, which goes on")


def _bytes(manifest: Manifest, rows: Sequence[int]) -> int:
    """Bytes of shards that hold so many tokens."""
    return cache_bytes(rows, manifest.shard_tokens, manifest.storage, manifest.layers, manifest.hidden_size)


def _arrays(config: CacheConfig, manifest: Manifest) -> dict[str, ts.TensorStore]:
    """The arrays that shards are written to."""
    arrays = open_arrays(config.output, manifest, create=True)
    return {name: array for name, array in arrays.items() if name != "documents"}


def _contents(config: CacheConfig, manifest: Manifest) -> str:
    return f"{config.output}: {manifest.documents:,} documents, {manifest.tokens:,} tokens as {manifest.storage}"


def _size(size: int) -> str:
    return f"{size / 1e9:,.2f} GB" if size >= 1e9 else f"{size / 1e6:,.2f} MB"


def _free(path: Path) -> int:
    """Bytes free where a folder is to be."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def _write(
    config: CacheConfig,
    target: Target,
    documents: Documents,
    layout: Layout,
    manifest: Manifest,
    missing: Sequence[int],
) -> None:
    """Computes and writes this process's part of the shards `missing`; then, from the first of all processes, what
    tells a complete cache.
    """
    with _reported(config):
        arrays = open_arrays(config.output, manifest)
    own, pending, begin = missing[jax.process_index() :: jax.process_count()], [], time.perf_counter()
    new, own_new = (sum(layout.rows[number] for number in numbers) for numbers in (missing, own))
    with tqdm(
        total=manifest.tokens - new + own_new, initial=manifest.tokens - new, unit=" tokens", unit_scale=True,
        disable=hidden_bar(), dynamic_ncols=True,
    ) as bar:  # fmt: skip
        for number in own:
            values, start = _shard(manifest, target, documents, layout, number, bar), number * layout.shard_tokens
            with _reported(config):
                # One shard is written while the next is computed.
                _wait(pending)
                pending = [
                    arrays[name][start : start + len(part)].write(part, can_reference_source_data_indefinitely=True)
                    for name, part in values.items()
                ]
        with _reported(config):
            _wait(pending)
    wait_for_all("shards")
    if not is_first():
        return
    with _reported(config):
        arrays["documents"].write(np.stack([layout.starts, documents.lengths], axis=1)).result()
    dataclasses.replace(manifest, complete=True).write(config.output)
    rate = new / (time.perf_counter() - begin)
    kept = manifest.shards - len(missing)
    print(f"{_contents(config, manifest)}; {rate:,.0f} tokens/s, compilations included ({kept} shards kept)")


def _wait(pending: Sequence[ts.Future]) -> None:
    for future in pending:
        future.result()


def _shard(
    manifest: Manifest, target: Target, documents: Documents, layout: Layout, number: int, bar: tqdm
) -> dict[str, np.ndarray]:
    """The rows of one shard, of each of its arrays."""
    batches, count = layout.shards[number], layout.rows[number]
    kinds = state_arrays(manifest.storage, manifest.layers, manifest.hidden_size)
    values = {name: np.empty((count, *shape), jnp.dtype(dtype)) for name, (shape, dtype) in kinds.items()}
    values["tokens"] = np.concatenate([documents[index][0] for batch in batches for index in batch])
    position = 0
    for batch, stored in _computed(manifest, target, documents, batches):
        host = jax.device_get({name: getattr(stored, name) for name in kinds})
        for row, index in enumerate(batch):
            length = len(documents[index][0])
            for name, rows in host.items():
                values[name][position : position + length] = rows[row, :length]
            position += length
            bar.update(length)
    return values


def _computed(
    manifest: Manifest, target: Target, documents: Documents, batches: Sequence[Int[np.ndarray, "batch"]]
) -> Iterator[tuple[Int[np.ndarray, "batch"], StoredFeatures]]:
    """Each batch with its features [batch_size, T, …]; the device works on the next one already."""
    before = None
    for batch in batches:
        rows = [documents[index][0] for index in batch]
        lengths = np.zeros(manifest.batch_size, np.int32)
        lengths[: len(rows)] = [len(row) for row in rows]
        tokens = np.zeros((manifest.batch_size, row_length(int(lengths.max()))), np.int32)
        for row, ids in enumerate(rows):
            tokens[row, : len(ids)] = ids
        inputs = jax.device_put((tokens, lengths))
        stored = compute_features(target.params, target.config, manifest.target_layer_ids, *inputs, manifest.storage)
        if before is not None:
            yield before
        before = batch, stored
    if before is not None:
        yield before
