#if defined(__x86_64__)
#include "isa/amx_detect.h"

#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace bf16kit {
namespace amx {
namespace {

constexpr bool has(uint64_t bits, int bit) { return (bits >> bit & 1) != 0; }

// CPUID leaf 1 tells whether XGETBV may be used, leaf 7 the instructions, leaf 0x1d the size of the tiles of palette 1.
bool processor_has_tiles(const Machine& machine) {
  constexpr int kOsXsave = 27, kAvx512f = 16, kAvx512bw = 30, kAvx512Bf16 = 5, kAmxBf16 = 22, kAmxTile = 24;
  if (machine.cpuid(0, 0).a < 0x1d || !has(machine.cpuid(1, 0).c, kOsXsave)) return false;
  const Registers features = machine.cpuid(7, 0);
  if (!has(features.b, kAvx512f) || !has(features.b, kAvx512bw) || !has(machine.cpuid(7, 1).a, kAvx512Bf16)) return false;
  if (!has(features.d, kAmxBf16) || !has(features.d, kAmxTile)) return false;
  const Registers palette = machine.cpuid(0x1d, 1);
  const uint32_t row_bytes = palette.b & 0xffff, tiles = palette.b >> 16, rows = palette.c & 0xffff;
  return row_bytes >= 64 && tiles >= 8 && rows >= 16;
}

bool system_saves_tiles(const Machine& machine) {
  constexpr uint64_t kSse = 1u << 1, kAvx = 1u << 2, kMasks = 1u << 5, kUpper = 1u << 6, kMore = 1u << 7;
  constexpr uint64_t kTileConfig = 1u << 17, kTileData = 1u << 18;
  constexpr uint64_t kAll = kSse | kAvx | kMasks | kUpper | kMore | kTileConfig | kTileData;
  return (machine.enabled() & kAll) == kAll;
}

Registers cpuid(uint32_t leaf, uint32_t subleaf) {
  Registers found = {};
  __cpuid_count(leaf, subleaf, found.a, found.b, found.c, found.d);
  return found;
}

uint64_t enabled() {
  uint32_t low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return static_cast<uint64_t>(high) << 32 | low;
}

// Linux lets a process use tiles only on request. The permission then holds for all of its threads and is inherited by fork. It
// is refused if a thread has an alternate signal stack that is too small for a frame with tiles; smaller ones are refused later.
bool permitted() {
#if defined(__linux__)
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#else
  return false;
#endif
}

}  // namespace

bool tiles_there(const Machine& machine) { return processor_has_tiles(machine) && system_saves_tiles(machine); }

const Machine& this_processor() {
  static const Machine machine = {cpuid, enabled, permitted};
  return machine;
}

}  // namespace amx
}  // namespace bf16kit
#endif
