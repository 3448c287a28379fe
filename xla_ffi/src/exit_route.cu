#include "tide/exit_route.cuh"

#include "launch.h"

namespace tide {

cudaError_t Launch(const ExitRoute& route, cudaStream_t stream) {
  return LaunchExitRoute(route, stream);
}

}  // namespace tide
