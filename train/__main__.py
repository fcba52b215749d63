"""`python -m train COMMAND`."""

import sys
from collections.abc import Sequence

from dspark_jax.io import command_line
from dspark_jax.io.command_line import Command
from train import byte_model, calibrate, export, fit, regenerate, stdlib_prompts
from train.fit_config import FitConfig

COMMANDS = {
    "regenerate": Command(regenerate.RegenerateConfig, regenerate.main),
    "fit": Command(FitConfig, fit.main),
    "calibrate": Command(calibrate.CalibrateConfig, calibrate.main),
    "export": Command(export.ExportConfig, export.main),
    "byte-model": Command(byte_model.ByteModelConfig, byte_model.main),
    "stdlib-prompts": Command(stdlib_prompts.StdlibPromptsConfig, stdlib_prompts.main),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    return command_line.main("train", COMMANDS, arguments)


if __name__ == "__main__":
    sys.exit(main())
