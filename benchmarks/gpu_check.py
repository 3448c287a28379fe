"""What only a GPU can show, in one command of at most eight minutes: do the kernels work there, and what do they cost?

    python benchmarks/gpu_check.py [--json] [--out FILE] [--seconds 480] [--stages build,tests,ops]

Needs Python >= 3.11 with jax and flax, nvcc, and an NVIDIA GPU; neither network, torch nor data: models are random, of
the shapes of Llama-3.1-8B and SmolLM2-135M, made on the device. Writes `benchmarks/results/gpu_DEVICE.json` after every
stage. Each stage is a process of its own with its own limit of time, so that a crash or a hang costs that stage only;
what it had measured until then is kept. In order of importance:

    device       facts, copy bandwidth (the byte floor of everything below), and the smallest loop that XLA can launch
    build        the CUDA kernels by pip, or else by hand with nvcc into a shared library that ctypes opens
    tests        pytest -m gpu
    ops          every kernel against max(launch, byte floor), and against XLA's code for the same formula
    predicates   what one conditional and one loop condition cost: as XLA does it by default, with command buffers that
                 capture conditionals and loops, and with neither captured
    decode_8b    `never_overhead` and speeds at fixed depths, in the same three ways
    sanitizer    compute-sanitizer memcheck, racecheck and synccheck, on a small program of every kernel
    decode_smollm2

How ops are timed: a body of dependent calls in a loop of fixed length, compiled at two lengths; the difference of the
two over the difference in calls, medians over interleaved rounds. `kernel` is the bare chain with the weights in the
caches of the GPU, `kernel_cold` goes round more weights than those hold, as in a whole model; in the `glued` forms each
state also depends on the result before it, without which XLA would move its own code out of the loop.

`--platform cpu --tiny --out FILE` rehearses all of this, but for what needs nvcc or a GPU, on a CPU.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import harness

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
LEAST = 12.0  # seconds with which a stage is still begun
GRACE = 6.0  # seconds between the time a stage is told and the time it is stopped
STAND_IN = "tide_gpu_kernels"  # module in place of the compiled extension, where that could not be built

# Ways to ask for `+CONDITIONAL,+WHILE`, of which the first is taken that this version of XLA understands: a compiler
# option replaces XLA's own list. A loop is captured with what is beside it, which is often less than the usual minimum.
_LIST = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION"
CAPTURED = tuple(
    {"xla_gpu_enable_command_buffer": names, **more}
    for more in ({"xla_gpu_graph_min_graph_size": 1}, {})
    for names in (
        "+CONDITIONAL,+WHILE",
        f"{_LIST},DYNAMIC_SLICE_COPY_FUSION,CONDITIONAL,WHILE",
        f"{_LIST},CONDITIONAL,WHILE",
    )
)
# The same without: newer versions capture conditionals, though not loops, unless told otherwise.
NOT_CAPTURED = tuple({"xla_gpu_enable_command_buffer": names} for names in ("-CONDITIONAL,-WHILE", _LIST))

TARGET_US = 6.0  # exit_route, N <= 256, d = 4,096, bf16: at most this, or 1.5 times its byte floor
TARGET_FLOORS = 1.5
TARGET_SHARE = 0.02  # of the time of the layers that it can save


class NotRun(Exception):
    """A stage that cannot run here; the reason is its message."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """A named part of the check.

    Attributes:
        seconds: its own limit.
        run: does it, in a process of its own.
    """

    name: str
    seconds: float
    run: Callable[["Report"], None]


class Report:
    """What one stage found, on disk from the moment it is known."""

    def __init__(self, options: argparse.Namespace, name: str):
        self.name, self.options, self.work = name, options, options.work
        self.facts: dict[str, Any] = {}
        self._deadline = time.monotonic() + options.seconds

    @property
    def left(self) -> float:
        """Seconds left of what this stage was given."""
        return self._deadline - time.monotonic()

    def put(self, **facts: Any) -> None:
        """Add facts, and write all of them."""
        self.facts.update(facts)
        write_json(self.work / f"{self.name}.json", self.facts)

    def of(self, stage: str) -> dict[str, Any]:
        """What an earlier stage found; empty where it found nothing."""
        path = self.work / f"{stage}.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def say(text: str) -> None:
    """A line of progress; whoever started this process adds the time."""
    print(text, file=sys.stderr, flush=True)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".part")
    beside.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    beside.replace(path)


def tail(text: str, lines: int = 30) -> str:
    """The last lines."""
    return "\n".join(text.strip().splitlines()[-lines:])


# --- The command -----------------------------------------------------------------------------------------------------


def main() -> None:
    options = parse(sys.argv[1:])
    if options.child:
        sys.exit(run_stage(options))
    with tempfile.TemporaryDirectory(prefix="gpu_check_") as work:
        options.work = Path(work)
        result = check(options)
    harness.emit(result, as_json=options.json, lines=table(result))
    sys.exit(any(stage["status"] == "failed" for stage in result["stages"].values()))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Options of the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--out", type=Path, help="file of the results; default: beside the others, by device")
    parser.add_argument("--seconds", type=float, default=480.0, help="for everything together")
    parser.add_argument("--stages", default=",".join(STAGES), help="only these, in the order of the list above")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--build", choices=("auto", "pip", "direct", "none"), default="auto",
                        help="none: as they are installed")  # fmt: skip
    parser.add_argument("--arch", default="native", help="GPU that nvcc compiles for")
    parser.add_argument("--platform", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes for a rehearsal")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.chosen = options.stages.split(",")
    if unknown := set(options.chosen) - set(STAGES):
        parser.error(f"unknown stages {sorted(unknown)}; there are {', '.join(STAGES)}")
    return options


def check(options: argparse.Namespace) -> dict[str, Any]:
    """Run the stages one after the other; the result is written after each."""
    began = time.monotonic()
    result: dict[str, Any] = {
        "stages": {},
        "settings": {"seconds": options.seconds, "rounds": options.rounds, "platform": options.platform,
                     "tiny": options.tiny, "build": options.build, "dtype": "bfloat16", "batch": 1},
        "environment": environment(),
    }  # fmt: skip
    # The first says what this is, so it always runs.
    for name in dict.fromkeys(["device", *(name for name in STAGES if name in options.chosen)]):
        left = options.seconds - (time.monotonic() - began)
        if left < LEAST:
            outcome = {"status": "not run", "reason": f"{max(left, 0):.0f} s left of {options.seconds:.0f} s"}
        else:
            outcome, result[name] = launch(name, min(STAGES[name].seconds, left), options, began)
        say(f"{time.monotonic() - began:6.1f} s  {name}: {outcome['status']} {outcome.get('reason', '')}".rstrip())
        result["stages"][name] = outcome
        if name == "device" and "name" not in result["device"]:
            sys.exit(f"There is nothing to check: {outcome.get('reason', 'the device is not known')}")
        result["targets"] = targets(result)
        result["environment"]["seconds_taken"] = round(time.monotonic() - began, 1)
        path = options.out
        if path is None and options.platform == "cuda":
            path = RESULTS / f"gpu_{slug(result['device']['name'])}.json"
        if path is not None:
            write_json(path, result)
    return result


def slug(name: str) -> str:
    """A device's name for use in a file name.

    Example:
        >>> slug("NVIDIA H200")
        'nvidia_h200'
    """
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def environment() -> dict[str, Any]:
    """Versions, machine and load."""
    packages = ("jax", "jaxlib", "flax", "numpy", "jax-cuda13-plugin", "jax-cuda12-plugin")
    found = [name for name in packages if version_of(name)]
    nvcc = shutil.which("nvcc")
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout if nvcc else ""
    release = re.search(r"release (\S+),", text)
    return {**harness.environment(*found), "nvcc": release[1] if release else None}


def version_of(package: str) -> str | None:
    """The installed version."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def launch(
    name: str, seconds: float, options: argparse.Namespace, began: float
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run one stage in a process of its own: how it went, and what it found."""
    command = [sys.executable, __file__, "--child", name, "--work", options.work, "--seconds", max(seconds - GRACE, 1)]
    command += ["--rounds", options.rounds, "--platform", options.platform, "--build", options.build]
    command += ["--arch", options.arch, *(["--tiny"] if options.tiny else [])]
    env = {**os.environ, "JAX_PLATFORMS": options.platform, "PYTHONUNBUFFERED": "1"}
    start = time.monotonic()
    process = subprocess.Popen(
        list(map(str, command)), cwd=ROOT, env=env, text=True, errors="replace", start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        expired, lines = follow(process, seconds, lambda line: f"{time.monotonic() - began:6.1f} s  {name}: {line}")
    finally:
        # And whatever it has started.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    path = options.work / f"{name}.json"
    facts = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    outcome: dict[str, Any] = {"status": "passed", "seconds": round(time.monotonic() - start, 1)}
    if (skipped := facts.pop("not_run", None)) is not None:
        return outcome | {"status": "not run", "reason": skipped}, facts
    if expired or process.returncode:
        code = process.returncode
        reason = f"ended by signal {-code}" if code < 0 else f"exit status {code}"
        reason = f"stopped after {seconds:.0f} s" if expired else facts.pop("error", reason)
        outcome |= {"status": "failed", "reason": reason, "output": lines[-40:]}
    return outcome, facts


def follow(process: subprocess.Popen, seconds: float, form: Callable[[str], str]) -> tuple[bool, list[str]]:
    """Pass on what a process says until it ends, or is ended after so many seconds: whether it was, and its lines."""
    lines = []

    def read() -> None:
        for line in process.stdout:
            lines.append(line.rstrip())
            say(form(lines[-1]))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    expired = False
    try:
        process.wait(timeout=max(seconds, 1))
    except subprocess.TimeoutExpired:
        expired = True
        process.kill()
        process.wait()
    reader.join(timeout=2)  # not for long: what it has started may hold the pipe open
    return expired, list(lines)


def run_stage(options: argparse.Namespace) -> int:
    """One stage, in this process; the exit status."""
    report = Report(options, options.child)
    try:
        {**{name: stage.run for name, stage in STAGES.items()}, "kernels": kernels}[options.child](report)
    except NotRun as reason:
        report.put(not_run=str(reason))
    except Exception as error:
        traceback.print_exc()
        report.put(error=f"{type(error).__name__}: {error}"[:2000])
        return 1
    return 0


def import_library(report: Report) -> None:
    """Make `tide_jax` importable as it is in this checkout, with the kernels that the build stage made."""
    sys.path.insert(0, str(ROOT))
    if (report.work / f"{STAND_IN}.py").exists():
        sys.path.insert(0, str(report.work))
        importlib.import_module(STAND_IN)


def have_kernels(report: Report) -> bool:
    """Whether the kernels of this platform can be used."""
    from tide_jax.kernels import status

    return status(report.options.platform).available


def streamed(command: Sequence[Any], seconds: float, env: Mapping[str, str] | None = None) -> tuple[int | None, str]:
    """Run a command with its output passed on: exit status (None: stopped for the time it took), and the output."""
    process = subprocess.Popen(
        list(map(str, command)), cwd=ROOT, env={**os.environ, **(env or {})}, text=True, errors="replace",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    expired, lines = follow(process, seconds, "  {}".format)
    return None if expired else process.returncode, "\n".join(lines)


# --- device ----------------------------------------------------------------------------------------------------------


def device(report: Report) -> None:
    """What the device is, its copy bandwidth, and what a loop of XLA's own around next to nothing costs."""
    import jax
    import jax.numpy as jnp

    try:
        first = jax.devices(report.options.platform)[0]
    except Exception as error:  # of whatever kind: versions of jax differ
        raise NotRun(f"jax finds no {report.options.platform} device ({type(error).__name__}: {error})") from error
    report.put(name=first.device_kind, memory_bytes=(first.memory_stats() or {}).get("bytes_limit"))
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,clocks.sm,clocks.max.sm,clocks.mem",
             "--format=csv,noheader"]  # fmt: skip
    if shutil.which(query[0]):
        answer = subprocess.run(query, capture_output=True, text=True).stdout
        report.put(nvidia_smi=answer.strip().splitlines()[0] if answer.strip() else None)

    size = 1 << (16 if report.options.tiny else 28)
    add = lambda fixed, x: x + fixed  # noqa: E731
    one = jnp.float32(1)
    chains = {
        "copy": Chain(add, one, jnp.zeros(size, jnp.float32), calls=1, lengths=(4, 20)),
        # Two launches: the sum, and the loop's counter.
        "loop": Chain(add, one, jnp.zeros(256, jnp.float32), calls=1, lengths=(64, 1088)),
    }
    us = measure(report, chains)
    bandwidth = 2 * 4 * size / us["copy"] * 1e6
    say(f"{first.device_kind}: {bandwidth / 1e12:.2f} TB/s, an iteration {us['loop']:.2f} µs")
    report.put(copy_bytes_per_second=bandwidth, copied_bytes=2 * 4 * size, xla_iteration_us=us["loop"])


