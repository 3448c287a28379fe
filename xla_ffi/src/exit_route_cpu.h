// The exit route of one set of router weights on a CPU.

#ifndef TIDE_EXIT_ROUTE_CPU_H_
#define TIDE_EXIT_ROUTE_CPU_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "parallel.h"
#include "tide/exit_route.h"
#include "tide/router_cpu.h"

namespace tide {

// Input features at a time. Weights of half a megabyte are taken as one: they stay in a core's second
// cache. Larger ones are cut, for helpers and so that a chunk is still there for the next rows, into
// few chunks, because each has partial sums. The cut depends on the weights alone, so that a score
// does not depend on threads or on other rows.
inline int64_t ChunkOf(int64_t d, int64_t r) {
  constexpr int64_t kBytes = 256 * 1024;
  constexpr int64_t kChunks = 8;
  if (4 * d * r < 2 * kBytes) return d;
  return std::max((kBytes + 4 * r - 1) / (4 * r), (d + kChunks - 1) / kChunks);
}

template <typename Pool>
void RunExitRoute(const ExitRoute& route, const RouterCpu& router, Pool& pool) {
  constexpr int64_t kTile = 16;
  const int64_t d = route.d, r = route.r, size = SizeOf(route.dtype);
  const int64_t chunk = ChunkOf(d, r), chunks = (d + chunk - 1) / chunk;
  const int64_t tile = std::min(route.rows, kTile);
  const int64_t stride = d + 16;  // of a normed row: rows of 2^n floats would share their cache sets

  // Kept from call to call: an allocation of this size would be mapped and cleared anew each time.
  static thread_local std::vector<float> scratch;
  const size_t needed = static_cast<size_t>(tile * (stride + chunks * r));
  if (scratch.size() < needed) scratch.resize(needed);
  float* const normed = scratch.data();
  float* const hidden = normed + tile * stride;

  int32_t remaining = 0;
  for (int64_t begin = 0; begin < route.rows; begin += tile) {
    const int64_t rows = std::min(tile, route.rows - begin);
    const char* x = static_cast<const char*>(route.x) + begin * d * size;
    for (int64_t row = 0; row < rows; ++row) {
      router.normed(x + row * d * size, route.dtype, d, route.norm, route.scale, route.bias,
                    route.eps, normed + row * stride);
    }
    ParallelFor(pool, chunks, [&](int64_t k) {
      router.hidden(normed, stride, rows, route.down, r, k * chunk, std::min(d, (k + 1) * chunk),
                    hidden + k * rows * r);
    });
    for (int64_t k = 1; k < chunks; ++k) {
      for (int64_t j = 0; j < rows * r; ++j) hidden[j] += hidden[k * rows * r + j];
    }
    for (int64_t row = 0; row < rows; ++row) {
      remaining += Decide(route, begin + row, router.score(hidden + row * r, route.up, r));
    }
  }
  *route.remaining = remaining;
}

}  // namespace tide

#endif  // TIDE_EXIT_ROUTE_CPU_H_
