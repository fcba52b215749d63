"""`python -m infer COMMAND`."""

import os
import signal
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    # Not above: Ctrl-C must find its handler below before these seconds of imports.
    from dspark_jax.io import command_line
    from dspark_jax.io.command_line import Command
    from infer.batch import BatchOptions, batch
    from infer.chat import ChatOptions, chat
    from infer.evaluate import EvaluateOptions, evaluate
    from infer.generate import GenerateOptions, generate
    from infer.load import LoadOptions, load
    from infer.profile import ProfileOptions, profile
    from infer.simulate import SimulateOptions, run_simulation
    from infer.suite import SuiteOptions, run_suite
    from infer.transformers_speed import TransformersSpeedOptions, transformers_speed
    from infer.tree_cost import TreeCostOptions, tree_cost

    commands = {
        "chat": Command(ChatOptions, chat),
        "generate": Command(GenerateOptions, generate),
        "batch": Command(BatchOptions, batch),
        "evaluate": Command(EvaluateOptions, evaluate),
        "load": Command(LoadOptions, load),
        "profile": Command(ProfileOptions, profile),
        "simulate": Command(SimulateOptions, run_simulation),
        "suite": Command(SuiteOptions, run_suite),
        "transformers-speed": Command(TransformersSpeedOptions, transformers_speed),
        "tree-cost": Command(TreeCostOptions, tree_cost),
    }
    return command_line.main("python -m infer", commands, arguments)


if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Around the command, which handles it itself: an exception may get lost, or a traceback out, in imports.
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    sys.exit(main())
