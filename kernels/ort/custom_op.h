// What all operators of this library tell ONNX Runtime in the same way.
#pragma once

#include <climits>

#include "ort/abi.h"

namespace bf16kit {

// An operator of the CPU, of any version, without variadic inputs or outputs, in memory of the usual kind. Its name, inputs,
// outputs, and what creates, runs and destroys a kernel are the caller's.
inline abi::CustomOp custom_op() {
  using abi::CustomOp;
  CustomOp op = {};
  op.version = abi::kVersion;
  op.GetExecutionProviderType = [](const CustomOp*) noexcept -> const char* { return nullptr; };  // the CPU's
  op.GetInputMemoryType = [](const CustomOp*, size_t) noexcept { return 0; };
  op.GetOutputCharacteristic = [](const CustomOp*, size_t) noexcept -> int { return abi::kRequired; };
  op.GetVariadicInputMinArity = [](const CustomOp*) noexcept { return 1; };
  op.GetVariadicInputHomogeneity = [](const CustomOp*) noexcept { return 1; };
  op.GetVariadicOutputMinArity = [](const CustomOp*) noexcept { return 1; };
  op.GetVariadicOutputHomogeneity = [](const CustomOp*) noexcept { return 1; };
  op.GetStartVersion = [](const CustomOp*) noexcept { return 1; };
  op.GetEndVersion = [](const CustomOp*) noexcept { return INT_MAX; };
  return op;
}

// One of fp32 alone, none of whose inputs may be left out. `Operator` begins with the CustomOp and has a name.
template <typename Operator>
abi::CustomOp custom_op_of_floats(size_t (*inputs)(const abi::CustomOp*) noexcept,
                                  size_t (*outputs)(const abi::CustomOp*) noexcept) {
  using abi::CustomOp;
  CustomOp op = custom_op();
  op.GetName = [](const CustomOp* op) noexcept -> const char* { return reinterpret_cast<const Operator*>(op)->name; };
  op.GetInputType = op.GetOutputType = [](const CustomOp*, size_t) noexcept -> int { return abi::kFloat; };
  op.GetInputCharacteristic = [](const CustomOp*, size_t) noexcept -> int { return abi::kRequired; };
  op.GetInputTypeCount = inputs;
  op.GetOutputTypeCount = outputs;
  return op;
}

}  // namespace bf16kit
