#include "tide/compact.cuh"

#include "launch.h"

namespace tide {

cudaError_t Launch(const Compact& op, cudaStream_t stream) { return LaunchCompact(op, stream); }

cudaError_t Launch(const ScatterRows& op, cudaStream_t stream) {
  return LaunchScatterRows(op, stream);
}

}  // namespace tide