# --- build -----------------------------------------------------------------------------------------------------------


def build(report: Report) -> None:
    """The CUDA extension by pip; where that leaves no kernels, a shared library and a module that opens it."""
    if report.options.platform != "cuda":
        raise NotRun(f"the platform is {report.options.platform}")
    way = report.options.build
    nvcc = find_tool("nvcc")
    if nvcc is None and way != "none":
        raise NotRun("no nvcc found")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        program_built = pool.submit(build_sanitizer_program, report) if nvcc else None
        if way == "none":
            report.put(way="as installed")
        elif way == "pip" or (way == "auto" and build_packages()):
            by_pip(report)
        if way == "direct" or (way == "auto" and not report.facts.get("kernels", {}).get("available")):
            if way == "auto":
                report.put(pip=report.facts.get("pip", "not tried: scikit-build-core or nanobind is not installed"))
            by_hand(report, nvcc)
        if program_built:
            report.put(sanitizer_program=program_built.result())
    if "kernels" not in report.facts:
        report.put(kernels=kernels_in_new_process(report))
    if not report.facts["kernels"].get("available"):
        raise RuntimeError(f"no kernels: {report.facts['kernels'].get('reason') or report.facts.get('pip')}")


def build_packages() -> bool:
    """Whether pip can build without fetching anything."""
    return all(importlib.util.find_spec(name) for name in ("pip", "scikit_build_core", "nanobind"))


def by_pip(report: Report) -> None:
    """The README's command, but for dependencies, which no kernel needs."""
    began = time.monotonic()
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-build-isolation",
               "--no-deps", "-v", "-C", "cmake.define.TIDE_CUDA=ON", "-e", "."]  # fmt: skip
    # Where both ways are open, some of the time is left for the other one.
    seconds = report.left * (0.6 if report.options.build == "auto" else 1)
    status, text = streamed(command, seconds, {"CUDACXX": find_tool("nvcc")})
    found = kernels_in_new_process(report) if status == 0 else {}
    report.put(kernels=found, pip_seconds=round(time.monotonic() - began, 1))
    if found.get("available"):
        report.put(way="pip")
    else:
        reason = "stopped for the time it took" if status is None else f"exit status {status}"
        report.put(pip=f"{reason}; {found.get('reason', '')}\n{tail(text)}")


def by_hand(report: Report, nvcc: str) -> None:
    """The handlers in a plain shared library, and a module that opens it and says what the extension would."""
    import jax.ffi

    began = time.monotonic()
    folder = report.work / "by_hand"
    folder.mkdir()
    source, library = ROOT / "xla_ffi" / "src", folder / "libtide_cuda.so"
    flags = ["-std=c++17", "-O3", f"-arch={report.options.arch}", "-Xcompiler=-fPIC", f"-I{ROOT / 'xla_ffi/include'}",
             f"-I{source}", "-isystem", jax.ffi.include_dir()]  # fmt: skip
    files = sorted([*source.glob("*.cu"), *source.glob("*_cuda_ffi.cc")])
    objects = [folder / f"{path.stem}.o" for path in files]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        jobs = [
            pool.submit(run_quietly, [nvcc, *flags, "-c", path, "-o", made], report.left)
            for path, made in zip(files, objects, strict=True)
        ]
        for job in jobs:
            job.result()
    run_quietly([nvcc, "-shared", f"-arch={report.options.arch}", *objects, "-o", library], report.left)
    version = re.search(r"release (\S+),", run_quietly([nvcc, "--version"], 10))
    text = _EXTENSION.format(
        library=str(library), version=version[1] if version else "unknown", arch=report.options.arch
    )
    (report.work / f"{STAND_IN}.py").write_text(text, encoding="utf-8")
    report.put(way="direct", direct_seconds=round(time.monotonic() - began, 1))
    report.put(kernels=kernels_in_new_process(report))


def run_quietly(command: Sequence[Any], seconds: float) -> str:
    """The output of a command that has to succeed."""
    command = list(map(str, command))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace", timeout=max(seconds, 1))
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{tail(done.stdout + done.stderr)}")
    return done.stdout


