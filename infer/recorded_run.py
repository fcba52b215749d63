"""A recorded run: what a drafter proposes from every position of the texts that its target decodes."""

import dataclasses
import json
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from dspark_jax import TreeSpec, request_keys
from dspark_jax.io import InputError, Prompt, atomic_file
from dspark_jax.io.calibration import tree_fields
from dspark_jax.io.files import reported
from dspark_jax.proposals import Proposal, chain
from dspark_jax.recording import record_positions
from dspark_jax.scheduling.simulation import Replay, accepted_drafts
from dspark_jax.scheduling.survival import SurvivalMap, forest_of
from infer.batching import Request, converse, make_batch
from infer.decoding import Decoder

_forests = jax.jit(forest_of)
_TREE = "tree_"


@dataclasses.dataclass(frozen=True, eq=False)
class RecordedTrees:
    """The tree at each row. `scores` and `parents` are those of a `Proposal`; `accepted` as in a `Replay`."""

    scores: Float[np.ndarray, "rows N"]
    parents: Int[np.ndarray, "rows N"]
    accepted: Bool[np.ndarray, "rows N"]

    @property
    def nodes(self) -> int:
        """Nodes of a tree, the root included."""
        return self.parents.shape[1]

    @property
    def depths(self) -> Int[np.ndarray, "rows N"]:
        depths, rows = np.zeros(self.parents.shape, np.int32), np.arange(len(self.parents))
        for node in range(1, self.nodes):
            parent = self.parents[:, node]
            depths[:, node] = np.where(parent < 0, 0, depths[rows, parent] + 1)
        return depths


@dataclasses.dataclass(frozen=True, eq=False)
class RecordedRun:
    """Chains, and perhaps trees, at the rows of a `Replay`, before calibration.

    `accepted`: how many drafts of each chain the target accepts. `law`: models, sampling and the tree, for reports.
    """

    lengths: Int[np.ndarray, "requests"]
    confidence_logits: Float[np.ndarray, "rows gamma"]
    accepted: Int[np.ndarray, "rows"]
    law: dict[str, Any]
    trees: RecordedTrees | None = None

    @property
    def gamma(self) -> int:
        return self.confidence_logits.shape[1]

    @property
    def tree(self) -> TreeSpec | None:
        return None if self.trees is None else TreeSpec(**self.law["tree"])

    def replay(self, survival: SurvivalMap) -> Replay:
        """The chains."""
        rows, gamma = self.confidence_logits.shape
        tokens, lengths = jnp.zeros((rows, gamma + 1), jnp.int32), jnp.full(rows, gamma, jnp.int32)
        proposal = chain(tokens, lengths, confidence_logits=jnp.asarray(self.confidence_logits))
        depths = np.arange(gamma + 1)
        accepted = (depths > 0) & (depths <= self.accepted[:, None])
        return self._replay(proposal, survival, accepted, trees=False)

    def tree_replay(self, survival: SurvivalMap) -> Replay | None:
        """The trees, where they were recorded."""
        if self.trees is None:
            return None
        scores, parents, depths = map(
            jnp.asarray, (self.trees.scores, self.trees.parents.astype(np.int32), self.trees.depths)
        )
        proposal = Proposal(jnp.zeros_like(parents), parents, depths, jnp.isfinite(scores), scores=scores)
        return self._replay(proposal, survival, self.trees.accepted, trees=True)

    def _replay(self, proposal: Proposal, survival: SurvivalMap, accepted: np.ndarray, trees: bool) -> Replay:
        forest = jax.device_get(_forests(proposal, survival, jnp.ones(len(accepted), bool)))
        return Replay(self.lengths, forest, accepted, trees)

    def save(self, path: Path) -> None:
        arrays = {name: value for name, value in vars(self).items() if name not in ("law", "trees")}
        if self.trees is not None:
            arrays |= {_TREE + name: value for name, value in vars(self.trees).items()}
        with atomic_file(path) as temporary, open(temporary, "wb") as file:
            np.savez_compressed(file, **arrays | {"law": np.array(json.dumps(self.law))})

    @classmethod
    def load(cls, path: Path) -> Self:
        """Raises an InputError for a file that is missing or no recorded run, in one line that names the field."""
        try:
            with reported(path), np.load(path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in ("lengths", "confidence_logits", "accepted")}
                law = json.loads(str(file["law"]))
                names = ("scores", "parents", "accepted") if isinstance(law, dict) and law.get("tree") else ()
                trees = {name: file[_TREE + name] for name in names}
        except KeyError as error:
            raise InputError(f"{path}: is no recorded run: {error.args[0]}; record one with --record") from error
        except (ValueError, EOFError, TypeError, zipfile.BadZipFile) as error:
            raise InputError(f"{path}: is no recorded run, or a damaged one; record one with --record") from error
        wrong = _wrong_field(law, **arrays)
        if wrong is None and trees:
            wrong = _wrong_trees(law["tree"], len(arrays["accepted"]), arrays["confidence_logits"].shape[1], **trees)
        if wrong is not None:
            raise InputError(f"{path}: {wrong}; record the run again")
        return cls(law=law, trees=RecordedTrees(**trees) if trees else None, **arrays)


