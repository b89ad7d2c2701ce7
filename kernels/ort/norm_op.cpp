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
  Node node = {api, nullptr, &of(op), 0};
  BF16KIT_RETURN_IF_ERROR(read_path(api, Arithmetic::kFp32, node.path));
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

Status* run(void* created, KernelContext* context) noexcept {
  const Node& node = *static_cast<const Node*>(created);
  const Operator& op = *node.op;
  const Api* api = node.api;
  Shape shape;
  Norm norm = {};
  norm.kind = op.form.kind;
  BF16KIT_RETURN_IF_ERROR(read_input(api, context, kX, shape, &norm.x));
  if (shape.count == 0) return error(api, kInvalidArgument, "x has no dimensions; it must have at least one");
  if (op.form.adds) BF16KIT_RETURN_IF_ERROR(read_input(api, context, kSkip, "skip", shape, &norm.skip));
  norm.width = shape.dims[shape.count - 1];
  norm.rows = norm.width == 0 ? 0 : shape.elements(0, shape.count - 1);
  norm.epsilon = node.epsilon;
  const Shape row = {{norm.width}, 1};
  BF16KIT_RETURN_IF_ERROR(read_input(api, context, op.scale(), "scale", row, &norm.scale));
  if (op.form.has_bias) BF16KIT_RETURN_IF_ERROR(read_input(api, context, op.bias(), "bias", row, &norm.bias));
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
