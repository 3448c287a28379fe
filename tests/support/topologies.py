"""Compile for an accelerator that is not there, so that a test can read its optimized HLO.

XLA's compilers need a description of the chip, not the chip: what the plugin would have asked the driver is
given as text. Nothing compiled here can run; it answers questions about copies, aliasing and memory.
"""

import dataclasses
import functools
import importlib.util
import os
import warnings

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

_H200 = """
device_description_str: "NVIDIA H200"
platform_name: "CUDA"
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  device_memory_size: 150754820096
  memory_bandwidth: 4800000000000
  l2_cache_size: 62914560
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
}
runtime_version { major: 13 minor: 0 }
dnn_version_info { major: 9 minor: 12 }
"""


@dataclasses.dataclass(frozen=True)
class Target:
    """What JAX must be told to compile for one kind of chip; `module` is there if the compiler is."""

    platform: str
    name: str
    module: str
    package: str
    options: dict[str, str] = dataclasses.field(default_factory=dict)
    environ: dict[str, str] = dataclasses.field(default_factory=dict)


_TARGETS = {
    "h200": Target(
        platform="cuda",
        name="H200",
        module="jax_plugins.xla_cuda13",
        package="jax-cuda13-plugin with jax-cuda13-pjrt, both of jax's own version, by pip install --no-deps",
        options={"target_config": _H200, "topology": "1x1x1"},
    ),
    # libtpu asks a metadata server which slice it is on unless the environment says so.
    "v5e": Target(
        platform="tpu",
        name="v5e:2x2",
        module="libtpu",
        package="libtpu",
        environ={
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_ACCELERATOR_TYPE": "v5litepod-4",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "TPU_WORKER_ID": "0",
        },
    ),
}


@functools.cache
def _topology(target: str):
    """The description of a slice of `target` chips, from that target's own plugin."""
    spec = _TARGETS[target]
    for key, value in spec.environ.items():
        os.environ.setdefault(key, value)
    return topologies.get_topology_desc(spec.name, spec.platform, **spec.options)


def available(target: str) -> str | None:
    """None when `compile_for(target, …)` can work here, else the reason why not, fit for a skip message."""
    spec = _TARGETS[target]
    if not all(map(importlib.util.find_spec, (spec.module.partition(".")[0], spec.module))):
        return f"no compiler for {target}: {spec.module} is not installed ({spec.package})"
    try:
        _topology(target)
    except RuntimeError as error:
        # Without CUDA's own libraries the CUDA plugin registers only when JAX is told not to run on it.
        return f"no compiler for {target}: {error}; is JAX_PLATFORMS=cpu set before JAX starts?"
    return None


def compile_for(target: str, fn, *abstract_args, donate_argnums=()):
    """`fn` compiled for one chip of `target`; the arguments are pytrees of arrays or `jax.ShapeDtypeStruct`.

    Only shapes and dtypes are read. The result has `as_text()`, `memory_analysis()` and `cost_analysis()`.
    """
    mesh = Mesh(np.array(_topology(target).devices[:1]), ("chip",))
    sharding = NamedSharding(mesh, PartitionSpec())

    def on_chip(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    traced = jax.jit(fn, donate_argnums=donate_argnums).trace(*jax.tree.map(on_chip, abstract_args))
    lowered = traced.lower(lowering_platforms=(_TARGETS[target].platform,))
    with warnings.catch_warnings():
        # A program for a device that is not there is written to the persistent cache, but cannot be read back.
        warnings.filterwarnings("ignore", "Error reading persistent compilation cache")
        return lowered.compile()
