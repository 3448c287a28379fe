// Rows gathered by a mask, and put back, on a GPU.

#ifndef TIDE_COMPACT_CUH_
#define TIDE_COMPACT_CUH_

#include "tide/compact.h"
#include "tide/device.cuh"
#include "tide/row_norm.cuh"

namespace tide {

constexpr int kCompactThreads = 256;
constexpr int kCompactRows = 64;  // rows, and places of the bucket, per block

// Copy d elements by the lanes of a warp.
template <typename T>
__device__ void CopyRow(const T* from, T* to, int64_t d, int lane) {
  if (PacksFit(from, d) && PacksFit(to, d)) {
    const Pack<T>* packs = reinterpret_cast<const Pack<T>*>(from);
#pragma unroll 2
    for (int64_t p = lane; p < d / Pack<T>::kSize; p += kWarp) {
      reinterpret_cast<Pack<T>*>(to)[p] = packs[p];
    }
  } else {
#pragma unroll 1
    for (int64_t i = lane; i < d; i += kWarp) to[i] = from[i];
  }
}

// A block takes kCompactRows rows. Where they go depends on how many of the earlier rows are kept,
// which it counts itself: the mask is small, and one launch is cheaper than a scan by several.
template <typename T>
__global__ void __launch_bounds__(kCompactThreads, 2) CompactKernel(Compact op) {
  TIDE_SHARED_MEMORY(shared);
  int* const counts = reinterpret_cast<int*>(shared);  // before, and all, per warp
  constexpr int kWarps = kCompactThreads / kWarp;
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = thread / kWarp, lane = thread % kWarp;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kCompactRows;

  int before = 0, all = 0;
  for (int64_t i = thread; i < op.n; i += kCompactThreads) {
    const int kept = op.keep[i] ? 1 : 0;
    all += kept;
    before += i < first ? kept : 0;
  }
  before = SumOver<kWarp>(before);
  all = SumOver<kWarp>(all);
  if (lane == 0) {
    counts[warp] = before;
    counts[kWarps + warp] = all;
  }
  __syncthreads();
  before = all = 0;
  for (int w = 0; w < kWarps; ++w) {
    before += counts[w];
    all += counts[kWarps + w];
  }
  if (blockIdx.x == 0 && thread == 0) *op.count = all;

  const T* const x = static_cast<const T*>(op.x);
  T* const rows = static_cast<T*>(op.rows);
  for (int j = warp; j < kCompactRows; j += kWarps) {
    // The kept row, if it is one, to its place.
    const int64_t row = first + j;
    int earlier = 0;
    for (int i = lane; i < j; i += kWarp) earlier += first + i < op.n && op.keep[first + i] ? 1 : 0;
    const int64_t place = before + SumOver<kWarp>(earlier);
    if (row < op.n && op.keep[row] && place < op.bucket) {
      const T* const from = x + row * op.d;
      T* const to = rows + place * op.d;
      if (op.normed) {
        const RowNorm stats = RowStatistics<kWarp>(from, op.d, op.norm, op.eps, lane, nullptr);
#pragma unroll 1
        for (int64_t i = lane; i < op.d; i += kWarp) {
          FromFloat(NormedElement(ToFloat(from[i]), stats, op.norm, op.scale, op.bias, i), &to[i]);
        }
      } else {
        CopyRow(from, to, op.d, lane);
      }
      if (lane == 0) op.index[place] = static_cast<int32_t>(row);
    }
    // The place of the same number, if no row comes to it.
    const int64_t empty = first + j;
    if (empty >= all && empty < op.bucket) {
      T zero;
      FromFloat(0.0f, &zero);
#pragma unroll 1
      for (int64_t i = lane; i < op.d; i += kWarp) rows[empty * op.d + i] = zero;
      if (lane == 0) op.index[empty] = static_cast<int32_t>(op.n);
    }
  }
}

// A warp takes one place of the bucket.
template <typename T>
__global__ void __launch_bounds__(kCompactThreads, 2) ScatterRowsKernel(ScatterRows op) {
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kCompactThreads + threadIdx.x;
  const int64_t place = thread / kWarp;
  if (place >= op.bucket) return;
  const int64_t row = op.index[place];
  if (row < 0 || row >= op.n) return;
  const int64_t d = op.row_bytes / static_cast<int64_t>(sizeof(T));
  CopyRow(static_cast<const T*>(op.rows) + place * d, static_cast<T*>(op.out) + row * d, d,
          static_cast<int>(thread % kWarp));
}

template <typename Kernel, typename Op>
cudaError_t LaunchBlocks(Kernel kernel, int64_t blocks, size_t shared, const Op& op,
                         cudaStream_t stream) {
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kCompactThreads);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, op);
}

// One mask, on the caller's stream: no allocation, no wait.
inline cudaError_t LaunchCompact(const Compact& op, cudaStream_t stream) {
  const int64_t most = op.n > op.bucket ? op.n : op.bucket;
  const int64_t blocks = most > 0 ? (most + kCompactRows - 1) / kCompactRows : 1;
  const size_t shared = 2 * kCompactThreads / kWarp * sizeof(int);
  switch (op.dtype) {
    case DType::kF32:
      return LaunchBlocks(CompactKernel<float>, blocks, shared, op, stream);
    case DType::kBF16:
      return LaunchBlocks(CompactKernel<BFloat16>, blocks, shared, op, stream);
    default:
      return LaunchBlocks(CompactKernel<Float16>, blocks, shared, op, stream);
  }
}

inline cudaError_t LaunchScatterRows(const ScatterRows& op, cudaStream_t stream) {
  if (op.out != op.base && op.n > 0 && op.row_bytes > 0) {
    const cudaError_t error =
        cudaMemcpyAsync(op.out, op.base, static_cast<size_t>(op.n * op.row_bytes),
                        cudaMemcpyDeviceToDevice, stream);
    if (error != cudaSuccess) return error;
  }
  if (op.bucket == 0 || op.n == 0) return cudaSuccess;
  const int64_t blocks = (op.bucket * kWarp + kCompactThreads - 1) / kCompactThreads;
  if (op.row_bytes % 4 == 0) {
    return LaunchBlocks(ScatterRowsKernel<float>, blocks, 0, op, stream);
  }
  return LaunchBlocks(ScatterRowsKernel<uint16_t>, blocks, 0, op, stream);
}

}  // namespace tide

#endif  // TIDE_COMPACT_CUH_
