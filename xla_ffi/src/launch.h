// The launchers of the CUDA kernels, for code that nvcc does not compile.

#ifndef TIDE_LAUNCH_H_
#define TIDE_LAUNCH_H_

#include <cuda_runtime_api.h>

#include "tide/compact.h"
#include "tide/exit_route.h"

namespace tide {

// Whether there is code for this process's device.
cudaError_t Probe();

cudaError_t Launch(const ExitRoute& route, cudaStream_t stream);
cudaError_t Launch(const Compact& op, cudaStream_t stream);
cudaError_t Launch(const ScatterRows& op, cudaStream_t stream);

}  // namespace tide

#endif  // TIDE_LAUNCH_H_
