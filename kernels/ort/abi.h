// The part of ONNX Runtime's C ABI that a custom operator needs, declared here because its wheels ship no headers.
//
// ONNX Runtime promises that the ABI only grows: every later release keeps the entries of version 21's table, in their order.
// `Index` are positions in that table. When the library is registered, it checks these declarations: by the runtime's version
// (register.cpp), and by calls with known results (fits.cpp).
// `make test-kernel-versions` runs the operators' tests in every minor release from 1.21 on.
#pragma once

#include <cstddef>
#include <cstdint>

namespace bf16kit::abi {

constexpr uint32_t kVersion = 21;  // ONNX Runtime 1.21; later releases return this table on request

// Opaque types of ONNX Runtime.
struct Status;
struct Api;  // an array of function pointers
struct KernelInfo;
struct KernelContext;
struct Value;
struct TensorInfo;
struct MemoryInfo;
struct SessionOptions;
struct Domain;

struct ApiBase {
  const Api*(*GetApi)(uint32_t version);
  const char*(*GetVersionString)();
};

enum Code : int { kFail = 1, kInvalidArgument = 2, kInvalidGraph = 10 };
enum ElementType : int { kFloat = 1, kInt64 = 7, kBfloat16 = 16 };
enum Characteristic : int { kRequired = 0, kOptional = 1 };

// Positions in the table.
enum Index : size_t {
  kCreateStatus = 0,
  kGetErrorCode = 1,
  kGetErrorMessage = 2,
  kCreateCustomOpDomain = 26,
  kCustomOpDomainAdd = 27,
  kAddCustomOpDomain = 28,
  kCreateTensorWithDataAsOrtValue = 49,
  kGetTensorMutableData = 51,
  kGetTensorElementType = 60,
  kGetDimensionsCount = 61,
  kGetDimensions = 62,
  kGetTensorTypeAndShape = 65,
  kCreateCpuMemoryInfo = 69,
  kKernelInfoGetAttributeFloat = 85,
  kKernelInfoGetAttributeInt64 = 86,
  kKernelInfoGetAttributeString = 87,
  kKernelContextGetInputCount = 88,
  kKernelContextGetInput = 90,
  kKernelContextGetOutput = 91,
  kReleaseStatus = 93,
  kReleaseMemoryInfo = 94,
  kReleaseValue = 96,
  kReleaseTensorTypeAndShapeInfo = 99,
  kReleaseCustomOpDomain = 101,
  kKernelInfoGetAttributeArrayInt64 = 163,
  kHasSessionConfigEntry = 237,
  kGetSessionConfigEntry = 238,
  kKernelInfoGetConstantInputTensor = 249,
  kKernelContextParallelFor = 274,
};

// An operator in the format of ONNX Runtime: 26 slots of eight bytes. C code calls these functions, and no exception may pass
// through C. So noexcept is part of their types: a function without it does not compile.
struct CustomOp {
  uint32_t version;
  void*(*CreateKernel)(const CustomOp*, const Api*, const KernelInfo*) noexcept;
  const char*(*GetName)(const CustomOp*) noexcept;
  const char*(*GetExecutionProviderType)(const CustomOp*) noexcept;
  int (*GetInputType)(const CustomOp*, size_t) noexcept;
  size_t (*GetInputTypeCount)(const CustomOp*) noexcept;
  int (*GetOutputType)(const CustomOp*, size_t) noexcept;
  size_t (*GetOutputTypeCount)(const CustomOp*) noexcept;
  void (*KernelCompute)(void*, KernelContext*) noexcept;
  void (*KernelDestroy)(void*) noexcept;
  int (*GetInputCharacteristic)(const CustomOp*, size_t) noexcept;
  int (*GetOutputCharacteristic)(const CustomOp*, size_t) noexcept;
  int (*GetInputMemoryType)(const CustomOp*, size_t) noexcept;
  int (*GetVariadicInputMinArity)(const CustomOp*) noexcept;
  int (*GetVariadicInputHomogeneity)(const CustomOp*) noexcept;
  int (*GetVariadicOutputMinArity)(const CustomOp*) noexcept;
  int (*GetVariadicOutputHomogeneity)(const CustomOp*) noexcept;
  Status*(*CreateKernelV2)(const CustomOp*, const Api*, const KernelInfo*, void** kernel) noexcept;
  Status*(*KernelComputeV2)(void*, KernelContext*) noexcept;
  Status*(*InferOutputShape)(const CustomOp*, void*) noexcept;
  int (*GetStartVersion)(const CustomOp*) noexcept;
  int (*GetEndVersion)(const CustomOp*) noexcept;
  size_t (*GetMayInplace)(int** inputs, int** outputs) noexcept;
  void (*ReleaseMayInplace)(int* inputs, int* outputs) noexcept;
  size_t (*GetAliasMap)(int** inputs, int** outputs) noexcept;
  void (*ReleaseAliasMap)(int* inputs, int* outputs) noexcept;
};
static_assert(sizeof(CustomOp) == 208, "the layout of ONNX Runtime's OrtCustomOp, version 21");

// Calls entry `index` of the table, which has the signature `R(Arguments...)`.
template <typename R, typename... Arguments>
R call(const Api* api, Index index, Arguments... arguments) {
  using Function = R (*)(Arguments...);
  auto table = reinterpret_cast<void* const*>(api);
  return reinterpret_cast<Function>(table[index])(arguments...);
}

}  // namespace bf16kit::abi
