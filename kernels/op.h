// The operator bf16kit::MatMul: y = activation(x · w + bias), w in bf16.
//
//   inputs      x [..., k] fp32; w bf16, a constant of k * n elements; bias [n] fp32, optional
//   output      y [..., n] fp32
//   attributes  k, n     int, the weight's rows and columns
//               layout   "panels" or "transposed": how the weight is stored (weight.h)
//               activation  "none", "relu", "gelu", "gelu_tanh", "silu"
#pragma once

#include "abi.h"

namespace bf16kit {

extern const abi::CustomOp kMatMul;

}  // namespace bf16kit
