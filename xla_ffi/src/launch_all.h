// What the CUDA handlers share: launch every set of operands of a call on the caller's stream. No
// handler allocates or waits, so XLA may record them in a command buffer (a CUDA graph).

#ifndef TIDE_LAUNCH_ALL_H_
#define TIDE_LAUNCH_ALL_H_

#include <cuda_runtime_api.h>

#include <string>

#include "check.h"
#include "launch.h"
#include "xla/ffi/api/ffi.h"

namespace tide {

using Stream = ffi::PlatformStream<cudaStream_t>;

template <typename Op>
ffi::Error LaunchAll(const char* target, const Call<Op>& call, cudaStream_t stream) {
  Op op = call.first;
  for (int64_t group = 0; group < call.groups; ++group, op = op.Next()) {
    const cudaError_t error = Launch(op, stream);
    if (error != cudaSuccess) {
      return ffi::Error::Internal(std::string(target) + ": launch failed: " +
                                  cudaGetErrorName(error) + ": " + cudaGetErrorString(error));
    }
  }
  return ffi::Error::Success();
}

}  // namespace tide

#endif  // TIDE_LAUNCH_ALL_H_
