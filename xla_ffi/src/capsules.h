// What the two nanobind tables share: a handler as a capsule.

#ifndef TIDE_CAPSULES_H_
#define TIDE_CAPSULES_H_

#include <nanobind/nanobind.h>

#include <type_traits>

#include "xla/ffi/api/c_api.h"

namespace tide {

template <typename T>
nanobind::capsule Handler(T* fn) {
  static_assert(std::is_invocable_r_v<XLA_FFI_Error*, T, XLA_FFI_CallFrame*>,
                "an XLA FFI handler takes an XLA_FFI_CallFrame* and returns an XLA_FFI_Error*");
  return nanobind::capsule(reinterpret_cast<void*>(fn));
}

}  // namespace tide

#endif  // TIDE_CAPSULES_H_
