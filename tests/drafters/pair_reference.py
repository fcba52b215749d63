"""Eagle3 and multi-token prediction in plain numpy float64: no cache, no scan, every pair recomputed every time."""

import numpy as np

from dspark_jax.config import DraftModelConfig, Eagle3Config
from dspark_jax.parameters import named_leaves


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


class PairReference:
    """A drafter's layer over pairs of a token and the hidden state before it."""

    def __init__(self, params, config: DraftModelConfig):
        self.config = config
        self.weights = {name: np.asarray(leaf, np.float64) for name, leaf in named_leaves(params).items()}
        self.eagle3 = isinstance(config, Eagle3Config)
        self.layer = "midlayer." if self.eagle3 else "block."

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        return x @ self.weights[f"{name}.weight"].T

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        scale = np.sqrt((x**2).mean(-1, keepdims=True) + self.config.rms_norm_eps)
        return x / scale * self.weights[f"{name}.weight"]

    def fuse(self, features: np.ndarray) -> np.ndarray:
        return self.linear("fc", features) if self.eagle3 else features

    def rotate(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        half = x.shape[-1] // 2
        angles = positions[:, None] * self.config.rope_theta ** (-np.arange(half) / half)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        first, second = x[..., :half], x[..., half:]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def parts(self, tokens: np.ndarray, hidden: np.ndarray, positions: np.ndarray):
        """(what the layer adds to, queries, keys, values) of n pairs, [n, heads, D]."""
        embedded = self.weights["embed_tokens.weight"][tokens]
        if self.eagle3:
            residual = hidden
            normed = (self.norm("midlayer.input_layernorm", embedded), self.norm("midlayer.hidden_norm", hidden))
            read = np.concatenate(normed, axis=-1)
        else:
            normed = (self.norm("enorm", embedded), self.norm("hnorm", hidden))
            residual = self.linear("eh_proj", np.concatenate(normed, axis=-1))
            read = self.norm("block.input_layernorm", residual)

        def heads(name: str) -> np.ndarray:
            x = self.linear(f"{self.layer}self_attn.{name}_proj", read).reshape(len(read), -1, self.config.head_dim)
            if self.config.qk_norm and name != "v":
                x = self.norm(f"{self.layer}self_attn.{name}_norm", x)
            return x if name == "v" else self.rotate(x, positions)

        return residual, heads("q"), heads("k"), heads("v")

    def finish(self, residual, queries, keys, values, mask) -> np.ndarray:
        """The layer's outputs, each query seeing the keys that `mask` [n, m] shows."""
        group = queries.shape[1] // keys.shape[1]
        keys, values = (np.repeat(x, group, axis=1) for x in (keys, values))
        scores = np.einsum("qhd,khd->hqk", queries, keys) / np.sqrt(self.config.head_dim)
        weights = softmax(np.where(mask[None], scores, -np.inf))
        attended = np.einsum("hqk,khd->qhd", weights, values).reshape(len(queries), -1)
        x = residual + self.linear(f"{self.layer}self_attn.o_proj", attended)
        h = self.norm(f"{self.layer}post_attention_layernorm", x)
        gate = self.linear(f"{self.layer}mlp.gate_proj", h)
        up = self.linear(f"{self.layer}mlp.up_proj", h)
        return x + self.linear(f"{self.layer}mlp.down_proj", gate / (1 + np.exp(-gate)) * up)

    def logits(self, outputs: np.ndarray) -> np.ndarray:
        return self.linear("lm_head", self.norm("norm", outputs))

    def draft_logits(self, tokens: np.ndarray, features: np.ndarray, drafts: np.ndarray) -> np.ndarray:
        """Logits [γ, V_d] of every draft after the anchor, the last of `tokens`; `features` are of those before it."""
        hidden = self.fuse(features)
        follows, rows = list(tokens[1:]), []
        for draft in drafts:
            count = len(follows)
            mask = np.tril(np.ones((count, count), bool))
            outputs = self.finish(*self.parts(np.array(follows), hidden, np.arange(count)), mask)
            rows.append(self.logits(outputs[-1]))
            follows.append(draft)
            hidden = np.concatenate([hidden, outputs[-1:]])
        return np.array(rows)
