"""`python -m infer COMMAND`."""

import sys
from collections.abc import Sequence

from dspark_jax.io.command_line import Command
from dspark_jax.io.command_line import main as run_command
from infer.batch import BatchOptions, batch
from infer.evaluate import EvaluateOptions, evaluate
from infer.generate import GenerateOptions, generate
from infer.load import LoadOptions, load
from infer.profile import ProfileOptions, profile
from infer.simulate import SimulateOptions, run_simulation
from infer.tree_cost import TreeCostOptions, tree_cost

COMMANDS = {
    "generate": Command(GenerateOptions, generate),
    "batch": Command(BatchOptions, batch),
    "evaluate": Command(EvaluateOptions, evaluate),
    "load": Command(LoadOptions, load),
    "profile": Command(ProfileOptions, profile),
    "simulate": Command(SimulateOptions, run_simulation),
    "tree-cost": Command(TreeCostOptions, tree_cost),
}


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command("python -m infer", COMMANDS, arguments)


if __name__ == "__main__":
    sys.exit(main())
