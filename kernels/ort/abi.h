// The part of ONNX Runtime's C ABI that a custom operator needs, declared here because its wheels ship no headers.
//
// ONNX Runtime promises that the ABI only ever grows: the table of version 21 keeps its entries, in their order, in
// every later release. `indices` are positions in that table. What is declared here is checked when the library is
// registered (register.cpp): the runtime's version, and a call whose answer is known.
#pragma once

#include <cstddef>
#include <cstdint>

namespace bf16kit::abi {

constexpr uint32_t kVersion = 21;  // ONNX Runtime 1.21; later ones give this table when asked for it

// Opaque to us.
struct Status;
struct Api;  // an array of function pointers
struct KernelInfo;
struct KernelContext;
struct Value;
struct TensorInfo;
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
  kGetErrorMessage = 2,
  kCreateCustomOpDomain = 26,
  kCustomOpDomainAdd = 27,
  kAddCustomOpDomain = 28,
  kGetTensorMutableData = 51,
  kGetDimensionsCount = 61,
  kGetDimensions = 62,
  kGetTensorTypeAndShape = 65,
  kKernelInfoGetAttributeFloat = 85,
  kKernelInfoGetAttributeInt64 = 86,
  kKernelInfoGetAttributeString = 87,
  kKernelContextGetInputCount = 88,
  kKernelContextGetInput = 90,
  kKernelContextGetOutput = 91,
  kReleaseStatus = 93,
  kReleaseTensorTypeAndShapeInfo = 99,
  kKernelInfoGetConstantInputTensor = 249,
  kKernelContextParallelFor = 274,
};

// An operator, as ONNX Runtime reads it: 26 slots of eight bytes.
struct CustomOp {
  uint32_t version;
  void*(*CreateKernel)(const CustomOp*, const Api*, const KernelInfo*);
  const char*(*GetName)(const CustomOp*);
  const char*(*GetExecutionProviderType)(const CustomOp*);
  int (*GetInputType)(const CustomOp*, size_t);
  size_t (*GetInputTypeCount)(const CustomOp*);
  int (*GetOutputType)(const CustomOp*, size_t);
  size_t (*GetOutputTypeCount)(const CustomOp*);
  void (*KernelCompute)(void*, KernelContext*);
  void (*KernelDestroy)(void*);
  int (*GetInputCharacteristic)(const CustomOp*, size_t);
  int (*GetOutputCharacteristic)(const CustomOp*, size_t);
  int (*GetInputMemoryType)(const CustomOp*, size_t);
  int (*GetVariadicInputMinArity)(const CustomOp*);
  int (*GetVariadicInputHomogeneity)(const CustomOp*);
  int (*GetVariadicOutputMinArity)(const CustomOp*);
  int (*GetVariadicOutputHomogeneity)(const CustomOp*);
  Status*(*CreateKernelV2)(const CustomOp*, const Api*, const KernelInfo*, void** kernel);
  Status*(*KernelComputeV2)(void*, KernelContext*);
  Status*(*InferOutputShape)(const CustomOp*, void*);
  int (*GetStartVersion)(const CustomOp*);
  int (*GetEndVersion)(const CustomOp*);
  size_t (*GetMayInplace)(int** inputs, int** outputs);
  void (*ReleaseMayInplace)(int* inputs, int* outputs);
  size_t (*GetAliasMap)(int** inputs, int** outputs);
  void (*ReleaseAliasMap)(int* inputs, int* outputs);
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
