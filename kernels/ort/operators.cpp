#include "ort/operators.h"

#include <cstdio>
#include <cstdlib>
#include <initializer_list>

#include "ort/custom_op.h"
#include "ort/lookup_op.h"
#include "ort/matmul_op.h"

namespace bf16kit {
namespace {

using namespace abi;

enum class Kind { kProduct, kLookup };

struct Operator {
  CustomOp op;  // the first member, because ONNX Runtime passes its address back
  char name[64];
  Kind kind;
  size_t weights;
  size_t biases;
  Arithmetic arithmetic;
};

const Operator& of(const CustomOp* op) { return *reinterpret_cast<const Operator*>(op); }

const char* name(const CustomOp* op) noexcept { return of(op).name; }

size_t input_count(const CustomOp* op) noexcept { return 1 + of(op).weights + of(op).biases; }
size_t output_count(const CustomOp* op) noexcept { return of(op).weights; }
int input_type(const CustomOp* op, size_t i) noexcept {
  if (i >= 1 && i <= of(op).weights) return kBfloat16;
  return of(op).kind == Kind::kLookup ? kInt64 : kFloat;
}
int output_type(const CustomOp*, size_t) noexcept { return kFloat; }
// Only the bias of a single product is optional.
int input_characteristic(const CustomOp* op, size_t i) noexcept {
  return of(op).weights == 1 && i == 2 ? kOptional : kRequired;
}

Status* create(const CustomOp* op, const Api* api, const KernelInfo* info, void** created) noexcept {
  if (of(op).kind == Kind::kLookup) return create_lookup(api, info, created);
  return create_product(api, info, of(op).weights, of(op).arithmetic, created);
}

CustomOp describe(Kind kind) {
  CustomOp op = custom_op();
  op.GetName = name;
  op.GetInputType = input_type;
  op.GetInputTypeCount = input_count;
  op.GetOutputType = output_type;
  op.GetOutputTypeCount = output_count;
  op.GetInputCharacteristic = input_characteristic;
  op.CreateKernelV2 = create;
  op.KernelComputeV2 = kind == Kind::kLookup ? run_lookup : run_product;
  op.KernelDestroy = kind == Kind::kLookup ? destroy_lookup : destroy_product;
  return op;
}

// The names must be those in converter/fuse/multiply.py.
struct Operators {
  Operator all[kProductsAndLookups];
  size_t count = 0;

  Operator& add(Kind kind, size_t weights, size_t biases, Arithmetic arithmetic = Arithmetic::kFp32) {
    if (count == kProductsAndLookups) std::abort();  // the constant and the loops below disagree
    Operator& added = all[count++];
    added = {describe(kind), "", kind, weights, biases, arithmetic};
    return added;
  }

  void add_products(Arithmetic arithmetic) {
    const char* rounded = arithmetic == Arithmetic::kBf16 ? "Bf16" : "";
    std::snprintf(add(Kind::kProduct, 1, 1, arithmetic).name, sizeof all->name, "MatMul%s", rounded);
    for (const char* layout : {"panels", "panels_tail", "panels_narrow", "transposed"}) {
      for (const char* bias : {"", "_bias"}) {
        for (const char* activation : kActivations) {
          const bool none = activation == kActivations[0];
          std::snprintf(add(Kind::kProduct, 1, 1, arithmetic).name, sizeof all->name, "MatMul%s_%s%s%s%s", rounded,
                        layout, bias, none ? "" : "_", none ? "" : activation);
        }
      }
    }
    for (size_t weights = 2; weights <= kMostProducts; ++weights) {
      for (const bool bias : {false, true}) {
        std::snprintf(add(Kind::kProduct, weights, bias ? weights : 0, arithmetic).name, sizeof all->name,
                      "MatMul%zu%s_panels%s", weights, rounded, bias ? "_bias" : "");
      }
    }
  }

  Operators() {
    add_products(Arithmetic::kFp32);
    add_products(Arithmetic::kBf16);
    for (const char* layout : {"panels", "panels_tail", "panels_narrow"}) {
      std::snprintf(add(Kind::kLookup, 1, 0).name, sizeof all->name, "Gather_%s", layout);
    }
    if (count != kProductsAndLookups) std::abort();
  }
};

}  // namespace

const CustomOp* operator_at(size_t index) {
  constexpr size_t kBeforeNorms = kProductsAndLookups + kAttentionOperators, kBeforeConvs = kBeforeNorms + kNormOperators;
  constexpr size_t kBeforeRecurrences = kBeforeConvs + kConvOperators;
  if (index >= kBeforeRecurrences) return recurrent_operator_at(index - kBeforeRecurrences);
  if (index >= kBeforeConvs) return conv_operator_at(index - kBeforeConvs);
  if (index >= kBeforeNorms) return norm_operator_at(index - kBeforeNorms);
  if (index >= kProductsAndLookups) return attention_operator_at(index - kProductsAndLookups);
  static const Operators operators;
  return &operators.all[index].op;
}

}  // namespace bf16kit
