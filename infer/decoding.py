"""A target and a drafter ready to decode batches."""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

import dspark_jax
from dspark_jax import DecodeConfig, DraftModelConfig, Generation, TargetConfig, TreeSpec, Verifier
from dspark_jax.decode_state import Requests
from dspark_jax.io import Drafter, InputError, Target
from infer.batching import Batch
from infer.options import DraftingOptions
from infer.text import Texts


@dataclasses.dataclass(frozen=True, eq=False)
class Decoder:
    """`dspark_jax.generate` with everything but the batch filled in. `drafter` None decodes plainly."""

    target: Target
    drafter: Drafter | None
    config: DecodeConfig
    options: DraftingOptions

    def run(self, batch: Batch) -> Generation:
        """Decodes to the end; on the host when it returns."""
        return jax.tree.map(np.asarray, dspark_jax.generate(*self._arguments(batch)))

    def compile(self, batch: Batch) -> None:
        """Compiles for batches of this shape, by a run that asks for no token."""
        nothing = dataclasses.replace(batch, max_tokens=jnp.zeros_like(batch.max_tokens))
        jax.block_until_ready(dspark_jax.generate(*self._arguments(nothing)))

    def stream(self, batch: Batch, rounds_per_chunk: int, texts: Texts) -> Iterator[Generation]:
        """As `dspark_jax.generate_chunks`, ending requests at the stop strings of `texts`."""

        def stop(_: int, tokens: np.ndarray) -> int | None:
            return texts.find_stop(tokens.tolist())

        chunks = dspark_jax.generate_chunks(
            *self._arguments(batch), rounds_per_chunk=rounds_per_chunk, stop=stop if texts.longest_stop else None
        )
        return (jax.tree.map(np.asarray, chunk) for chunk in chunks)

    def requests(self, batch: Batch) -> Requests:
        rows = batch.shape[0]
        threshold = jnp.full(rows, self.options.confidence_threshold, jnp.float32)
        return Requests(batch.keys, self.options.sampling(rows), batch.max_tokens, threshold)

    def _arguments(self, batch: Batch) -> tuple:
        requests = self.requests(batch)
        return (
            self.target.params,
            None if self.drafter is None else self.drafter.params,
            batch.tokens,
            batch.lengths,
            batch.keys,
            self.config,
            requests.sampling,
            requests.max_tokens,
            requests.confidence_threshold,
        )


def decode_config(
    target: TargetConfig,
    drafter: DraftModelConfig | None,
    max_new_tokens: int,
    verifier: Verifier = Verifier.COUPLED,
    tree: TreeSpec | None = None,
    eos_token_ids: tuple[int, ...] = (),
    log_probabilities: bool = False,
    max_drafts: int | None = None,
) -> DecodeConfig:
    """Raises an InputError for a tree that does not fit the drafter or the verifier. `max_drafts`: of a chain; a tree
    and plain decoding have none.
    """
    try:
        return DecodeConfig(
            target=target,
            drafter=drafter,
            tree=tree,
            max_drafts=max_drafts if tree is None and drafter is not None else None,
            max_new_tokens=min(max_new_tokens, target.max_position_embeddings),
            eos_token_ids=eos_token_ids,
            verifier=verifier,
            log_probabilities=log_probabilities,
        )
    except ValueError as error:
        raise InputError(f"--{str(error).replace('tree ', 'tree-', 1)}") from error


def make_decoder(
    target: Target,
    drafter: Drafter | None,
    options: DraftingOptions,
    verifier: Verifier = Verifier.COUPLED,
    tree: TreeSpec | None = None,
    log_probabilities: bool = False,
) -> Decoder:
    drafter_config = None if drafter is None else drafter.config
    config = decode_config(
        target.config,
        drafter_config,
        options.max_new_tokens,
        verifier,
        tree,
        target.eos_token_ids,
        log_probabilities,
        options.max_drafts,
    )
    return Decoder(target, drafter, config, options)
