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

constexpr size_t kX = 0, kSkip = 1, kScale = 2, kBias = 3;  // inputs

struct Operator {
  CustomOp op;  // first: ONNX Runtime hands back its address
  char name[32];
  bool has_bias, gives_sum;
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

Status* read_row(const Api* api, const KernelContext* context, size_t input, int64_t width, const float** data) {
  Shape shape;
  void* values = nullptr;
  BF16KIT_RETURN_IF_ERROR(read_input(api, context, input, shape, &values));
  if (shape.count != 1 || shape.dims[0] != width) {
    return error(api, kInvalidArgument, "the %s has %zu dimensions and %lld elements; it must be [%lld]",
                 input == kScale ? "scale" : "bias", shape.count,
                 static_cast<long long>(shape.elements(0, shape.count)), static_cast<long long>(width));
  }
  *data = static_cast<const float*>(values);
  return nullptr;
}

Status* check_same(const Api* api, const Shape& x, const Shape& skip) {
  bool same = x.count == skip.count && x.count > 0;
  for (size_t i = 0; same && i < x.count; ++i) same = x.dims[i] == skip.dims[i];
  if (same) return nullptr;
  return error(api, kInvalidArgument, "x and skip, of %zu and %zu dimensions, do not have one shape of at least one",
               x.count, skip.count);
}

Status* run(void* created, KernelContext* context) noexcept {
  const Node& node = *static_cast<const Node*>(created);
  const Api* api = node.api;
  Shape shape, other;
  void *x = nullptr, *skip = nullptr;
  BF16KIT_RETURN_IF_ERROR(read_input(api, context, kX, shape, &x));
  BF16KIT_RETURN_IF_ERROR(read_input(api, context, kSkip, other, &skip));
  BF16KIT_RETURN_IF_ERROR(check_same(api, shape, other));
  Norm norm = {};
  norm.x = static_cast<const float*>(x), norm.skip = static_cast<const float*>(skip);
  norm.width = shape.dims[shape.count - 1];
  norm.rows = norm.width == 0 ? 0 : shape.elements(0, shape.count - 1);
  norm.epsilon = node.epsilon;
  BF16KIT_RETURN_IF_ERROR(read_row(api, context, kScale, norm.width, &norm.scale));
  if (node.op->has_bias) BF16KIT_RETURN_IF_ERROR(read_row(api, context, kBias, norm.width, &norm.bias));
  BF16KIT_RETURN_IF_ERROR(make_output(api, context, 0, shape, &norm.y));
  if (node.op->gives_sum) BF16KIT_RETURN_IF_ERROR(make_output(api, context, 1, shape, &norm.sum));
  Threads threads = {api, context, nullptr};
  normalise(norm, *node.path, run_parts, &threads);
  return threads.status;
}

size_t input_count(const CustomOp* op) noexcept { return of(op).has_bias ? 4 : 3; }
size_t output_count(const CustomOp* op) noexcept { return of(op).gives_sum ? 2 : 1; }

CustomOp describe() {
  CustomOp op = custom_op_of_floats<Operator>(input_count, output_count);
  op.CreateKernelV2 = create;
  op.KernelComputeV2 = run;
  op.KernelDestroy = destroy;
  return op;
}

// The names are converter/cpukernel/norms.py's.
struct Operators {
  Operator all[kNormOperators];

  Operators() {
    for (size_t i = 0; i < kNormOperators; ++i) {
      Operator& added = all[i];
      added = {describe(), "", (i & 1) != 0, (i & 2) != 0};
      std::snprintf(added.name, sizeof added.name, "AddLayerNorm%s%s", added.has_bias ? "_bias" : "",
                    added.gives_sum ? "_sum" : "");
    }
  }
};

}  // namespace

const CustomOp* norm_operator_at(size_t index) {
  static const Operators operators;
  return &operators.all[index].op;
}

}  // namespace bf16kit
