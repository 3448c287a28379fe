// The exit route on a GPU, one launch: norm, down, SiLU, up, sigmoid, decision.
//
// A cluster of blocks takes a tile of rows; each of its blocks takes a part of the r hidden features,
// over all of d, so that what the blocks must add up is one number per row, through each other's
// shared memory. Before sm_90 there are no clusters and one block does all features of its tile.
// A score depends on the row and on the tile's height, never on the other rows.

#ifndef TIDE_EXIT_ROUTE_CUH_
#define TIDE_EXIT_ROUTE_CUH_

#include "tide/device.cuh"
#include "tide/exit_route.h"
#include "tide/row_norm.cuh"

namespace tide {

constexpr int kRouteThreads = 256;
constexpr int kRouteChunk = 512;                // features of x in shared memory at a time
constexpr int kRouteStride = kRouteChunk + 4;   // of a row of the chunk: rows on different banks
constexpr int kRouteParts = 8;                  // the largest portable cluster

// In floats: the chunk (later the partial sums, then the products), a word per warp, and the parts'
// logits.
template <int kRows>
constexpr int kRouteShared = (kRows * kRouteStride > kRows * kRouteThreads ? kRows * kRouteStride
                                                                          : kRows * kRouteThreads) +
                             kRouteThreads / kWarp + kRows;

template <typename T, int kRows>
__global__ void __launch_bounds__(kRouteThreads, 2)
    ExitRouteKernel(ExitRoute route, bool alone) {
  constexpr int kThreadsPerRow = kRouteThreads / kRows;
  TIDE_SHARED_MEMORY(shared);
  float* const scratch = shared + kRouteShared<kRows> - kRouteThreads / kWarp - kRows;
  float* const logits = scratch + kRouteThreads / kWarp;

  const int thread = static_cast<int>(threadIdx.x);
  const int part = ClusterRank(), parts = ClusterSize();
  const int64_t first = static_cast<int64_t>(blockIdx.x) / parts * kRows;
  const int64_t d = route.d, r = route.r;
  const T* const x = static_cast<const T*>(route.x);

  // Threads that load row `row` know its statistics.
  const int row = thread / kThreadsPerRow, in_row = thread % kThreadsPerRow;
  const T* const mine = first + row < route.rows ? x + (first + row) * d : nullptr;
  const RowNorm stats =
      RowStatistics<kThreadsPerRow>(mine, d, route.norm, route.eps, in_row, scratch);

  const int64_t per_part = (r + parts - 1) / parts;
  const int64_t begin = part * per_part;
  const int64_t end = begin + per_part < r ? begin + per_part : r;
  if (thread < kRows) logits[thread] = 0.0f;

  // As many columns at a time as there are threads; with fewer columns, slices of d share them.
  for (int64_t column0 = begin; column0 < end; column0 += kRouteThreads) {
    const int columns =
        static_cast<int>(end - column0 < kRouteThreads ? end - column0 : kRouteThreads);
    const int slices = kRouteThreads / columns;
    const int column = thread % columns, slice = thread / columns;
    float sum[kRows] = {};
    for (int64_t i0 = 0; i0 < d; i0 += kRouteChunk) {
      __syncthreads();
      for (int i = in_row; i < kRouteChunk; i += kThreadsPerRow) {
        const bool there = mine != nullptr && i0 + i < d;
        shared[row * kRouteStride + i] =
            there ? NormedElement(ToFloat(mine[i0 + i]), stats, route.norm, route.scale, route.bias,
                                  i0 + i)
                  : 0.0f;
      }
      __syncthreads();
      if (slice < slices) {
        const int64_t here = d - i0 < kRouteChunk ? d - i0 : kRouteChunk;
        const float* const down = route.down + i0 * r + column0 + column;
        for (int i = 4 * slice; i < here; i += 4 * slices) {
          float weight[4];
#pragma unroll
          for (int k = 0; k < 4; ++k) weight[k] = i + k < here ? down[(i + k) * r] : 0.0f;
#pragma unroll
          for (int m = 0; m < kRows; ++m) {
            const float4 value = *reinterpret_cast<const float4*>(shared + m * kRouteStride + i);
            sum[m] += value.x * weight[0];
            sum[m] += value.y * weight[1];
            sum[m] += value.z * weight[2];
            sum[m] += value.w * weight[3];
          }
        }
      }
    }
    // Add the slices up, then what the columns give to each row's logit.
    __syncthreads();
    if (slice < slices) {
#pragma unroll
      for (int m = 0; m < kRows; ++m) shared[m * kRouteThreads + thread] = sum[m];
    }
    __syncthreads();
    for (int item = thread; item < kRows * columns; item += kRouteThreads) {
      float* const sums = shared + item / columns * kRouteThreads + item % columns;
      float hidden = 0.0f;
      for (int s = 0; s < slices; ++s) hidden += sums[s * columns];
      *sums = Silu(hidden) * route.up[column0 + item % columns];
    }
    __syncthreads();
    for (int m = thread / kWarp; m < kRows; m += kRouteThreads / kWarp) {
      float logit = 0.0f;
      for (int c = thread % kWarp; c < columns; c += kWarp) logit += shared[m * kRouteThreads + c];
      logit = SumOver<kWarp>(logit);
      if (thread % kWarp == 0) logits[m] += logit;
    }
  }

  ClusterSync();
  if (part == 0 && thread < kWarp) {
    int remains = 0;
    if (thread < kRows && first + thread < route.rows) {
      float logit = 0.0f;
      for (int p = 0; p < parts; ++p) logit += ClusterPeer(logits, p)[thread];
      remains = Decide(route, first + thread, Sigmoid(logit)) ? 1 : 0;
    }
    const int remaining = SumOver<kWarp>(remains);
    if (thread == 0) {
      if (alone) {
        *route.remaining = remaining;
      } else {
        atomicAdd(route.remaining, remaining);
      }
    }
  }
  ClusterSync();  // a block's shared memory must last until it has been read
}

// Blocks of a cluster, with at least eight hidden features each. What the code was compiled for
// decides, and not the device: code for sm_80 that runs on sm_90 knows of no cluster.
template <typename Kernel>
cudaError_t RouteParts(Kernel kernel, int64_t r, int* parts) {
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
  if (error != cudaSuccess) return error;
  *parts = 1;
  while (attributes.ptxVersion >= 90 && *parts < kRouteParts && r >= 16 * *parts) *parts *= 2;
  return cudaSuccess;
}

template <typename T, int kRows>
cudaError_t LaunchExitRouteTile(const ExitRoute& route, cudaStream_t stream) {
  int parts = 1;
  const cudaError_t unknown = RouteParts(ExitRouteKernel<T, kRows>, route.r, &parts);
  if (unknown != cudaSuccess) return unknown;
  const int64_t tiles = (route.rows + kRows - 1) / kRows;
  if (tiles > 1) {
    const cudaError_t error = cudaMemsetAsync(route.remaining, 0, sizeof(int32_t), stream);
    if (error != cudaSuccess) return error;
  }
  if (tiles * parts > INT32_MAX) return cudaErrorInvalidConfiguration;
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = static_cast<unsigned>(parts);
  cluster.val.clusterDim.y = 1;
  cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(tiles * parts));
  config.blockDim = dim3(kRouteThreads);
  config.dynamicSmemBytes = kRouteShared<kRows> * sizeof(float);
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = parts > 1 ? 1 : 0;
  return cudaLaunchKernelEx(&config, ExitRouteKernel<T, kRows>, route, tiles == 1);
}

// Few rows want many blocks, many rows want each weight read for several of them.
template <typename T>
cudaError_t LaunchExitRouteOf(const ExitRoute& route, cudaStream_t stream) {
  if (route.rows == 1) return LaunchExitRouteTile<T, 1>(route, stream);
  if (route.rows <= 64) return LaunchExitRouteTile<T, 4>(route, stream);
  return LaunchExitRouteTile<T, 16>(route, stream);
}

// One set of weights, on the caller's stream: no allocation, no wait.
inline cudaError_t LaunchExitRoute(const ExitRoute& route, cudaStream_t stream) {
  if (route.rows == 0) return cudaMemsetAsync(route.remaining, 0, sizeof(int32_t), stream);
  switch (route.dtype) {
    case DType::kF32:
      return LaunchExitRouteOf<float>(route, stream);
    case DType::kBF16:
      return LaunchExitRouteOf<BFloat16>(route, stream);
    default:
      return LaunchExitRouteOf<Float16>(route, stream);
  }
}

}  // namespace tide

#endif  // TIDE_EXIT_ROUTE_CUH_
