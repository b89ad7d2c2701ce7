// The exports of the library: ONNX Runtime's entry point for custom operators, and the names of the code paths.
#include <cstdio>

#include "gemm/path.h"
#include "ort/abi.h"
#include "ort/domain.h"
#include "ort/fits.h"
#include "ort/status.h"

#define BF16KIT_EXPORT extern "C" __attribute__((visibility("default")))

namespace bf16kit {
namespace {

using namespace abi;

Status* refuse(const ApiBase* base, const char* version, const char* why) {
  // CreateStatus is the first entry of every version's table, and every release has the table of version 1. Without it no error
  // can be returned; the session then runs the definitions in the graph.
  const Api* oldest = base->GetApi(1);
  if (oldest == nullptr) return nullptr;
  return error(oldest, kFail, "ONNX Runtime %s %s", version == nullptr ? "of unknown version" : version, why);
}

Status* register_operators(SessionOptions* options, const ApiBase* base) {
  int major = 0, minor = 0;
  const char* version = base->GetVersionString();
  if (version == nullptr || std::sscanf(version, "%d.%d", &major, &minor) != 2) {
    return refuse(base, version, "does not tell its version");
  }
  if (major != 1 || minor < static_cast<int>(kVersion)) {
    return refuse(base, version, "is not a release this kernel knows: it needs 1.21 or a later 1.x");
  }
  const Api* api = base->GetApi(kVersion);
  if (const char* why = misfit(api)) {
    char text[96];
    std::snprintf(text, sizeof text, "does not have the interface of version 1.21: %s", why);
    return refuse(base, version, text);
  }
  return add_domain(api, options);
}

}  // namespace
}  // namespace bf16kit

BF16KIT_EXPORT bf16kit::abi::Status* RegisterCustomOps(bf16kit::abi::SessionOptions* options,
                                                       const bf16kit::abi::ApiBase* base) noexcept {
  return bf16kit::register_operators(options, base);
}

// Return the names of the code paths that new kernels will use, for products in fp32 and in bf16; null if BF16KIT_KERNEL_PATH
// names no path, or one that this processor cannot run.
BF16KIT_EXPORT const char* bf16kit_kernel_path() noexcept {
  const bf16kit::Path* path = bf16kit::choose_path(bf16kit::Arithmetic::kFp32);
  return path == nullptr ? nullptr : path->name;
}

BF16KIT_EXPORT const char* bf16kit_kernel_path_bf16() noexcept {
  const bf16kit::Path* path = bf16kit::choose_path(bf16kit::Arithmetic::kBf16);
  return path == nullptr ? nullptr : path->name;
}

// Returns why the tiles of this processor are not used; null if they are used, or if there are none.
BF16KIT_EXPORT const char* bf16kit_kernel_tiles_off() noexcept {
#if defined(__x86_64__)
  switch (bf16kit::tile_use()) {
    case bf16kit::TileUse::kForbidden: return "the operating system does not permit them";
    case bf16kit::TileUse::kWrong: return "they failed the self-check: their results differ from those of dot products";
    default: break;
  }
#endif
  return nullptr;
}
