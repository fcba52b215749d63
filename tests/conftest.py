"""Eight CPU devices, strict numerics, a compilation cache between runs, and a counter of compilations.

Float64 tests run their bodies under `jax.enable_x64(True)`.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before jax is imported.
os.environ["JAX_PLATFORMS"] = "cpu"
# Tests spend their time compiling small programs, which XLA does twice as fast without optimising them.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        # On a busy machine the eight devices wait for each other longer than XLA's 40 seconds, after which it aborts.
        "--xla_cpu_collective_call_terminate_timeout_seconds=600",
    ]
)

import jax

jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parents[1] / ".cache" / "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Fires once for each program that is compiled or, when it is there, taken from the persistent cache.
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


@pytest.fixture(scope="module", autouse=True)
def _release_programs() -> Iterator[None]:
    """Frees a module's compiled programs: a process that keeps them all runs out of memory mappings and crashes."""
    yield
    jax.clear_caches()


class Compilations:
    """How many programs this process has compiled since the fixture's start or the last `reset`."""

    def __init__(self) -> None:
        self.count = 0

    def reset(self) -> None:
        self.count = 0

    def __call__(self, event: str, duration: float, **_: object) -> None:
        self.count += event == _COMPILE_EVENT


@pytest.fixture
def compilations() -> Iterator[Compilations]:
    """A counter of XLA compilations: `compilations.reset()`, run, then look at `compilations.count`."""
    counter = Compilations()
    jax.monitoring.register_event_duration_secs_listener(counter)
    yield counter
    jax.monitoring.unregister_event_duration_listener(counter)
