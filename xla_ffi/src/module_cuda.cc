// The Python module `tide_jax._xla_ffi_cuda`: a table of CUDA handlers and how they were compiled.

#include <cuda_runtime_api.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>

#include "capsules.h"
#include "launch.h"

namespace nb = nanobind;

extern "C" XLA_FFI_Error* TideCompactCuda(XLA_FFI_CallFrame* call_frame);
extern "C" XLA_FFI_Error* TideExitRouteCuda(XLA_FFI_CallFrame* call_frame);
extern "C" XLA_FFI_Error* TideScatterRowsCuda(XLA_FFI_CallFrame* call_frame);

NB_MODULE(_xla_ffi_cuda, m) {
  m.doc() = "Native kernels of tide_jax for CUDA as XLA FFI handlers.";
  m.def(
      "registrations",
      [] {
        nb::dict targets;
        targets["tide_compact_v1"] = tide::Handler(TideCompactCuda);
        targets["tide_exit_route_v1"] = tide::Handler(TideExitRouteCuda);
        targets["tide_scatter_rows_v1"] = tide::Handler(TideScatterRowsCuda);
        return targets;
      },
      "Return {target name: capsule} of every handler compiled into this module.");
  m.def(
      "device_error",
      [] {
        const cudaError_t error = tide::Probe();
        return std::string(error == cudaSuccess ? "" : cudaGetErrorString(error));
      },
      "Return why the kernels cannot run on this process's device, or an empty string.");
  m.def(
      "cuda_version",
      [] {
        return std::to_string(CUDART_VERSION / 1000) + "." + std::to_string(CUDART_VERSION % 1000 / 10);
      },
      "Return the version of the CUDA toolkit that it was compiled with, such as \"13.0\".");
  m.def(
      "architectures", [] { return std::string(TIDE_CUDA_ARCHITECTURES); },
      "Return the GPU architectures that it was compiled for, as CMake writes them.");
}
