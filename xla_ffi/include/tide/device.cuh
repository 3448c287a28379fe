// The few device primitives that the kernels use: shared memory, sums over a warp, clusters.
//
// Kernels are written against these and plain CUDA C++, and are launched by cudaLaunchKernelEx, so
// that xla_ffi/testing can run their bodies on a CPU.

#ifndef TIDE_DEVICE_CUH_
#define TIDE_DEVICE_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#if defined(__CUDACC__)
#include <cooperative_groups.h>

// Dynamic shared memory of the block, aligned for 16-byte accesses.
#define TIDE_SHARED_MEMORY(name)           \
  extern __shared__ float4 tide_shared_[]; \
  float* const name = reinterpret_cast<float*>(tide_shared_)
#endif

namespace tide {

constexpr int kWarp = 32;

// Sum over aligned groups of kLanes lanes; every lane of a group has it. The order of additions does
// not depend on the values.
template <int kLanes, typename Number>
__device__ inline Number SumOver(Number value) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, offset, kWarp);
  }
  return value;
}

#if defined(__CUDACC__)
// Blocks of one cluster see each other's shared memory (sm_90 and later); elsewhere a block is alone.
__device__ inline int ClusterRank() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  return static_cast<int>(cooperative_groups::this_cluster().block_rank());
#else
  return 0;
#endif
}

__device__ inline int ClusterSize() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  return static_cast<int>(cooperative_groups::this_cluster().num_blocks());
#else
  return 1;
#endif
}

__device__ inline void ClusterSync() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  cooperative_groups::this_cluster().sync();
#else
  __syncthreads();
#endif
}

// The same place in the shared memory of another block of the cluster.
__device__ inline const float* ClusterPeer(float* own, int rank) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  return cooperative_groups::this_cluster().map_shared_rank(own, rank);
#else
  (void)rank;
  return own;
#endif
}
#endif

// 16 bytes at a time where the address allows it.
template <typename T>
struct alignas(16) Pack {
  static constexpr int kSize = 16 / static_cast<int>(sizeof(T));
  T at[kSize];
};

template <typename T>
__device__ inline bool PacksFit(const T* row, int64_t d) {
  return d % Pack<T>::kSize == 0 && reinterpret_cast<uintptr_t>(row) % 16 == 0;
}

}  // namespace tide

#endif  // TIDE_DEVICE_CUH_
