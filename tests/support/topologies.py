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
from support.require import missing

from benchmarks.roofline import CHIPS
from tide_jax.compat import use_mesh

# What the driver says of every NVIDIA GPU here, and what it says of one. With a driver version XLA also plans the
# command buffers that it would record.
_GPU = """
device_description_str: "NVIDIA {name}"
platform_name: "CUDA"
gpu_device_info {{
  cuda_compute_capability {{ major: {compute_capability} }}
  core_count: {cores}
  fpus_per_core: {fpus_per_core}
  clock_rate_ghz: {clock_ghz}
  device_memory_size: {memory:.0f}
  memory_bandwidth: {bandwidth:.0f}
  l2_cache_size: {l2_cache}
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {shared_memory}
  shared_memory_per_core: {shared_memory_per_core}
  driver_version: "13.0.0"
}}
runtime_version {{ major: 13 minor: 0 }}
dnn_version_info {{ major: 9 minor: 12 }}
"""
_HOPPER = dict(
    compute_capability=9, cores=132, fpus_per_core=128, clock_ghz=1.98, shared_memory=232448,
    shared_memory_per_core=233472,
)  # fmt: skip
_GPUS = {
    "a100": dict(
        compute_capability=8, cores=108, fpus_per_core=64, clock_ghz=1.41, l2_cache=40 << 20, shared_memory=166912,
        shared_memory_per_core=167936,
    ),
    "h100": dict(_HOPPER, l2_cache=50 << 20),
    "h200": dict(_HOPPER, l2_cache=50 << 20),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Target:
    """What JAX must be told to compile for one kind of chip; `module` is there if the compiler is."""

    platform: str
    name: str
    module: str
    package: str
    options: dict[str, str] = dataclasses.field(default_factory=dict)
    environ: dict[str, str] = dataclasses.field(default_factory=dict)


def _gpu(name: str) -> Target:
    chip = CHIPS[name]
    described = _GPU.format(name=chip.name, bandwidth=chip.bandwidth, memory=chip.memory, **_GPUS[name])
    return Target(
        platform="cuda",
        name=chip.name,
        module="jax_plugins.xla_cuda13",
        package="jax-cuda13-plugin with jax-cuda13-pjrt, both of jax's own version, by pip install --no-deps",
        options={"target_config": described, "topology": "1x1x{chips}"},
    )


def _tpu(topology: str) -> Target:
    # libtpu asks a metadata server which slice it is on unless the environment says so, once, when it is loaded. A
    # topology that is named need not be of that kind: one process compiles for every generation.
    return Target(
        platform="tpu",
        name=topology,
        module="libtpu",
        package="libtpu",
        environ={
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_ACCELERATOR_TYPE": "v5litepod-4",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "TPU_WORKER_ID": "0",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no chip is touched, so processes need not wait for each other
        },
    )


TARGETS = {**{name: _gpu(name) for name in _GPUS}, "v5e": _tpu("v5e:2x2"), "v6e": _tpu("v6e:2x2")}


@functools.cache
def _topology(target: str, chips: int = 1):
    """The description of a slice of so many `target` chips, from that target's own plugin; TPUs come in fours."""
    spec = TARGETS[target]
    for key, value in spec.environ.items():
        os.environ.setdefault(key, value)
    options = {key: value.replace("{chips}", str(chips)) for key, value in spec.options.items()}
    return topologies.get_topology_desc(spec.name, spec.platform, **options)


def devices(target: str, count: int) -> list:
    """So many chips of `target` that are not there; "cpu": of this process."""
    return (jax.devices() if target == "cpu" else _topology(target, count).devices)[:count]


def available(target: str) -> str | None:
    """None when `compile_for(target, …)` can work here, else the reason why not, fit for a skip message."""
    spec = TARGETS[target]
    if not all(map(importlib.util.find_spec, (spec.module.partition(".")[0], spec.module))):
        return f"no compiler for {target}: {spec.module} is not installed ({spec.package})"
    try:
        _topology(target)
    except RuntimeError as error:
        # Without CUDA's own libraries the CUDA plugin registers only when JAX is told not to run on it.
        return f"no compiler for {target}: {error}; is JAX_PLATFORMS=cpu set before JAX starts?"
    return None


def require(target: str) -> None:
    """Skip the test when nothing here compiles for `target` ("cpu": always does), or fail it if TIDE_REQUIRE_AOT=1."""
    reason = None if target == "cpu" else available(target)
    if reason:
        missing(reason, "TIDE_REQUIRE_AOT")


def compile_for(target: str, fn, *abstract_args, donate_argnums=(), mesh: Mesh | None = None):
    """`fn` compiled for one chip of `target`; the arguments are pytrees of arrays or `jax.ShapeDtypeStruct`.

    Only shapes and dtypes are read. The result has `as_text()`, `memory_analysis()` and `cost_analysis()`. "cpu" is
    this machine, for which nothing has to be described.

    With a mesh (over `devices`), for all of it: the arguments then have shardings, and so has the first donated one
    where it comes out.
    """
    made = None
    if mesh is not None:
        made = jax.tree.map(lambda leaf: leaf.sharding, [abstract_args[i] for i in donate_argnums])
        made = made[0] if made else None
    elif target != "cpu":
        place = NamedSharding(Mesh(np.array(devices(target, 1)), ("chip",)), PartitionSpec())
        abstract_args = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), abstract_args
        )
    with use_mesh(mesh):
        traced = jax.jit(fn, donate_argnums=donate_argnums, out_shardings=made).trace(*abstract_args)
        lowered = traced.lower(lowering_platforms=("cpu" if target == "cpu" else TARGETS[target].platform,))
    with warnings.catch_warnings():
        # A program for a device that is not there is written to the persistent cache, but cannot be read back.
        warnings.filterwarnings("ignore", "Error reading persistent compilation cache")
        return lowered.compile()
