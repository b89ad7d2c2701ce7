// A code path: the same multiplication compiled for one instruction set.
#pragma once

#include <cstdint>

#include "gemm/attention.h"
#include "gemm/image.h"
#include "gemm/norm.h"
#include "gemm/recurrent.h"
#include "gemm/weight.h"

namespace bf16kit {

// How a product is computed. The operator's name in the graph decides it, never the processor.
enum class Arithmetic {
  kFp32,  // x as it is
  kBf16,  // x rounded to bf16, to nearest, ties to even; products and sums in fp32
};

// y = activation(x · weight + bias), for rows [0, rows) and all columns.
struct Product {
  const float* x;  // [rows, weight.k], or an image
  int64_t rows;
  Weight weight;
  const float* bias;  // [weight.n], or null
  Activation activation;
  Arithmetic arithmetic;
  float* y;  // [rows, weight.n]
  uint64_t id;  // identifies this x: a thread reuses its copy of x's rows in the next part
  const Image* image = nullptr;  // if there is one, x is an image, and its windows are the rows
};

// The part of a product that one thread computes: at most kRowBlock rows, or kTallBlock.
struct Part {
  int64_t first_row;
  int64_t rows;
  int64_t first_panel;
  int64_t panels;
};

// The most rows of a part (BLIS: MC). Their sums and a block of the weight fit into the first-level cache together.
constexpr int64_t kRowBlock = 48;
// The same where blocks of the weight are copied. To transpose them takes a quarter of the time of 48 rows, to widen the last
// panel a tenth.
constexpr int64_t kTallBlock = 192;

// Computes one part. Returns false if there is no memory for copies.
using Compute = bool (*)(const Product&, const Part&);
using Attend = bool (*)(const Attention&, const AttentionPart&);

// A path that lacks an operator has null there: kAvx512Bf16 has nothing in fp32.
struct Path {
  const char* name = nullptr;
  bool tall = true;  // whether its parts may have more than kRowBlock rows
  bool (*supported)() = nullptr;  // whether this processor can run the path
  Compute fp32 = nullptr;
  Compute bf16 = nullptr;
  Attend attend = nullptr;  // in fp32
  Attend attend_bf16 = nullptr;
  void (*normalise)(const Norm&, int64_t first_row, int64_t rows) = nullptr;  // in fp32
  void (*convolve)(const Depthwise&, int64_t first_row, int64_t rows) = nullptr;  // in fp32; rows of the output
  void (*recur)(const Step&) = nullptr;  // in fp32
  void (*recur_bf16)(const Step&) = nullptr;

  Compute compute(Arithmetic arithmetic) const { return arithmetic == Arithmetic::kFp32 ? fp32 : bf16; }
};

extern const Path kPortable;
#if defined(__x86_64__)
extern const Path kAvx2;
extern const Path kAvx512;
extern const Path kAvx512Bf16;
extern const Path kAmx;  // run in an emulator, never timed on a processor

// Whether kAmx is used; if not: the processor has no tiles, the system forbids them, or they failed the self-check (agree.h).
enum class TileUse { kUsed, kNone, kForbidden, kWrong };
TileUse tile_use();
#elif defined(__aarch64__)
extern const Path kNeon;
extern const Path kNeonBf16;
#endif

// Returns the path that the environment variable BF16KIT_KERNEL_PATH names, else the fastest one for `arithmetic` on this
// processor. If the named path has only the other arithmetic, returns the next one. Returns null if the variable names no path,
// or one that this processor cannot run.
const Path* choose_path(Arithmetic arithmetic);

}  // namespace bf16kit
