"""The CUDA extension as it was built: what it holds, for which GPUs, and with what resources."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.require import missing

from tide_jax.errors import InputError
from tide_jax.kernels import register_cuda

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def extension():
    """The module, registered; missing where there is no nvcc, or a failure where it must be there."""
    try:
        register_cuda()
    except InputError as error:
        missing(str(error), "TIDE_REQUIRE_CUDA")
    from tide_jax import _xla_ffi_cuda

    return _xla_ffi_cuda


def resources(sources):
    """(architecture, kernel) -> registers and bytes spilled, as ptxas says for the architectures of CMake."""
    cmake = (ROOT / "CMakeLists.txt").read_text()
    listed = re.search(r"set\(CMAKE_CUDA_ARCHITECTURES (75-real [\w -]*120)\)", cmake)[1]
    names = [name.removesuffix("-real") for name in listed.split()]
    codes = [part for name in names for part in ("-gencode", f"arch=compute_{name},code=sm_{name}")]
    options = ["-std=c++17", "-O3", f"-I{ROOT / 'xla_ffi/include'}", *codes, "-Werror=all-warnings", "-Xptxas", "-v"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    running = [subprocess.Popen(["nvcc", *options, "-c", str(one), "-o", os.devnull], **pipes) for one in sources]
    found = {}
    for process in running:
        text, _ = process.communicate()
        assert process.returncode == 0, text
        for entry in text.split("Compiling entry function ")[1:]:
            name, architecture = re.match(r"'(\w+)' for '(\w+)'", entry).groups()
            spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", entry)
            registers = re.search(r"Used (\d+) registers", entry)
            found[architecture, name] = int(registers[1]), sum(map(int, spilled.groups()))
    return names, found


def test_it_registers_what_the_cpu_has_too(extension):
    from tide_jax.kernels import status

    assert set(register_cuda().targets) == {*status("cpu").targets, "tide_scatter_rows_v1"}
    assert re.fullmatch(r"1[2-9]\.\d+", extension.cuda_version())


def test_it_was_built_for_the_architectures_it_names(extension):
    """All of them, where no GPU says which one."""
    assert extension.architectures() == "native" or extension.architectures().endswith("90-real,100-real,120")


def test_importing_needs_no_gpu_and_no_cuda_library(extension):
    """cudart is linked in; the driver is looked for by the first launch."""
    needed = subprocess.run(["readelf", "-d", extension.__file__], capture_output=True, text=True, check=True).stdout
    assert "NEEDED" in needed
    assert "cuda" not in needed.lower()


@pytest.mark.slow
def test_no_kernel_spills_registers_on_any_architecture():
    if shutil.which("nvcc") is None:
        missing("no nvcc on the PATH", "TIDE_REQUIRE_CUDA")
    architectures, usage = resources(sorted((ROOT / "xla_ffi/src").glob("*.cu")))
    assert {architecture for architecture, _ in usage} == {f"sm_{name}" for name in architectures}
    kernels = {re.search(r"ExitRoute|Compact|ScatterRows", name)[0] for _, name in usage}
    assert kernels == {"ExitRoute", "Compact", "ScatterRows"}
    for key, (registers, spilled) in usage.items():
        assert spilled == 0, (key, spilled)
        # Blocks of 256 threads: with 128 registers each, two of them fit a multiprocessor.
        assert registers <= 128, (key, registers)
    _check_table(usage)


def _check_table(usage):
    """The registers that docs/kernels.md lists are these, where nvcc is the one it names."""
    if "release 13.0" not in subprocess.run(["nvcc", "--version"], capture_output=True, text=True).stdout:
        return
    page = (ROOT / "docs/kernels.md").read_text()
    names = {
        "exit_route, 1 row a tile": "ExitRouteKernelI{}Li1E",
        "exit_route, 4 rows": "ExitRouteKernelI{}Li4E",
        "exit_route, 16 rows": "ExitRouteKernelI{}Li16E",
        "compact": "CompactKernelI{}E",
    }
    for label, pattern in names.items():
        listed = re.search(rf"\| {label} \| (\d+) \| (\d+) \| (\d+) \|", page).groups()
        for mangled, count in zip(("f", "NS_8BFloat16E", "NS_7Float16E"), listed, strict=True):
            (found,) = [
                registers
                for (architecture, name), (registers, _) in usage.items()
                if architecture == "sm_90" and pattern.format(mangled) in name
            ]
            assert found == int(count), (label, mangled, found)


def configure(tmp_path, *options, **environment):
    """What cmake says."""
    import nanobind  # noqa: F401 - a build requirement that must be there

    command = ["cmake", "-S", str(ROOT), "-B", str(tmp_path), "-DSKBUILD=1", f"-DPython_EXECUTABLE={sys.executable}"]
    env = {**os.environ, "JAX_PLATFORMS": "cpu", **environment}
    return subprocess.run([*command, *options], capture_output=True, text=True, env=env)


def test_without_nvcc_the_build_says_what_to_do(tmp_path):
    if shutil.which("cmake") is None:
        missing("no cmake on the PATH", "TIDE_REQUIRE_KERNELS")
    hidden = os.pathsep.join(
        folder for folder in os.environ["PATH"].split(os.pathsep) if not (Path(folder) / "nvcc").exists()
    )
    done = configure(tmp_path, "-DTIDE_CUDA=ON", "-DCMAKE_CUDA_COMPILER=NOTFOUND", PATH=hidden, CUDACXX="")
    assert done.returncode != 0
    message = " ".join(done.stderr.split())
    assert "TIDE_CUDA=ON needs the CUDA toolkit, and no nvcc was found" in message
    assert "its jnp path gives the same results" in message


FAKE_NVCC = """#!/bin/sh
case "$*" in
  *--version*) echo "Cuda compilation tools, release {release}, V{release}.1" ;;
  *compute_1[02]*) echo "nvcc fatal   : Unsupported gpu architecture" >&2; exit 1 ;;
  *) exec nvcc "$@" ;;
esac
"""


@pytest.mark.parametrize(("release", "said"), [("12.4", None), ("11.8", "the kernels need CUDA 12.1 or newer")])
def test_older_toolkits_get_what_they_know_or_are_refused(tmp_path, release, said):
    if shutil.which("cmake") is None or shutil.which("nvcc") is None:
        missing("no cmake or no nvcc on the PATH", "TIDE_REQUIRE_CUDA")
    fake = tmp_path / "nvcc"
    fake.write_text(FAKE_NVCC.format(release=release))
    fake.chmod(0o755)
    done = configure(tmp_path / "build", "-DTIDE_CUDA=ON", CUDACXX=str(fake))
    if said is None:
        assert done.returncode == 0, done.stderr
        cache = (tmp_path / "build" / "CMakeFiles").rglob("CMakeCUDACompiler.cmake")
        assert any("compute_120" not in path.read_text() for path in cache)
    else:
        assert done.returncode != 0
        assert said in " ".join(done.stderr.split())
