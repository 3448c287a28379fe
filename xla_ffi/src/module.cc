// The Python module `tide_jax._xla_ffi`: a table of CPU handlers, nothing else. Handlers live in
// *_ffi.cc and never see Python.

#include <nanobind/nanobind.h>

#include "capsules.h"

namespace nb = nanobind;

extern "C" XLA_FFI_Error* TideCompactCpu(XLA_FFI_CallFrame* call_frame);
extern "C" XLA_FFI_Error* TideExitRouteCpu(XLA_FFI_CallFrame* call_frame);

NB_MODULE(_xla_ffi, m) {
  m.doc() = "Native kernels of tide_jax for the CPU as XLA FFI handlers.";
  m.def(
      "registrations",
      [] {
        // Target names carry a version: an exported program names the target it was built for.
        nb::dict targets;
        targets["tide_compact_v1"] = tide::Handler(TideCompactCpu);
        targets["tide_exit_route_v1"] = tide::Handler(TideExitRouteCpu);
        return targets;
      },
      "Return {target name: capsule} of every handler compiled into this module.");
}
