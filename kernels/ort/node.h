// Common functions of all operators: they read shapes, data, attributes and weights from ONNX Runtime, and run parts.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gemm/path.h"
#include "ort/abi.h"

namespace bf16kit {

constexpr size_t kMostDims = 16;

struct Shape {
  int64_t dims[kMostDims];
  size_t count;

  int64_t elements(size_t first, size_t last) const {
    int64_t product = 1;
    for (size_t i = first; i < last; ++i) product *= dims[i];
    return product;
  }
};

abi::Status* read_shape(const abi::Api* api, const abi::Value* value, Shape& shape);

// Read input `index`, of floats unless the operator declares another type; `data` stays null without an optional one. The second
// requires the shape `wanted`, and calls the input `what`.
abi::Status* read_input(const abi::Api* api, const abi::KernelContext* context, size_t index, Shape& shape,
                        const float** data, abi::Characteristic needed = abi::kRequired);
abi::Status* read_input(const abi::Api* api, const abi::KernelContext* context, size_t index, const char* what,
                        const Shape& wanted, const float** data, abi::Characteristic needed = abi::kRequired);

// Makes output `index`; `data` stays null without an optional one.
abi::Status* make_output(const abi::Api* api, abi::KernelContext* context, size_t index, const Shape& shape,
                         float** data, abi::Characteristic needed = abi::kRequired);

// Finds the path that computes in `arithmetic`.
abi::Status* read_path(const abi::Api* api, Arithmetic arithmetic, const Path*& path);

// Reads an integer attribute, which must be from 1 to INT32_MAX.
abi::Status* read_size(const abi::Api* api, const abi::KernelInfo* info, const char* name, int64_t& size);

// Reads a string attribute, which must be one of `names`, as its index in them.
abi::Status* read_choice(const abi::Api* api, const abi::KernelInfo* info, const char* name, const char* const* names,
                         size_t count, size_t& choice);

// Reads input `index`, which must be a constant of weight.k * weight.n elements.
abi::Status* read_weight(const abi::Api* api, const abi::KernelInfo* info, size_t index, Weight& weight);

// Returns an error that calls the tensor `what` unless its shape is `wanted`.
abi::Status* check_shape(const abi::Api* api, const char* what, const Shape& shape, const Shape& wanted);

// Runs parts on the threads of the session that runs the node; a RunParts of gemm/parts.h.
struct Threads {
  const abi::Api* api;
  abi::KernelContext* context;
  abi::Status* status;
};
void run_parts(void* threads, void (*part)(void*, size_t), size_t parts, void* context);

}  // namespace bf16kit
