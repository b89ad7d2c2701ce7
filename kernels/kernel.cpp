#include "kernel.h"

#include <cstdint>
#include <cstring>
#include <new>

#include "matmul.h"
#include "status.h"

namespace bf16kit {
namespace {

using namespace abi;

constexpr size_t kMostDims = 16;
// Far beyond any weight, and no product of two of these overflows.
constexpr int64_t kLargest = INT32_MAX;

struct Kernel {
  const Api* api;
  const Path* path;
  Weight weight;
  Activation activation;
};

struct Shape {
  int64_t dims[kMostDims];
  size_t count;
  int type;

  int64_t elements(size_t first, size_t last) const {
    int64_t product = 1;
    for (size_t i = first; i < last; ++i) product *= dims[i];
    return product;
  }
};

Status* read_shape(const Api* api, const Value* value, Shape& shape) {
  TensorInfo* info = nullptr;
  BF16KIT_RETURN_IF_ERROR(call<Status*>(api, kGetTensorTypeAndShape, value, &info));
  Status* status = call<Status*>(api, kGetDimensionsCount, static_cast<const TensorInfo*>(info), &shape.count);
  if (status == nullptr && shape.count > kMostDims) {
    status = error(api, kInvalidArgument, "a tensor has %zu dimensions; at most %zu are supported", shape.count,
                   kMostDims);
  }
  if (status == nullptr) {
    status = call<Status*>(api, kGetDimensions, static_cast<const TensorInfo*>(info), shape.dims, shape.count);
  }
  if (status == nullptr) {
    status = call<Status*>(api, kGetTensorElementType, static_cast<const TensorInfo*>(info), &shape.type);
  }
  call<void>(api, kReleaseTensorTypeAndShapeInfo, info);
  return status;
}

Status* read_data(const Api* api, const Value* value, void** data) {
  return call<Status*>(api, kGetTensorMutableData, const_cast<Value*>(value), data);
}

// --- attributes -------------------------------------------------------------------------------------------------------

// What ONNX Runtime says of an attribute that is missing or of another type does not name it.
Status* wrong_attribute(const Api* api, Status* status, const char* name, const char* type) {
  call<void>(api, kReleaseStatus, status);
  return error(api, kInvalidGraph, "attribute %s is missing or of another type; it must be %s", name, type);
}

Status* read_size(const Api* api, const KernelInfo* info, const char* name, int64_t& size) {
  if (Status* status = call<Status*>(api, kKernelInfoGetAttributeInt64, info, name, &size)) {
    return wrong_attribute(api, status, name, "an integer");
  }
  if (size < 1 || size > kLargest) {
    return error(api, kInvalidGraph, "attribute %s is %lld; it must be between 1 and %lld", name,
                 static_cast<long long>(size), static_cast<long long>(kLargest));
  }
  return nullptr;
}

template <typename T>
struct Choice {
  const char* name;
  T value;
};

constexpr Choice<Layout> kLayouts[] = {{"panels", Layout::kPanels}, {"transposed", Layout::kTransposed}};
constexpr Choice<Activation> kActivations[] = {
    {kActivationNames[0], Activation::kNone},     {kActivationNames[1], Activation::kRelu},
    {kActivationNames[2], Activation::kGelu},     {kActivationNames[3], Activation::kGeluTanh},
    {kActivationNames[4], Activation::kSilu},
};

template <typename T, size_t kCount>
Status* read_choice(const Api* api, const KernelInfo* info, const char* name, const Choice<T> (&choices)[kCount],
                    T& value) {
  char text[32] = {};
  size_t size = 0;
  if (Status* status = call<Status*>(api, kKernelInfoGetAttributeString, info, name, static_cast<char*>(nullptr), &size)) {
    return wrong_attribute(api, status, name, "a string");
  }
  if (size <= sizeof text) {
    BF16KIT_RETURN_IF_ERROR(
        call<Status*>(api, kKernelInfoGetAttributeString, info, name, static_cast<char*>(text), &size));
    for (const Choice<T>& choice : choices) {
      if (std::strcmp(choice.name, text) == 0) {
        value = choice.value;
        return nullptr;
      }
    }
  }
  char known[128] = {};
  for (const Choice<T>& choice : choices) {
    if (known[0] != '\0') std::strncat(known, ", ", sizeof known - std::strlen(known) - 1);
    std::strncat(known, choice.name, sizeof known - std::strlen(known) - 1);
  }
  return error(api, kInvalidGraph, "attribute %s is \"%s\"; it must be one of: %s", name,
               text[0] != '\0' ? text : "(a longer text)", known);
}

// --- the constants ----------------------------------------------------------------------------------------------------

Status* read_weight(const Api* api, const KernelInfo* info, Weight& weight) {
  int is_constant = 0;
  const Value* value = nullptr;
  BF16KIT_RETURN_IF_ERROR(call<Status*>(api, kKernelInfoGetConstantInputTensor, info, kWeight, &is_constant, &value));
  if (is_constant == 0 || value == nullptr) {
    return error(api, kInvalidGraph, "the weight is computed; it must be a constant of the graph");
  }
  Shape shape;
  BF16KIT_RETURN_IF_ERROR(read_shape(api, value, shape));
  const int64_t elements = shape.elements(0, shape.count);
  if (elements != weight.k * weight.n) {
    return error(api, kInvalidGraph, "the weight has %lld elements; k = %lld and n = %lld need %lld",
                 static_cast<long long>(elements), static_cast<long long>(weight.k), static_cast<long long>(weight.n),
                 static_cast<long long>(weight.k * weight.n));
  }
  void* data = nullptr;
  BF16KIT_RETURN_IF_ERROR(read_data(api, value, &data));
  if (reinterpret_cast<uintptr_t>(data) % alignof(uint16_t) != 0) {
    return error(api, kInvalidGraph, "the weight lies at address %p, which is odd; align it to 64 bytes in its file",
                 data);
  }
  weight.data = static_cast<const uint16_t*>(data);
  return nullptr;
}

Status* check_bias(const Api* api, const Value* bias, int64_t n) {
  Shape shape;
  BF16KIT_RETURN_IF_ERROR(read_shape(api, bias, shape));
  if (shape.count == 1 && shape.dims[0] == n) return nullptr;
  return error(api, kInvalidArgument, "the bias has %zu dimensions and %lld elements; it must be [n] with n = %lld",
               shape.count, static_cast<long long>(shape.elements(0, shape.count)), static_cast<long long>(n));
}

// A bias that is known is refused at load; one that is computed, when it comes.
Status* check_constant_bias(const Api* api, const KernelInfo* info, int64_t n) {
  int is_constant = 0;
  const Value* bias = nullptr;
  BF16KIT_RETURN_IF_ERROR(call<Status*>(api, kKernelInfoGetConstantInputTensor, info, kBias, &is_constant, &bias));
  return is_constant != 0 && bias != nullptr ? check_bias(api, bias, n) : nullptr;
}

}  // namespace

Status* create_kernel(const CustomOp*, const Api* api, const KernelInfo* info, void** created) {
  Kernel kernel = {};
  kernel.api = api;
  kernel.path = choose_path();
  if (kernel.path == nullptr) {
    return error(api, kFail, "BF16KIT_KERNEL_PATH names no code path that this processor can run; unset it");
  }
  BF16KIT_RETURN_IF_ERROR(read_size(api, info, "k", kernel.weight.k));
  BF16KIT_RETURN_IF_ERROR(read_size(api, info, "n", kernel.weight.n));
  BF16KIT_RETURN_IF_ERROR(read_choice(api, info, "layout", kLayouts, kernel.weight.layout));
  BF16KIT_RETURN_IF_ERROR(read_choice(api, info, "activation", kActivations, kernel.activation));
  BF16KIT_RETURN_IF_ERROR(read_weight(api, info, kernel.weight));
  BF16KIT_RETURN_IF_ERROR(check_constant_bias(api, info, kernel.weight.n));
  *created = new (std::nothrow) Kernel(kernel);
  return *created != nullptr ? nullptr : error(api, kFail, "out of memory");
}

void destroy_kernel(void* created) { delete static_cast<Kernel*>(created); }

// --- running ----------------------------------------------------------------------------------------------------------

namespace {

Status* read_x(const Kernel& kernel, const KernelContext* context, Shape& shape, const float** x) {
  const Api* api = kernel.api;
  const Value* value = nullptr;
  BF16KIT_RETURN_IF_ERROR(call<Status*>(api, kKernelContextGetInput, context, kX, &value));
  BF16KIT_RETURN_IF_ERROR(read_shape(api, value, shape));
  if (shape.count == 0) return error(api, kInvalidArgument, "x is a scalar; it must have at least one dimension");
  if (shape.dims[shape.count - 1] != kernel.weight.k) {
    return error(api, kInvalidArgument, "the last dimension of x is %lld; the weight has k = %lld rows",
                 static_cast<long long>(shape.dims[shape.count - 1]), static_cast<long long>(kernel.weight.k));
  }
  void* data = nullptr;
  BF16KIT_RETURN_IF_ERROR(read_data(api, value, &data));
  *x = static_cast<const float*>(data);
  return nullptr;
}

Status* read_bias(const Kernel& kernel, const KernelContext* context, const float** bias) {
  const Api* api = kernel.api;
  size_t inputs = 0;
  BF16KIT_RETURN_IF_ERROR(call<Status*>(api, kKernelContextGetInputCount, context, &inputs));
  const Value* value = nullptr;
  if (inputs > kBias) BF16KIT_RETURN_IF_ERROR(call<Status*>(api, kKernelContextGetInput, context, kBias, &value));
  if (value == nullptr) return nullptr;
  BF16KIT_RETURN_IF_ERROR(check_bias(api, value, kernel.weight.n));
  void* data = nullptr;
  BF16KIT_RETURN_IF_ERROR(read_data(api, value, &data));
  *bias = static_cast<const float*>(data);
  return nullptr;
}

struct Threads {
  const Api* api;
  KernelContext* context;
  Status* status;
};

void run_parts(void* threads, void (*part)(void*, size_t), size_t parts, void* context) {
  auto& session = *static_cast<Threads*>(threads);
  // As many batches as parts: the session's threads then take one after the other, and a slow one takes fewer.
  session.status = call<Status*>(session.api, kKernelContextParallelFor,
                                 static_cast<const KernelContext*>(session.context), part, parts, parts, context);
}

}  // namespace

Status* run_kernel(void* created, KernelContext* context) {
  const Kernel& kernel = *static_cast<const Kernel*>(created);
  const Api* api = kernel.api;
  Product product = {};
  Shape shape;
  BF16KIT_RETURN_IF_ERROR(read_x(kernel, context, shape, &product.x));
  BF16KIT_RETURN_IF_ERROR(read_bias(kernel, context, &product.bias));
  product.rows = shape.elements(0, shape.count - 1);
  product.weight = kernel.weight;
  product.activation = kernel.activation;
  shape.dims[shape.count - 1] = kernel.weight.n;
  Value* y = nullptr;
  BF16KIT_RETURN_IF_ERROR(call<Status*>(api, kKernelContextGetOutput, context, size_t{0},
                                        static_cast<const int64_t*>(shape.dims), shape.count, &y));
  void* data = nullptr;
  BF16KIT_RETURN_IF_ERROR(read_data(api, y, &data));
  product.y = static_cast<float*>(data);
  Threads threads = {api, context, nullptr};
  const bool done = multiply(product, *kernel.path, run_parts, &threads);
  if (threads.status != nullptr) return threads.status;
  return done ? nullptr : error(api, kFail, "out of memory while copying %lld rows of x",
                                static_cast<long long>(product.rows));
}

}  // namespace bf16kit
