// The operators of this library in ONNX Runtime's format. matmul_op.h, lookup_op.h, attention_op.h, norm_op.h, conv_op.h and
// recurrent_op.h describe them.
#pragma once

#include <cstddef>

#include "ort/abi.h"
#include "ort/attention_op.h"
#include "ort/conv_op.h"
#include "ort/norm_op.h"
#include "ort/recurrent_op.h"

namespace bf16kit {

// A graph defines each operator that it uses as a function of ONNX's own operators, so that it also runs without this library.
// The definition is found by the operator's name. So each variant with its own definition has its own name.
//   MatMul                                      any of the following, for graphs made by hand
//   MatMul_LAYOUT[_bias][_ACTIVATION]           4 layouts, 6 activations
//   MatMul2_panels[_bias], MatMul3_panels[_bias]
//   MatMulBf16…, MatMul2Bf16…, MatMul3Bf16…     all of these again, with x rounded to bf16
//   Gather_LAYOUT                               3 layouts
//   Attention[Bf16]_FORM[_grouped][_mask]       attention_op.h
//   AddLayerNorm[_bias][_sum], RmsNorm, AddRmsNorm[_sum]    norm_op.h
//   Conv[Bf16]_LAYOUT[_ACTIVATION], ConvDepthwise[_ACTIVATION], ConvBlock[Bf16]_LAYOUT_LAYOUT[_ACTIVATION]    conv_op.h
//   LSTM[2][Bf16], GRU[2][Bf16]                 recurrent_op.h
constexpr size_t kProductsAndLookups = 2 * (1 + 4 * 2 * 6 + 4) + 3;
constexpr size_t kOperators =
    kProductsAndLookups + kAttentionOperators + kNormOperators + kConvOperators + kRecurrentOperators;

// Returns operator `index`, which lives as long as the program.
const abi::CustomOp* operator_at(size_t index);

}  // namespace bf16kit
