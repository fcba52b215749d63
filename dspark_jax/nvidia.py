"""What NVIDIA's GPUs can do, by their compute capability."""

# The first that computes in bfloat16, and that cuDNN's fused attention runs on.
AMPERE = (8, 0)


def generation(platform: str, compute_capability: str | None) -> tuple[int, ...] | None:
    """(7, 5) of a T4; None of what is no NVIDIA GPU.

    `platform`, `compute_capability`: of a `jax.Device`, such as "gpu" and "7.5"; other makers' GPUs have names there.
    """
    numbers = (compute_capability or "").split(".")
    if platform != "gpu" or not all(number.isdecimal() for number in numbers):
        return None
    return tuple(map(int, numbers))
