// XLA handler of `tide_exit_route_v1` on the CPU.

#include "exit_route_cpu.h"
#include "exit_route_operands.h"

namespace {

namespace ffi = xla::ffi;

struct Handler {
  template <typename... Operands>
  ffi::Error operator()(ffi::ThreadPool pool, Operands... operands) const {
    tide::Call<tide::ExitRoute> call;
    ffi::Error error = tide::ReadExitRoute(operands..., &call);
    if (error.failure()) return error;
    tide::ExitRoute route = call.first;
    for (int64_t group = 0; group < call.groups; ++group, route = route.Next()) {
      tide::RunExitRoute(route, tide::BestRouterCpu(), pool);
    }
    return error;
  }
};

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(TideExitRouteCpu, Handler{},
                              tide::ExitRouteBinding<ffi::ThreadPool>());
