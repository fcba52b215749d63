"""`python -m train fit`: data, target and drafter brought together, trained and exported."""

import dataclasses
import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from dspark_jax.config import DraftModelConfig
from dspark_jax.drafters.kinds import first_anchor
from dspark_jax.io import InputError, TargetDescription, describe_target
from dspark_jax.io.drafter_config import fields_from_drafter_config
from dspark_jax.io.mesh_option import mesh_of_devices
from dspark_jax.sharding import TRAIN_MESH_AXES, batch_axes
from dspark_jax.training.step import TrainConfig, abstract_train_state, init_train_state
from train.cached_features import CachedFeatures, complete_manifest
from train.checkpoints import Checkpoints
from train.data import (
    Documents,
    Encoding,
    RowPacker,
    first_pass,
    held_out_rows,
    in_order,
    load_documents,
    row_length,
    row_packer,
    split,
    training_order,
    training_rows,
)
from train.export import CHECKPOINTS, export
from train.fit_config import FitConfig, check_settings, settings
from train.loop import Run, fit
from train.metrics import plot
from train.new_drafter import initial_drafter
from train.processes import is_first, join, say, spread

DRAFTER = "drafter"


def main(config: FitConfig) -> None:
    """Runs the command."""
    if not config.data:
        raise InputError("--data: name at least one file")
    if config.distributed:
        join()
    mesh = None if config.mesh is None else mesh_of_devices("--mesh", config.mesh, TRAIN_MESH_AXES)
    target = describe_target(config.target, allow_config_keys=config.allow_config_key)
    cache = None
    if config.features is not None:
        cache = CachedFeatures(config.features, complete_manifest(config.features, target))
    checkpoints = Checkpoints(config.output / CHECKPOINTS)
    now = settings(config, target)
    if (last := checkpoints.last()) is not None:
        check_settings(checkpoints.notes(last)["settings"], now, config)
    try:
        _train(config, target, cache, checkpoints, now, mesh)
    finally:
        checkpoints.close()


def _train(
    config: FitConfig,
    description: TargetDescription,
    cache: CachedFeatures | None,
    checkpoints: Checkpoints,
    now: dict,
    mesh: Mesh | None,
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
    target = description.load(
        dtype=config.dtype,
        mesh=mesh,
        # A loop over stacked layers gathers one at a time from all devices.
        stacked_layers=mesh is not None and len(set(description.config.sliding_windows)) == 1,
        without_layers=stored and config.init_layers is None,
    )
    initial_key, run_key = jax.random.split(jax.random.key(config.seed))
    drafter, params = initial_drafter(config, target, documents, initial_key)
    if stored:
        # Nothing runs them any more.
        target = dataclasses.replace(target, params=target.params.replace(layers=()))
    add = None if starts is None else cache.rows(starts, drafter, mesh)
    add_held_out = None if held_out_starts is None else cache.rows(held_out_starts, drafter, mesh)
    order = training_order(chosen, config.batch_size, config.seed)
    packer = _packer(config, drafter, documents, first_pass(order, len(chosen)), mesh)
    batches = in_order(held_out, config.batch_size)
    held_out_packer = _packer(config, drafter, held_out_documents, batches, mesh)
    steps = config.steps or max(1, round(config.epochs * len(chosen) / config.batch_size))
    train = TrainConfig(
        target=target.config,
        drafter=drafter,
        total_steps=steps,
        loss=config.loss,
        optimizer=config.optimizer,
        remat=config.remat,
    )
    run = Run(
        config,
        train,
        target.params,
        training_rows(order, packer, add),
        lambda: held_out_rows(batches, held_out_packer, add_held_out),
        checkpoints,
        {
            "settings": now,
            "drafter": fields_from_drafter_config(drafter),
            "target": config.target,
            "dtype": config.dtype,
        },
        mesh,
    )
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    say(
        f"{len(chosen)} documents ({len(held_out)} held out, {documents.dropped} dropped), {steps} steps of "
        f"{config.batch_size} in {packer.rows} rows of {packer.capacity.tokens} tokens and {packer.capacity.anchors} "
        f"anchors; {size:,} trained parameters"
    )
    if cache is not None:
        size = packer.rows * packer.capacity.tokens * cache.token_bytes
        say(f"{config.features}: the features of a batch take {size / 1e6:,.1f} MB of the device's memory")
    state = init_train_state(train, run_key, params)
    if mesh is None:
        best = fit(run, state)
    else:
        state = spread(state, jax.tree.map(lambda x: x.sharding, abstract_train_state(train, mesh)))
        with jax.set_mesh(mesh):
            best = fit(run, state)
    if is_first():
        plot(config.output)
    export(checkpoints, best, drafter, target, config.output / DRAFTER, config.dtype, deepspec=False)
    say(f"{config.output / DRAFTER}: the drafter after step {best}")


def _packer(
    config: FitConfig,
    drafter: DraftModelConfig,
    documents: Documents,
    batches: Sequence[np.ndarray],
    mesh: Mesh | None,
) -> RowPacker:
    """For batches of which each document has as many anchors as are trained at a time."""
    anchors = np.minimum(documents.valid_anchors(first_anchor(drafter)), drafter.num_anchors)
    devices = 1 if mesh is None else math.prod(mesh.shape[axis] for axis in batch_axes(mesh))
    return row_packer(
        documents, anchors, batches, row_length(documents, config.max_length), config.accumulation, devices
    )


def _held_out_starts(cache: CachedFeatures, documents: Documents, encoding: Encoding):
    """Where held-out documents are in the cache; None, and a line that says so, unless all are."""
    starts = cache.starts(documents, encoding.max_length)
    if (starts >= 0).all():
        return starts
    say(f"{cache.folder}: lacks documents of --held-out-data; the target runs on all of these")
    return None


def _documents(config: FitConfig, encoding: Encoding):
    """Documents and chosen indices, for training and held out."""
    documents = load_documents(config.data, encoding)
    if not config.held_out_data:
        chosen, held_out = split(documents)
        return documents, chosen, documents, held_out
    held_out_documents = load_documents(config.held_out_data, encoding)
    return documents, range(len(documents)), held_out_documents, range(len(held_out_documents))
