#include "ort/recurrent_op.h"

#include <cstdio>
#include <cstring>
#include <iterator>
#include <new>

#include "gemm/parallel.h"
#include "gemm/path.h"
#include "ort/custom_op.h"
#include "ort/node.h"
#include "ort/status.h"

namespace bf16kit {
namespace {

using namespace abi;

constexpr int64_t kMostHidden = 1 << 20;  // the sizes of weights and gates stay far below the limits of int64

struct Operator {
  CustomOp op;  // the first member, because ONNX Runtime passes its address back
  char name[16];
  Cell cell;
  size_t weights;  // of each kind
  Arithmetic arithmetic;

  size_t states() const { return cell == Cell::kLstm ? 2 : 1; }
  size_t bias() const { return 1 + 2 * weights; }
};

const Operator& of(const CustomOp* op) { return *reinterpret_cast<const Operator*>(op); }

struct Node {
  const Api* api;
  const Path* path;
  const Operator* op;
  Recurrence recurrence;  // without its tensors
};

Status* read_how(const Api* api, const KernelInfo* info, Node& node) {
  static constexpr const char* kDirections[] = {"forward", "reverse", "bidirectional"};
  static constexpr const char* kOrders[2][2] = {{"iofc", "ifco"}, {"zrh", "rzh"}};
  Recurrence& all = node.recurrence;
  size_t choice = 0;
  BF16KIT_RETURN_IF_ERROR(read_choice(api, info, "direction", kDirections, std::size(kDirections), choice));
  all.directions = choice == 2 ? 2 : 1;
  all.reverse = choice == 1;
  if (node.op->weights > static_cast<size_t>(all.directions)) {
    return error(api, kInvalidGraph, "%s has two directions; attribute direction must be \"bidirectional\"", node.op->name);
  }
  const char* const(&orders)[2] = kOrders[all.cell == Cell::kLstm ? 0 : 1];
  BF16KIT_RETURN_IF_ERROR(read_choice(api, info, "gates", orders, 2, choice));
  for (int i = 0; i < gates(all.cell); ++i) {
    all.blocks[i] = static_cast<int>(std::strchr(orders[choice], orders[0][i]) - orders[choice]);
  }
  BF16KIT_RETURN_IF_ERROR(read_size(api, info, "hidden", all.hidden));
  BF16KIT_RETURN_IF_ERROR(read_size(api, info, "inputs", all.inputs));
  if (all.hidden <= kMostHidden) return nullptr;
  return error(api, kInvalidGraph, "attribute hidden is %lld; it must be at most %lld", static_cast<long long>(all.hidden),
               static_cast<long long>(kMostHidden));
}

// Reads the weights of one kind, from input `first` on, as those of each direction.
Status* read_weights(const Api* api, const KernelInfo* info, const Node& node, size_t first, int64_t k, const uint16_t** each) {
  const Recurrence& all = node.recurrence;
  const int64_t wide = gates(all.cell) * all.hidden, stacked = all.directions / static_cast<int64_t>(node.op->weights);
  for (int64_t d = 0; d < all.directions; ++d) {
    Weight weight = {nullptr, k, wide * stacked, Layout::kTransposed};
    BF16KIT_RETURN_IF_ERROR(read_weight(api, info, first + static_cast<size_t>(d / stacked), weight));
    each[d] = weight.data + d % stacked * wide * k;
  }
  return nullptr;
}

Status* create(const CustomOp* op, const Api* api, const KernelInfo* info, void** created) noexcept {
  Node node = {};
  node.api = api;
  node.op = &of(op);
  node.recurrence.cell = node.op->cell;
  node.recurrence.arithmetic = node.op->arithmetic;
  BF16KIT_RETURN_IF_ERROR(read_path(api, node.op->arithmetic, node.path));
  Recurrence& all = node.recurrence;
  BF16KIT_RETURN_IF_ERROR(read_how(api, info, node));
  BF16KIT_RETURN_IF_ERROR(read_weights(api, info, node, 1, all.inputs, all.w));
  BF16KIT_RETURN_IF_ERROR(read_weights(api, info, node, 1 + node.op->weights, all.hidden, all.r));
  *created = new (std::nothrow) Node(node);
  return *created != nullptr ? nullptr : error(api, kFail, "out of memory");
}

void destroy(void* created) noexcept { delete static_cast<Node*>(created); }

Status* run(void* created, KernelContext* context) noexcept {
  const Node& node = *static_cast<const Node*>(created);
  const Api* api = node.api;
  Recurrence all = node.recurrence;
  const bool lstm = all.cell == Cell::kLstm;
  Shape shape;
  BF16KIT_RETURN_IF_ERROR(read_input(api, context, 0, shape, &all.x));
  if (shape.count != 3 || shape.dims[2] != all.inputs) {
    return error(api, kInvalidArgument, "x has %zu dimensions, the last of size %lld; it must be [steps, batch, %lld]",
                 shape.count, shape.count == 0 ? 0 : static_cast<long long>(shape.dims[shape.count - 1]),
                 static_cast<long long>(all.inputs));
  }
  all.steps = shape.dims[0], all.batch = shape.dims[1];
  const Shape state = {{all.directions, all.batch, all.hidden}, 3}, every = {{all.steps, all.directions, all.batch, all.hidden}, 4};
  const Shape biases = {{all.directions, 2 * gates(all.cell) * all.hidden}, 2};
  const size_t bias = node.op->bias();
  BF16KIT_RETURN_IF_ERROR(read_input(api, context, bias, "bias", biases, &all.bias, kOptional));
  BF16KIT_RETURN_IF_ERROR(read_input(api, context, bias + 1, "initial h", state, &all.h, kOptional));
  if (lstm) BF16KIT_RETURN_IF_ERROR(read_input(api, context, bias + 2, "initial c", state, &all.c, kOptional));
  BF16KIT_RETURN_IF_ERROR(make_output(api, context, 0, every, &all.y, kOptional));
  BF16KIT_RETURN_IF_ERROR(make_output(api, context, 1, state, &all.last_h, kOptional));
  if (lstm) BF16KIT_RETURN_IF_ERROR(make_output(api, context, 2, state, &all.last_c, kOptional));
  Threads threads = {api, context, nullptr};
  const bool done = recur(all, *node.path, run_parts, &threads, available_cores());
  if (threads.status != nullptr) return threads.status;
  return done ? nullptr : error(api, kFail, "out of memory for %lld steps of %lld rows", static_cast<long long>(all.steps),
                                static_cast<long long>(all.batch));
}

CustomOp describe() {
  CustomOp op = custom_op_of_floats<Operator>(
      [](const CustomOp* op) noexcept { return of(op).bias() + 1 + of(op).states(); },
      [](const CustomOp* op) noexcept { return 1 + of(op).states(); });
  op.GetInputType = [](const CustomOp* op, size_t i) noexcept -> int { return i >= 1 && i < of(op).bias() ? kBfloat16 : kFloat; };
  op.GetInputCharacteristic = [](const CustomOp* op, size_t i) noexcept -> int { return i < of(op).bias() ? kRequired : kOptional; };
  op.GetOutputCharacteristic = [](const CustomOp*, size_t) noexcept -> int { return kOptional; };
  op.CreateKernelV2 = create;
  op.KernelComputeV2 = run;
  op.KernelDestroy = destroy;
  return op;
}

// The names must be those in converter/fuse/recurrent.py.
struct Operators {
  Operator all[kRecurrentOperators];

  Operators() {
    for (size_t i = 0; i < kRecurrentOperators; ++i) {
      Operator& each = all[i];
      each = {describe(), "", (i & 1) == 0 ? Cell::kLstm : Cell::kGru, 1 + (i >> 1 & 1), (i & 4) == 0 ? Arithmetic::kFp32 : Arithmetic::kBf16};
      std::snprintf(each.name, sizeof each.name, "%s%s%s", each.cell == Cell::kLstm ? "LSTM" : "GRU",
                    each.weights == 2 ? "2" : "", each.arithmetic == Arithmetic::kBf16 ? "Bf16" : "");
    }
  }
};

}  // namespace

const CustomOp* recurrent_operator_at(size_t index) {
  static const Operators operators;
  return &operators.all[index].op;
}

}  // namespace bf16kit
