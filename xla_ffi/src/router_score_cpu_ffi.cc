// XLA handler of `tide_router_score_v1` on the CPU: checks what it was given, then runs the loop of
// tide/router_score.h over the rows, in the buffers of the caller.
//
//   x     [..., d]     f32, bf16 or f16
//   norm  [V..., d]    f32
//   down  [V..., d, r] f32
//   up    [V..., r]    f32
//   eps                f32 attribute
//   score [...]        f32
//
// V is empty unless the call was vmapped: `broadcast_all` then puts the mapped dimensions in front
// of every operand, and the leading dimensions of x begin with V.

#include <cstdint>
#include <string>
#include <vector>

#include "tide/router_score.h"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;

using Dims = ffi::AnyBuffer::Dimensions;

std::string ToString(const Dims& dims) {
  std::string text = "[";
  for (size_t i = 0; i < dims.size(); ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(dims[i]);
  }
  return text + "]";
}

ffi::Error Mismatch(const char* argument, const std::string& expected, const Dims& got) {
  return ffi::Error::InvalidArgument("tide_router_score_v1: `" + std::string(argument) +
                                     "` must have shape " + expected + ", got " + ToString(got));
}

bool StartsWith(const Dims& dims, const Dims& prefix, size_t count) {
  if (dims.size() < count || prefix.size() < count) return false;
  for (size_t i = 0; i < count; ++i) {
    if (dims[i] != prefix[i]) return false;
  }
  return true;
}

struct Sizes {
  int64_t groups = 1;  // product of V: sets of weights
  int64_t rows = 1;    // rows of x for each set of weights
  int64_t d = 0;
  int64_t r = 0;
};

ffi::Error Check(const Dims& x, const Dims& norm, const Dims& down, const Dims& up,
                 const Dims& score, Sizes* sizes) {
  if (x.size() < 1 || x.back() < 1) return Mismatch("x", "[..., d] with d >= 1", x);
  sizes->d = x.back();

  if (norm.size() < 1) return Mismatch("norm_weight", "[d]", norm);
  const size_t mapped = norm.size() - 1;
  if (!StartsWith(norm, x, mapped) || x.size() < mapped + 1 || norm.back() != sizes->d) {
    return Mismatch("norm_weight", "[d] with d = " + std::to_string(sizes->d) + " as in `x`", norm);
  }
  if (down.size() != mapped + 2 || !StartsWith(down, x, mapped) || down[mapped] != sizes->d ||
      down.back() < 1) {
    return Mismatch("down", "[d, r] with d = " + std::to_string(sizes->d) + " as in `x`, r >= 1",
                    down);
  }
  sizes->r = down.back();
  if (up.size() != mapped + 1 || !StartsWith(up, x, mapped) || up.back() != sizes->r) {
    return Mismatch("up", "[r] with r = " + std::to_string(sizes->r) + " as in `down`", up);
  }
  if (score.size() != x.size() - 1 || !StartsWith(score, x, score.size())) {
    return Mismatch("score", "[...], the leading dimensions of `x`", score);
  }

  for (size_t i = 0; i < mapped; ++i) sizes->groups *= x[i];
  for (size_t i = mapped; i + 1 < x.size(); ++i) sizes->rows *= x[i];
  return ffi::Error::Success();
}

template <typename T>
void Run(const Sizes& sizes, const void* x, const float* norm, const float* down, const float* up,
         float eps, float* score) {
  const T* row = static_cast<const T*>(x);
  std::vector<float> hidden(sizes.r);
  for (int64_t group = 0; group < sizes.groups; ++group) {
    for (int64_t i = 0; i < sizes.rows; ++i) {
      *score++ =
          tide::RouterScoreRow(row, norm, down, up, sizes.d, sizes.r, eps, hidden.data());
      row += sizes.d;
    }
    norm += sizes.d;
    down += sizes.d * sizes.r;
    up += sizes.r;
  }
}

ffi::Error RouterScoreImpl(ffi::AnyBuffer x, ffi::Buffer<ffi::F32> norm,
                           ffi::Buffer<ffi::F32> down, ffi::Buffer<ffi::F32> up, float eps,
                           ffi::ResultBuffer<ffi::F32> score) {
  Sizes sizes;
  ffi::Error error = Check(x.dimensions(), norm.dimensions(), down.dimensions(), up.dimensions(),
                           score->dimensions(), &sizes);
  if (error.failure()) return error;

  const auto run = [&](auto zero) {
    Run<decltype(zero)>(sizes, x.untyped_data(), norm.typed_data(), down.typed_data(),
                        up.typed_data(), eps, score->typed_data());
    return ffi::Error::Success();
  };
  switch (x.element_type()) {
    case ffi::F32:
      return run(float{});
    case ffi::BF16:
      return run(tide::BFloat16{});
    case ffi::F16:
      return run(tide::Float16{});
    default:
      return ffi::Error::InvalidArgument(
          "tide_router_score_v1: `x` must be float32, bfloat16 or float16, got XLA element type " +
          std::to_string(static_cast<int>(x.element_type())));
  }
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(TideRouterScoreCpu, RouterScoreImpl,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()         // x
                                  .Arg<ffi::Buffer<ffi::F32>>()  // norm
                                  .Arg<ffi::Buffer<ffi::F32>>()  // down
                                  .Arg<ffi::Buffer<ffi::F32>>()  // up
                                  .Attr<float>("eps")
                                  .Ret<ffi::Buffer<ffi::F32>>()  // score
);
