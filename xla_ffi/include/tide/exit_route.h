// What an exit point is asked, for the rows of one set of router weights. The CPU and the CUDA
// kernel take the same struct; tide_jax/kernels/exit_route.py holds the specification.

#ifndef TIDE_EXIT_ROUTE_H_
#define TIDE_EXIT_ROUTE_H_

#include <cstdint>

#include "tide/numeric.h"

namespace tide {

enum class DType { kF32, kBF16, kF16 };

TIDE_INLINE int64_t SizeOf(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }

struct ExitRoute {
  // Operands.
  const void* x;           // [rows, d]
  const float* scale;      // [d]
  const float* bias;       // [d] for the LayerNorm, else unread
  const float* down;       // [d, r]
  const float* up;         // [r]
  const float* threshold;  // [rows]
  const bool* live;        // [rows]
  const bool* exited;      // [rows]
  const int32_t* depth;    // [rows]
  // Results.
  float* score;         // [rows]
  bool* exited_out;     // [rows]
  int32_t* depth_out;   // [rows]
  int32_t* remaining;   // []
  // Sizes and attributes.
  DType dtype;
  int64_t rows;
  int64_t d;
  int64_t r;
  Norm norm;
  float eps;
  int32_t layers;

  // The same question for the next set of weights and its rows (a mapped call).
  ExitRoute Next() const {
    ExitRoute next = *this;
    next.x = static_cast<const char*>(x) + rows * d * SizeOf(dtype);
    next.scale += d;
    next.bias += norm == Norm::kLayer ? d : 0;
    next.down += d * r;
    next.up += r;
    next.threshold += rows;
    next.live += rows;
    next.exited += rows;
    next.depth += rows;
    next.score += rows;
    next.exited_out += rows;
    next.depth_out += rows;
    next.remaining += 1;
    return next;
  }
};

// What becomes of one row, given its score. Returns whether it remains.
TIDE_INLINE bool Decide(const ExitRoute& route, int64_t row, float score) {
  const bool live = route.live[row];
  const bool was_out = route.exited[row];
  const bool leaves = live && !was_out && Fires(score, route.threshold[row]);
  route.score[row] = score;
  route.exited_out[row] = was_out || leaves;
  route.depth_out[row] = leaves ? route.layers : route.depth[row];
  return live && !was_out && !leaves;
}

}  // namespace tide

#endif  // TIDE_EXIT_ROUTE_H_
