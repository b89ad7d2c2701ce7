// What the library exports: ONNX Runtime's entry point for custom operators, and the name of the path that will run.
#include <cstdio>
#include <cstring>
#include <mutex>

#include "ort/abi.h"
#include "ort/operators.h"
#include "gemm/path.h"
#include "ort/status.h"

#define BF16KIT_EXPORT extern "C" __attribute__((visibility("default")))

namespace bf16kit {
namespace {

using namespace abi;

// Whether the table is the one declared in abi.h: an error made through it reads back as it was made.
bool fits(const Api* api) {
  static const char kProbe[] = "bf16kit kernel: a probe";
  Status* status = call<Status*>(api, kCreateStatus, static_cast<int>(kFail), static_cast<const char*>(kProbe));
  if (status == nullptr) return false;
  const char* text = call<const char*>(api, kGetErrorMessage, static_cast<const Status*>(status));
  const bool same = text != nullptr && std::strcmp(text, kProbe) == 0;
  call<void>(api, kReleaseStatus, status);
  return same;
}

Status* refuse(const ApiBase* base, const char* version, const char* why) {
  // CreateStatus is the first entry of every version's table, and every release has that of version 1. One that had not
  // could not be told anything: its session then runs the definitions in the graph.
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
  if (api == nullptr || !fits(api)) return refuse(base, version, "does not have the interface of version 1.21");
  // One for all sessions: it must outlive them, and nobody says when the last one has gone.
  static std::mutex mutex;
  static Domain* shared = nullptr;
  const std::lock_guard<std::mutex> lock(mutex);
  if (shared == nullptr) {
    Domain* domain = nullptr;
    BF16KIT_RETURN_IF_ERROR(call<Status*>(api, kCreateCustomOpDomain, static_cast<const char*>("bf16kit"), &domain));
    for (size_t i = 0; i < kOperators; ++i) {
      BF16KIT_RETURN_IF_ERROR(call<Status*>(api, kCustomOpDomainAdd, domain, operator_at(i)));
    }
    shared = domain;
  }
  return call<Status*>(api, kAddCustomOpDomain, options, shared);
}

}  // namespace
}  // namespace bf16kit

BF16KIT_EXPORT bf16kit::abi::Status* RegisterCustomOps(bf16kit::abi::SessionOptions* options,
                                                       const bf16kit::abi::ApiBase* base) {
  return bf16kit::register_operators(options, base);
}

// The names of the code paths that kernels created from now on use, for products in fp32 and in bf16; null when
// BF16KIT_KERNEL_PATH names none, or one this processor cannot run.
BF16KIT_EXPORT const char* bf16kit_kernel_path() {
  const bf16kit::Path* path = bf16kit::choose_path(bf16kit::Arithmetic::kFp32);
  return path == nullptr ? nullptr : path->name;
}

BF16KIT_EXPORT const char* bf16kit_kernel_path_bf16() {
  const bf16kit::Path* path = bf16kit::choose_path(bf16kit::Arithmetic::kBf16);
  return path == nullptr ? nullptr : path->name;
}
