"""The ways of drafting and verifying that an evaluation puts side by side."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from dspark_jax import TreeKind, TreeSpec, Verifier
from dspark_jax.io import InputError
from infer.options import DecodingOptions

MethodName = Literal["chain", "pctree", "jetspec", "ddtree"]


@dataclasses.dataclass(frozen=True)
class Method:
    """A chain (`tree` None) or a tree, under one verifier. `name` tells it apart within one report.

    `named`: asked for by name, not a control or a size of a sweep.
    """

    name: str
    tree: TreeSpec | None
    verifier: Verifier
    named: bool

    @property
    def label(self) -> str:
        return f"{self.name}, {self.verifier.value}"


def chosen_methods(
    options: DecodingOptions,
    names: Sequence[MethodName],
    budgets: Sequence[int],
    verifiers: Sequence[Verifier],
    drafts: int,
) -> list[Method]:
    """Every named method under every verifier that can verify it, without repetition.

    With several names, a chain beside PCTree brings two controls: PCTree with the chain's number of nodes, and the
    chain with each slot's second choice, which says how often that is what the target wants. `budgets`: sizes of
    PCTree to sweep over. `drafts`: of a chain.

    Raises:
      InputError: tree options that make no tree, or verifiers of which none can verify a method.
    """
    trees: dict[str, TreeSpec | None] = {}
    for name in names:
        if name == "chain":
            trees[name] = None
        else:
            tree = options.tree_spec(TreeKind(name))
            trees[f"{name} N={tree.budget}"] = tree
    named = set(trees)
    if "chain" in names and "pctree" in names:
        own = options.tree_spec(TreeKind.PCTREE)
        trees[f"pctree N={drafts + 1}, no spine"] = dataclasses.replace(own, budget=drafts + 1, spine=False)
        trees["chain and second choices"] = TreeSpec(k=2, width=1, budget=2 * drafts + 1)
    for budget in budgets:
        trees[f"pctree N={budget}"] = dataclasses.replace(options.tree_spec(TreeKind.PCTREE), budget=budget)
    methods = [
        Method(name, tree, verifier, name in named)
        for name, tree in trees.items()
        for verifier in dict.fromkeys(verifiers)
        if tree is None or not verifier.chains_only
    ]
    for name in trees:
        if all(method.name != name for method in methods):
            raise InputError(
                f"--verifier {' '.join(verifier.value for verifier in verifiers)}: cannot verify a tree ({name}); add "
                f"{Verifier.COUPLED.value} or {Verifier.TARGET_WALK.value}"
            )
    return methods
