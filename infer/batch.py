"""`python -m infer batch`: a prompt file through the serving engine."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp

from dspark_jax import DecodeConfig, Verifier
from dspark_jax.io import Drafter, InputError, Prompt, Target
from dspark_jax.io.calibration import CalibrationLaw, load_calibration
from dspark_jax.io.outputs import check_output
from dspark_jax.io.step_table import StepTableLaw, load_step_table
from dspark_jax.scheduling.policy import Policy, PolicyKind, check_lossless
from dspark_jax.scheduling.survival import SurvivalMap
from dspark_jax.scheduling.throughput import StepTable
from dspark_jax.serving import Engine, EngineConfig
from infer.batch_run import BatchRun
from infer.batching import read_prompt_file
from infer.decoding import decode_config
from infer.models import describe, load_described, load_named, print_cache_size
from infer.options import SamplingOptions, under_mesh
from infer.outputs import ResumableOutput, resume_settings
from infer.step_table import measure, warn_if_flat
from infer.text import Texts

# Options that change neither what is generated nor which policy schedules it.
_IRRELEVANT = ("slots", "table", "calibration", "output", "mesh", "allow_config_key")
_WITHOUT_TABLE = (PolicyKind.FIXED, PolicyKind.THRESHOLD)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchOptions(SamplingOptions):
    """Complete prompts by continuous batching: as generate, but requests come and go, and drafts are scheduled.

    Prompt and output lines are as for generate. A prompt that the context has no room for fails alone: its line has
    finish_reason error, and says why in `error`. Results are kept in OUTPUT.partial as they finish; the same command
    goes on with them. Ctrl-C or SIGTERM finishes the requests that are running and stops; a second one stops at once.
    """

    prompts: Path
    """JSON Lines file, one prompt a line."""
    output: Path
    """JSON Lines file to write, in the order of the prompts."""
    slots: int = 8
    """Requests decoded together."""
    policy: PolicyKind = PolicyKind.STALE_CAPACITY
    """How much is verified: by the throughput table and confidences (stale-capacity, early-stop, global-best), a fixed
    length, or all drafts of a least prefix survival (threshold)."""
    policy_length: int | None = None
    """Drafts a request, or a tree's depth, for the fixed policy."""
    policy_threshold: float | None = None
    """Least prefix survival for the threshold policy."""
    table: Path | None = None
    """Throughput table of `profile --slots`; without it the table is measured at the start."""
    calibration: Path | None = None
    """Calibration of `python -m train calibrate`; without it confidences are taken as they are."""
    verifier: Verifier = Verifier.COUPLED
    """How drafts are accepted at a temperature above 0: coupled yields plain sampling's tokens, the others its law;
    rejection and block are for chains, and for policies other than global-best."""
    stop: tuple[str, ...] = ()
    """Strings that end a request; the text ends before them."""

    def check(self) -> None:
        super().check()
        if self.slots < 1:
            raise InputError(f"--slots {self.slots} must be at least 1")
        if self.drafter is None:
            for name in ("tree", "table", "calibration"):
                if getattr(self, name) is not None:
                    raise InputError(f"--{name}: plain decoding has none; add --drafter, or leave it out")
        self.check_tree()
        self.chosen_policy()
        if self.table is not None and self.policy in _WITHOUT_TABLE:
            raise InputError(f"--table: policy {self.policy.value} reads none; leave it out")
        if self.calibration is not None and self.policy is PolicyKind.FIXED:
            raise InputError(f"--calibration: policy {self.policy.value} reads none; leave it out")
        if "" in self.stop:
            raise InputError("--stop: a stop string must not be empty")
        for path in (self.prompts, self.table, self.calibration):
            if path is not None and not path.is_file():
                raise InputError(f"{path}: no such file")
        check_output(self.output, [self.prompts, self.target, self.drafter, self.table, self.calibration])

    def chosen_policy(self) -> Policy:
        """The policy. Raises an InputError if it is none, or would change the target's law under the verifier."""
        try:
            policy = Policy(kind=self.policy, length=self.policy_length, threshold=self.policy_threshold)
            check_lossless(policy, self.verifier, self.tree is not None)
        except ValueError as error:
            message = str(error)
            for field in ("length", "threshold"):
                message = message.replace(f"policy {field}", f"policy-{field}", 1)
            raise InputError(f"--{message}") from error
        return policy


@under_mesh
def batch(options: BatchOptions) -> None:
    options.check()
    output = ResumableOutput(options.output, resume_settings(options, options.drafter, _IRRELEVANT))
    description = describe(options, options.drafter)
    # Whatever their length: too long ones fail alone.
    prompts = read_prompt_file(options.prompts, description, options, limit=sys.maxsize)
    if description.target.tokenizer is None and options.stop:
        raise InputError(f"{options.target}: has no tokenizer, which --stop needs")
    decode = decode_config(
        description.target.config,
        description.drafter_config,
        options.max_new_tokens,
        options.verifier,
        options.chosen_tree,
    )
    capacity = _slot_room(prompts, decode) + decode.width
    print_cache_size(description, options.slots, capacity, options.dtype)
    if options.table is not None:
        load_step_table(options.table)
    target = load_described(options, description)
    drafter = None if options.drafter is None else load_named(options, options.drafter, target)
    config = EngineConfig(
        decode=dataclasses.replace(decode, eos_token_ids=target.eos_token_ids),
        slots=options.slots,
        capacity=capacity,
        policy=options.chosen_policy(),
    )
    survival = None
    if drafter is not None:
        survival = chosen_survival(options.calibration, target, drafter, config.decode, options.sampling_law)
    table = _step_table(options, target, drafter, config)
    engine = Engine(target.params, None if drafter is None else drafter.params, config, table, survival)
    texts = None if target.tokenizer is None else Texts(target.tokenizer, options.stop)
    BatchRun(options, engine, texts, output, prompts).run()


def _slot_room(prompts: Sequence[Prompt], decode: DecodeConfig) -> int:
    """Tokens of the longest conversation, replies included, as far as the context has room for it."""
    context = decode.target.max_position_embeddings
    needed = [decode.max_new_tokens + 1]
    for prompt in prompts:
        if len(prompt.turn_ids()) < context:
            earlier = prompt.num_turns - 1
            questions = len(prompt.turn_ids(earlier, [""] * earlier))
            needed.append(questions + prompt.num_turns * decode.max_new_tokens)
    return min(max(needed), context)


def chosen_survival(
    path: Path | None, target: Target, drafter: Drafter, decode: DecodeConfig, sampling: dict[str, float]
) -> SurvivalMap | None:
    """The calibration file's map, which must be about what is decoded; None without a file."""
    if path is None:
        return None
    law = CalibrationLaw.of(target, drafter, decode.verifier, **sampling)
    return load_calibration(path, decode.depth, law, decode.tree).survival


def _step_table(options: BatchOptions, target: Target, drafter: Drafter | None, config: EngineConfig) -> StepTable:
    """The file's table, or a measured one; any where nothing is scheduled by it."""
    if drafter is None or options.policy in _WITHOUT_TABLE:
        return StepTable(jnp.asarray(config.buckets, jnp.int32), jnp.ones(len(config.buckets), jnp.float32))
    if options.table is not None:
        law = StepTableLaw.of(target, drafter, config.decode.tree, config.slots, config.buckets)
        table = load_step_table(options.table, law)
    else:
        print("no --table: measuring the engine's steps first (`profile --slots` keeps them)", file=sys.stderr)
        table = measure(target, drafter, config, context=(config.capacity - config.decode.width) // 2)
    warn_if_flat(table)
    return table
