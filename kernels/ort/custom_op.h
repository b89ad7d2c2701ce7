// The properties that are the same for all operators of this library.
#pragma once

#include <climits>

#include "ort/abi.h"

namespace bf16kit {

// Returns an operator for the CPU, of any version, without variadic inputs or outputs, in default memory. The caller sets its
// name, its inputs and outputs, and the functions that create, run and destroy a kernel.
inline abi::CustomOp custom_op() {
  using abi::CustomOp;
  CustomOp op = {};
  op.version = abi::kVersion;
  op.GetExecutionProviderType = [](const CustomOp*) noexcept -> const char* { return nullptr; };  // the CPU
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

// Returns an operator with fp32 inputs and outputs, all of them required. `Operator` begins with the CustomOp and has a name.
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
