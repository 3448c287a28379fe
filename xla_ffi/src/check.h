// What handlers check of the buffers that XLA hands them. Errors name the argument, what it must be
// and what it is.

#ifndef TIDE_CHECK_H_
#define TIDE_CHECK_H_

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "tide/exit_route.h"
#include "xla/ffi/api/ffi.h"

namespace tide {

namespace ffi = xla::ffi;

using Dims = ffi::AnyBuffer::Dimensions;

inline std::string ToString(const int64_t* dims, size_t rank) {
  std::string text = "[";
  for (size_t i = 0; i < rank; ++i) text += (i > 0 ? ", " : "") + std::to_string(dims[i]);
  return text + "]";
}

// What one call of an op asks: `groups` sets of operands, the first of which is `first`.
template <typename Op>
struct Call {
  Op first{};
  int64_t groups = 0;
};

// Checks the operands of one op. `mapped` are the dimensions that vmap put in front of every
// operand, as the first operand shows; all shapes are given without them. Nothing is allocated
// unless something is wrong: a call takes microseconds.
class Checker {
 public:
  Checker(const char* target, const Dims& like, size_t rank) : target_(target), like_(like) {
    if (like.size() < rank) {
      Fail("the first operand must have " + std::to_string(rank) + " dimensions or more, got " +
           ToString(like.begin(), like.size()));
      return;
    }
    mapped_ = like.size() - rank;
  }

  void Shape(const char* name, const Dims& got, std::initializer_list<int64_t> want) {
    const bool fits = got.size() == mapped_ + want.size() &&
                      std::equal(like_.begin(), like_.begin() + mapped_, got.begin()) &&
                      std::equal(want.begin(), want.end(), got.begin() + mapped_);
    if (fits) return;
    std::vector<int64_t> full(like_.begin(), like_.begin() + mapped_);
    full.insert(full.end(), want.begin(), want.end());
    Fail("`" + std::string(name) + "` must have shape " + ToString(full.data(), full.size()) +
         ", got " + ToString(got.begin(), got.size()));
  }

  void AtLeastOne(const char* name, int64_t value) {
    if (value < 1) Fail(std::string(name) + " must be 1 or more, got " + std::to_string(value));
  }

  void Type(const char* name, ffi::DataType got, DType* dtype) {
    switch (got) {
      case ffi::F32:
        *dtype = DType::kF32;
        return;
      case ffi::BF16:
        *dtype = DType::kBF16;
        return;
      case ffi::F16:
        *dtype = DType::kF16;
        return;
      default:
        Fail("`" + std::string(name) + "` must be float32, bfloat16 or float16, got XLA element type " +
             std::to_string(static_cast<int>(got)));
    }
  }

  void SameType(const char* name, ffi::DataType got, ffi::DataType want) {
    if (got == want) return;
    Fail("`" + std::string(name) + "` must have the type of the first operand, XLA element type " +
         std::to_string(static_cast<int>(want)) + ", got " + std::to_string(static_cast<int>(got)));
  }

  void NormKind(int32_t got, Norm* norm) {
    if (got < 0 || got > 2) Fail("attribute `norm` must be 0, 1 or 2, got " + std::to_string(got));
    *norm = static_cast<Norm>(got);
  }

  // The first thing that was wrong, if any.
  ffi::Error Result() const {
    return message_.empty() ? ffi::Error::Success()
                            : ffi::Error::InvalidArgument(std::string(target_) + ": " + message_);
  }

  // Sets of operands: the product of the mapped dimensions.
  int64_t Groups() const {
    int64_t groups = 1;
    for (size_t i = 0; i < mapped_; ++i) groups *= like_[i];
    return groups;
  }

  bool failed() const { return !message_.empty(); }

 private:
  void Fail(std::string message) {
    if (message_.empty()) message_ = std::move(message);
  }

  const char* target_;
  Dims like_;
  size_t mapped_ = 0;
  std::string message_;
};

}  // namespace tide

#endif  // TIDE_CHECK_H_
