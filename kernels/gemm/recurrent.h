// LSTM and GRU over a sequence, as ONNX defines them with their default activations; a GRU resets after its product:
//     LSTM  i, o, f = sigmoid(g);  c' = tanh(g);  c = f * c + i * c';  h = o * tanh(c)
//     GRU   z, r = sigmoid(g);  h' = tanh(x·W + Wb + r * (h·R + Rb));  h = (1 - z) * h' + z * h
// where each gate has its own g = (x·W + Wb + Rb) + h·R. All of it is in fp32, except the weights.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gemm/parts.h"

namespace bf16kit {

struct Path;
enum class Arithmetic;

enum class Cell { kLstm, kGru };

constexpr int kUnits = 16;  // hidden units that are computed together
constexpr int kMostGates = 4;
inline int gates(Cell cell) { return cell == Cell::kLstm ? 4 : 3; }

// One step of some rows of a batch in one direction, for the hidden units [first_unit, last_unit).
struct Step {
  Cell cell;
  const int* blocks;        // the gate's rows are [blocks[gate] * hidden, …) of r; gates in ONNX's order: i, o, f, c or z, r, h
  int64_t hidden, rows;
  int64_t first_unit, last_unit;
  const uint16_t* r;        // [gates * hidden, hidden]
  const float* inputs;      // x·W + biases, [rows, gates * hidden] in the order of r; kUnits more numbers may be read
  const float* reset_bias;  // GRU: the h' gate's Rb, [hidden]; the same
  const float* h;           // [rows, hidden], of the step before
  float* c;                 // LSTM: [rows, hidden], replaced
  float* y;                 // [rows, hidden], the new h
  void* scratch;            // scratch_floats(hidden) * rows floats, for h in the format of the path
};

// One row of a step's scratch, in floats: h padded with zeros to whole blocks.
inline int64_t scratch_floats(int64_t hidden) { return divide_up(hidden, 32) * 32; }

// A whole recurrence. Its one or two directions each have their own weights.
struct Recurrence {
  Cell cell;
  Arithmetic arithmetic;  // in bf16, x and h are rounded before they are multiplied
  int64_t steps, batch, inputs, hidden, directions;
  bool reverse;            // whether the only direction begins at the last step; of two, the second one does
  int blocks[kMostGates];  // as in Step
  const uint16_t *w[2], *r[2];  // [gates * hidden, inputs] and [gates * hidden, hidden] of each direction
  const float* x;          // [steps, batch, inputs]
  const float* bias;       // [directions, 2 * gates * hidden], Wb and Rb with gates in ONNX's order; may be null
  const float *h, *c;      // [directions, batch, hidden]; null for zeros
  float* y;                // [steps, directions, batch, hidden]; may be null
  float *last_h, *last_c;  // [directions, batch, hidden]; may be null
};

// Computes y, last_h and last_c with `run(threads, …)`. Threads divide batch rows and directions; if these are too few for
// `cores`, also the units of long steps. Returns false if there was no memory.
bool recur(const Recurrence& recurrence, const Path& path, RunParts run, void* threads, unsigned cores);

}  // namespace bf16kit