def find_tool(name: str) -> str | None:
    """A program of the CUDA toolkit, which need not be on the path."""
    homes = [os.environ[key] for key in ("CUDA_HOME", "CUDA_PATH") if key in os.environ]
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), *(f"{h}/bin" for h in homes),
                                                    "/usr/local/cuda/bin"]))  # fmt: skip


def kernels(report: Report) -> None:
    """What the library says of its kernels; in a process of its own, because what is installed shows in new ones."""
    import_library(report)
    from tide_jax.kernels import status

    report.put(**dataclasses.asdict(status(report.options.platform)))


def kernels_in_new_process(report: Report) -> dict[str, Any]:
    """`kernels`, from outside."""
    path = report.work / "kernels.json"
    path.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--child", "kernels", "--work", report.work]
    command += ["--platform", report.options.platform]
    status, text = streamed(command, 60)
    if not path.exists():
        return {"available": False, "reason": f"exit status {status}: {tail(text)}"}
    found = report.of("kernels")
    return found if "available" in found else {"available": False, "reason": found.get("error")}


_EXTENSION = '''"""The CUDA handlers of a plain shared library; once imported, in place of tide_jax._xla_ffi_cuda."""

import ctypes
import sys

import jax

_LIBRARY = ctypes.CDLL({library!r})
sys.modules["tide_jax._xla_ffi_cuda"] = sys.modules[__name__]


def registrations():
    return {{
        "tide_compact_v1": jax.ffi.pycapsule(_LIBRARY.TideCompactCuda),
        "tide_exit_route_v1": jax.ffi.pycapsule(_LIBRARY.TideExitRouteCuda),
        "tide_scatter_rows_v1": jax.ffi.pycapsule(_LIBRARY.TideScatterRowsCuda),
    }}


def cuda_version():
    return {version!r}


def architectures():
    return {arch!r}
'''


# --- tests -----------------------------------------------------------------------------------------------------------


