#include "ort/node.h"

#include <cstring>

#include "ort/status.h"

namespace bf16kit {

using namespace abi;

namespace {

// Larger than any dimension of a weight; a product of two such numbers does not overflow int64.
constexpr int64_t kLargest = INT32_MAX;

// Replaces ONNX Runtime's error for an attribute that is missing or of another type, which does not name the attribute.
Status* wrong_attribute(const Api* api, Status* status, const char* name, const char* type) {
  call<void>(api, kReleaseStatus, status);
  return error(api, kInvalidGraph, "attribute %s is missing or of another type; it must be %s", name, type);
}

}  // namespace

Status* read_shape(const Api* api, const Value* value, Shape& shape) {
  TensorInfo* info = nullptr;
  BF16KIT_RETURN_IF_ERROR(call<Status*>(api, kGetTensorTypeAndShape, value, &info));
  Status* status = call<Status*>(api, kGetDimensionsCount, static_cast<const TensorInfo*>(info), &shape.count);
  if (status == nullptr && shape.count >= kMostDims) {  // the output may have one dimension more
    status = error(api, kInvalidArgument, "a tensor has %zu dimensions; fewer than %zu are supported", shape.count,
                   kMostDims);
  }
  if (status == nullptr) {
    status = call<Status*>(api, kGetDimensions, static_cast<const TensorInfo*>(info), shape.dims, shape.count);
  }
  call<void>(api, kReleaseTensorTypeAndShapeInfo, info);
  return status;
}

Status* read_data(const Api* api, const Value* value, void** data) {
  return call<Status*>(api, kGetTensorMutableData, const_cast<Value*>(value), data);
}

Status* read_input(const Api* api, const KernelContext* context, size_t index, Shape& shape, void** data) {
  const Value* value = nullptr;
  BF16KIT_RETURN_IF_ERROR(call<Status*>(api, kKernelContextGetInput, context, index, &value));
  if (value == nullptr) return error(api, kInvalidGraph, "input %zu is missing; the node needs it", index);
  BF16KIT_RETURN_IF_ERROR(read_shape(api, value, shape));
  return read_data(api, value, data);
}

Status* make_output(const Api* api, KernelContext* context, size_t index, const Shape& shape, float** data) {
  Value* value = nullptr;
  BF16KIT_RETURN_IF_ERROR(call<Status*>(api, kKernelContextGetOutput, context, index,
                                        static_cast<const int64_t*>(shape.dims), shape.count, &value));
  if (value == nullptr) return error(api, kInvalidGraph, "output %zu has no name; give it one", index);
  void* address = nullptr;
  BF16KIT_RETURN_IF_ERROR(read_data(api, value, &address));
  *data = static_cast<float*>(address);
  return nullptr;
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

Status* read_choice(const Api* api, const KernelInfo* info, const char* name, const char* const* names, size_t count,
                    size_t& choice) {
  char text[32] = {};
  size_t size = 0;
  if (Status* status =
          call<Status*>(api, kKernelInfoGetAttributeString, info, name, static_cast<char*>(nullptr), &size)) {
    return wrong_attribute(api, status, name, "a string");
  }
  if (size <= sizeof text) {
    BF16KIT_RETURN_IF_ERROR(
        call<Status*>(api, kKernelInfoGetAttributeString, info, name, static_cast<char*>(text), &size));
    for (choice = 0; choice < count; ++choice) {
      if (std::strcmp(names[choice], text) == 0) return nullptr;
    }
  }
  char known[128] = {};
  for (size_t i = 0; i < count; ++i) {
    if (known[0] != '\0') std::strncat(known, ", ", sizeof known - std::strlen(known) - 1);
    std::strncat(known, names[i], sizeof known - std::strlen(known) - 1);
  }
  return error(api, kInvalidGraph, "attribute %s is \"%s\"; it must be one of: %s", name,
               size <= sizeof text ? text : "(a longer text)", known);
}

Status* read_weight(const Api* api, const KernelInfo* info, size_t index, Weight& weight) {
  int is_constant = 0;
  const Value* value = nullptr;
  BF16KIT_RETURN_IF_ERROR(call<Status*>(api, kKernelInfoGetConstantInputTensor, info, index, &is_constant, &value));
  if (is_constant == 0 || value == nullptr) {
    return error(api, kInvalidGraph, "input %zu, a weight, is computed; it must be a constant of the graph", index);
  }
  Shape shape;
  BF16KIT_RETURN_IF_ERROR(read_shape(api, value, shape));
  const int64_t elements = shape.elements(0, shape.count);
  if (elements != weight.k * weight.n) {
    return error(api, kInvalidGraph, "the weight, input %zu, has %lld elements; k = %lld and n = %lld need %lld", index,
                 static_cast<long long>(elements), static_cast<long long>(weight.k), static_cast<long long>(weight.n),
                 static_cast<long long>(weight.k * weight.n));
  }
  void* data = nullptr;
  BF16KIT_RETURN_IF_ERROR(read_data(api, value, &data));
  if (reinterpret_cast<uintptr_t>(data) % alignof(uint16_t) != 0) {
    return error(api, kInvalidGraph, "the weight, input %zu, lies at the odd address %p; align it to 64 bytes in its"
                 " file", index, data);
  }
  weight.data = static_cast<const uint16_t*>(data);
  return nullptr;
}

Status* check_bias(const Api* api, const Shape& shape, int64_t n) {
  if (shape.count == 1 && shape.dims[0] == n) return nullptr;
  return error(api, kInvalidArgument, "the bias has %zu dimensions and %lld elements; it must be [n] with n = %lld",
               shape.count, static_cast<long long>(shape.elements(0, shape.count)), static_cast<long long>(n));
}

namespace {

struct Parts {
  void (*run)(void*, size_t);
  void* context;
};

void run_one(void* parts, size_t i) noexcept { static_cast<Parts*>(parts)->run(static_cast<Parts*>(parts)->context, i); }

}  // namespace

void run_parts(void* threads, void (*part)(void*, size_t), size_t parts, void* context) {
  auto& session = *static_cast<Threads*>(threads);
  if (session.status != nullptr) return;  // an operator that runs several times keeps its first error
  Parts all = {part, context};
  void (*const one)(void*, size_t) noexcept = run_one;  // noexcept because C code calls it, like the functions of CustomOp
  // As many batches as parts, so that each thread takes one part after the other, and a slow thread takes fewer.
  session.status = call<Status*>(session.api, kKernelContextParallelFor,
                                 static_cast<const KernelContext*>(session.context), one, parts, parts,
                                 static_cast<void*>(&all));
}

}  // namespace bf16kit
