// AMX: fp32 products with bf16 tiles (amx.inl). Used only if BF16KIT_KERNEL_PATH names it: it has never run on a processor with
// AMX, only in a model of the published instructions (tests/amx_test.cpp).
#if defined(__x86_64__)
#include "gemm/path.h"
#include "gemm/rounding_mode.h"
#include "isa/amx_detect.h"

#include <cstdlib>
#include <cstring>
#include <utility>

#include <immintrin.h>
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw")
#endif

namespace bf16kit {
namespace amx {
namespace {


#include "avx512.inl"

#include "activation.inl"
#include "operands.inl"

struct TileConfig;

// The tile instructions. Tile numbers are part of their encoding, so they are template parameters. The compiler does not know
// tiles: `volatile` and "memory" keep the instructions in order.
struct Tile {
  static inline TileConfig current();
  static inline void configure(const TileConfig& config);

  template <int kTile>
  static void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
  }
  template <int kTile>
  static void load(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(kTile) : "memory");
  }
  template <int kTile>
  static void store(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(kTile) : "memory");
  }
  template <int kSum, int kA, int kB>
  static void dot() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kA), "i"(kB));
  }
};

#include "amx.inl"

TileConfig Tile::current() {
  TileConfig config;
  asm volatile("sttilecfg %0" : "=m"(config));
  return config;
}

// A configuration with palette 0 clears and releases the tiles.
void Tile::configure(const TileConfig& config) { asm volatile("ldtilecfg %0" ::"m"(config) : "memory"); }

}  // namespace
}  // namespace amx

// The code below must run on any processor.
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

// Attention and normalisation use the AVX-512 path, which each processor with AMX supports.
const Path kAmx = {
    .name = "amx",
    .supported = [] { return amx::tiles_offered(amx::this_processor()); },
    .fp32 = amx::compute_in_tiles,
    .attend = [](const Attention& a, const AttentionPart& part) { return kAvx512.attend(a, part); },
    .normalise = [](const Norm& norm, int64_t first, int64_t rows) { kAvx512.normalise(norm, first, rows); },
    .recur = [](const Step& step) { kAvx512.recur(step); },
};

}  // namespace bf16kit
#endif
