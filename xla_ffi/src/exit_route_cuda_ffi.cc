// XLA handler of `tide_exit_route_v1` on CUDA.

#include "exit_route_operands.h"
#include "launch_all.h"

namespace {

namespace ffi = xla::ffi;

struct Handler {
  template <typename... Operands>
  ffi::Error operator()(cudaStream_t stream, Operands... operands) const {
    tide::Call<tide::ExitRoute> call;
    ffi::Error error = tide::ReadExitRoute(operands..., &call);
    return error.failure() ? error : tide::LaunchAll("tide_exit_route_v1", call, stream);
  }
};

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(TideExitRouteCuda, Handler{}, tide::ExitRouteBinding<tide::Stream>(),
                              {ffi::Traits::kCmdBufferCompatible});
