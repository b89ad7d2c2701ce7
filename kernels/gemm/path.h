// A code path: the same multiplication compiled for one instruction set.
#pragma once

#include <cstdint>

#include "gemm/attention.h"
#include "gemm/norm.h"
#include "gemm/weight.h"

namespace bf16kit {

enum class Activation { kNone, kRelu, kGelu, kGeluTanh, kSilu };

// How a product is computed. The graph says so, by the operator's name; the processor never decides it.
enum class Arithmetic {
  kFp32,  // x as it is
  kBf16,  // x rounded to bf16, to nearest, ties to even; products and sums in fp32
};

// y = activation(x · weight + bias), for rows [0, rows) and all columns.
struct Product {
  const float* x;  // [rows, weight.k]
  int64_t rows;
  Weight weight;
  const float* bias;  // [weight.n], or null
  Activation activation;
  Arithmetic arithmetic;
  float* y;  // [rows, weight.n]
  uint64_t id;  // of this x: threads keep what they copied of it from one part to the next
};

// The part of a product that one thread computes: at most kRowBlock rows.
struct Part {
  int64_t first_row;
  int64_t rows;
  int64_t first_panel;
  int64_t panels;
};

// Rows of a part, at most (BLIS: MC): their sums and a block of the weight fit into the first-level cache together.
constexpr int64_t kRowBlock = 48;

// False when there is no memory for its copies.
using Compute = bool (*)(const Product&, const Part&);
using Attend = bool (*)(const Attention&, const AttentionPart&);

struct Path {
  const char* name;
  bool (*supported)();  // by the processor this runs on
  Compute fp32;         // null where the path is for the other arithmetic alone
  Compute bf16;
  Attend attend;  // in fp32; null and false as those above
  Attend attend_bf16;
  void (*normalise)(const Norm&, int64_t first_row, int64_t rows);  // null as fp32 is

  Compute compute(Arithmetic arithmetic) const { return arithmetic == Arithmetic::kFp32 ? fp32 : bf16; }
};

extern const Path kPortable;
#if defined(__x86_64__)
extern const Path kAvx2;
extern const Path kAvx512;
extern const Path kAvx512Bf16;
extern const Path kAmx;  // only where it is named: never run on a processor that has it
#endif

// The fastest path for `arithmetic` that this processor supports, or the one that the environment variable
// BF16KIT_KERNEL_PATH names; where that one is for the other arithmetic alone, the next one. Null when the variable names
// none, or one this processor cannot run.
const Path* choose_path(Arithmetic arithmetic);

}  // namespace bf16kit
