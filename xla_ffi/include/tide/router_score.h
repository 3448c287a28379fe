// Arithmetic of the router score, in plain C++.
//
//   score = sigmoid(up . silu(rmsnorm(x) @ down)),  rmsnorm(x) = x * rsqrt(mean(x^2) + eps) * norm
//
// This header knows nothing of XLA, Python or a device runtime. The scalar functions compile for
// the host and, under nvcc, for the device, so that the formula is written once; RouterScoreRow is
// the host loop. tide_jax/kernels/router_score.py holds the specification.

#ifndef TIDE_ROUTER_SCORE_H_
#define TIDE_ROUTER_SCORE_H_

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define TIDE_HOST_DEVICE __host__ __device__
#else
#define TIDE_HOST_DEVICE
#endif

#if defined(_MSC_VER)
#define TIDE_RESTRICT __restrict
#else
#define TIDE_RESTRICT __restrict__
#endif

namespace tide {

// Bit patterns of the 16-bit formats: C++17 has no such types, and the compilers that offer them
// disagree on the name.
struct BFloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

TIDE_HOST_DEVICE inline float FloatFromBits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

TIDE_HOST_DEVICE inline float ToFloat(float value) { return value; }

TIDE_HOST_DEVICE inline float ToFloat(BFloat16 value) {
  return FloatFromBits(static_cast<uint32_t>(value.bits) << 16);
}

// Exact for every finite value, infinity and NaN. A subnormal half is rebuilt by a subtraction of
// two normal floats, never by scaling a subnormal one: XLA may run with denormals flushed to zero.
TIDE_HOST_DEVICE inline float ToFloat(Float16 value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t shifted = static_cast<uint32_t>(value.bits & 0x7fffu) << 13;
  const uint32_t exponent = shifted & 0x0f800000u;
  uint32_t bits = shifted + (112u << 23);  // 112: difference of the two exponent biases
  if (exponent == 0x0f800000u) {           // infinity or NaN
    bits += 112u << 23;
  } else if (exponent == 0) {  // zero or subnormal
    const float magnitude = FloatFromBits(bits + (1u << 23)) - FloatFromBits(113u << 23);
    std::memcpy(&bits, &magnitude, sizeof(bits));
  }
  return FloatFromBits(bits | sign);
}

// exp overflows to infinity for very negative z, which gives the right limit, 0.
TIDE_HOST_DEVICE inline float Sigmoid(float z) { return 1.0f / (1.0f + expf(-z)); }

TIDE_HOST_DEVICE inline float Silu(float z) { return z * Sigmoid(z); }

TIDE_HOST_DEVICE inline float RmsScale(float sum_of_squares, int64_t d, float eps) {
  return 1.0f / sqrtf(sum_of_squares / static_cast<float>(d) + eps);
}

// Sum of x^2 in float. Strict floating point forbids the compiler to reorder one running sum, so
// the lanes are spelled out: they become vector registers, and round better than a single chain.
template <typename T>
float SumOfSquares(const T* TIDE_RESTRICT x, int64_t d) {
  constexpr int kLanes = 16;
  float lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= d; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const float value = ToFloat(x[i + lane]);
      lanes[lane] += value * value;
    }
  }
  float sum = 0.0f;
  for (; i < d; ++i) {
    const float value = ToFloat(x[i]);
    sum += value * value;
  }
  for (int lane = 0; lane < kLanes; ++lane) sum += lanes[lane];
  return sum;
}

// Score of one row. `down` is [d, r] row-major: then `hidden += x[i] * down[i, :]` runs over
// contiguous memory with no reduction inside, which vectorises under strict floating point and
// reads each weight once. [r, d] would need d-long dot products, one serial chain each. Four rows
// of `down` are taken at a time so that `hidden` is loaded and stored once per four.
//
// `hidden` is scratch for r floats.
template <typename T>
float RouterScoreRow(const T* TIDE_RESTRICT x, const float* TIDE_RESTRICT norm,
                     const float* TIDE_RESTRICT down, const float* TIDE_RESTRICT up, int64_t d,
                     int64_t r, float eps, float* TIDE_RESTRICT hidden) {
  const float scale = RmsScale(SumOfSquares(x, d), d, eps);
  for (int64_t j = 0; j < r; ++j) hidden[j] = 0.0f;

  int64_t i = 0;
  for (; i + 4 <= d; i += 4) {
    const float x0 = ToFloat(x[i]) * scale * norm[i];
    const float x1 = ToFloat(x[i + 1]) * scale * norm[i + 1];
    const float x2 = ToFloat(x[i + 2]) * scale * norm[i + 2];
    const float x3 = ToFloat(x[i + 3]) * scale * norm[i + 3];
    const float* TIDE_RESTRICT row = down + i * r;
    for (int64_t j = 0; j < r; ++j) {
      hidden[j] += x0 * row[j] + x1 * row[r + j] + x2 * row[2 * r + j] + x3 * row[3 * r + j];
    }
  }
  for (; i < d; ++i) {
    const float xi = ToFloat(x[i]) * scale * norm[i];
    const float* TIDE_RESTRICT row = down + i * r;
    for (int64_t j = 0; j < r; ++j) hidden[j] += xi * row[j];
  }

  float logit = 0.0f;
  for (int64_t j = 0; j < r; ++j) logit += Silu(hidden[j]) * up[j];
  return Sigmoid(logit);
}

}  // namespace tide

#endif  // TIDE_ROUTER_SCORE_H_
