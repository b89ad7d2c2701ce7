// The operators bf16kit::MatMul…: y = activation(x · w + bias), w in bf16.
//
//   inputs      x [..., k] fp32; w bf16, a constant of k * n elements; bias [n] fp32, optional
//   output      y [..., n] fp32
//   attributes  k, n     int, the weight's rows and columns
//               layout   "panels" or "transposed": how the weight is stored (weight.h)
//               activation  "none", "relu", "gelu", "gelu_tanh", "silu"
//
// All compute what their attributes say. They have many names, because a graph defines each in ONNX's own operators
// for who runs it without this library, and a definition goes by its name.
#pragma once

#include <cstddef>

#include "abi.h"

namespace bf16kit {

constexpr size_t kOperators = 41;  // MatMul, and MatMul_LAYOUT[_bias][_ACTIVATION] for 4 layouts and 5 activations

// Operator `index`, which lives as long as the program.
const abi::CustomOp* operator_at(size_t index);

}  // namespace bf16kit
