// The statistics of rows, by groups of threads of one block.

#ifndef TIDE_ROW_NORM_CUH_
#define TIDE_ROW_NORM_CUH_

#include "tide/device.cuh"
#include "tide/exit_route.h"

namespace tide {

template <typename T>
struct Stored;
template <>
struct Stored<float> {
  static constexpr DType kDType = DType::kF32;
};
template <>
struct Stored<BFloat16> {
  static constexpr DType kDType = DType::kBF16;
};
template <>
struct Stored<Float16> {
  static constexpr DType kDType = DType::kF16;
};

// This thread's share of the sum of x - mean, or of its squares.
template <bool kSquares, typename T>
__device__ float ShareOfSum(const T* row, int64_t d, int thread, int threads, float mean) {
  float sum = 0.0f;
  const auto add = [&](T element) {
    const float off = ToFloat(element) - mean;
    sum += kSquares ? off * off : off;
  };
  if (PacksFit(row, d)) {
    constexpr int kPack = Pack<T>::kSize;
    const Pack<T>* packs = reinterpret_cast<const Pack<T>*>(row);
    for (int64_t p = thread; p < d / kPack; p += threads) {
      const Pack<T> pack = packs[p];
#pragma unroll
      for (int k = 0; k < kPack; ++k) add(pack.at[k]);
    }
  } else {
    for (int64_t i = thread; i < d; i += threads) add(row[i]);
  }
  return sum;
}

// The sum over the kThreads threads of a row; `scratch` has a float for every warp of the block. All
// threads of the block take part.
template <int kThreads>
__device__ float SumOverRow(float share, float* scratch) {
  constexpr int kLanes = kThreads < kWarp ? kThreads : kWarp;
  constexpr int kWarps = kThreads / kLanes;
  float sum = SumOver<kLanes>(share);
  if (kWarps == 1) return sum;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  if (threadIdx.x % kWarp == 0) scratch[warp] = sum;
  __syncthreads();
  sum = 0.0f;
  for (int w = 0; w < kWarps; ++w) sum += scratch[warp / kWarps * kWarps + w];
  __syncthreads();
  return sum;
}

// The statistics of a row of d elements, known to all kThreads threads that belong to it; `thread`
// is this thread's number among them. A row that does not exist is null.
template <int kThreads, typename T>
__device__ RowNorm RowStatistics(const T* row, int64_t d, Norm norm, float eps, int thread,
                                 float* scratch) {
  RowNorm result;
  if (norm == Norm::kLayer) {
    const float share = row ? ShareOfSum<false>(row, d, thread, kThreads, 0.0f) : 0.0f;
    result.mean = SumOverRow<kThreads>(share, scratch) / static_cast<float>(d);
  }
  const float share = row ? ShareOfSum<true>(row, d, thread, kThreads, result.mean) : 0.0f;
  result.inverse = InverseDeviation(SumOverRow<kThreads>(share, scratch), d, eps);
  return result;
}

}  // namespace tide

#endif  // TIDE_ROW_NORM_CUH_
