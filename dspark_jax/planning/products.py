"""Matrix products, counted: almost all arithmetic of a transformer, and the least that its memory must move.

XLA's own `cost_analysis` counts the body of a loop once, however often it runs; this counts from shapes.
"""

import dataclasses
from collections.abc import Iterable
from typing import Self

from dspark_jax.config import DecoderConfig


@dataclasses.dataclass(frozen=True)
class Cost:
    """Of some work on one chip.

    `useful`: floating-point operations that the mathematics needs, each product once, forward and backward. `executed`:
    those that the program does, with what it computes again and what it masks. `bytes`: to and from HBM.
    """

    useful: float = 0.0
    executed: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: Self) -> "Cost":
        return Cost(self.useful + other.useful, self.executed + other.executed, self.bytes + other.bytes)

    def __mul__(self, times: float) -> "Cost":
        return Cost(times * self.useful, times * self.executed, times * self.bytes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Product:
    """`count` products [rows, inner] × [inner, columns], whose operands and results each cross HBM once.

    Bytes of an element: `left` and `right` of the operands, `result` of the result; 0 for what stays on the chip.
    """

    rows: float
    inner: float
    columns: float
    count: float = 1
    left: int = 2
    right: int = 2
    result: int = 2

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.inner * self.columns * self.count

    @property
    def bytes(self) -> float:
        moved = (
            self.rows * self.inner * self.left
            + self.inner * self.columns * self.right
            + self.rows * self.columns * self.result
        )
        return float(moved * self.count)


def once(products: Iterable[Product]) -> Cost:
    """Products that are all useful, each done once."""
    return times(products, useful=1, executed=1)


def times(products: Iterable[Product], useful: float, executed: float) -> Cost:
    """Products of which a multiple is useful and another is executed.

    A product's gradients are two of the same size: trained weights behind a trained input are 3 and 3.
    """
    products = list(products)
    flops = sum(product.flops for product in products)
    return Cost(useful * flops, executed * flops, executed * sum(product.bytes for product in products))


def cut(size: int, ways: int) -> int:
    """What one of so many chips has of a dimension; all of it where they do not divide it, as in `sharding`."""
    return size // ways if size % ways == 0 else size


def layer_products(config: DecoderConfig, tokens: int, model: int = 1, weight: int = 2) -> list[Product]:
    """Of one decoder layer but its attention, over so many tokens.

    `model`: chips that a layer's heads and MLP are cut between. `weight`: bytes of a weight.
    """
    d = config.hidden_size
    queries = cut(config.num_attention_heads, model) * config.head_dim
    mlp = cut(config.intermediate_size, model)
    return [
        Product(rows=tokens, inner=d, columns=queries, right=weight),
        *key_value_products(config, tokens, model, weight),
        Product(rows=tokens, inner=queries, columns=d, right=weight),
        Product(rows=tokens, inner=d, columns=mlp, count=2, right=weight),
        Product(rows=tokens, inner=mlp, columns=d, right=weight),
    ]


def key_value_products(config: DecoderConfig, tokens: int, model: int = 1, weight: int = 2) -> list[Product]:
    """Of one layer's keys and values."""
    keys = cut(config.num_key_value_heads, model) * config.head_dim
    return [Product(rows=tokens, inner=config.hidden_size, columns=keys, count=2, right=weight)]


def attention_products(
    config: DecoderConfig, rows: float, queries: float, keys: float, model: int = 1, scores: int = 4, cache: int = 2
) -> list[Product]:
    """Of one layer's attention in each of `rows`: scores of `queries` × `keys`, and the weighted values.

    Bytes of an element: `scores`, 0 where a kernel keeps them on the chip; `cache` of keys and values.
    """
    kv_heads = cut(config.num_key_value_heads, model)
    group = config.num_attention_heads // config.num_key_value_heads
    shape = {"count": rows * kv_heads, "right": cache}
    return [
        Product(rows=group * queries, inner=config.head_dim, columns=keys, result=scores, **shape),
        Product(rows=group * queries, inner=keys, columns=config.head_dim, left=min(scores, 2), **shape),
    ]
