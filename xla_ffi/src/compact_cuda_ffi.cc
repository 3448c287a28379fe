// XLA handlers of `tide_compact_v1` and `tide_scatter_rows_v1` on CUDA.

#include "compact_operands.h"
#include "launch_all.h"

namespace {

namespace ffi = xla::ffi;

struct CompactHandler {
  template <typename... Operands>
  ffi::Error operator()(cudaStream_t stream, Operands... operands) const {
    tide::Call<tide::Compact> call;
    ffi::Error error = tide::ReadCompact(operands..., &call);
    return error.failure() ? error : tide::LaunchAll("tide_compact_v1", call, stream);
  }
};

struct ScatterRowsHandler {
  template <typename... Operands>
  ffi::Error operator()(cudaStream_t stream, Operands... operands) const {
    tide::Call<tide::ScatterRows> call;
    ffi::Error error = tide::ReadScatterRows(operands..., &call);
    return error.failure() ? error : tide::LaunchAll("tide_scatter_rows_v1", call, stream);
  }
};

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(TideCompactCuda, CompactHandler{},
                              tide::CompactBinding<tide::Stream>(),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(TideScatterRowsCuda, ScatterRowsHandler{},
                              tide::ScatterRowsBinding<tide::Stream>(),
                              {ffi::Traits::kCmdBufferCompatible});
