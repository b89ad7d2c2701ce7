#include "ort/fits.h"

#include <cstring>

namespace bf16kit {

using namespace abi;

namespace {

constexpr Index kAll[] = {
    kCreateStatus,
    kGetErrorCode,
    kGetErrorMessage,
    kCreateCustomOpDomain,
    kCustomOpDomainAdd,
    kAddCustomOpDomain,
    kCreateTensorWithDataAsOrtValue,
    kGetTensorMutableData,
    kGetTensorElementType,
    kGetDimensionsCount,
    kGetDimensions,
    kGetTensorTypeAndShape,
    kCreateCpuMemoryInfo,
    kKernelInfoGetAttributeFloat,
    kKernelInfoGetAttributeInt64,
    kKernelInfoGetAttributeString,
    kKernelInfoGetAttributeArrayInt64,
    kKernelContextGetInputCount,
    kKernelContextGetInput,
    kKernelContextGetOutput,
    kReleaseStatus,
    kReleaseMemoryInfo,
    kReleaseValue,
    kReleaseTensorTypeAndShapeInfo,
    kReleaseCustomOpDomain,
    kHasSessionConfigEntry,
    kGetSessionConfigEntry,
    kKernelInfoGetConstantInputTensor,
    kKernelContextParallelFor,
};

bool all_there(const Api* api) {
  const auto table = reinterpret_cast<void* const*>(api);
  for (const Index index : kAll) {
    if (table[index] == nullptr) return false;
  }
  return true;
}

// Checks that an error reads back as it was created.
bool errors_fit(const Api* api) {
  static const char kProbe[] = "bf16kit kernel: a probe";
  Status* status = call<Status*>(api, kCreateStatus, static_cast<int>(kInvalidGraph), static_cast<const char*>(kProbe));
  if (status == nullptr) return false;
  const char* text = call<const char*>(api, kGetErrorMessage, static_cast<const Status*>(status));
  const bool same = text != nullptr && std::strcmp(text, kProbe) == 0 &&
                    call<int>(api, kGetErrorCode, static_cast<const Status*>(status)) == kInvalidGraph;
  call<void>(api, kReleaseStatus, status);
  return same;
}

// Returns whether a call succeeded. Releases its error, which errors_fit() has shown to work.
bool done(const Api* api, Status* status) {
  if (status != nullptr) call<void>(api, kReleaseStatus, status);
  return status == nullptr;
}

// Checks that a tensor over our memory returns its address, type and shape.
bool tells(const Api* api, Value* value, const void* data, const int64_t (&dims)[2]) {
  void* found = nullptr;
  TensorInfo* info = nullptr;
  if (!done(api, call<Status*>(api, kGetTensorMutableData, value, &found)) || found != data) return false;
  if (!done(api, call<Status*>(api, kGetTensorTypeAndShape, static_cast<const Value*>(value), &info))) return false;
  if (info == nullptr) return false;
  const auto* about = static_cast<const TensorInfo*>(info);
  int type = 0;
  size_t count = 0;
  int64_t shape[2] = {};
  const bool same = done(api, call<Status*>(api, kGetTensorElementType, about, &type)) && type == kBfloat16 &&
                    done(api, call<Status*>(api, kGetDimensionsCount, about, &count)) && count == 2 &&
                    done(api, call<Status*>(api, kGetDimensions, about, static_cast<int64_t*>(shape), count)) &&
                    std::memcmp(shape, dims, sizeof dims) == 0;
  call<void>(api, kReleaseTensorTypeAndShapeInfo, info);
  return same;
}

bool tensors_fit(const Api* api) {
  static uint16_t data[6] = {};
  static constexpr int64_t kDims[2] = {2, 3};
  constexpr int kArena = 1, kDefault = 0;
  MemoryInfo* memory = nullptr;
  Value* value = nullptr;
  if (!done(api, call<Status*>(api, kCreateCpuMemoryInfo, kArena, kDefault, &memory)) || memory == nullptr) return false;
  bool same = done(api, call<Status*>(api, kCreateTensorWithDataAsOrtValue, static_cast<const MemoryInfo*>(memory),
                                      static_cast<void*>(data), sizeof data, static_cast<const int64_t*>(kDims),
                                      size_t{2}, static_cast<int>(kBfloat16), &value)) && value != nullptr;
  same = same && tells(api, value, data, kDims);
  if (value != nullptr) call<void>(api, kReleaseValue, value);
  call<void>(api, kReleaseMemoryInfo, memory);
  return same;
}

// Checks that a domain can be created and released.
bool domains_fit(const Api* api) {
  Domain* domain = nullptr;
  if (!done(api, call<Status*>(api, kCreateCustomOpDomain, static_cast<const char*>("bf16kit.probe"), &domain))) {
    return false;
  }
  if (domain == nullptr) return false;
  call<void>(api, kReleaseCustomOpDomain, domain);
  return true;
}

}  // namespace

const char* misfit(const Api* api) {
  if (api == nullptr) return "there is none";
  if (!all_there(api)) return "entries are missing";
  if (!errors_fit(api)) return "an error does not read back as it was made";
  if (!tensors_fit(api)) return "a tensor does not read back as it was made";
  return domains_fit(api) ? nullptr : "no domain can be made";
}

}  // namespace bf16kit
