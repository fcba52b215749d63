"""Continuous batching: a host loop over compiled rounds of fixed shapes."""

from dspark_jax.serving.config import EngineConfig
from dspark_jax.serving.engine import Engine, Statistics
from dspark_jax.serving.measure import measure_schedule, measure_steps
from dspark_jax.serving.requests import Request, Result, Update

__all__ = [
    "Engine",
    "EngineConfig",
    "Request",
    "Result",
    "Statistics",
    "Update",
    "measure_schedule",
    "measure_steps",
]
