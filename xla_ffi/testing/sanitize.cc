// A small cover of all kernels, CPU and CUDA, to be compiled with sanitizers: every buffer is as
// large as it must be and no larger. Compares with the formulas in double precision, so that it is
// also a test without them. Exit status 1 and a line for every mismatch.

#include <chrono>
#include <cstdio>
#include <functional>
#include <random>
#include <thread>
#include <vector>

#include "compact_cpu.h"
#include "exit_route_cpu.h"
#include "tide/compact.cuh"
#include "tide/exit_route.cuh"

namespace {

using tide::DType;
using tide::Norm;

int failures = 0;

void Expect(bool holds, const char* what, const char* where) {
  if (holds) return;
  std::printf("%s: %s\n", where, what);
  ++failures;
}

// Runs tasks on threads of their own, some of them late.
class Pool {
 public:
  ~Pool() {
    for (std::thread& thread : threads_) thread.join();
  }
  int64_t num_threads() const { return 3; }
  template <typename Task>
  void Schedule(Task task) {
    const int delay = static_cast<int>(threads_.size()) % 3 * 200;
    threads_.emplace_back([task, delay] {
      std::this_thread::sleep_for(std::chrono::microseconds(delay));
      task();
    });
  }

 private:
  std::vector<std::thread> threads_;
};

// bool has no contiguous vector.
struct Flags {
  explicit Flags(size_t size) : data(new bool[size]) {}
  ~Flags() { delete[] data; }
  Flags(const Flags&) = delete;
  Flags& operator=(const Flags&) = delete;
  bool* data;
};

struct Rows {
  std::vector<char> bytes;
  std::vector<double> values;  // as stored
};

template <typename T>
void Fill(Rows* rows, int64_t count, std::mt19937* random) {
  std::normal_distribution<float> normal;
  rows->bytes.resize(static_cast<size_t>(count) * sizeof(T));
  rows->values.resize(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    T stored;
    tide::FromFloat(normal(*random), &stored);
    std::memcpy(rows->bytes.data() + static_cast<size_t>(i) * sizeof(T), &stored, sizeof(T));
    rows->values[static_cast<size_t>(i)] = tide::ToFloat(stored);
  }
}

Rows MakeRows(DType dtype, int64_t count, std::mt19937* random) {
  Rows rows;
  switch (dtype) {
    case DType::kF32:
      Fill<float>(&rows, count, random);
      break;
    case DType::kBF16:
      Fill<tide::BFloat16>(&rows, count, random);
      break;
    case DType::kF16:
      Fill<tide::Float16>(&rows, count, random);
      break;
  }
  return rows;
}

std::vector<float> MakeFloats(int64_t count, std::mt19937* random) {
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(*random);
  return values;
}

std::vector<double> Normed(const double* x, int64_t d, Norm norm, const std::vector<float>& scale,
                           const std::vector<float>& bias, double eps) {
  double mean = 0, square = 0;
  if (norm == Norm::kLayer) {
    for (int64_t i = 0; i < d; ++i) mean += x[i] / static_cast<double>(d);
  }
  for (int64_t i = 0; i < d; ++i) square += (x[i] - mean) * (x[i] - mean) / static_cast<double>(d);
  std::vector<double> normed(static_cast<size_t>(d));
  for (size_t i = 0; i < normed.size(); ++i) {
    const double unit = (x[i] - mean) / std::sqrt(square + eps);
    normed[i] = norm == Norm::kLayer ? unit * scale[i] + bias[i]
                                     : unit * (norm == Norm::kRms ? scale[i] : 1.0 + scale[i]);
  }
  return normed;
}

void CheckExitRoute(DType dtype, Norm norm, int64_t rows, int64_t d, int64_t r, uint32_t seed) {
  std::mt19937 random(seed);
  const Rows x = MakeRows(dtype, rows * d, &random);
  const std::vector<float> scale = MakeFloats(d, &random);
  const std::vector<float> bias = MakeFloats(norm == Norm::kLayer ? d : 0, &random);
  std::vector<float> down = MakeFloats(d * r, &random);
  for (float& weight : down) weight /= std::sqrt(static_cast<float>(d));
  const std::vector<float> up = MakeFloats(r, &random);
  std::vector<float> threshold(static_cast<size_t>(rows)), score(static_cast<size_t>(rows));
  std::vector<int32_t> depth(static_cast<size_t>(rows)), depth_out(static_cast<size_t>(rows));
  Flags live(static_cast<size_t>(rows)), exited(static_cast<size_t>(rows)),
      exited_out(static_cast<size_t>(rows));
  for (int64_t i = 0; i < rows; ++i) {
    threshold[static_cast<size_t>(i)] = i % 5 == 0 ? -INFINITY : i % 3 == 0 ? 2.0f : 0.5f;
    depth[static_cast<size_t>(i)] = static_cast<int32_t>(100 + i);
    live.data[i] = random() % 4 != 0;
    exited.data[i] = random() % 4 == 0;
  }
  int32_t remaining = -1;
  const tide::ExitRoute route = {x.bytes.data(), scale.data(), bias.data(), down.data(), up.data(),
                                 threshold.data(), live.data, exited.data, depth.data(),
                                 score.data(), exited_out.data, depth_out.data(), &remaining,
                                 dtype, rows, d, r, norm, 1e-5f, 7};

  const auto check = [&](const char* where) {
    int32_t expected_remaining = 0;
    for (int64_t row = 0; row < rows; ++row) {
      const size_t at = static_cast<size_t>(row);
      const std::vector<double> normed = Normed(x.values.data() + row * d, d, norm, scale, bias, 1e-5);
      double logit = 0;
      for (int64_t j = 0; j < r; ++j) {
        double hidden = 0;
        for (int64_t i = 0; i < d; ++i) {
          hidden += normed[static_cast<size_t>(i)] * down[static_cast<size_t>(i * r + j)];
        }
        logit += hidden / (1 + std::exp(-hidden)) * up[static_cast<size_t>(j)];
      }
      Expect(std::abs(1 / (1 + std::exp(-logit)) - score[at]) < 1e-4, "score", where);
      const bool leaves = live.data[row] && !exited.data[row] &&
                          (score[at] > threshold[at] || std::isinf(threshold[at]));
      Expect(exited_out.data[row] == (exited.data[row] || leaves), "exited", where);
      Expect(depth_out[at] == (leaves ? 7 : depth[at]), "depth", where);
      expected_remaining += live.data[row] && !exited.data[row] && !leaves;
    }
    Expect(remaining == expected_remaining, "remaining", where);
    std::fill(score.begin(), score.end(), NAN);
    remaining = -1;
  };

  Pool pool;
  tide::RunExitRoute(route, tide::isa_baseline::kRouter, pool);
  check("exit_route, baseline");
#if defined(TIDE_X86)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    tide::RunExitRoute(route, tide::isa_avx2::kRouter, pool);
    check("exit_route, avx2");
  }
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl")) {
    tide::RunExitRoute(route, tide::isa_avx512::kRouter, pool);
    check("exit_route, avx512");
  }
