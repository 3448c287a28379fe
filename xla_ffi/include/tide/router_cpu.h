// The router's arithmetic on a CPU, once per instruction set.

#ifndef TIDE_ROUTER_CPU_H_
#define TIDE_ROUTER_CPU_H_

#include <cstdint>

#include "tide/exit_route.h"

namespace tide {

struct RouterCpu {
  // One row of d elements to its normed form, in float32.
  void (*normed)(const void* x, DType dtype, int64_t d, Norm norm, const float* scale,
                 const float* bias, float eps, float* out);

  // The share of input features [first, last) in `normed @ down`:
  //   hidden[row, j] = sum over i of normed[row, i] * down[i, j]
  // normed [rows, d] with its rows `stride` apart, down [d, r], hidden [rows, r]. A sum runs over i in
  // order, whatever the number of rows: a row comes out the same to the last bit.
  void (*hidden)(const float* normed, int64_t stride, int64_t rows, const float* down, int64_t r,
                 int64_t first, int64_t last, float* hidden);

  // sigmoid(up . silu(hidden)) of one row.
  float (*score)(const float* hidden, const float* up, int64_t r);
};

// The functions for the widest vectors that this processor has.
const RouterCpu& BestRouterCpu();

namespace isa_baseline {
extern const RouterCpu kRouter;
}
namespace isa_avx2 {
extern const RouterCpu kRouter;
}
namespace isa_avx512 {
extern const RouterCpu kRouter;
}

}  // namespace tide

#endif  // TIDE_ROUTER_CPU_H_
