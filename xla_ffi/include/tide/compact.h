// Rows gathered by a mask, and put back. The CPU and the CUDA kernels take the same structs;
// tide_jax/kernels/compact.py holds the specification.

#ifndef TIDE_COMPACT_H_
#define TIDE_COMPACT_H_

#include <cstdint>

#include "tide/exit_route.h"
#include "tide/numeric.h"

namespace tide {

// The kept rows of x, in order, in the first places of a bucket; the places after them are zeros
// and have the index n.
struct Compact {
  const void* x;       // [n, d]
  const bool* keep;    // [n]
  const float* scale;  // [d] if normed, else unread
  const float* bias;   // [d] for the LayerNorm, else unread
  void* rows;          // [bucket, d], of the type of x
  int32_t* index;      // [bucket]
  int32_t* count;      // []: how many rows the mask keeps, which may be more than the bucket holds
  DType dtype;
  int64_t n;
  int64_t d;
  int64_t bucket;
  bool normed;
  Norm norm;
  float eps;

  // The same for the next mask and its rows (a mapped call).
  Compact Next() const {
    Compact next = *this;
    next.x = static_cast<const char*>(x) + n * d * SizeOf(dtype);
    next.keep += n;
    next.scale += normed ? d : 0;
    next.bias += normed && norm == Norm::kLayer ? d : 0;
    next.rows = static_cast<char*>(rows) + bucket * d * SizeOf(dtype);
    next.index += bucket;
    next.count += 1;
    return next;
  }
};

// base with row index[m] replaced by rows[m]; an index outside [0, n) drops its row.
struct ScatterRows {
  const void* base;      // [n, d]
  const void* rows;      // [bucket, d]
  const int32_t* index;  // [bucket], no row twice
  void* out;             // [n, d], may be base
  int64_t n;
  int64_t row_bytes;
  int64_t bucket;

  // The same for the next base (a mapped call).
  ScatterRows Next() const {
    ScatterRows next = *this;
    next.base = static_cast<const char*>(base) + n * row_bytes;
    next.rows = static_cast<const char*>(rows) + bucket * row_bytes;
    next.index += bucket;
    next.out = static_cast<char*>(out) + n * row_bytes;
    return next;
  }
};

}  // namespace tide

#endif  // TIDE_COMPACT_H_
