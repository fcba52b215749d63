"""`python -m train fit`: data, target and drafter brought together, trained and exported."""

import dataclasses

import jax

from dspark_jax.io import InputError, TargetDescription, describe_target
from dspark_jax.io.drafter_config import fields_from_drafter_config
from dspark_jax.training.step import TrainConfig, init_train_state
from train.cached_features import CachedFeatures, complete_manifest
from train.checkpoints import Checkpoints
from train.data import Documents, Encoding, held_out_rows, load_documents, row_length, split, training_rows
from train.export import CHECKPOINTS, export
from train.fit_config import FitConfig, check_settings, settings
from train.loop import Run, fit
from train.metrics import plot
from train.new_drafter import initial_drafter

DRAFTER = "drafter"


def main(config: FitConfig) -> None:
    """Runs the command."""
    if not config.data:
        raise InputError("--data: name at least one file")
    target = describe_target(config.target, allow_config_keys=config.allow_config_key)
    cache = None
    if config.features is not None:
        cache = CachedFeatures(config.features, complete_manifest(config.features, target))
    checkpoints = Checkpoints(config.output / CHECKPOINTS)
    now = settings(config, target)
    if (last := checkpoints.last()) is not None:
        check_settings(checkpoints.notes(last)["settings"], now, config)
    try:
        _train(config, target, cache, checkpoints, now)
    finally:
        checkpoints.close()


def _train(
    config: FitConfig,
    description: TargetDescription,
    cache: CachedFeatures | None,
    checkpoints: Checkpoints,
    now: dict,
) -> None:
    encoding = Encoding(
        tokenizer=description.tokenizer,
        vocab_size=description.config.vocab_size,
        max_length=min(config.max_length, description.config.max_position_embeddings),
        enable_thinking=config.enable_thinking,
    )
    documents, chosen, held_out_documents, held_out = _documents(config, encoding)
    starts, held_out_starts = None, None
    if cache is not None:
        starts = cache.starts(documents, encoding.max_length)
        cache.check_found(starts, documents, encoding, now["data"])
        held_out_starts = _held_out_starts(cache, held_out_documents, encoding)
    stored = held_out_starts is not None
    target = description.load(dtype=config.dtype, without_layers=stored and config.init_layers is None)
    initial_key, run_key = jax.random.split(jax.random.key(config.seed))
    drafter, params = initial_drafter(config, target, documents, initial_key)
    if stored:
        # Nothing runs them any more.
        target = dataclasses.replace(target, params=target.params.replace(layers=()))
    add = None if starts is None else cache.rows(starts, drafter)
    add_held_out = None if held_out_starts is None else cache.rows(held_out_starts, drafter)
    length = row_length(documents, config.max_length)
    steps = config.steps or max(1, round(config.epochs * len(chosen) / config.batch_size))
    train = TrainConfig(
        target=target.config, drafter=drafter, total_steps=steps, loss=config.loss, optimizer=config.optimizer
    )
    rows = config.batch_size // config.accumulation
    held_out_length = row_length(held_out_documents, config.max_length)
    run = Run(
        config,
        train,
        target.params,
        training_rows(documents, chosen, length, config.batch_size, config.seed, add),
        lambda: held_out_rows(held_out_documents, held_out, held_out_length, rows, add_held_out),
        checkpoints,
        {
            "settings": now,
            "drafter": fields_from_drafter_config(drafter),
            "target": config.target,
            "dtype": config.dtype,
        },
    )
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    print(
        f"{len(chosen)} documents ({len(held_out)} held out, {documents.dropped} dropped), rows of {length} tokens, "
        f"{steps} steps of {config.batch_size}; {size:,} trained parameters"
    )
    if cache is not None:
        size = config.batch_size * length * cache.token_bytes
        print(f"{config.features}: the features of a batch take {size / 1e6:,.1f} MB of the device's memory")
    best = fit(run, init_train_state(train, run_key, params))
    plot(config.output)
    export(checkpoints, best, drafter, target, config.output / DRAFTER, config.dtype, deepspec=False)
    print(f"{config.output / DRAFTER}: the drafter after step {best}")


def _held_out_starts(cache: CachedFeatures, documents: Documents, encoding: Encoding):
    """Where held-out documents are in the cache; None, and a line that says so, unless all are."""
    starts = cache.starts(documents, encoding.max_length)
    if (starts >= 0).all():
        return starts
    print(f"{cache.folder}: lacks documents of --held-out-data; the target runs on all of these")
    return None


def _documents(config: FitConfig, encoding: Encoding):
    """Documents and chosen indices, for training and held out."""
    documents = load_documents(config.data, encoding)
    if not config.held_out_data:
        chosen, held_out = split(documents)
        return documents, chosen, documents, held_out
    held_out_documents = load_documents(config.held_out_data, encoding)
    return documents, range(len(documents)), held_out_documents, range(len(held_out_documents))
