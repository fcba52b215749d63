"""Pallas kernels, each beside its jnp twin."""
