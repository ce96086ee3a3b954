"""One autograd graph in two backwards: first all that the inputs' gradients need, later the weights beside that path.

A node from which an input can be reached is on the path; it runs in the first backward. What hangs off the path falls
into components that have no node in common. A component that hangs on one node of the path alone, its cut node, is left
for the second backward: the cut node runs again, asked for that component only, and nothing else of the path is needed.
A component with several cut nodes or with an output of its own is done in the first. So every node runs once but for
cut nodes, which do one part of their work in each, every accumulator is reached in one engine call, and its hooks fire
once; no gradient is lost, whether an input lies behind a parameter or not.

Source of the two halves: Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

_ACCUMULATE = "torch::autograd::AccumulateGrad"


@dataclass
class Late:
    """A cut node, the leaves whose gradients wait for it, and the gradients that it got in the first backward."""

    node: Node
    leaves: list[torch.Tensor] = field(default_factory=list)
    grads: tuple[torch.Tensor | None, ...] = ()

    def capture(self, grads: tuple[torch.Tensor | None, ...]) -> None:
        """A pre-hook of the node."""
        self.grads = grads


@dataclass
class Cut:
    """A graph divided: the leaves of the first backward, inputs among them, and the work of the second."""

    early: list[torch.Tensor]
    late: list[Late]


def cut(outputs: Sequence[torch.Tensor | GradientEdge], inputs: Sequence[torch.Tensor]) -> Cut | None:
    """Divide the graph between `outputs` and `inputs`; None if it holds code that must run in one piece.

    That is code of Python (a custom Function, compiled code, a reentrant checkpoint): what it does is not known. Takes
    time linear in the number of nodes and edges.
    """
    roots = [(t if isinstance(t, GradientEdge) else get_gradient_edge(t)).node for t in outputs]
    targets = {get_gradient_edge(t).node for t in inputs}
    order = _topological(roots)
    if order is None:
        return None
    path = set(targets)
    for node in order:
        if any(child in path for child, _ in node.next_functions):
            path.add(node)
    components = _components([node for node in order if node not in path])
    return _divide(order, path, roots, list(inputs), components)


def run_first(division: Cut, outputs: Sequence[Any], grad_outputs: Sequence[torch.Tensor]) -> None:
    """The first backward; accumulates the gradients of `division.early`."""
    handles = [late.node.register_prehook(late.capture) for late in division.late]
    try:
        torch.autograd.backward(outputs, grad_outputs, inputs=division.early, retain_graph=True)
    finally:
        for handle in handles:
            handle.remove()


def run_second(late: Late) -> None:
    """The second backward, for one cut node; frees what the node had saved."""
    edges = [GradientEdge(late.node, index) for index, grad in enumerate(late.grads) if grad is not None]
    if not edges:
        return
    # Tensor hooks on the node's outputs have had their say in the first backward.
    handle = late.node.register_prehook(lambda _: late.grads)
    try:
        torch.autograd.backward(edges, [grad for grad in late.grads if grad is not None], inputs=late.leaves)
    finally:
        handle.remove()


def _topological(roots: Sequence[Node]) -> list[Node] | None:
    """All nodes, children (towards the leaves) before parents; None if one of them is Python code."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(root, False) for root in roots]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node not in seen:
            if isinstance(node, torch.autograd.function.BackwardCFunction):
                return None
            seen.add(node)
            stack.append((node, True))
            stack.extend((child, False) for child, _ in node.next_functions if child is not None and child not in seen)
    return order


def _components(nodes: Sequence[Node]) -> dict[Node, Node]:
    """Each node with a representative of its component: the nodes that edges join, whatever their direction."""
    parent = {node: node for node in nodes}

    def find(node: Node) -> Node:
        while parent[node] is not node:
            parent[node] = node = parent[parent[node]]
        return node

    for node in nodes:
        for child, _ in node.next_functions:
            if child is not None:
                parent[find(node)] = find(child)
    return {node: find(node) for node in nodes}


def _divide(
    order: Sequence[Node],
    path: set[Node],
    roots: Sequence[Node],
    inputs: list[torch.Tensor],
    components: dict[Node, Node],
) -> Cut:
    cuts: dict[Node, set[Node]] = {component: set() for component in components.values()}
    for node in order:
        if node in path:
            for child, _ in node.next_functions:
                if child is not None and child not in path:
                    cuts[components[child]].add(node)
    fixed = {components[root] for root in roots if root not in path}
    division = Cut(inputs, [])
    late: dict[Node, Late] = {}
    for node, component in components.items():
        if node.name() != _ACCUMULATE:
            continue
        (leaf,) = [node.variable]  # type: ignore[attr-defined]
        hanging = cuts[component]
        if component in fixed or len(hanging) != 1 or not _runs_twice(only := next(iter(hanging))):
            division.early.append(leaf)
        else:
            late.setdefault(only, Late(only)).leaves.append(leaf)
    division.late = list(late.values())
    return division


def _runs_twice(node: Node) -> bool:
    """False if a saved tensor is brought back by hooks: a checkpoint would compute its layers once more for each."""
    return all(_is_plain(getattr(node, name)) for name in _saved_names(type(node)))


@functools.cache
def _saved_names(node_type: type) -> tuple[str, ...]:
    return tuple(name for name in dir(node_type) if name.startswith("_raw_saved_"))


def _is_plain(saved: Any) -> bool:
    if isinstance(saved, (tuple, list)):
        return all(map(_is_plain, saved))
    return saved is None or saved.unpack_hook is None
