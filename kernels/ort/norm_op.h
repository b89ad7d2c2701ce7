// The operators bf16kit::AddLayerNorm…: y = LayerNormalization(x + skip) over the last dimension, in fp32.
//
//   inputs      x and skip [..., width], of the same shape; scale [width]; bias [width] in those with _bias
//   outputs     y [..., width]; x + skip as well in those with _sum
//   attributes  epsilon  float, positive
#pragma once

#include <cstddef>

#include "ort/abi.h"

namespace bf16kit {

constexpr size_t kNormOperators = 4;

// Operator `index`, which lives as long as the program.
const abi::CustomOp* norm_operator_at(size_t index);

}  // namespace bf16kit
