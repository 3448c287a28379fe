// The CUDA kernels as a shared library that runs on a CPU, for tests/kernels/test_cuda_on_cpu.py.
// Every function returns a cudaError_t.

#include "tide/compact.cuh"
#include "tide/exit_route.cuh"

namespace {

// As the handlers do: one launch for every set of operands.
template <typename Op, typename Launch>
int All(Op op, int64_t groups, const Launch& launch) {
  for (int64_t group = 0; group < groups; ++group, op = op.Next()) {
    const cudaError_t error = launch(op);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace

extern "C" {

// The emulated device; returns how many kernels were launched since the last call.
int tide_device(int compute_capability_major, int order, uint32_t seed) {
  const int launches = cuda_on_cpu::device.launches;
  cuda_on_cpu::device = {compute_capability_major, static_cast<cuda_on_cpu::Order>(order), seed, 0};
  return launches;
}

int tide_exit_route(const void* x, const float* scale, const float* bias, const float* down,
                    const float* up, const float* threshold, const bool* live, const bool* exited,
                    const int32_t* depth, float* score, bool* exited_out, int32_t* depth_out,
                    int32_t* remaining, int dtype, int64_t groups, int64_t rows, int64_t d,
                    int64_t r, int norm, float eps, int layers) {
  const tide::ExitRoute route = {x,     scale,      bias,      down,      up,
                                 threshold, live,   exited,    depth,     score,
                                 exited_out, depth_out, remaining, static_cast<tide::DType>(dtype),
                                 rows,  d,          r,         static_cast<tide::Norm>(norm),
                                 eps,   layers};
  return All(route, groups, [](const auto& op) { return tide::LaunchExitRoute(op, nullptr); });
}

int tide_compact(const void* x, const bool* keep, const float* scale, const float* bias, void* rows,
                 int32_t* index, int32_t* count, int dtype, int64_t groups, int64_t n, int64_t d,
                 int64_t bucket, int norm, float eps) {
  const tide::Compact op = {x,         keep, scale, bias,   rows,
                            index,     count, static_cast<tide::DType>(dtype), n, d,
                            bucket,    norm >= 0, static_cast<tide::Norm>(norm >= 0 ? norm : 0), eps};
  return All(op, groups, [](const auto& one) { return tide::LaunchCompact(one, nullptr); });
}

int tide_scatter_rows(const void* base, const void* rows, const int32_t* index, void* out,
                      int64_t groups, int64_t n, int64_t row_bytes, int64_t bucket) {
  const tide::ScatterRows op = {base, rows, index, out, n, row_bytes, bucket};
  return All(op, groups, [](const auto& one) { return tide::LaunchScatterRows(one, nullptr); });
}

}  // extern "C"
