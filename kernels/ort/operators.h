// The operators of this library, as ONNX Runtime reads them: see matmul_op.h and lookup_op.h for what each computes.
#pragma once

#include <cstddef>

#include "ort/abi.h"

namespace bf16kit {

// A graph defines each operator that it uses in ONNX's own, for who runs it without this library, and a definition goes
// by its name: so whatever needs a definition of its own has a name of its own.
//   MatMul                                      any of the following, for graphs made by hand
//   MatMul_LAYOUT[_bias][_ACTIVATION]           4 layouts, 5 activations
//   MatMul2_panels[_bias], MatMul3_panels[_bias]
//   MatMulBf16…, MatMul2Bf16…, MatMul3Bf16…     all of these once more, x being rounded to bf16
//   Gather_LAYOUT                               3 layouts
constexpr size_t kOperators = 2 * (1 + 4 * 2 * 5 + 4) + 3;

// Operator `index`, which lives as long as the program.
const abi::CustomOp* operator_at(size_t index);

}  // namespace bf16kit
