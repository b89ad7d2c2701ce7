#include "ort/attention_op.h"

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

constexpr size_t kOperands = 3, kMask = 3;  // the number of inputs q, k and v; the input after them
constexpr size_t kQ = 0, kK = 1, kV = 2;
constexpr const char* kNames[] = {"q", "k", "v", "the mask"};

struct Operator {
  CustomOp op;  // the first member, because ONNX Runtime passes its address back
  char name[32];
  bool in_heads[kOperands];
  bool has_mask;
  Arithmetic arithmetic;
};

const Operator& of(const CustomOp* op) { return *reinterpret_cast<const Operator*>(op); }

struct Node {
  const Api* api;
  const Path* path;
  const Operator* op;
  int64_t heads, kv_heads;
  float scale;
};

Status* create(const CustomOp* op, const Api* api, const KernelInfo* info, void** created) noexcept {
  Node node = {api, nullptr, &of(op), 0, 0, 0};
  BF16KIT_RETURN_IF_ERROR(read_path(api, node.op->arithmetic, node.path));
  BF16KIT_RETURN_IF_ERROR(read_size(api, info, "heads", node.heads));
  BF16KIT_RETURN_IF_ERROR(read_size(api, info, "kv_heads", node.kv_heads));
  if (node.heads % node.kv_heads != 0) {
    return error(api, kInvalidGraph, "heads = %lld is not a multiple of kv_heads = %lld",
                 static_cast<long long>(node.heads), static_cast<long long>(node.kv_heads));
  }
  if (Status* status = call<Status*>(api, kKernelInfoGetAttributeFloat, info, "scale", &node.scale)) {
    call<void>(api, kReleaseStatus, status);
    return error(api, kInvalidGraph, "attribute scale is missing or of another type; it must be a float");
  }
  if (!std::isfinite(node.scale)) return error(api, kInvalidGraph, "attribute scale is not a finite number");
  *created = new (std::nothrow) Node(node);
  return *created != nullptr ? nullptr : error(api, kFail, "out of memory");
}

void destroy(void* created) noexcept { delete static_cast<Node*>(created); }

// One of q, k and v: its sizes and strides.
struct Operand {
  int64_t batch, heads, rows, columns;
  Strided strided;
};

Status* read_operand(const Node& node, const KernelContext* context, size_t input, Operand& operand) {
  const Api* api = node.api;
  Shape shape;
  const float* values = nullptr;
  BF16KIT_RETURN_IF_ERROR(read_input(api, context, input, shape, &values));
  const bool in_heads = node.op->in_heads[input];
  if (shape.count != (in_heads ? 4u : 3u)) {
    return error(api, kInvalidArgument, "%s has %zu dimensions; %s needs %d", kNames[input], shape.count,
                 node.op->name, in_heads ? 4 : 3);
  }
  const int64_t* dims = shape.dims;
  const int64_t heads = input == kQ ? node.heads : node.kv_heads;
  const int64_t found = in_heads ? dims[1] : dims[2];
  if (in_heads ? found != heads : found % heads != 0) {
    return error(api, kInvalidArgument, "dimension %d of %s is %lld, which does not fit to %lld heads",
                 in_heads ? 1 : 2, kNames[input], static_cast<long long>(found), static_cast<long long>(heads));
  }
  if (in_heads) {
    operand = {dims[0], heads, dims[2], dims[3], {values, heads * dims[2] * dims[3], dims[2] * dims[3], dims[3], 1}};
  } else {
    operand = {dims[0], heads, dims[1], dims[2] / heads, {values, dims[1] * dims[2], dims[2] / heads, dims[2], 1}};
  }
  return nullptr;
}

Status* check_operands(const Node& node, const Operand& q, const Operand& k, const Operand& v) {
  const auto differ = [&](const char* what, int64_t a, int64_t b) {
    return error(node.api, kInvalidArgument, "%s: %lld and %lld; they must be the same", what,
                 static_cast<long long>(a), static_cast<long long>(b));
  };
  if (k.batch != q.batch) return differ("the batches of q and k", q.batch, k.batch);
  if (v.batch != q.batch) return differ("the batches of q and v", q.batch, v.batch);
  if (v.rows != k.rows) return differ("the rows of k and v", k.rows, v.rows);
  if (q.columns == 0) return error(node.api, kInvalidArgument, "a head of q and k has 0 columns; it needs 1 or more");
  if (k.columns != q.columns) return differ("the columns of q and k, of one head", q.columns, k.columns);
  return nullptr;
}

