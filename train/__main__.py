"""`python -m train COMMAND`."""

import os
import signal
import traceback
from collections.abc import Sequence
from typing import NoReturn


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    # Not above: Ctrl-C must find its handler below before these seconds of imports.
    from dspark_jax.io import command_line
    from dspark_jax.io.command_line import Command
    from train import (
        byte_model,
        cache,
        calibrate,
        device_check,
        export,
        fit,
        plan,
        recipe_speed,
        regenerate,
        stdlib_prompts,
    )
    from train.fit_config import FitConfig
    from train.plan_config import CONFIGS, PlanConfig

    commands = {
        "regenerate": Command(regenerate.RegenerateConfig, regenerate.main),
        "cache": Command(cache.CacheConfig, cache.main),
        "fit": Command(FitConfig, fit.main),
        "plan": Command(PlanConfig, plan.main),
        "device-check": Command(device_check.DeviceCheckConfig, device_check.main),
        "recipe-speed": Command(recipe_speed.RecipeSpeedConfig, recipe_speed.main),
        "calibrate": Command(calibrate.CalibrateConfig, calibrate.main),
        "export": Command(export.ExportConfig, export.main),
        "byte-model": Command(byte_model.ByteModelConfig, byte_model.main),
        "stdlib-prompts": Command(stdlib_prompts.StdlibPromptsConfig, stdlib_prompts.main),
    }
    return command_line.main("train", commands, arguments, CONFIGS)


def run() -> NoReturn:
    """Runs the command of this process, and ends it."""
    try:
        code = main()
    except Exception:
        traceback.print_exc()
        code = 1
    from train.processes import leave

    leave(code)


if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Around the command, which handles it itself: an exception may get lost, or a traceback out, in imports.
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    run()
