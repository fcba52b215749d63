"""Kernels that XLA calls, each beside what it replaces."""
