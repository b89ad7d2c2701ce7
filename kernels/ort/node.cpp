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

template <typename T>
Status* read_data(const Api* api, const Value* value, T** data) {
  void* found = nullptr;
  Status* status = call<Status*>(api, kGetTensorMutableData, const_cast<Value*>(value), &found);
  *data = static_cast<T*>(found);
  return status;
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

Status* read_input(const Api* api, const KernelContext* context, size_t index, Shape& shape, const float** data,
                   Characteristic needed) {
  const Value* value = nullptr;
  size_t inputs = index + 1;
  if (needed == kOptional) BF16KIT_RETURN_IF_ERROR(call<Status*>(api, kKernelContextGetInputCount, context, &inputs));
  if (index < inputs) BF16KIT_RETURN_IF_ERROR(call<Status*>(api, kKernelContextGetInput, context, index, &value));
  if (value == nullptr && needed == kOptional) return nullptr;
  if (value == nullptr) return error(api, kInvalidGraph, "input %zu is missing; the node needs it", index);
  BF16KIT_RETURN_IF_ERROR(read_shape(api, value, shape));
  return read_data(api, value, data);
}

Status* read_input(const Api* api, const KernelContext* context, size_t index, const char* what, const Shape& wanted,
                   const float** data, Characteristic needed) {
  Shape shape = wanted;
  BF16KIT_RETURN_IF_ERROR(read_input(api, context, index, shape, data, needed));
  return check_shape(api, what, shape, wanted);
}

Status* make_output(const Api* api, KernelContext* context, size_t index, const Shape& shape, float** data,
                    Characteristic needed) {
  Value* value = nullptr;
  BF16KIT_RETURN_IF_ERROR(call<Status*>(api, kKernelContextGetOutput, context, index,
                                        static_cast<const int64_t*>(shape.dims), shape.count, &value));
  if (value != nullptr) return read_data(api, value, data);
  return needed == kOptional ? nullptr : error(api, kInvalidGraph, "output %zu has no name; give it one", index);
}

Status* read_path(const Api* api, Arithmetic arithmetic, const Path*& path) {
  path = choose_path(arithmetic);
  if (path != nullptr) return nullptr;
  return error(api, kFail, "BF16KIT_KERNEL_PATH names no code path that this processor can run; unset it");
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
  BF16KIT_RETURN_IF_ERROR(read_data(api, value, &weight.data));
  if (reinterpret_cast<uintptr_t>(weight.data) % alignof(uint16_t) == 0) return nullptr;
  return error(api, kInvalidGraph, "the weight, input %zu, lies at the odd address %p; align it to 64 bytes in its file", index,
               static_cast<const void*>(weight.data));
}

Status* check_shape(const Api* api, const char* what, const Shape& shape, const Shape& wanted) {
  if (shape.count != wanted.count) {
    return error(api, kInvalidArgument, "the %s has %zu dimensions; it must have %zu", what, shape.count, wanted.count);
  }
  for (size_t i = 0; i < shape.count; ++i) {
    if (shape.dims[i] == wanted.dims[i]) continue;
    return error(api, kInvalidArgument, "dimension %zu of the %s is %lld; it must be %lld", i, what,
                 static_cast<long long>(shape.dims[i]), static_cast<long long>(wanted.dims[i]));
  }
  return nullptr;
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
