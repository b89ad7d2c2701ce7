// The operators of this library, as ONNX Runtime reads them: matmul_op.h, lookup_op.h and attention_op.h say what each computes.
#pragma once

#include <cstddef>

#include "ort/abi.h"
#include "ort/attention_op.h"
#include "ort/norm_op.h"

namespace bf16kit {

// A graph defines each operator that it uses in ONNX's own, for who runs it without this library, and a definition goes
// by its name: so whatever needs a definition of its own has a name of its own.
//   MatMul                                      any of the following, for graphs made by hand
//   MatMul_LAYOUT[_bias][_ACTIVATION]           4 layouts, 5 activations
//   MatMul2_panels[_bias], MatMul3_panels[_bias]
//   MatMulBf16…, MatMul2Bf16…, MatMul3Bf16…     all of these once more, x being rounded to bf16
//   Gather_LAYOUT                               3 layouts
//   Attention[Bf16]_FORM[_grouped][_mask]       attention_op.h
//   AddLayerNorm[_bias][_sum], RmsNorm, AddRmsNorm[_sum]    norm_op.h
constexpr size_t kProductsAndLookups = 2 * (1 + 4 * 2 * 5 + 4) + 3;
constexpr size_t kOperators = kProductsAndLookups + kAttentionOperators + kNormOperators;

// Operator `index`, which lives as long as the program.
const abi::CustomOp* operator_at(size_t index);

}  // namespace bf16kit
