// AMX: bf16 products with tiles (amx.inl); attention is AVX512_BF16's. Run in an emulator (tests/emulated) and in a model of the
// published instructions (tests/amx_test.cpp), never timed on a processor.
#if defined(__x86_64__)
#include "gemm/agree.h"
#include "gemm/path.h"
#include "gemm/rounding_mode.h"
#include "isa/amx_detect.h"

#include <cstdlib>
#include <cstring>
#include <utility>

#include <immintrin.h>
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512bf16"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512bf16")
#endif

namespace bf16kit {
namespace amx {
namespace {

#include "avx512.inl"

#include "activation.inl"

namespace dots {
#include "tile.inl"
#include "dots.inl"
}

struct TileConfig;

// The tile instructions. Tile numbers are part of their encoding, so they are template parameters. The compiler does not know
// tiles: `volatile` and "memory" keep the instructions in order.
struct Tile {
  static inline TileConfig current();
  static inline void configure(const TileConfig& config);
  static void release() { asm volatile("tilerelease" ::: "memory"); }

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

void Tile::configure(const TileConfig& config) { asm volatile("ldtilecfg %0" ::"m"(config) : "memory"); }

}  // namespace
}  // namespace amx

// The code below must run on any processor.
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

const Path kAmx = [] {
  Path path = kAvx512Bf16;  // initialised before: it is a constant expression
  path.name = "amx";
  path.tall = false;  // its tiles are configured for a part
  path.supported = [] { return tile_use() == TileUse::kUsed; };
  path.bf16 = amx::compute_in_tiles;
  path.recur_bf16 = kAvx512.recur_bf16;  // the same bits sooner: gemm/choose.cpp
  return path;
}();

// Asks the system and runs the self-check once. Both hold for all threads of the process, and for those it forks.
TileUse tile_use() {
  static const TileUse found = [] {
    if (!amx::tiles_there(amx::this_processor())) return TileUse::kNone;
    if (!amx::this_processor().permitted()) return TileUse::kForbidden;
    bool agreed = agree(kAmx, kAvx512Bf16, Operands::kExact);
    for (const Operands operands : kAllOperands) agreed = agreed && agree(kAmx, kAmx, operands);
    return agreed ? TileUse::kUsed : TileUse::kWrong;
  }();
  return found;
}

}  // namespace bf16kit
#endif
