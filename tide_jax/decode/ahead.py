"""Compilation ahead of the call, so that no timing ever contains one."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from tide_jax.compat import use_mesh


def compile_ahead(function: Callable, *args: Any, state: int, mesh: Mesh | None) -> Callable:
    """`function` compiled for these arguments; that number `state` is donated, and comes out where it went in.

    Args:
        function: of arrays, which returns the new state.
        args: its arguments; with a mesh, placed on it.
        state: number of the state among them.
        mesh: devices to trace for; None: one.
    """
    made = None if mesh is None else jax.tree.map(lambda leaf: leaf.sharding, args[state])
    with use_mesh(mesh):
        return jax.jit(function, donate_argnums=(state,), out_shardings=made).lower(*args).compile()
