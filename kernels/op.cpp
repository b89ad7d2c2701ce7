#include "op.h"

#include <climits>
#include <cstdio>
#include <initializer_list>

#include "kernel.h"

namespace bf16kit {
namespace {

using namespace abi;

int one(const CustomOp*) { return 1; }
int newest(const CustomOp*) { return INT_MAX; }
int required(const CustomOp*, size_t) { return kRequired; }
int memory_default(const CustomOp*, size_t) { return 0; }

struct Operator {
  CustomOp op;  // first: ONNX Runtime hands back its address
  char name[64];
};

const char* name_of(const CustomOp* op) { return reinterpret_cast<const Operator*>(op)->name; }

CustomOp describe() {
  CustomOp op = {};
  op.version = kVersion;
  op.GetName = name_of;
  op.GetExecutionProviderType = [](const CustomOp*) -> const char* { return nullptr; };  // the CPU's
  op.GetInputType = [](const CustomOp*, size_t i) -> int { return i == kWeight ? kBfloat16 : kFloat; };
  op.GetInputTypeCount = [](const CustomOp*) -> size_t { return 3; };
  op.GetOutputType = [](const CustomOp*, size_t) -> int { return kFloat; };
  op.GetOutputTypeCount = [](const CustomOp*) -> size_t { return 1; };
  op.KernelDestroy = destroy_kernel;
  op.GetInputCharacteristic = [](const CustomOp*, size_t i) -> int { return i == kBias ? kOptional : kRequired; };
  op.GetOutputCharacteristic = required;
  op.GetInputMemoryType = memory_default;
  op.GetVariadicInputMinArity = one;
  op.GetVariadicInputHomogeneity = one;
  op.GetVariadicOutputMinArity = one;
  op.GetVariadicOutputHomogeneity = one;
  op.CreateKernelV2 = create_kernel;
  op.KernelComputeV2 = run_kernel;
  op.GetStartVersion = one;
  op.GetEndVersion = newest;
  return op;
}

struct Operators {
  Operator all[kOperators];

  Operators() {
    // As converter/functions.py names them; `lists` there says what parts the panels into four.
    size_t count = 0;
    std::snprintf(all[count++].name, sizeof all->name, "MatMul");
    for (const char* layout : {"panels", "panels_tail", "panels_narrow", "transposed"}) {
      for (const char* bias : {"", "_bias"}) {
        for (const char* activation : kActivationNames) {
          const bool none = activation == kActivationNames[0];
          std::snprintf(all[count++].name, sizeof all->name, "MatMul_%s%s%s%s", layout, bias, none ? "" : "_",
                        none ? "" : activation);
        }
      }
    }
    for (Operator& each : all) each.op = describe();
  }
};

}  // namespace

const CustomOp* operator_at(size_t index) {
  static const Operators operators;
  return &operators.all[index].op;
}

}  // namespace bf16kit
