// A node of a loaded graph: made from its attributes and its weight, and run for each batch.
#pragma once

#include "abi.h"

namespace bf16kit {

// The inputs' positions.
constexpr size_t kX = 0, kWeight = 1, kBias = 2;

// What the attribute `activation` may be.
constexpr const char* kActivationNames[] = {"none", "relu", "gelu", "gelu_tanh", "silu"};

abi::Status* create_kernel(const abi::CustomOp*, const abi::Api*, const abi::KernelInfo*, void** created);
abi::Status* run_kernel(void* created, abi::KernelContext*);
void destroy_kernel(void* created);

}  // namespace bf16kit
