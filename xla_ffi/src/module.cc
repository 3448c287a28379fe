// The Python module `tide_jax._xla_ffi`: a table of handlers, nothing else. Handlers live in
// *_ffi.cc and never see Python.

#include <nanobind/nanobind.h>

#include <type_traits>

#include "xla/ffi/api/c_api.h"

namespace nb = nanobind;

extern "C" XLA_FFI_Error* TideRouterScoreCpu(XLA_FFI_CallFrame* call_frame);

namespace {

template <typename T>
nb::capsule Handler(T* fn) {
  static_assert(std::is_invocable_r_v<XLA_FFI_Error*, T, XLA_FFI_CallFrame*>,
                "an XLA FFI handler takes an XLA_FFI_CallFrame* and returns an XLA_FFI_Error*");
  return nb::capsule(reinterpret_cast<void*>(fn));
}

// Target names carry a version: an exported program names the target it was built for.
nb::dict Registrations() {
  nb::dict targets;
  targets["tide_router_score_v1"] = Handler(TideRouterScoreCpu);
  return targets;
}

}  // namespace

NB_MODULE(_xla_ffi, m) {
  m.doc() = "Native kernels of tide_jax as XLA FFI handlers.";
  m.def("registrations", &Registrations,
        "Return {target name: capsule} of every CPU handler compiled into this module.");
}
