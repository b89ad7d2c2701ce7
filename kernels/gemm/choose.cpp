#include <cstdlib>
#include <cstring>

#include "gemm/path.h"

namespace bf16kit {
namespace {

// Returns whether another path has the same bits sooner. Intel's processors take two cycles for a dot product of bf16 pairs, so
// there products in fp32's instructions are up to 1.8 times as fast.
bool is_slow([[maybe_unused]] const Path& path) {
#if defined(__x86_64__)
  return &path == &kAvx512Bf16 && __builtin_cpu_is("intel") != 0;
#else
  return false;
#endif
}

}  // namespace

const Path* choose_path(Arithmetic arithmetic) {
  static const Path* const kPaths[] = {
#if defined(__x86_64__)
      &kAmx,
      &kAvx512Bf16,
      &kAvx512,
      &kAvx2,
#elif defined(__aarch64__)
      &kNeonBf16,
      &kNeon,
#endif
      &kPortable,
  };
  const char* wanted = std::getenv("BF16KIT_KERNEL_PATH");
  if (wanted != nullptr && *wanted == '\0') wanted = nullptr;
  for (const Path* path : kPaths) {
    const bool named = wanted != nullptr && std::strcmp(wanted, path->name) == 0 && path->supported();
    if (named) wanted = nullptr;
    const bool usable = wanted == nullptr && path->compute(arithmetic) != nullptr && path->supported();
    if (usable && (named || !is_slow(*path))) return path;
  }
  return nullptr;
}

}  // namespace bf16kit
