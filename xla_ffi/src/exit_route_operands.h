// The operands of `tide_exit_route_v1`, alike on every platform.
//
//   x          [rows, d]  f32, bf16 or f16      norm    s32 attribute, tide::Norm
//   scale      [d]        f32                   eps     f32 attribute
//   bias       [d] f32; [0] for the RMS norms   layers  s32 attribute
//   down       [d, r]     f32
//   up         [r]        f32                   score      [rows]  f32
//   threshold  [rows]     f32                   exited     [rows]  pred
//   live       [rows]     pred                  depth      [rows]  s32
//   exited     [rows]     pred                  remaining  []      s32
//   depth      [rows]     s32
//
// A mapped call (vmap, broadcast_all) has the mapped dimensions in front of every one.

#ifndef TIDE_EXIT_ROUTE_OPERANDS_H_
#define TIDE_EXIT_ROUTE_OPERANDS_H_

#include "check.h"
#include "tide/exit_route.h"
#include "xla/ffi/api/ffi.h"

namespace tide {

template <typename Context>
auto ExitRouteBinding() {
  return ffi::Ffi::Bind()
      .Ctx<Context>()
      .template Arg<ffi::AnyBuffer>()          // x
      .template Arg<ffi::Buffer<ffi::F32>>()   // scale
      .template Arg<ffi::Buffer<ffi::F32>>()   // bias
      .template Arg<ffi::Buffer<ffi::F32>>()   // down
      .template Arg<ffi::Buffer<ffi::F32>>()   // up
      .template Arg<ffi::Buffer<ffi::F32>>()   // threshold
      .template Arg<ffi::Buffer<ffi::PRED>>()  // live
      .template Arg<ffi::Buffer<ffi::PRED>>()  // exited
      .template Arg<ffi::Buffer<ffi::S32>>()   // depth
      .template Attr<int32_t>("norm")
      .template Attr<float>("eps")
      .template Attr<int32_t>("layers")
      .template Ret<ffi::Buffer<ffi::F32>>()   // score
      .template Ret<ffi::Buffer<ffi::PRED>>()  // exited
      .template Ret<ffi::Buffer<ffi::S32>>()   // depth
      .template Ret<ffi::Buffer<ffi::S32>>();  // remaining
}

inline ffi::Error ReadExitRoute(ffi::AnyBuffer x, ffi::Buffer<ffi::F32> scale,
                                ffi::Buffer<ffi::F32> bias, ffi::Buffer<ffi::F32> down,
                                ffi::Buffer<ffi::F32> up, ffi::Buffer<ffi::F32> threshold,
                                ffi::Buffer<ffi::PRED> live, ffi::Buffer<ffi::PRED> exited,
                                ffi::Buffer<ffi::S32> depth, int32_t norm, float eps,
                                int32_t layers, ffi::ResultBuffer<ffi::F32> score,
                                ffi::ResultBuffer<ffi::PRED> exited_out,
                                ffi::ResultBuffer<ffi::S32> depth_out,
                                ffi::ResultBuffer<ffi::S32> remaining, Call<ExitRoute>* call) {
  Checker check("tide_exit_route_v1", x.dimensions(), 2);
  if (check.failed()) return check.Result();
  ExitRoute& route = call->first;
  const Dims dims = x.dimensions();
  route.rows = dims[dims.size() - 2];
  route.d = dims.back();
  route.r = down.dimensions().size() > 0 ? down.dimensions().back() : 0;
  check.AtLeastOne("d, the last dimension of `x`,", route.d);
  check.AtLeastOne("r, the last dimension of `down`,", route.r);
  check.Type("x", x.element_type(), &route.dtype);
  check.NormKind(norm, &route.norm);
  check.Shape("scale", scale.dimensions(), {route.d});
  check.Shape("bias", bias.dimensions(), {route.norm == Norm::kLayer ? route.d : 0});
  check.Shape("down", down.dimensions(), {route.d, route.r});
  check.Shape("up", up.dimensions(), {route.r});
  check.Shape("threshold", threshold.dimensions(), {route.rows});
  check.Shape("live", live.dimensions(), {route.rows});
  check.Shape("exited", exited.dimensions(), {route.rows});
  check.Shape("depth", depth.dimensions(), {route.rows});
  check.Shape("score", score->dimensions(), {route.rows});
  check.Shape("exited (result)", exited_out->dimensions(), {route.rows});
  check.Shape("depth (result)", depth_out->dimensions(), {route.rows});
  check.Shape("remaining", remaining->dimensions(), {});

  route.x = x.untyped_data();
  route.scale = scale.typed_data();
  route.bias = bias.typed_data();
  route.down = down.typed_data();
  route.up = up.typed_data();
  route.threshold = threshold.typed_data();
  route.live = live.typed_data();
  route.exited = exited.typed_data();
  route.depth = depth.typed_data();
  route.score = score->typed_data();
  route.exited_out = exited_out->typed_data();
  route.depth_out = depth_out->typed_data();
  route.remaining = remaining->typed_data();
  route.eps = eps;
  route.layers = layers;
  call->groups = check.Groups();
  return check.Result();
}

}  // namespace tide

#endif  // TIDE_EXIT_ROUTE_OPERANDS_H_