#endif
  for (int major : {8, 9}) {
    cuda_on_cpu::device = {major, cuda_on_cpu::Order::kShuffled, seed, 0};
    Expect(tide::LaunchExitRoute(route, nullptr) == cudaSuccess, "launch", "exit_route, cuda");
    check(major == 8 ? "exit_route, sm_80" : "exit_route, sm_90");
  }
}

void CheckCompact(DType dtype, bool normed, Norm norm, int64_t n, int64_t d, int64_t bucket,
                  uint32_t seed) {
  std::mt19937 random(seed);
  const int64_t size = tide::SizeOf(dtype);
  const Rows x = MakeRows(dtype, n * d, &random);
  const std::vector<float> scale = MakeFloats(normed ? d : 0, &random);
  const std::vector<float> bias = MakeFloats(normed && norm == Norm::kLayer ? d : 0, &random);
  Flags keep(static_cast<size_t>(n));
  std::vector<int32_t> wanted;
  for (int64_t i = 0; i < n; ++i) {
    keep.data[i] = random() % 2 == 0;
    if (keep.data[i]) wanted.push_back(static_cast<int32_t>(i));
  }
  std::vector<char> rows(static_cast<size_t>(bucket * d * size));
  std::vector<int32_t> index(static_cast<size_t>(bucket), -1);
  int32_t count = -1;
  const tide::Compact op = {x.bytes.data(), keep.data, scale.data(), bias.data(), rows.data(),
                            index.data(), &count, dtype, n, d, bucket, normed, norm, 1e-5f};
  const auto check = [&](const char* where) {
    Expect(count == static_cast<int32_t>(wanted.size()), "count", where);
    for (int64_t m = 0; m < bucket; ++m) {
      const bool full = m < static_cast<int64_t>(wanted.size());
      const int64_t from = full ? wanted[static_cast<size_t>(m)] : n;
      Expect(index[static_cast<size_t>(m)] == from, "index", where);
      if (!full || !normed) {
        const std::vector<char> zeros(static_cast<size_t>(d * size));
        Expect(std::memcmp(rows.data() + m * d * size,
                           full ? x.bytes.data() + from * d * size : zeros.data(),
                           static_cast<size_t>(d * size)) == 0,
               "rows", where);
      }
    }
    count = -1;
  };
  tide::RunCompact(op, tide::BestRouterCpu());
  check("compact, cpu");
  cuda_on_cpu::device = {9, cuda_on_cpu::Order::kBackward, seed, 0};
  Expect(tide::LaunchCompact(op, nullptr) == cudaSuccess, "launch", "compact, cuda");
  check("compact, cuda");

  // And back: what was gathered is where it was.
  if (normed) return;
  std::vector<char> base(x.bytes), out(x.bytes.size());
  for (char& byte : base) byte = 1;
  const auto restored = [&](const std::vector<char>& got, const char* where) {
    for (int64_t m = 0; m < std::min<int64_t>(bucket, static_cast<int64_t>(wanted.size())); ++m) {
      const int64_t at = wanted[static_cast<size_t>(m)] * d * size;
      Expect(std::memcmp(got.data() + at, x.bytes.data() + at, static_cast<size_t>(d * size)) == 0,
             "row", where);
    }
  };
  tide::ScatterRows back = {base.data(), rows.data(), index.data(), out.data(), n, d * size, bucket};
  Expect(tide::LaunchScatterRows(back, nullptr) == cudaSuccess, "launch", "scatter_rows, cuda");
  restored(out, "scatter_rows, cuda");
  back.out = base.data();
  Expect(tide::LaunchScatterRows(back, nullptr) == cudaSuccess, "launch", "scatter_rows in place");
  restored(base, "scatter_rows in place");
}

}  // namespace

int main() {
  const DType dtypes[] = {DType::kF32, DType::kBF16, DType::kF16};
  const Norm norms[] = {Norm::kRms, Norm::kRmsOnePlus, Norm::kLayer};
  const int64_t rows[] = {1, 5, 17, 66, 0}, ds[] = {8, 100, 577, 1}, rs[] = {128, 33, 1, 257};
  uint32_t seed = 0;
  for (int i = 0; i < 12; ++i, ++seed) {
    CheckExitRoute(dtypes[i % 3], norms[i / 3 % 3], rows[i % 5], ds[i % 4], rs[(i + i / 4) % 4], seed);
  }
  for (int i = 0; i < 24; ++i, ++seed) {
    CheckCompact(dtypes[i % 3], i % 4 == 3, norms[i / 4 % 3], rows[i % 5], ds[i / 2 % 4],
                 i % 7 == 0 ? 0 : 3 * i, seed);
  }
  std::printf(failures ? "%d mismatches\n" : "all agree\n", failures);
  return failures ? 1 : 0;
}
