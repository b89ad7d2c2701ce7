// AMX: products in fp32 by tiles of bf16, as amx.inl says. Only where BF16KIT_KERNEL_PATH names it: it has never run on a
// processor that has it, only in a model of the published instructions (tests/amx_test.cpp).
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

// The instructions. Their tiles are part of the encoding, hence numbers known when this is compiled. The compiler knows no
// tiles: `volatile` and "memory" keep the order.
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

// One that says palette 0 empties and releases the tiles.
void Tile::configure(const TileConfig& config) { asm volatile("ldtilecfg %0" ::"m"(config) : "memory"); }

}  // namespace
}  // namespace amx

// What follows runs on any processor.
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

// A processor with tiles has AVX-512, by which attention goes.
const Path kAmx = {"amx", [] { return amx::tiles_offered(amx::this_processor()); }, amx::compute_in_tiles, nullptr,
                   [](const Attention& a, const AttentionPart& part) { return kAvx512.attend(a, part); }, nullptr,
                   [](const Norm& norm, int64_t first, int64_t rows) { kAvx512.normalise(norm, first, rows); }};

}  // namespace bf16kit
#endif
