// Arithmetic that the CPU and the CUDA kernels share: number formats, norms, the router's formula
// and its decision. Plain C++ that nvcc compiles for both sides; knows no framework.
//
// tide_jax/kernels/exit_route.py holds the specification.

#ifndef TIDE_NUMERIC_H_
#define TIDE_NUMERIC_H_

#include <cmath>
#include <cstdint>
#include <cstring>

// Static: files compiled for different instruction sets must not share a copy.
#if defined(__CUDACC__)
#define TIDE_INLINE static inline __host__ __device__
#else
#define TIDE_INLINE static inline
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

TIDE_INLINE float FloatFromBits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

TIDE_INLINE uint32_t BitsFromFloat(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

TIDE_INLINE float ToFloat(float value) { return value; }

TIDE_INLINE float ToFloat(BFloat16 value) {
  return FloatFromBits(static_cast<uint32_t>(value.bits) << 16);
}

// Exact for every finite value, infinity and NaN. A subnormal half is rebuilt by a subtraction of
// two normal floats, never by scaling a subnormal one: XLA may run with denormals flushed to zero.
TIDE_INLINE float ToFloat(Float16 value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t shifted = static_cast<uint32_t>(value.bits & 0x7fffu) << 13;
  const uint32_t exponent = shifted & 0x0f800000u;
  uint32_t bits = shifted + (112u << 23);  // 112: difference of the two exponent biases
  if (exponent == 0x0f800000u) {           // infinity or NaN
    bits += 112u << 23;
  } else if (exponent == 0) {  // zero or subnormal
    bits = BitsFromFloat(FloatFromBits(bits + (1u << 23)) - FloatFromBits(113u << 23));
  }
  return FloatFromBits(bits | sign);
}

// Round to nearest, ties to even; what is not a number stays so.
TIDE_INLINE void FromFloat(float value, float* out) { *out = value; }

TIDE_INLINE void FromFloat(float value, BFloat16* out) {
  uint32_t bits = BitsFromFloat(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    bits |= 0x00400000u;  // the payload may lie in the bits that go
  } else {
    bits += 0x7fffu + ((bits >> 16) & 1u);
  }
  out->bits = static_cast<uint16_t>(bits >> 16);
}

TIDE_INLINE void FromFloat(float value, Float16* out) {
  const uint32_t bits = BitsFromFloat(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u;  // NaN
  } else if (magnitude >= 0x47800000u) {
    half = 0x7c00u;  // 65,536 and above
  } else if (magnitude >= 0x38800000u) {
    // Normal; a carry out of the mantissa goes into the exponent, up to infinity.
    half = (magnitude + 0x0fffu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
  } else {
    // Subnormal: adding 0.5 makes the float's own rounding happen at the last bit of the half.
    half = BitsFromFloat(FloatFromBits(magnitude) + 0.5f) - 0x3f000000u;
  }
  out->bits = static_cast<uint16_t>(sign | half);
}

// How a state is normed before the router sees it; the numbers are those of the FFI attribute.
enum class Norm : int32_t {
  kRms = 0,         // x / sqrt(mean(x^2) + eps) * scale
  kRmsOnePlus = 1,  // ... * (1 + scale)
  kLayer = 2,       // (x - mean) / sqrt(variance + eps) * scale + bias
};

// The statistics of one row: what a normed element is made from.
struct RowNorm {
  float mean = 0.0f;  // 0 for the RMS norms
  float inverse = 0.0f;
};

// `square` is the sum of (x - mean)^2.
TIDE_INLINE float InverseDeviation(float square, int64_t d, float eps) {
  return 1.0f / sqrtf(square / static_cast<float>(d) + eps);
}

// `bias` is read by the LayerNorm only.
TIDE_INLINE float NormedElement(float x, RowNorm row, Norm norm, const float* scale,
                                            const float* bias, int64_t i) {
  const float unit = (x - row.mean) * row.inverse;
  if (norm == Norm::kLayer) return unit * scale[i] + bias[i];
  return unit * (norm == Norm::kRmsOnePlus ? 1.0f + scale[i] : scale[i]);
}

// exp overflows to infinity for very negative z, which gives the right limit, 0.
TIDE_INLINE float Sigmoid(float z) { return 1.0f / (1.0f + expf(-z)); }

TIDE_INLINE float Silu(float z) { return z * Sigmoid(z); }

// Whether a row leaves. A score that is not a number leaves at no threshold but minus infinity,
// where every row does.
TIDE_INLINE bool Fires(float score, float threshold) {
  return score > threshold || threshold == -INFINITY;
}

}  // namespace tide

#endif  // TIDE_NUMERIC_H_