def tests(report: Report) -> None:
    """The tests that are marked `gpu`, where no test may be skipped for want of kernels."""
    if report.options.platform != "cuda":
        raise NotRun(f"the platform is {report.options.platform}")
    if not importlib.util.find_spec("pytest"):
        raise NotRun("pytest is not installed")
    # Without the options of pyproject.toml: they ask for packages that only the whole test suite needs, and make
    # every warning of another version of jax an error.
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-m", "gpu", "-q", "-rfE", "--tb=short",
               "-o", "addopts=", "--import-mode=importlib", "-W", "default", "-p", "no:cacheprovider"]  # fmt: skip
    paths = [str(ROOT)]
    if (report.work / f"{STAND_IN}.py").exists():
        paths.append(str(report.work))
        command += ["-p", STAND_IN]
    cache = str(report.work / "jax_cache")
    env = {"PYTHONPATH": os.pathsep.join(paths), "JAX_COMPILATION_CACHE_DIR": cache, "TIDE_REQUIRE_KERNELS": "1"}
    status, text = streamed(command, report.left, env)
    counts = {what: int(count) for count, what in re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", tail(text, 1))}
    report.put(counts=counts, exit_status=status)
    if status != 0:
        report.put(output=tail(text, 80).splitlines())
        raise RuntimeError("stopped for the time it took" if status is None else tail(text, 1))


# --- ops -------------------------------------------------------------------------------------------------------------


class Chain(NamedTuple):
    """Dependent calls to be timed.

    Attributes:
        body: (fixed, carry) -> carry, with `calls` calls in it.
        fixed: arrays that stay the same.
        carry: arrays that the first call takes.
        calls: in one body.
        lengths: two numbers of bodies; their difference is what counts.
    """

    body: Callable[[Any, Any], Any]
    fixed: Any
    carry: Any
    calls: int
    lengths: tuple[int, int]


def measure(report: Report, chains: Mapping[str, Chain]) -> dict[str, float]:
    """Microseconds of one call of each chain; a chain that fails is reported, and left out."""
    import jax

    def loop(body: Callable, length: int, fixed, carry):
        return jax.lax.fori_loop(0, length, lambda _, carry: body(fixed, carry), carry)

    lowered = {}
    for name, chain in chains.items():
        for end, length in enumerate(chain.lengths):
            program = jax.jit(functools.partial(loop, chain.body, length))
            lowered[name, end] = program.lower(chain.fixed, chain.carry)
    programs, failed = compiled(lowered)
    failures = {name: text for (name, _), text in failed.items()}

    def once(name: str, end: int) -> float:
        began = time.perf_counter()
        jax.block_until_ready(programs[name, end](chains[name].fixed, chains[name].carry))
        return time.perf_counter() - began

    seconds: dict[str, list[float]] = {}
    for round_ in range(report.options.rounds + 2):  # twice thrown away: a command buffer is recorded at the second
        for name, chain in chains.items():
            if name in failures:
                continue
            try:
                taken = once(name, 1) - once(name, 0)
            except Exception as error:
                failures[name] = f"{type(error).__name__}: {error}"[:1000]
                continue
            if round_ > 1:
                calls = chain.calls * (chain.lengths[1] - chain.lengths[0])
                seconds.setdefault(name, []).append(taken / calls)
    if failures:
        report.put(failures=report.facts.get("failures", {}) | failures)
    return {name: 1e6 * harness.median(values) for name, values in seconds.items() if name not in failures}


def compiled(lowered: Mapping[Any, Any], options: Mapping[str, Any] | None = None) -> tuple[dict, dict[Any, str]]:
    """The programs by name, compiled side by side, and the messages of those that cannot be."""
    programs, failures = {}, {}
    with concurrent.futures.ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        jobs = {name: pool.submit(one.compile, compiler_options=options) for name, one in lowered.items()}
        for name, job in jobs.items():
            try:
                programs[name] = job.result()
            except Exception as error:
                failures[name] = f"{type(error).__name__}: {error}"[:1000]
    return programs, failures


@functools.cache
def _noise():
    import jax
    import jax.numpy as jnp

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def noise(shape, dtype, seed, scale):
        bits = jax.lax.iota(jnp.uint32, math.prod(shape)) * jnp.uint32(2654435761) + seed
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
            bits = (bits ^ (bits >> shift)) * jnp.uint32(factor)
        uniform = bits.astype(jnp.float32) * jnp.float32(2.0**-31) - 1
        return (uniform * (scale * 3**0.5)).astype(dtype).reshape(shape)

    return noise


def noise(shape: Sequence[int], dtype: Any = "float32", *, seed: int, scale: float = 1.0):
    """Uniform noise of this standard deviation, made on the device by a program that compiles in no time."""
    import numpy as np

    return _noise()(tuple(shape), np.dtype(dtype), np.uint32(seed * 7919 + 1), np.float32(scale))


def ops(report: Report) -> None:
    """Every kernel against its floors and against XLA."""
    import_library(report)
    import jax
    import jax.numpy as jnp

    from tide_jax.kernels import status

    bandwidth = report.of("device").get("copy_bytes_per_second")
    use = have_kernels(report)
    report.put(kernels=use)
    tiny = report.options.tiny
    launch = None
    if use:
        # As little as a kernel of ours can do: one row, one block.
        smallest = {"launch": route_chain("kernel", 1, 8, 1, jnp.bfloat16, tiny=tiny)}
        launch = measure(report, smallest).get("launch")
        report.put(launch_us=launch)
        say(f"the smallest call of a kernel of ours: {launch} µs")

    def finish(op: str, chains: Mapping[str, Mapping[str, Chain]], moved: Mapping[str, int]) -> dict[str, Any]:
        flat = {f"{op} {size} {form}": chain for size, forms in chains.items() for form, chain in forms.items()}
        times = measure(report, flat)
        results = {}
        for size, forms in chains.items():
            us = {form: times[f"{op} {size} {form}"] for form in forms if f"{op} {size} {form}" in times}
            floor = 1e6 * moved[size] / bandwidth if bandwidth else None
            results[size] = {"us": us, "bytes": moved[size], "byte_floor_us": floor}
            floors = [value for value in (floor, launch) if value is not None]
            worst = max((us[form] for form in ("kernel", "kernel_cold") if form in us), default=None)
            if worst is not None and floors:
                results[size]["over_floor"] = worst / max(floors)
            if {"kernel_glued", "xla_glued"} <= us.keys():
                results[size]["vs_xla"] = us["xla_glued"] / us["kernel_glued"]
            say(f"{op} {size}: " + ", ".join(f"{form} {value:.2f} µs" for form, value in us.items()))
        return results

    forms = ("kernel", "kernel_glued", "xla_glued") if use else ("xla_glued",)
    sizes = ([(1, 64), (5, 64)], [(9, 64)]) if tiny else (
        [(n, 4096) for n in (1, 4, 16, 64, 256, 1024)], [(n, 576) for n in (1, 16, 256)]
    )  # fmt: skip
    results: dict[str, Any] = {}
    for group in sizes:  # in two parts, so that one is there if the time ends
        chains, moved = {}, {}
        for n, d in group:
            cold = ("kernel_cold",) if use and d == group[0][1] and group is sizes[0] else ()
            dtype, r = jnp.bfloat16, 128
            chains[f"n{n} d{d}"] = {form: route_chain(form, n, d, r, dtype, tiny=tiny) for form in (*forms, *cold)}
            moved[f"n{n} d{d}"] = n * d * 2 + 4 * (d + d * r + r) + n * (4 + 1 + 1 + 4) + n * (4 + 1 + 4) + 4
        results |= finish("exit_route", chains, moved)
        report.put(exit_route=results)
    moves = [(8, 64)] if tiny else [(64, 4096), (512, 4096), (512, 576)]
    there = status("cuda" if jax.default_backend() == "gpu" else "cpu").targets
    for op in ("compact", "scatter_rows"):
        if use and f"tide_{op}_v1" not in there:
            continue  # a rehearsal: the CPU has no kernel for all of them
        chains = {f"n{n} d{d}": {form: move_chain(op, form, n, d, tiny=tiny) for form in forms} for n, d in moves}
        rows = {"compact": lambda n: n // 2 + n, "scatter_rows": lambda n: n}[op]
        moved = {f"n{n} d{d}": rows(n) * d * 2 + (6 * n if op == "compact" else 2 * n) for n, d in moves}
        report.put(**{op: finish(op, chains, moved)})


def route_chain(form: str, n: int, d: int, r: int, dtype: Any, *, tiny: bool) -> Chain:
    """Exit routes of n rows, each for the rows that the one before it left."""
    import jax.numpy as jnp

    from tide_jax.kernels import Gate, Norm, exit_route

    sets = {"kernel_cold": 48}.get(form, 1)  # of weights; 48 of 4,096 by 128 are 100 MB
    calls = 8 if form.endswith("glued") else 48
    use_kernels = not form.startswith("xla")
    downs = [noise((d, r), seed=3 + i, scale=d**-0.5) for i in range(4 if tiny and sets > 1 else sets)]
    fixed = (noise((d,), seed=1), downs, noise((r,), seed=2))

    def body(fixed, carry):
        scale, downs, up = fixed
        x, gate = carry
        for call in range(calls):
            route = exit_route(
                x, scale, None, downs[call % len(downs)], up, gate, norm=Norm(eps=1e-5), layers=8,
                use_kernels=use_kernels,
            )  # fmt: skip
            gate = gate._replace(exited=route.exited, depth=route.depth)
            if form.endswith("glued"):
                x = (x + 1e-9 * route.score[:, None]).astype(x.dtype)
        return x, gate

    ones = jnp.ones(n, bool)
    gate = Gate(jnp.full(n, 2.0), ones, ~ones, jnp.full(n, 30, jnp.int32))
    return Chain(body, fixed, (noise((n, d), dtype, seed=0), gate), calls, _lengths(calls, tiny))


def move_chain(op: str, form: str, n: int, d: int, *, tiny: bool) -> Chain:
    """Gathering half of n rows into n places, or putting n / 2 rows back."""
    import jax.numpy as jnp

    from tide_jax.kernels import compact, scatter_rows

    use_kernels, glued = not form.startswith("xla"), form.endswith("glued")
    calls = 8 if glued else 48

    def gather(_, carry):
        x, keep = carry
        for _ in range(calls):
            x = compact(x, keep, bucket=n, use_kernels=use_kernels).rows
            keep = jnp.roll(keep, 1) if glued else keep
        return x, keep

    def put(rows, carry):
        base, index = carry
        for _ in range(calls):
            base = scatter_rows(base, rows, index, use_kernels=use_kernels)
            index = (index + 1) % n if glued else index
        return base, index

    x, half = noise((n, d), "bfloat16", seed=0), jnp.arange(n) % 2 == 0
    lengths = _lengths(calls, tiny)
    if op == "compact":
        return Chain(gather, None, (x, half), calls, lengths)
    rows, index = noise((n // 2, d), "bfloat16", seed=1), 2 * jnp.arange(n // 2, dtype=jnp.int32)
    return Chain(put, rows, (x, index), calls, lengths)


def _lengths(calls: int, tiny: bool) -> tuple[int, int]:
    """About a thousand calls between the two; the shorter is long enough not to be unrolled."""
    return (8, 12) if tiny else (8, 8 + 1024 // calls)


# --- predicates ------------------------------------------------------------------------------------------------------

# The ways of which each takes the first spelling that is understood; None: no option.
WAYS = {"default": (None,), "command_buffers": CAPTURED, "no_conditionals": NOT_CAPTURED}


def predicates(report: Report) -> None:
    """What a conditional and a loop condition cost, both decided by the device, and whether XLA captures them."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    some, size = 8, 256
    weights = noise((some, size, size), seed=1, scale=size**-0.5)

    def loop(kind: str, weights, x, count):
        def body(carry):
            done, x = carry
            x = jnp.sin(x) + 1
            for weight in weights if kind != "empty" else ():
                # Products, since XLA turns conditionals over less into selects.
                here, there = (lambda x, w=weight: x[::-1] @ w), (lambda x, w=weight: jnp.tanh(x @ w))
                x = here(x) if kind == "straight" else jax.lax.cond(x[0] > 3e9, there, here, x)
            return done + 1, x

        return jax.lax.while_loop(lambda carry: (carry[0] < count) & (carry[1][1] < 1e30), body, (jnp.int32(0), x))[1]

    x = jnp.zeros(size, jnp.float32)
    lowered = {
        kind: jax.jit(functools.partial(loop, kind)).lower(weights, x, jnp.int32(0))
        for kind in ("empty", "straight", "conditional")
    }
    counts = (4, 8) if report.options.tiny else (16, 272)

    def timed(options: Mapping[str, Any] | None) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as dump:
            programs, failures = compiled({"conditional": lowered["conditional"]}, {**(options or {}), **dumping(dump)})
            captured = thunks(Path(dump))
        more, others = compiled({kind: one for kind, one in lowered.items() if kind not in programs}, options)
        programs |= more
        if failures | others:
            raise RuntimeError("; ".join((failures | others).values()))
        seconds: dict[str, list[float]] = {}
        answers = {}
        for round_ in range(report.options.rounds + 2):
            for kind, program in programs.items():
                taken = []
                for count in counts:
                    began = time.perf_counter()
                    answers[kind] = jax.block_until_ready(program(weights, x, jnp.int32(count)))
                    taken.append(time.perf_counter() - began)
                if round_ > 1:
                    seconds.setdefault(kind, []).append((taken[1] - taken[0]) / (counts[1] - counts[0]))
        us = {kind: 1e6 * harness.median(values) for kind, values in seconds.items()}
        return {
            "options": options,
            "iteration_us": us["empty"],
            "conditional_us": (us["conditional"] - us["straight"]) / some,
            "loops_us": us,
            "thunks": captured,
            "answers": {kind: float(np.asarray(answer)[0]) for kind, answer in answers.items()},
        }

    for way, spellings in WAYS.items():
        options, refused = accepted_options(spellings)
        if refused:
            report.put(options_refused=report.facts.get("options_refused", {}) | refused)
        if len(refused) == len(spellings):
            report.put(**{way: {"not_run": "no spelling of the option is accepted"}})
            continue
        report.put(**{way: timed(options)})
        say(f"{way}: {report.facts[way]}")
        for kind, answer in report.facts[way]["answers"].items():
            if not math.isclose(answer, report.facts["default"]["answers"][kind], rel_tol=1e-3):
                raise RuntimeError(f"{way}, {kind}: another answer than by default")


def accepted_options(spellings: tuple[dict[str, Any] | None, ...]) -> tuple[dict[str, Any] | None, dict[str, str]]:
    """The first of these compiler options that this version takes, and what it says of those before."""
    import jax
    import jax.numpy as jnp

    lowered = jax.jit(lambda x: x + 1).lower(jnp.zeros(8))
    refused = {}
    for options in spellings:
        try:
            lowered.compile(compiler_options=options)
        except Exception as error:
            refused[json.dumps(options)] = f"{type(error).__name__}: {error}"[:300]
        else:
            return options, refused
    return None, refused


def dumping(folder: str) -> dict[str, Any]:
    """Compiler options with which XLA writes down what it will launch, and little else."""
    return {"xla_dump_to": folder, "xla_dump_hlo_as_proto": True}


def thunks(folder: Path) -> dict[str, int] | None:
    """How many loops and conditionals of the largest program XLA has put inside command buffers; None: it does not say.

    In its list of what it launches, whatever is inside a thing is indented further than the thing.
    """
    lists = [*folder.glob("*thunk_sequence_after_thunk_passes*.txt")] or [*folder.glob("*thunk_sequence*.txt")]
    if not lists:
        return None
    return count_thunks(max(lists, key=lambda path: path.stat().st_size).read_text(encoding="utf-8"))


def count_thunks(text: str) -> dict[str, int]:
    """Command buffers, and the loops and conditionals inside and outside of them.

    Example:
        >>> text = "0: kWhile\\n  0: kCommandBuffer\\n    0: kConditional\\n  1: kKernel\\n  2: kConditional"
        >>> {name: count for name, count in count_thunks(text).items() if count}
        {'command_buffers': 1, 'whiles_outside': 1, 'conditionals_inside': 1, 'conditionals_outside': 1}
    """
    kinds = {"kWhile": "whiles", "kConditional": "conditionals"}
    counts = {"command_buffers": 0, **{f"{kind}_{at}": 0 for kind in kinds.values() for at in ("inside", "outside")}}
    inside = None  # how far the command buffer is indented
    for line in text.splitlines():
        words = line.split()
        indent = len(line) - len(line.lstrip())
        kind = next((word for word in words[:3] if word.startswith("k")), None)
        if kind is None:
            continue
        if inside is not None and indent <= inside:
            inside = None
        if kind == "kCommandBuffer":
            counts["command_buffers"] += 1
            inside = indent if inside is None else inside
        elif kind in kinds:
            counts[f"{kinds[kind]}_{'outside' if inside is None else 'inside'}"] += 1
    return counts


# --- decode ----------------------------------------------------------------------------------------------------------

PROMPT = 128  # positions in the cache before the first step
STEPS = (8, 40)  # decode steps between which the clock is read


def shape_of(name: str, tiny: bool):
    """The config of a model, and its exit points."""
    from tide_jax.models import DecoderConfig, LayerKind, RopeConfig

    if tiny:
        config = DecoderConfig(
            family="llama", vocab_size=97, hidden_size=24, ffn_size=40, num_layers=6, num_heads=6, num_kv_heads=2,
            head_dim=8, norm_eps=1e-5, kinds=(LayerKind(rope=RopeConfig()),),
            max_positions=1024, tied_head=name == "smollm2",
        )  # fmt: skip
        return config, (2, 4)
    if name == "smollm2":
        config = DecoderConfig(
            family="llama", vocab_size=49152, hidden_size=576, ffn_size=1536, num_layers=30, num_heads=9,
            num_kv_heads=3, head_dim=64, norm_eps=1e-5, kinds=(LayerKind(rope=RopeConfig(theta=100_000.0)),),
            max_positions=8192,
            tied_head=True,
        )  # fmt: skip
    else:
        config = DecoderConfig(
            family="llama", vocab_size=128256, hidden_size=4096, ffn_size=14336, num_layers=32, num_heads=32,
            num_kv_heads=8, head_dim=128, norm_eps=1e-5, max_positions=131072, tied_head=False,
            kinds=(
                LayerKind(rope=RopeConfig(theta=500_000.0, kind="llama3", factor=8.0, original_max_positions=8192)),
            ),
        )  # fmt: skip
    return config, (8, 16, 24)


def random_model(config, points: Sequence[int]):
    """A model with random weights, and with what calibration leaves at an exit point: a router and a projection."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    import tide_jax as tide
    from tide_jax.exits import ExitHead, ExitHeads, Projection, Router
    from tide_jax.models import Decoder

    graphdef, abstract = nnx.split(nnx.eval_shape(lambda: Decoder(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))))
    seeds = iter(range(1, 1 << 30))

    def fill(leaf):
        if len(leaf.shape) == 1:  # the scale of a norm
            return jnp.ones(leaf.shape, leaf.dtype)
        # A kernel is [inputs, outputs]; the embedding, [vocabulary, width], serves a tied head too.
        inputs = config.hidden_size if leaf.shape[0] == config.vocab_size else leaf.shape[0]
        return noise(leaf.shape, leaf.dtype, seed=next(seeds), scale=inputs**-0.5)

    params = jax.tree.map(fill, abstract)
    d, r = config.hidden_size, 128
    heads = {
        depth: ExitHead(
            Router(noise((d, r), seed=next(seeds), scale=d**-0.5), noise((r,), seed=next(seeds), scale=r**-0.5)),
            Projection(noise((d, d), seed=next(seeds), scale=d**-0.5), noise((d,), seed=next(seeds))),
        )
        for depth in points
    }
    return tide.Model(graphdef, params, exits=ExitHeads(heads=heads, thresholds=dict.fromkeys(points, 0.5)))


class Decoding:
    """One decode loop, started again and again from the same place in the same caches."""

    def __init__(self, model, plan, heads):
        import jax
        import jax.numpy as jnp

        from tide_jax.decode.loop import run

        self.model, self.plan, self.heads = model, plan, heads
        self.refill()
        # As the engine compiles it.
        jitted = jax.jit(functools.partial(run, model.graphdef, plan), donate_argnums=(2,))
        self.lowered = jitted.lower(model.params, heads, self.rewound((0,) * len(plan.points)), jnp.int32(0))

    def refill(self) -> None:
        """Make a state as after a prompt of random content."""
        import numpy as np

        from tide_jax.decode.state import new_state
        from tide_jax.models import KV

        config, dtype = self.model.config, self.model.dtype
        ids = np.arange(PROMPT) % config.vocab_size
        state = new_state(
            config, tokens=[ids.tolist()], max_new_tokens=[STEPS[1] + 2], stops=[], seeds=[0], temperature=[0.0],
            thresholds=np.zeros((1, len(self.plan.points)), np.float32), dtype=dtype, record_states=False,
        )  # fmt: skip
        places = np.arange(state.slots.shape[1])
        places = np.where(places < PROMPT, places, -1).astype(np.int32)[None]
        # What a run changes, on the host: a state is given away with every run.
        self.start = {"length": np.full(1, PROMPT, np.int32), "slots": places, "live": np.ones(1, bool)}
        self.start |= {name: np.asarray(getattr(state, name)) for name in ("segments_run", "steps", "tokens", "depths")}
        shape = state.caches[0].k.shape
        caches = [KV(*(noise(shape, dtype, seed=2 * i + j) for j in (0, 1))) for i in range(config.num_layers)]
        self.state = dataclasses.replace(state, caches=tuple(caches))

    def rewound(self, thresholds: Sequence[float]):
        """The state before the first step, with these thresholds."""
        import jax.numpy as jnp
        import numpy as np

        fresh = {name: jnp.array(value) for name, value in self.start.items()}
        return dataclasses.replace(self.state, **fresh, thresholds=jnp.asarray(np.asarray([thresholds], np.float32)))

    def run(self, program: Callable, thresholds: Sequence[float], count: int) -> float:
        """Seconds of so many steps."""
        import jax
        import jax.numpy as jnp

        state, steps = jax.block_until_ready((self.rewound(thresholds), jnp.int32(count)))
        began = time.perf_counter()
        self.state = jax.block_until_ready(program(self.model.params, self.heads, state, steps))
        return time.perf_counter() - began

    def emitted(self) -> dict[str, Any]:
        """Tokens and depths of the steps of the last run, and whether it met what is not finite."""
        import numpy as np

        places = slice(PROMPT + 1, PROMPT + 1 + STEPS[1])
        tokens, depths = (np.asarray(part)[0, places].tolist() for part in (self.state.tokens, self.state.depths))
        return {"tokens": tokens, "depths": depths, "flagged": bool(np.asarray(self.state.flagged).any())}


class Variant(NamedTuple):
    """One way to decode.

    Attributes:
        loop: which compiled loop.
        thresholds: of its exit points.
        depth: layers that every token must run.
    """

    loop: str
    thresholds: tuple[float, ...]
    depth: int


def decode(name: str, report: Report) -> None:
    """Speeds at fixed depths and the cost of exits that never fire, by default and with command buffers."""
    import_library(report)
    import jax
    from decode import ceilings

    from tide_jax.compat import release_free_memory
    from tide_jax.decode.plan import Plan
    from tide_jax.exits import RouterScorer
    from tide_jax.exits.rules import LEAVE, STAY

    config, points = shape_of(name, report.options.tiny)
    began = time.monotonic()
    model = jax.block_until_ready(random_model(config, points))
    jax.block_until_ready(model.params)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    report.put(config=config.to_json(), exit_points=points, weights_bytes=size, kernels=have_kernels(report))
    say(f"{size / 1e9:.2f} GB of weights after {time.monotonic() - began:.0f} s")
    layers = config.num_layers
    routed = Plan(points=points, scorer=RouterScorer())
    loops = {
        "full": Decoding(model, Plan(), {}),
        "routers": Decoding(model, routed, model.exits.heads),
        "routers_of_xla": Decoding(model, Plan(points=points, scorer=RouterScorer(False)), model.exits.heads),
        # Conditionals alone: thresholds decide, nothing is scored.
        "points": Decoding(model, Plan(points=points), {}),
    }
    never = (STAY,) * len(points)
    variants = {
        "full": Variant("full", (), layers),
        "never_fires": Variant("routers", never, layers),
        **{
            f"depth{depth}": Variant("routers", tuple(LEAVE if p == depth else STAY for p in points), depth)
            for depth in reversed(points)
        },
        "never_fires_xla": Variant("routers_of_xla", never, layers),
        "conditionals_alone": Variant("points", never, layers),
    }
    say(f"{len(loops)} loops traced after {time.monotonic() - began:.0f} s")

    programs: dict[tuple[str, str], Any] = {}
    context = PROMPT + STEPS[1] // 2
    report.put(byte_ceilings={f"depth{depth}": ceilings(config, depth, context) for depth in points})
    for way, spellings in WAYS.items():
        options, refused = accepted_options(spellings)
        reason = "no spelling of the option is accepted" if len(refused) == len(spellings) else None
        if programs and report.left < 2 * report.facts["default"]["compile_seconds"] + 10:
            reason = f"{report.left:.0f} s left"
        if reason:
            report.put(**{way: {"not_run": reason}})
            continue
        compiling = time.monotonic()
        with tempfile.TemporaryDirectory() as dump:
            wanted = {loop: one.lowered for loop, one in loops.items()}
            made, failures = compiled(wanted, {**(options or {}), **dumping(dump)})
            captured = thunks(Path(dump))
        release_free_memory()
        programs |= {(way, loop): program for loop, program in made.items()}
        taken = round(time.monotonic() - compiling, 1)
        report.put(**{way: {"options": options, "compile_seconds": taken, "thunks": captured, "failures": failures}})
        say(f"{way}: compiled in {taken} s; {captured}")
        if way == "default":  # lest what comes next costs this
            step_times(report, loops, variants, programs, rounds=2)
    step_times(report, loops, variants, programs, rounds=report.options.rounds)
    wrong = [
        f"{way}, {name}"
        for way in WAYS
        for name, right in report.facts[way].get("depths_as_asked", {}).items()
        if not right
    ]
    if wrong:
        raise RuntimeError(f"tokens ran another depth than asked for: {'; '.join(wrong)}")
    if not any(way == "default" for way, _ in programs):
        raise RuntimeError("; ".join(report.facts["default"]["failures"].values()))


def step_times(report: Report, loops, variants: Mapping[str, Variant], programs, *, rounds: int) -> None:
    """Milliseconds of a step of every variant in every way there is a program for, in the same rounds, and ratios."""
    ways = list(dict.fromkeys(way for way, _ in programs))
    seconds: dict[tuple[str, str], list[float]] = {}
    said: dict[tuple[str, str], dict[str, Any]] = {}
    failures: dict[tuple[str, str], str] = {}
    for round_ in range(rounds + 2):
        if round_ > 3 and report.left < 5:
            say(f"only {round_ - 2} rounds, as the time ends")
            break
        for name, variant in variants.items():
            for way in ways:
                if (way, variant.loop) not in programs or (way, name) in failures:
                    continue
                loop, program = loops[variant.loop], programs[way, variant.loop]
                try:
                    short, long = (loop.run(program, variant.thresholds, count) for count in STEPS)
                except Exception as error:
                    failures[way, name] = f"{type(error).__name__}: {error}"[:1000]
                    loop.refill()  # the state went with it
                    continue
                said[way, name] = loop.emitted()
                if round_ > 1:
                    seconds.setdefault((way, name), []).append((long - short) / (STEPS[1] - STEPS[0]))
    for way in ways:
        names = [name for name in variants if (way, name) in seconds and (way, name) not in failures]
        ms = {name: 1e3 * harness.median(seconds[way, name]) for name in names}
        facts = {**report.facts[way], "step_ms": ms, **ratios(ms, report.facts["config"]["num_layers"])}
        facts["failures"] = facts["failures"] | {name: text for (of, name), text in failures.items() if of == way}
        facts["tokens_per_second"] = {name: 1e3 / value for name, value in ms.items()}
        facts["depths_as_asked"] = {name: set(said[way, name]["depths"]) == {variants[name].depth} for name in names}
        facts["not_finite"] = [name for name in names if said[way, name]["flagged"]]
        # With random weights in 16 bits another order of additions may choose another token, but never another depth.
        if "full" in names:
            tokens = said[way, "full"]["tokens"]
            facts["tokens_as_full"] = {
                name: sum(a == b for a, b in zip(said[way, name]["tokens"], tokens, strict=True)) / len(tokens)
                for name in names
                if variants[name].depth == variants["full"].depth
            }
        report.put(**{way: facts})
        say(f"{way}: " + ", ".join(f"{name} {value:.3f} ms" for name, value in ms.items()))


def ratios(ms: Mapping[str, float], layers: int) -> dict[str, Any]:
    """What the step times say: ratios, and the time of the layers that an exit leaves out.

    Example:
        >>> ratios({"full": 4.0, "never_fires": 5.0, "depth2": 2.0}, 8)
        {'depth2_vs_full': 2.0, 'never_overhead': 0.25, 'segment_ms': {'2': 3.0}, 'layer_ms': 0.5}
    """
    depths = sorted(int(name.removeprefix("depth")) for name in ms if name.startswith("depth"))
    found: dict[str, Any] = {}
    if "full" in ms:
        found = {f"depth{depth}_vs_full": ms["full"] / ms[f"depth{depth}"] for depth in depths}
        overheads = {
            "never_overhead": "never_fires",
            "never_overhead_xla": "never_fires_xla",
            "conditionals_overhead": "conditionals_alone",
        }
        found |= {key: ms[name] / ms["full"] - 1 for key, name in overheads.items() if name in ms}
    if depths and "never_fires" in ms:
        found["segment_ms"] = {str(depth): ms["never_fires"] - ms[f"depth{depth}"] for depth in depths}
        found["layer_ms"] = found["segment_ms"][str(depths[0])] / (layers - depths[0])
    return found


# --- sanitizer -------------------------------------------------------------------------------------------------------


def build_sanitizer_program(report: Report) -> str:
    """Compile the program that compute-sanitizer watches; `built`, or why not."""
    source = report.work / "sanitize.cu"
    source.write_text(_SANITIZED, encoding="utf-8")
    flags = ["-std=c++17", "-O2", "-lineinfo", f"-arch={report.options.arch}", f"-I{ROOT / 'xla_ffi/include'}"]
    try:
        run_quietly([find_tool("nvcc"), *flags, source, "-o", report.work / "sanitize"], report.left)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "built"


def sanitizer(report: Report) -> None:
    """compute-sanitizer over small sizes of every kernel, each buffer as large as it must be and no larger."""
    if report.options.platform != "cuda":
        raise NotRun(f"the platform is {report.options.platform}")
    tool = find_tool("compute-sanitizer")
    program = report.work / "sanitize"
    if not program.exists():
        if not find_tool("nvcc"):
            raise NotRun("no nvcc found")
        if (outcome := build_sanitizer_program(report)) != "built":
            raise RuntimeError(outcome)
    status, text = streamed([program], min(30, report.left))
    report.put(alone={"exit_status": status, "output": tail(text, 10)})
    wrong = [] if status == 0 else ["the program by itself"]
    if tool is None and not wrong:
        raise NotRun("no compute-sanitizer found")
    for name, options in (
        ("memcheck", ["--leak-check", "full"]), ("racecheck", ["--racecheck-report", "all"]), ("synccheck", []),
    ):  # fmt: skip
        if tool is None or report.left < 5:
            reason = f"{report.left:.0f} s left" if tool else "no compute-sanitizer found"
            report.put(**{name: {"not_run": reason}})
            continue
        began = time.monotonic()
        status, text = streamed([tool, "--tool", name, "--error-exitcode", "9", *options, program], report.left)
        summary = re.findall(r"=+ ((?:ERROR|RACECHECK|LEAK) SUMMARY: .*)", text)
        facts = {"exit_status": status, "summary": summary, "seconds": round(time.monotonic() - began, 1)}
        if status != 0:
            facts["output"] = tail(text, 40)
            wrong.append(name)
        report.put(**{name: facts})
    if wrong:
        raise RuntimeError(f"not clean: {', '.join(wrong)}")


# Compares with the formulas in double precision too, so that it says something without jax.
_SANITIZED = r"""
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "tide/compact.cuh"
#include "tide/exit_route.cuh"

using tide::DType;
using tide::Norm;

int failures = 0;
std::mt19937 engine(0);

void Expect(bool holds, const char* what) {
  if (!holds) std::printf("wrong: %s\n", what), ++failures;
}

void Check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("%s: %s\n", what, cudaGetErrorString(error));
  std::exit(2);
}

template <typename T>
struct Buffer {  // on the device, exactly as large as asked for
  T* at = nullptr;
  size_t count;
  explicit Buffer(size_t n) : count(n) {
    Check(cudaMalloc(reinterpret_cast<void**>(&at), n * sizeof(T)), "cudaMalloc");
  }
  explicit Buffer(const std::vector<T>& host) : Buffer(host.size()) {
    Check(cudaMemcpy(at, host.data(), count * sizeof(T), cudaMemcpyHostToDevice), "to the device");
  }
  ~Buffer() { cudaFree(at); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  std::vector<T> Read() const {
    std::vector<T> host(count);
    Check(cudaMemcpy(host.data(), at, count * sizeof(T), cudaMemcpyDeviceToHost), "from the device");
    return host;
  }
};

float Random() { return std::normal_distribution<float>()(engine); }

std::vector<float> Floats(int64_t count, float scale = 1.0f) {
  std::vector<float> values(count);
  for (float& value : values) value = scale * Random();
  return values;
}

template <typename T>
void Store(std::vector<float>* values, std::vector<char>* bytes) {
  for (float& value : *values) {
    T stored;
    tide::FromFloat(value, &stored);
    value = tide::ToFloat(stored);
    const char* first = reinterpret_cast<const char*>(&stored);
    bytes->insert(bytes->end(), first, first + sizeof(T));
  }
}

// Random values as they are stored, and the bytes of them.
std::vector<char> Rows(DType dtype, int64_t count, std::vector<float>* values) {
  *values = Floats(count);
  std::vector<char> bytes;
  if (dtype == DType::kF32) Store<float>(values, &bytes);
  if (dtype == DType::kBF16) Store<tide::BFloat16>(values, &bytes);
  if (dtype == DType::kF16) Store<tide::Float16>(values, &bytes);
  return bytes;
}

void ExitRoutes(DType dtype, Norm norm, int64_t rows, int64_t d, int64_t r) {
  std::vector<float> values;
  const Buffer<char> x(Rows(dtype, rows * d, &values));
  const std::vector<float> scale = Floats(d), bias = Floats(norm == Norm::kLayer ? d : 0);
  const std::vector<float> down = Floats(d * r, 1 / std::sqrt(static_cast<float>(d))), up = Floats(r);
  std::vector<float> threshold(rows);
  std::vector<char> live(rows), exited(rows);
  std::vector<int32_t> depth(rows);
  for (int64_t i = 0; i < rows; ++i) {
    threshold[i] = i % 5 == 0 ? -INFINITY : i % 3 == 0 ? 2.0f : 0.5f;
    live[i] = engine() % 4 != 0;
    exited[i] = engine() % 4 == 0;
    depth[i] = static_cast<int32_t>(100 + i);
  }
  const Buffer<float> scales(scale), biases(bias), downs(down), ups(up), thresholds(threshold);
  const Buffer<char> lives(live), exiteds(exited);
  const Buffer<int32_t> depths(depth);
  Buffer<float> scores(rows);
  Buffer<char> exiteds_out(rows);
  Buffer<int32_t> depths_out(rows), remainings(1);
  tide::ExitRoute route = {};
  route.x = x.at, route.scale = scales.at, route.bias = biases.at, route.down = downs.at, route.up = ups.at;
  route.threshold = thresholds.at, route.live = reinterpret_cast<const bool*>(lives.at);
  route.exited = reinterpret_cast<const bool*>(exiteds.at), route.depth = depths.at;
  route.score = scores.at, route.exited_out = reinterpret_cast<bool*>(exiteds_out.at);
  route.depth_out = depths_out.at, route.remaining = remainings.at;
  route.dtype = dtype, route.rows = rows, route.d = d, route.r = r, route.norm = norm, route.eps = 1e-5f;
  route.layers = 7;
  Check(tide::LaunchExitRoute(route, nullptr), "exit_route, launch");
  Check(cudaDeviceSynchronize(), "exit_route");
  const std::vector<float> score = scores.Read();
  const std::vector<char> exited_out = exiteds_out.Read();
  const std::vector<int32_t> depth_out = depths_out.Read(), remaining = remainings.Read();
  int32_t expected = 0;
  for (int64_t row = 0; row < rows; ++row) {
    const float* const own = values.data() + row * d;
    double mean = 0, square = 0, logit = 0;
    for (int64_t i = 0; norm == Norm::kLayer && i < d; ++i) mean += own[i] / static_cast<double>(d);
    for (int64_t i = 0; i < d; ++i) square += (own[i] - mean) * (own[i] - mean) / static_cast<double>(d);
    std::vector<double> normed(d);
    for (int64_t i = 0; i < d; ++i) {
      const double unit = (own[i] - mean) / std::sqrt(square + 1e-5);
      normed[i] = norm == Norm::kLayer ? unit * scale[i] + bias[i]
                                       : unit * (norm == Norm::kRms ? scale[i] : 1.0 + scale[i]);
    }
    for (int64_t j = 0; j < r; ++j) {
      double hidden = 0;
      for (int64_t i = 0; i < d; ++i) hidden += normed[i] * down[i * r + j];
      logit += hidden / (1 + std::exp(-hidden)) * up[j];
    }
    Expect(std::abs(1 / (1 + std::exp(-logit)) - score[row]) < 1e-4, "score");
    const bool fires = score[row] > threshold[row] || std::isinf(threshold[row]);
    const bool leaves = live[row] && !exited[row] && fires;
    Expect((exited_out[row] != 0) == (exited[row] || leaves), "exited");
    Expect(depth_out[row] == (leaves ? 7 : depth[row]), "depth");
    expected += live[row] && !exited[row] && !leaves;
  }
  Expect(remaining[0] == expected, "remaining");
}

void Moves(DType dtype, bool normed, Norm norm, int64_t n, int64_t d, int64_t bucket) {
  std::vector<float> values;
  const std::vector<char> bytes = Rows(dtype, n * d, &values);
  const size_t row_bytes = static_cast<size_t>(d * tide::SizeOf(dtype));
  std::vector<char> keep(n);
  std::vector<int32_t> wanted;
  for (int64_t i = 0; i < n; ++i) {
    keep[i] = engine() % 2 == 0;
    if (keep[i]) wanted.push_back(static_cast<int32_t>(i));
  }
  const Buffer<char> x(bytes), keeps(keep);
  const Buffer<float> scales(Floats(normed ? d : 0)), biases(Floats(normed && norm == Norm::kLayer ? d : 0));
  Buffer<char> rows(bucket * row_bytes);
  Buffer<int32_t> indices(bucket), counts(1);
  const tide::Compact op = {x.at, reinterpret_cast<const bool*>(keeps.at), scales.at, biases.at, rows.at,
                            indices.at, counts.at, dtype, n, d, bucket, normed, norm, 1e-5f};
  Check(tide::LaunchCompact(op, nullptr), "compact, launch");
  Check(cudaDeviceSynchronize(), "compact");
  const std::vector<char> gathered = rows.Read(), zeros(row_bytes);
  const std::vector<int32_t> index = indices.Read();
  Expect(counts.Read()[0] == static_cast<int32_t>(wanted.size()), "count");
  const int64_t full = std::min<int64_t>(bucket, static_cast<int64_t>(wanted.size()));
  for (int64_t m = 0; m < bucket; ++m) {
    Expect(index[m] == (m < full ? wanted[m] : n), "index");
    if (normed && m < full) continue;
    const char* const want = m < full ? bytes.data() + wanted[m] * row_bytes : zeros.data();
    Expect(std::memcmp(gathered.data() + m * row_bytes, want, row_bytes) == 0, "rows");
  }
  // And back: into another buffer, then in place.
  Buffer<char> base(std::vector<char>(bytes.size(), 1)), out(bytes.size());
  for (char* into : {out.at, base.at}) {
    const tide::ScatterRows back = {base.at, rows.at, indices.at, into, n, static_cast<int64_t>(row_bytes), bucket};
    Check(tide::LaunchScatterRows(back, nullptr), "scatter_rows, launch");
    Check(cudaDeviceSynchronize(), "scatter_rows");
    std::vector<char> expected(bytes.size(), 1);
    for (int64_t m = 0; m < full; ++m) {
      std::memcpy(expected.data() + wanted[m] * row_bytes, gathered.data() + m * row_bytes, row_bytes);
    }
    Expect((into == out.at ? out.Read() : base.Read()) == expected, "scattered");
  }
}

int main() {
  const DType dtypes[] = {DType::kF32, DType::kBF16, DType::kF16};
  const Norm norms[] = {Norm::kRms, Norm::kRmsOnePlus, Norm::kLayer};
  const int64_t rows[] = {1, 5, 17, 66, 0, 300}, ds[] = {8, 100, 577, 1, 1032}, rs[] = {128, 33, 1, 257};
  for (int i = 0; i < 24; ++i) {
    ExitRoutes(dtypes[i % 3], norms[i / 3 % 3], rows[i % 6], ds[i % 5], rs[(i + i / 4) % 4]);
  }
  for (int i = 0; i < 36; ++i) {
    Moves(dtypes[i % 3], i % 4 == 3, norms[i / 4 % 3], rows[(i + i / 6) % 6], ds[i % 5], i % 7 == 0 ? 0 : 5 * i);
  }
  std::printf(failures ? "%d mismatches\n" : "all agree\n", failures);
  return failures ? 1 : 0;
}
"""


# --- What it all says ------------------------------------------------------------------------------------------------


def targets(result: Mapping[str, Any]) -> dict[str, Any]:
    """What was asked for, beside what was found; only what could be measured."""
    found: dict[str, Any] = {}
    routes = {
        size: times
        for size, times in result.get("ops", {}).get("exit_route", {}).items()
        if size.endswith(" d4096") and int(size[1:].split()[0]) <= 256
    }
    slowest = {}
    for size, times in routes.items():
        us = [times["us"][form] for form in ("kernel", "kernel_cold") if form in times["us"]]
        if us and times["byte_floor_us"] is not None:
            slowest[size] = max(us), max(TARGET_US, TARGET_FLOORS * times["byte_floor_us"])
    if slowest:
        found["exit_route_us"] = {
            size: {"us": us, "at_most": limit, "met": us <= limit} for size, (us, limit) in slowest.items()
        }
        found["exit_route_met"] = all(us <= limit for us, limit in slowest.values())
    segments = result.get("decode_8b", {}).get("default", {}).get("segment_ms")
    one_row = slowest.get("n1 d4096")
    if one_row and segments:
        shares = {depth: one_row[0] / (1e3 * ms) for depth, ms in segments.items()}
        found["exit_route_share_of_segment"] = shares
        found["exit_route_share_met"] = all(0 <= share < TARGET_SHARE for share in shares.values())
    for name in ("decode_8b", "decode_smollm2"):
        for way in WAYS:
            overhead = result.get(name, {}).get(way, {}).get("never_overhead")
            if overhead is not None:
                found.setdefault("never_overhead", {})[f"{name.removeprefix('decode_')} {way}"] = overhead
    return found


def table(result: Mapping[str, Any]) -> list[str]:
    """The result for people."""
    return [line for part in (_stages, _device, _ops, _predicates, _decode, _targets) for line in part(result)] + [
        str(result["environment"])
    ]


def _stages(result: Mapping[str, Any]) -> Iterator[str]:
    for name, stage in result["stages"].items():
        reason = str(stage.get("reason", "")).strip().splitlines()
        yield f"{name:<16}{stage['status']:<9}{stage.get('seconds', 0):7.1f} s  {reason[0] if reason else ''}".rstrip()
    yield ""


def _device(result: Mapping[str, Any]) -> Iterator[str]:
    facts = result["device"]
    if "copy_bytes_per_second" in facts:
        ours = _number(result.get("ops", {}).get("launch_us"))
        yield f"{facts['name']}: copies {facts['copy_bytes_per_second'] / 1e12:.2f} TB/s"
        yield f"smallest iteration of XLA's {facts['xla_iteration_us']:.2f} µs, smallest call of ours {ours} µs"
    facts = result.get("build", {})
    if facts:
        yield f"kernels: {facts.get('way')}; {facts.get('kernels', {}).get('reason')}"
    counts = result.get("tests", {}).get("counts")
    if counts:
        yield "tests: " + ", ".join(f"{count} {what}" for what, count in counts.items())
    for name in ("memcheck", "racecheck", "synccheck"):
        facts = result.get("sanitizer", {}).get(name)
        if facts:
            yield f"{name}: {'; '.join(facts.get('summary', [])) or facts}"
    yield ""


def _ops(result: Mapping[str, Any]) -> Iterator[str]:
    forms = ("kernel", "kernel_cold", "kernel_glued", "xla_glued")
    facts = result.get("ops", {})
    if not facts:
        return
    cells = "".join(f"{form.replace('_', ' '):>14}" for form in forms)
    yield f"{'µs':<26}{cells}{'byte floor':>12}{'over':>7}{'vs XLA':>8}"
    for op in ("exit_route", "compact", "scatter_rows"):
        for size, times in facts.get(op, {}).items():
            cells = "".join(f"{_number(times['us'].get(form)):>14}" for form in forms)
            cells += f"{_number(times['byte_floor_us']):>12}{_number(times.get('over_floor')):>7}"
            yield f"{op + ' ' + size:<26}{cells}{_number(times.get('vs_xla')):>8}"
    for name, text in facts.get("failures", {}).items():
        yield f"{name}: {text.splitlines()[0]}"
    yield ""


def _predicates(result: Mapping[str, Any]) -> Iterator[str]:
    for way in WAYS:
        facts = result.get("predicates", {}).get(way, {})
        if "conditional_us" in facts:
            costs = (
                f"a conditional {facts['conditional_us']:.2f} µs, a loop of one kernel {facts['iteration_us']:.2f} µs"
            )
            yield f"{way:<16} {costs}; {facts['thunks']}"
    yield ""


def _decode(result: Mapping[str, Any]) -> Iterator[str]:
    for model in ("8b", "smollm2"):
        facts = result.get(f"decode_{model}", {})
        for way in WAYS:
            one = facts.get(way, {})
            if "step_ms" not in one:
                continue
            yield f"{model}, {way}: {one['thunks']}"
            for name, ms in one["step_ms"].items():
                ratio = one.get(f"{name}_vs_full")
                ceiling = facts["byte_ceilings"].get(name)
                more = "" if ratio is None else f"{ratio:8.2f} × full (byte ceiling {ceiling:.2f})"
                yield f"  {name:<22}{ms:9.3f} ms{1e3 / ms:9.1f} tokens/s{more}"
            for name in ("never_overhead", "never_overhead_xla", "conditionals_overhead"):
                if name in one:
                    yield f"  {name:<22}{one[name]:+9.3f}"
            yield ""


def _targets(result: Mapping[str, Any]) -> Iterator[str]:
    for name, value in result.get("targets", {}).items():
        yield f"{name:<28}{json.dumps(value)}"
    yield ""


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


STAGES = {
    stage.name: stage
    for stage in (
        Stage("device", 40, device),
        Stage("build", 140, build),
        Stage("tests", 100, tests),
        Stage("ops", 90, ops),
        Stage("predicates", 40, predicates),
        Stage("decode_8b", 170, functools.partial(decode, "8b")),
        Stage("sanitizer", 75, sanitizer),
        Stage("decode_smollm2", 100, functools.partial(decode, "smollm2")),
    )
}

if __name__ == "__main__":
    main()
