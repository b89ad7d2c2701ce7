#include <cstdlib>
#include <cstring>

#include "gemm/path.h"

namespace bf16kit {

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
    if (wanted != nullptr && std::strcmp(wanted, path->name) == 0 && path->supported()) wanted = nullptr;
    if (wanted == nullptr && path->compute(arithmetic) != nullptr && path->supported()) return path;
  }
  return nullptr;
}

}  // namespace bf16kit
