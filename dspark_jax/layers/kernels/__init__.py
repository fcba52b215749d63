"""Kernels: Pallas for TPU, and C++ that XLA calls on CPU, each beside what it replaces."""
