// The operands of `tide_compact_v1` and `tide_scatter_rows_v1`, alike on every platform.
//
//   compact       x      [n, d]  f32, bf16 or f16     rows   [bucket, d]  of the type of x
//                 keep   [n]     pred                 index  [bucket]     s32
//                 scale  [d] f32; [0] without a norm  count  []           s32
//                 bias   [d] f32; [0] but for the LayerNorm
//                 norm   s32 attribute: tide::Norm, or -1 for none;  eps  f32 attribute
//
//   scatter_rows  base   [n, d]  f32, bf16 or f16     out    [n, d]       of the type of base
//                 rows   [bucket, d]  of the same type
//                 index  [bucket]     s32
//
// A mapped call (vmap, broadcast_all) has the mapped dimensions in front of every one.

#ifndef TIDE_COMPACT_OPERANDS_H_
#define TIDE_COMPACT_OPERANDS_H_

#include "check.h"
#include "tide/compact.h"
#include "xla/ffi/api/ffi.h"

namespace tide {

template <typename Context>
auto CompactBinding() {
  return ffi::Ffi::Bind()
      .Ctx<Context>()
      .template Arg<ffi::AnyBuffer>()          // x
      .template Arg<ffi::Buffer<ffi::PRED>>()  // keep
      .template Arg<ffi::Buffer<ffi::F32>>()   // scale
      .template Arg<ffi::Buffer<ffi::F32>>()   // bias
      .template Attr<int32_t>("norm")
      .template Attr<float>("eps")
      .template Ret<ffi::AnyBuffer>()         // rows
      .template Ret<ffi::Buffer<ffi::S32>>()  // index
      .template Ret<ffi::Buffer<ffi::S32>>();  // count
}

inline ffi::Error ReadCompact(ffi::AnyBuffer x, ffi::Buffer<ffi::PRED> keep,
                              ffi::Buffer<ffi::F32> scale, ffi::Buffer<ffi::F32> bias, int32_t norm,
                              float eps, ffi::Result<ffi::AnyBuffer> rows,
                              ffi::ResultBuffer<ffi::S32> index, ffi::ResultBuffer<ffi::S32> count,
                              Call<Compact>* call) {
  Checker check("tide_compact_v1", x.dimensions(), 2);
  if (check.failed()) return check.Result();
  Compact& op = call->first;
  const Dims dims = x.dimensions();
  op.n = dims[dims.size() - 2];
  op.d = dims.back();
  op.bucket = index->dimensions().size() > 0 ? index->dimensions().back() : 0;
  op.normed = norm != -1;
  check.AtLeastOne("d, the last dimension of `x`,", op.d);
  check.Type("x", x.element_type(), &op.dtype);
  if (op.normed) check.NormKind(norm, &op.norm);
  check.Shape("keep", keep.dimensions(), {op.n});
  check.Shape("scale", scale.dimensions(), {op.normed ? op.d : 0});
  check.Shape("bias", bias.dimensions(), {op.normed && op.norm == Norm::kLayer ? op.d : 0});
  check.SameType("rows (result)", rows->element_type(), x.element_type());
  check.Shape("rows (result)", rows->dimensions(), {op.bucket, op.d});
  check.Shape("index (result)", index->dimensions(), {op.bucket});
  check.Shape("count (result)", count->dimensions(), {});

  op.x = x.untyped_data();
  op.keep = keep.typed_data();
  op.scale = scale.typed_data();
  op.bias = bias.typed_data();
  op.rows = rows->untyped_data();
  op.index = index->typed_data();
  op.count = count->typed_data();
  op.eps = eps;
  call->groups = check.Groups();
  return check.Result();
}

template <typename Context>
auto ScatterRowsBinding() {
  return ffi::Ffi::Bind()
      .Ctx<Context>()
      .template Arg<ffi::AnyBuffer>()         // base
      .template Arg<ffi::AnyBuffer>()         // rows
      .template Arg<ffi::Buffer<ffi::S32>>()  // index
      .template Ret<ffi::AnyBuffer>();        // out
}

inline ffi::Error ReadScatterRows(ffi::AnyBuffer base, ffi::AnyBuffer rows,
                                  ffi::Buffer<ffi::S32> index, ffi::Result<ffi::AnyBuffer> out,
                                  Call<ScatterRows>* call) {
  Checker check("tide_scatter_rows_v1", base.dimensions(), 2);
  if (check.failed()) return check.Result();
  ScatterRows& op = call->first;
  const Dims dims = base.dimensions();
  DType dtype = DType::kF32;
  op.n = dims[dims.size() - 2];
  op.bucket = index.dimensions().size() > 0 ? index.dimensions().back() : 0;
  check.Type("base", base.element_type(), &dtype);
  check.SameType("rows", rows.element_type(), base.element_type());
  check.SameType("out (result)", out->element_type(), base.element_type());
  check.Shape("rows", rows.dimensions(), {op.bucket, dims.back()});
  check.Shape("index", index.dimensions(), {op.bucket});
  check.Shape("out (result)", out->dimensions(), {op.n, dims.back()});

  op.base = base.untyped_data();
  op.rows = rows.untyped_data();
  op.index = index.typed_data();
  op.out = out->untyped_data();
  op.row_bytes = dims.back() * SizeOf(dtype);
  call->groups = check.Groups();
  return check.Result();
}

}  // namespace tide

#endif  // TIDE_COMPACT_OPERANDS_H_
