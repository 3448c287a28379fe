// XLA handler of `tide_compact_v1` on the CPU.

#include "compact_cpu.h"
#include "compact_operands.h"

namespace {

namespace ffi = xla::ffi;

struct Handler {
  template <typename... Operands>
  ffi::Error operator()(ffi::ThreadPool, Operands... operands) const {
    tide::Call<tide::Compact> call;
    ffi::Error error = tide::ReadCompact(operands..., &call);
    if (error.failure()) return error;
    tide::Compact op = call.first;
    for (int64_t group = 0; group < call.groups; ++group, op = op.Next()) {
      tide::RunCompact(op, tide::BestRouterCpu());
    }
    return error;
  }
};

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(TideCompactCpu, Handler{},
                              tide::CompactBinding<ffi::ThreadPool>());
