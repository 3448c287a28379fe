// router_cpu.h for one instruction set. CMake compiles this file once for each, with
//   TIDE_ISA            the namespace of the result
//   TIDE_VECTOR_FLOATS  floats in a vector register
// and the compiler's options for it. All but the one table is internal: a function of this file
// must never be taken by the linker for another file's.

#include "tide/router_cpu.h"

namespace tide {
namespace TIDE_ISA {
namespace {

// float, and vectors of floats that may lie anywhere: the compiler's vector extension turns
// operators into instructions.
template <int kFloats>
struct Lanes {
  typedef float Type __attribute__((vector_size(4 * kFloats)));
  typedef float InMemory __attribute__((vector_size(4 * kFloats), aligned(4), may_alias));
  typedef uint32_t Bits __attribute__((vector_size(4 * kFloats)));
};

template <>
struct Lanes<1> {
  using Type = float;
  using InMemory = float;
  using Bits = uint32_t;
};

template <int kFloats>
using Vec = typename Lanes<kFloats>::Type;

template <int kFloats>
inline Vec<kFloats> Load(const float* from) {
  return *reinterpret_cast<const typename Lanes<kFloats>::InMemory*>(from);
}

template <int kFloats>
inline void Store(float* to, Vec<kFloats> value) {
  *reinterpret_cast<typename Lanes<kFloats>::InMemory*>(to) = value;
}

constexpr int kFloats = TIDE_VECTOR_FLOATS;

template <int kValue>
struct Int {
  static constexpr int value = kValue;
};

// exp within 2 units in the last place: 2^n times a polynomial on [-ln2/2, ln2/2] (its coefficients
// are those of the Taylor series). Above 88 it is infinite, below -87 some 1e-38: a sigmoid does not
// see the difference.
template <int kFloats>
inline Vec<kFloats> Exp(Vec<kFloats> x) {
  using V = Vec<kFloats>;
  using Bits = typename Lanes<kFloats>::Bits;
  const V bounded = x > 88.0f ? V{} + 88.0f : (x < -87.0f ? V{} - 87.0f : x);
  // Adding 1.5 * 2^23 rounds to an integer, which is then in the low bits.
  const V shifted = bounded * 1.44269504f + 12582912.0f;
  const V n = shifted - 12582912.0f;
  const V f = (bounded - n * 0.693145752f) - n * 1.42860677e-6f;
  V p = f * (1.0f / 5040) + (1.0f / 720);
  p = p * f + (1.0f / 120);
  p = p * f + (1.0f / 24);
  p = p * f + (1.0f / 6);
  p = p * f + 0.5f;
  p = p * f + 1.0f;
  p = p * f + 1.0f;
  Bits bits;
  __builtin_memcpy(&bits, &shifted, sizeof(bits));
  bits = (bits << 23) + 0x3f800000u;
  V power;
  __builtin_memcpy(&power, &bits, sizeof(power));
  return x > 88.0f ? V{} + __builtin_inff() : p * power;
}

template <int kFloats>
inline Vec<kFloats> Silu(Vec<kFloats> z) {
  return z / (1.0f + Exp<kFloats>(-z));
}

template <typename T>
void Widen(const void* from, int64_t d, float* out) {
  const T* x = static_cast<const T*>(from);
  for (int64_t i = 0; i < d; ++i) out[i] = ToFloat(x[i]);
}

// Sum of (x - mean)^2, or of x; several running sums, because strict floating point forbids the
// compiler to split one.
template <bool kSquares>
float Sum(const float* x, int64_t d, float mean) {
  constexpr int kSums = 4;
  Vec<kFloats> sums[kSums] = {};
  int64_t i = 0;
  for (; i + kSums * kFloats <= d; i += kSums * kFloats) {
    for (int k = 0; k < kSums; ++k) {
      const Vec<kFloats> off = Load<kFloats>(x + i + k * kFloats) - mean;
      sums[k] += kSquares ? off * off : off;
    }
  }
  const Vec<kFloats> all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  float total = 0.0f;
  for (int lane = 0; lane < kFloats; ++lane) total += all[lane];
  for (; i < d; ++i) {
    const float off = x[i] - mean;
    total += kSquares ? off * off : off;
  }
  return total;
}

void Normed(const void* x, DType dtype, int64_t d, Norm norm, const float* scale, const float* bias,
            float eps, float* out) {
  const float* wide = out;
  switch (dtype) {
    case DType::kF32:
      wide = static_cast<const float*>(x);
      break;
    case DType::kBF16:
      Widen<BFloat16>(x, d, out);
      break;
    case DType::kF16:
      Widen<Float16>(x, d, out);
      break;
  }
  RowNorm row;
  if (norm == Norm::kLayer) row.mean = Sum<false>(wide, d, 0.0f) / static_cast<float>(d);
  const float square = Sum<true>(wide, d, row.mean);
  row.inverse = 1.0f / __builtin_sqrtf(square / static_cast<float>(d) + eps);
  for (int64_t i = 0; i < d; ++i) out[i] = NormedElement(wide[i], row, norm, scale, bias, i);
}

// The sums over d of kRows rows and kVectors vectors of columns, held in registers.
template <int kFloats, int kRows, int kVectors>
inline void Block(const float* normed, int64_t stride, int64_t d, const float* down, int64_t r,
                  float* hidden) {
  Vec<kFloats> sum[kRows][kVectors] = {};
  for (int64_t i = 0; i < d; ++i) {
    Vec<kFloats> weights[kVectors];
    for (int v = 0; v < kVectors; ++v) weights[v] = Load<kFloats>(down + i * r + v * kFloats);
    for (int row = 0; row < kRows; ++row) {
      const float value = normed[row * stride + i];
      for (int v = 0; v < kVectors; ++v) sum[row][v] += value * weights[v];
    }
  }
  for (int row = 0; row < kRows; ++row) {
    for (int v = 0; v < kVectors; ++v) Store<kFloats>(hidden + row * r + v * kFloats, sum[row][v]);
  }
}

// All columns of kRows rows: wide blocks, then single vectors, fours, single columns.
template <int kRows, int kVectors>
void Rows(const float* normed, int64_t stride, int64_t d, const float* down, int64_t r,
          float* hidden) {
  int64_t j = 0;
  for (; j + kVectors * kFloats <= r; j += kVectors * kFloats) {
    Block<kFloats, kRows, kVectors>(normed, stride, d, down + j, r, hidden + j);
  }
  for (; j + kFloats <= r; j += kFloats) {
    Block<kFloats, kRows, 1>(normed, stride, d, down + j, r, hidden + j);
  }
  for (; j + 4 <= r; j += 4) Block<4, kRows, 1>(normed, stride, d, down + j, r, hidden + j);
  for (; j < r; ++j) Block<1, kRows, 1>(normed, stride, d, down + j, r, hidden + j);
}

void Hidden(const float* normed, int64_t stride, int64_t rows, const float* down, int64_t r,
            int64_t first, int64_t last, float* hidden) {
  normed += first;
  down += first * r;
  const int64_t d = last - first;
  // Blocks of as many sums as there are registers for: 32 with the widest vectors, else 16.
  constexpr int kSums = kFloats == 16 ? 16 : 8;
  int64_t row = 0;
  const auto take = [&](auto count, auto vectors) {
    for (; row + count.value <= rows; row += count.value) {
      Rows<count.value, vectors.value>(normed + row * stride, stride, d, down, r, hidden + row * r);
    }
  };
  if constexpr (kSums == 16) take(Int<8>{}, Int<kSums / 8>{});
  take(Int<4>{}, Int<kSums / 4>{});
  take(Int<2>{}, Int<kSums / 2>{});
  take(Int<1>{}, Int<8>{});
}

float Score(const float* hidden, const float* up, int64_t r) {
  Vec<kFloats> sums = {};
  int64_t j = 0;
  for (; j + kFloats <= r; j += kFloats) {
    sums += Silu<kFloats>(Load<kFloats>(hidden + j)) * Load<kFloats>(up + j);
  }
  float logit = 0.0f;
  for (int lane = 0; lane < kFloats; ++lane) logit += sums[lane];
  for (; j < r; ++j) logit += Silu<1>(hidden[j]) * up[j];
  return 1.0f / (1.0f + Exp<1>(-logit));
}

}  // namespace

const RouterCpu kRouter = {Normed, Hidden, Score};

}  // namespace TIDE_ISA
}  // namespace tide
