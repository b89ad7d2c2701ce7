// The operators bf16kit::LSTM, GRU, LSTM2, GRU2, and with Bf16 at the end of each name: LSTM and GRU as in ONNX, with default
// activations and weights in bf16. A GRU resets after its product (linear_before_reset = 1). …2 has the weights of its two
// directions apart. …Bf16 rounds x and h to bf16 before they are multiplied.
//
//   inputs      X [steps, batch, inputs]; each W [directions, gates * hidden, inputs], then each R [directions, gates * hidden,
//               hidden], bf16 constants, for one direction each in …2; optional: B [directions, 2 * gates * hidden] with gates
//               in ONNX's order, initial h and, of an LSTM, c [directions, batch, hidden]
//   outputs     Y [steps, directions, batch, hidden]; the last h and, of an LSTM, c; each may be absent
//   attributes  hidden, inputs  int
//               gates      the order of the gates in W and R: ONNX's "iofc" or "ifco", "zrh" or "rzh"
//               direction  "forward", "reverse", "bidirectional"
#pragma once

#include <cstddef>

#include "ort/abi.h"

namespace bf16kit {

constexpr size_t kRecurrentOperators = 8;

// Returns operator `index`, which lives as long as the program.
const abi::CustomOp* recurrent_operator_at(size_t index);

}  // namespace bf16kit
