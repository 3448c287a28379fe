#include "tide/router_cpu.h"

namespace tide {

const RouterCpu& BestRouterCpu() {
#if defined(TIDE_X86)
  static const RouterCpu& best =
      __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl")
          ? isa_avx512::kRouter
      : __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? isa_avx2::kRouter
                                                                        : isa_baseline::kRouter;
  return best;
#else
  return isa_baseline::kRouter;
#endif
}

}  // namespace tide
