// A code path: the same multiplication compiled for one instruction set.
#pragma once

#include <cstdint>

#include "gemm/weight.h"

namespace bf16kit {

enum class Activation { kNone, kRelu, kGelu, kGeluTanh, kSilu };

// y = activation(x · weight + bias), for rows [0, rows) and all columns.
struct Product {
  const float* x;  // [rows, weight.k]
  int64_t rows;
  Weight weight;
  const float* bias;  // [weight.n], or null
  Activation activation;
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

// Rows of a part, at most: their sums and a block of the weight fit into the first-level cache together.
constexpr int64_t kRowBlock = 48;

struct Path {
  const char* name;
  bool (*supported)();  // by the processor this runs on
  bool (*compute)(const Product&, const Part&);  // false when there is no memory for its copies
};

extern const Path kPortable;
#if defined(__x86_64__)
extern const Path kAvx2;
extern const Path kAvx512;
#endif

// The fastest path that this processor supports, or the one that the environment variable BF16KIT_KERNEL_PATH names.
// Null when that names none, or one this processor cannot run.
const Path* choose_path();

}  // namespace bf16kit