// The mask, of up to four dimensions; missing leading dimensions are 1.
Status* read_mask(const Node& node, const KernelContext* context, const Attention& a, Strided& mask) {
  const Api* api = node.api;
  Shape shape;
  BF16KIT_RETURN_IF_ERROR(read_input(api, context, kMask, shape, &mask.data));
  const int64_t wanted[] = {a.batch, a.heads, a.queries, a.keys};
  int64_t* const strides[] = {&mask.batch, &mask.head, &mask.row, &mask.column};
  if (shape.count > 4) {
    return error(api, kInvalidArgument, "the mask has %zu dimensions; at most 4 make sense", shape.count);
  }
  int64_t stride = 1;
  for (size_t i = 4; i-- > 0;) {
    const size_t missing = 4 - shape.count;
    const int64_t size = i < missing ? 1 : shape.dims[i - missing];
    if (size != 1 && size != wanted[i]) {
      return error(api, kInvalidArgument, "dimension %zu of the mask is %lld; it must be 1 or %lld", i - missing,
                   static_cast<long long>(size), static_cast<long long>(wanted[i]));
    }
    *strides[i] = size == 1 ? 0 : stride;
    stride *= size;
  }
  return nullptr;
}

Status* run(void* created, KernelContext* context) noexcept {
  const Node& node = *static_cast<const Node*>(created);
  const Api* api = node.api;
  Operand operands[kOperands];
  for (size_t i = 0; i < kOperands; ++i) BF16KIT_RETURN_IF_ERROR(read_operand(node, context, i, operands[i]));
  const Operand &q = operands[kQ], &k = operands[kK], &v = operands[kV];
  BF16KIT_RETURN_IF_ERROR(check_operands(node, q, k, v));
  Attention attention = {q.batch, node.heads, node.kv_heads, q.rows,    k.rows, q.columns, v.columns,
                         node.scale, node.op->arithmetic, q.strided, k.strided, v.strided, {}, nullptr, 0};
  if (node.op->has_mask) BF16KIT_RETURN_IF_ERROR(read_mask(node, context, attention, attention.mask));
  const Shape shape = {{q.batch, q.rows, node.heads * v.columns}, 3};
  BF16KIT_RETURN_IF_ERROR(make_output(api, context, 0, shape, &attention.y));
  Threads threads = {api, context, nullptr};
  const bool done = attend(attention, *node.path, run_parts, &threads);
  if (threads.status != nullptr) return threads.status;
  if (done) return nullptr;
  return error(api, kFail, "out of memory while copying %lld keys and values", static_cast<long long>(k.rows));
}

size_t input_count(const CustomOp* op) noexcept { return kOperands + (of(op).has_mask ? 1 : 0); }
size_t output_count(const CustomOp*) noexcept { return 1; }

CustomOp describe() {
  CustomOp op = custom_op_of_floats<Operator>(input_count, output_count);
  op.CreateKernelV2 = create;
  op.KernelComputeV2 = run;
  op.KernelDestroy = destroy;
  return op;
}

// The names must be those in converter/fuse/attend.py.
struct Operators {
  Operator all[kAttentionOperators];

  Operators() {
    for (size_t i = 0; i < kAttentionOperators; ++i) {
      Operator& added = all[i];
      const bool rounds = (i & 32) != 0;
      added = {describe(), "", {(i & 1) != 0, (i & 2) != 0, (i & 4) != 0}, (i & 8) != 0,
               rounds ? Arithmetic::kBf16 : Arithmetic::kFp32};
      char form[kOperands + 1] = "rrr";
      for (size_t input = 0; input < kOperands; ++input) form[input] = added.in_heads[input] ? 'h' : 'r';
      std::snprintf(added.name, sizeof added.name, "Attention%s_%s%s%s", rounds ? "Bf16" : "", form,
                    (i & 16) != 0 ? "_grouped" : "", added.has_mask ? "_mask" : "");
    }
  }
};

}  // namespace

const CustomOp* attention_operator_at(size_t index) {
  static const Operators operators;
  return &operators.all[index].op;
}

}  // namespace bf16kit