def _wrong_field(law: Any, lengths: np.ndarray, confidence_logits: np.ndarray, accepted: np.ndarray) -> str | None:
    if not isinstance(law, dict):
        return "law must be an object"
    if lengths.ndim != 1 or not lengths.size or lengths.dtype.kind != "i" or (lengths < 2).any():
        return "lengths must be integers of at least 2, one a request"
    rows = int((lengths - 1).sum())
    shape = confidence_logits.shape
    if len(shape) != 2 or shape[0] != rows or not shape[1] or confidence_logits.dtype.kind != "f":
        return f"confidence_logits {list(shape)} must be numbers of {rows} rounds, the positions that lengths tells of"
    if not np.isfinite(confidence_logits).all():
        return "confidence_logits are not all finite"
    if accepted.shape != (rows,) or accepted.dtype.kind != "i" or (accepted < 0).any() or (accepted > shape[1]).any():
        return f"accepted {list(accepted.shape)} must be integers of {rows} rounds, from 0 to {shape[1]}"
    return None


def _wrong_trees(
    spec: Any, rows: int, gamma: int, scores: np.ndarray, parents: np.ndarray, accepted: np.ndarray
) -> str | None:
    try:
        shape = (rows, TreeSpec(**spec).budget)
    except (TypeError, ValueError) as error:
        return f"law.tree describes no tree ({error})"
    for name, values, kind in (("scores", scores, "f"), ("parents", parents, "i"), ("accepted", accepted, "b")):
        if values.shape != shape or values.dtype.kind != kind:
            return f"{_TREE}{name} {list(values.shape)} must hold the nodes {list(shape)} of the law's tree"
    valid = np.isfinite(scores)
    before = (parents < np.arange(shape[1])) & (parents >= 0)
    if not valid[:, 0].all() or (parents[:, 0] >= 0).any() or not before[:, 1:][valid[:, 1:]].all():
        return f"{_TREE}parents must come before their children, and the root first"
    above = np.maximum(parents, 0)
    with_root = accepted | (np.arange(shape[1]) == 0)
    trees = RecordedTrees(scores, parents, accepted)
    if not np.take_along_axis(valid, above, axis=1)[valid].all() or trees.depths.max() > gamma:
        return f"{_TREE}scores are not those of trees of depth {gamma}"
    if (
        not (np.take_along_axis(with_root, above, axis=1) & valid)[accepted].all()
        or (accepted.sum(axis=1) != (accepted * trees.depths).max(axis=1)).any()
    ):
        return f"{_TREE}accepted must be paths from the root"
    return None


def record_run(
    decoder: Decoder, prompts: Sequence[Prompt], rows: int, law: dict[str, Any], done: Callable[[int], object]
) -> RecordedRun:
    """Decodes the prompts, `rows` together, one token a round: each round drafts from the next position.

    The decoder's drafter has a confidence head, and its verifier is coupled. Where it has a tree, each round drafts the
    chain and the tree. Requests of one token, which have no round, are left out. `done` is told how many requests each
    batch has finished.

    Raises:
      InputError: no request has a round, or a confidence is not finite.
    """
    target, options, config = decoder.target, decoder.options, decoder.config
    keys, tokenizer = request_keys(options.seed, len(prompts)), target.tokenizer
    lengths: list[int] = []
    chains: list[tuple[Proposal, np.ndarray]] = []
    trees: list[tuple[Proposal, np.ndarray]] = []

    def answer(asked: list[Request]) -> list[str]:
        batch = make_batch(asked, rows, config.target.max_position_embeddings, config.max_new_tokens, keys)
        arguments = (batch.tokens, batch.lengths, decoder.requests(batch), config)
        recorded = record_positions(target.params, decoder.drafter.params, *arguments)
        generation, (chain, tree) = jax.device_get(recorded)
        texts = [generation.tokens[row, : generation.lengths[row]] for row in range(len(asked))]
        for row, text in enumerate(texts):
            if len(text) < 2:
                continue
            lengths.append(len(text))
            chains.append(_followed(chain, row, text))
            if tree is not None:
                trees.append(_followed(tree, row, text))
        done(len(asked))
        return ["" if tokenizer is None else tokenizer.decode(text.tolist()) for text in texts]

    converse(prompts, rows, answer)
    if not lengths:
        raise InputError("--prompts: every answer is one token, without a round; give other prompts")
    logits = np.concatenate([np.asarray(proposal.confidence_logits) for proposal, _ in chains]).astype(np.float32)
    if not np.isfinite(logits).all():
        raise InputError(f"--drafter {options.drafter}: gives confidences that are not finite")
    recorded_trees = None
    if config.tree is not None:
        scores, parents = (np.concatenate([getattr(tree, name) for tree, _ in trees]) for name in ("scores", "parents"))
        accepted = np.concatenate([accepted for _, accepted in trees])
        recorded_trees = RecordedTrees(scores.astype(np.float32), parents.astype(np.int16), accepted)
    accepted = np.concatenate([accepted.sum(axis=1) for _, accepted in chains])
    law = law | {"tree": None if config.tree is None else tree_fields(config.tree)}
    return RecordedRun(np.asarray(lengths), logits, accepted, law, recorded_trees)


def _followed(proposals: Proposal, row: int, text: np.ndarray) -> tuple[Proposal, Bool[np.ndarray, "L-1 N"]]:
    """A request's proposals, and which of their drafts its text follows."""
    proposal = jax.tree.map(lambda x: x[row, : len(text) - 1], proposals)
    return proposal, accepted_drafts(proposal.tokens, proposal.parents, proposal.depths, text)
