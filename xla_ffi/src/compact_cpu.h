// Rows gathered by a mask on a CPU. Putting them back is left to XLA, which is as fast at it.

#ifndef TIDE_COMPACT_CPU_H_
#define TIDE_COMPACT_CPU_H_

#include <cstdint>
#include <cstring>
#include <vector>

#include "tide/compact.h"
#include "tide/router_cpu.h"

namespace tide {

template <typename T>
void Narrow(const float* from, int64_t d, void* to) {
  T* out = static_cast<T*>(to);
  for (int64_t i = 0; i < d; ++i) FromFloat(from[i], &out[i]);
}

inline void NormedRow(const Compact& op, const RouterCpu& router, const char* from, char* to) {
  if (op.dtype == DType::kF32) {
    router.normed(from, op.dtype, op.d, op.norm, op.scale, op.bias, op.eps,
                  reinterpret_cast<float*>(to));
    return;
  }
  static thread_local std::vector<float> scratch;
  scratch.resize(static_cast<size_t>(op.d));
  router.normed(from, op.dtype, op.d, op.norm, op.scale, op.bias, op.eps, scratch.data());
  if (op.dtype == DType::kBF16) {
    Narrow<BFloat16>(scratch.data(), op.d, to);
  } else {
    Narrow<Float16>(scratch.data(), op.d, to);
  }
}

inline void RunCompact(const Compact& op, const RouterCpu& router) {
  const int64_t bytes = op.d * SizeOf(op.dtype);
  const char* x = static_cast<const char*>(op.x);
  char* rows = static_cast<char*>(op.rows);
  int64_t kept = 0;
  for (int64_t i = 0; i < op.n; ++i) {
    if (!op.keep[i]) continue;
    if (kept < op.bucket) {
      if (op.normed) {
        NormedRow(op, router, x + i * bytes, rows + kept * bytes);
      } else {
        std::memcpy(rows + kept * bytes, x + i * bytes, static_cast<size_t>(bytes));
      }
      op.index[kept] = static_cast<int32_t>(i);
    }
    ++kept;
  }
  for (int64_t m = kept; m < op.bucket; ++m) {
    std::memset(rows + m * bytes, 0, static_cast<size_t>(bytes));
    op.index[m] = static_cast<int32_t>(op.n);
  }
  *op.count = static_cast<int32_t>(kept);
}

}  // namespace tide

#endif  // TIDE_COMPACT_CPU_H_
