#include "ort/norm_op.h"

#include <cmath>
#include <cstdio>
#include <new>

#include "gemm/path.h"
#include "ort/custom_op.h"
#include "ort/node.h"
#include "ort/status.h"

namespace bf16kit {
namespace {

using namespace abi;

constexpr size_t kX = 0, kSkip = 1;  // inputs; scale and bias are the last ones

struct Form {
  NormKind kind;
  bool adds, has_bias, gives_sum;
};

struct Operator {
  CustomOp op;  // the first member, because ONNX Runtime passes its address back
  char name[32];
  Form form;

  size_t scale() const { return form.adds ? 2 : 1; }
  size_t bias() const { return scale() + 1; }
};

const Operator& of(const CustomOp* op) { return *reinterpret_cast<const Operator*>(op); }

struct Node {
  const Api* api;
  const Path* path;
  const Operator* op;
  float epsilon;
};

Status* create(const CustomOp* op, const Api* api, const KernelInfo* info, void** created) noexcept {
  Node node = {api, choose_path(Arithmetic::kFp32), &of(op), 0};
  if (node.path == nullptr) {
    return error(api, kFail, "BF16KIT_KERNEL_PATH names no code path that this processor can run; unset it");
  }
  if (Status* status = call<Status*>(api, kKernelInfoGetAttributeFloat, info, "epsilon", &node.epsilon)) {
    call<void>(api, kReleaseStatus, status);
    return error(api, kInvalidGraph, "attribute epsilon is missing or of another type; it must be a float");
  }
  if (!(node.epsilon >= 0) || !std::isfinite(node.epsilon)) {
    return error(api, kInvalidGraph, "attribute epsilon is not a finite number from 0 on");
  }
  *created = new (std::nothrow) Node(node);
  return *created != nullptr ? nullptr : error(api, kFail, "out of memory");
}

void destroy(void* created) noexcept { delete static_cast<Node*>(created); }

Status* read_row(const Api* api, const KernelContext* context, const char* what, size_t input, int64_t width,
                 const float** data) {
  Shape shape;
  void* values = nullptr;
  BF16KIT_RETURN_IF_ERROR(read_input(api, context, input, shape, &values));
  if (shape.count != 1 || shape.dims[0] != width) {
    return error(api, kInvalidArgument, "the %s has %zu dimensions and %lld elements; it must be [%lld]",
                 what, shape.count, static_cast<long long>(shape.elements(0, shape.count)),
                 static_cast<long long>(width));
  }
  *data = static_cast<const float*>(values);
  return nullptr;
}

Status* read_skip(const Api* api, const KernelContext* context, const Shape& x, const float** data) {
  Shape skip;
  void* values = nullptr;
  BF16KIT_RETURN_IF_ERROR(read_input(api, context, kSkip, skip, &values));
  bool same = x.count == skip.count;
  for (size_t i = 0; same && i < x.count; ++i) same = x.dims[i] == skip.dims[i];
  *data = static_cast<const float*>(values);
  if (same) return nullptr;
  return error(api, kInvalidArgument, "x and skip, of %zu and %zu dimensions, do not have one shape", x.count,
               skip.count);
}

Status* run(void* created, KernelContext* context) noexcept {
  const Node& node = *static_cast<const Node*>(created);
  const Operator& op = *node.op;
  const Api* api = node.api;
  Shape shape;
  void* x = nullptr;
  BF16KIT_RETURN_IF_ERROR(read_input(api, context, kX, shape, &x));
  if (shape.count == 0) return error(api, kInvalidArgument, "x has no dimensions; it must have at least one");
  Norm norm = {};
  norm.kind = op.form.kind;
  norm.x = static_cast<const float*>(x);
  if (op.form.adds) BF16KIT_RETURN_IF_ERROR(read_skip(api, context, shape, &norm.skip));
  norm.width = shape.dims[shape.count - 1];
  norm.rows = norm.width == 0 ? 0 : shape.elements(0, shape.count - 1);
  norm.epsilon = node.epsilon;
  BF16KIT_RETURN_IF_ERROR(read_row(api, context, "scale", op.scale(), norm.width, &norm.scale));
  if (op.form.has_bias) BF16KIT_RETURN_IF_ERROR(read_row(api, context, "bias", op.bias(), norm.width, &norm.bias));
  BF16KIT_RETURN_IF_ERROR(make_output(api, context, 0, shape, &norm.y));
  if (op.form.gives_sum) BF16KIT_RETURN_IF_ERROR(make_output(api, context, 1, shape, &norm.sum));
  Threads threads = {api, context, nullptr};
  normalise(norm, *node.path, run_parts, &threads);
  return threads.status;
}

size_t input_count(const CustomOp* op) noexcept { return of(op).form.has_bias ? of(op).bias() + 1 : of(op).bias(); }
size_t output_count(const CustomOp* op) noexcept { return of(op).form.gives_sum ? 2 : 1; }

CustomOp describe() {
  CustomOp op = custom_op_of_floats<Operator>(input_count, output_count);
  op.CreateKernelV2 = create;
  op.KernelComputeV2 = run;
  op.KernelDestroy = destroy;
  return op;
}

constexpr Form kForms[kNormOperators] = {
    {NormKind::kLayer, true, false, false}, {NormKind::kLayer, true, true, false},
    {NormKind::kLayer, true, false, true},  {NormKind::kLayer, true, true, true},
    {NormKind::kRms, false, false, false},  {NormKind::kRms, true, false, false},
    {NormKind::kRms, true, false, true},
};

// The names must be those in converter/fuse/norms.py.
struct Operators {
  Operator all[kNormOperators];

  Operators() {
    for (size_t i = 0; i < kNormOperators; ++i) {
      const Form& form = kForms[i];
      all[i] = {describe(), "", form};
      std::snprintf(all[i].name, sizeof all[i].name, "%s%s%s%s", form.adds ? "Add" : "",
                    form.kind == NormKind::kLayer ? "LayerNorm" : "RmsNorm", form.has_bias ? "_bias" : "",
                    form.gives_sum ? "_sum" : "");
    }
  }
};

}  // namespace

const CustomOp* norm_operator_at(size_t index) {
  static const Operators operators;
  return &operators.all[index].op;
}

}  // namespace bf16kit
