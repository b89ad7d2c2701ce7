// The operators bf16kit::AddLayerNorm…: y = LayerNormalization(x + skip) over the last dimension, in fp32; and
// bf16kit::AddRmsNorm… and RmsNorm: y = RMSNormalization(x + skip) and RMSNormalization(x).
//
//   inputs      x and skip [..., width], of the same shape; scale [width]; bias [width] in those with _bias
//   outputs     y [..., width]; in those with _sum also x + skip
//   attributes  epsilon  float, not negative
#pragma once

#include <cstddef>

#include "ort/abi.h"

namespace bf16kit {

constexpr size_t kNormOperators = 7;

// Returns operator `index`, which lives as long as the program.
const abi::CustomOp* norm_operator_at(size_t index);

}  // namespace bf16kit
